"""Folders of pictures as `underdraw generate` writes them, and pairs of them joined by the pictures' numbers.

A picture is known by the number in its manifest line, never by its place in a listing. Knows no model and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from underdraw.errors import ConfigError
from underdraw.io import unpack_grid

LINES = "manifest.jsonl"
PICTURES = (".png", ".jpg", ".jpeg", ".webp")


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a folder."""

    path: Path
    prompt: str
    seed: int | None
    packed: Any  # its codes, if the manifest holds them

    def codes(self) -> NDArray[np.int32] | None:
        return None if self.packed is None else unpack_grid(self.packed, f"the manifest line of {self.path}")


@dataclass(frozen=True, slots=True)
class Joined:
    """Pictures that two folders have in common, in the order of their numbers."""

    ids: list[int]
    ours: list[Picture]
    theirs: list[Picture]
    only_ours: int
    only_theirs: int


def read_folder(folder: Path) -> dict[int, Picture]:
    """The pictures of a folder by their numbers."""
    path = folder / LINES
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {LINES}; name a folder that `underdraw generate --prompts` has written.")
    found: dict[int, Picture] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        index, picture = _line(folder, line, f"line {number} of {path}")
        if index in found:
            raise ConfigError(f"line {number} of {path} holds picture {index} a second time; delete one of them.")
        found[index] = picture
    if not found:
        raise ConfigError(f"{path} holds no pictures; draw some into {folder} first.")
    return found


def _line(folder: Path, line: str, where: str) -> tuple[int, Picture]:
    try:
        row = json.loads(line)
        index, file, prompt = row["index"], row["file"], row["prompt"]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{where} is no manifest line with index, file and prompt; draw the folder again.") from None
    if (
        not isinstance(index, int)
        or not isinstance(file, str)
        or Path(file).name != file
        or not isinstance(prompt, str)
    ):
        raise ConfigError(f"{where} needs a whole number index, a file name and a text prompt.")
    if not (folder / file).is_file():
        raise ConfigError(f"{where} names {file}, which is missing; draw it again with the same command.")
    return index, Picture(folder / file, prompt, row.get("seed"), row.get("codes"))


def join(ours: dict[int, Picture], theirs: dict[int, Picture]) -> Joined:
    """The pictures with the same number; they must have the same prompts."""
    ids = sorted(set(ours) & set(theirs))
    if not ids:
        raise ConfigError("the two folders have no picture numbers in common; compare folders of the same prompts.")
    for index in ids:
        if ours[index].prompt != theirs[index].prompt:
            raise ConfigError(
                f"picture {index} is {ours[index].prompt!r} in one folder and {theirs[index].prompt!r} in the other; "
                "compare folders of the same prompts."
            )
    pairs = [ours[i] for i in ids], [theirs[i] for i in ids]
    return Joined(ids, *pairs, len(ours) - len(ids), len(theirs) - len(ids))


def picture_files(folder: Path) -> list[Path]:
    """All pictures of a folder, with a manifest or without: a reference set, where order means nothing."""
    if (folder / LINES).is_file():
        return [picture.path for picture in read_folder(folder).values()]
    found = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES) if folder.is_dir() else []
    if not found:
        raise ConfigError(f"{folder} holds no pictures; name a folder with {', '.join(PICTURES)} files.")
    return found


def pixels(path: Path) -> NDArray[np.uint8]:
    """A picture as (height, width, 3)."""
    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except (OSError, UnidentifiedImageError) as error:
        raise ConfigError(f"{path} cannot be read as a picture ({error}); draw or copy it again.") from None


def exact_match(joined: Joined) -> dict[str, Any]:
    """How many pictures of the two folders are the same, pixel for pixel, and the share of equal codes."""
    same = [np.array_equal(pixels(a.path), pixels(b.path)) for a, b in zip(joined.ours, joined.theirs, strict=True)]
    found: dict[str, Any] = {"pictures": len(same), "identical": int(sum(same)), "rate": round(float(np.mean(same)), 6)}
    codes = codes_of(joined.ours), codes_of(joined.theirs)
    if codes[0] is not None and codes[1] is not None and codes[0].shape == codes[1].shape:
        found["equal_codes"] = round(float((codes[0] == codes[1]).mean()), 6)
    return found


def codes_of(pictures: Sequence[Picture]) -> NDArray[np.int32] | None:
    """Codes (N, rows, cols) of pictures of one size; None if a manifest does not hold them."""
    found = [codes for codes in (picture.codes() for picture in pictures) if codes is not None]
    if len(found) < len(pictures):
        return None
    if len({codes.shape for codes in found}) > 1:
        raise ConfigError("the pictures of a folder have codes of different sizes; compare folders of one size.")
    return np.stack(found)
