"""Builds the training pack from pinned packages: `python -m recipes.tiny.build --out pack.bin`.

Downloads about 900 MB once (730 MB of it for the animation stills, see --drop), then renders for a few minutes. Only
MIT, Apache-2.0, CC0, CC-BY-4.0 and public-domain pictures. The same versions of Pillow and resvg give the same bytes.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.tiny.collect import PORTRAIT_STYLES, groceries, landscapes, portraits
from recipes.tiny.data import STYLES, Picture, write_pack
from recipes.tiny.emoji import EMOJI_STYLES, EmojiTable, emoji_pictures
from recipes.tiny.raw import RawPicture, render
from recipes.tiny.sources import sha256
from underdraw.errors import unknown
from underdraw.training.command import part_parser, run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """What goes into a pack. 192 px is the size the tiny family draws at."""

    px: int = 192
    quality: int = 70
    alpha_quality: int = 60  # beyond that, WebP spends a third of the file on edges nobody sees
    portraits_per_style: int = 200
    groceries_per_class: int = 24
    drop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for style in self.drop:
            if style not in STYLES:
                raise unknown("style", style, STYLES)


def collect(config: BuildConfig, cache: Path) -> Iterator[RawPicture]:
    """All pictures of the set, before they are drawn."""
    wanted = [style for style in STYLES if style not in config.drop]
    table = EmojiTable(cache)
    for style in wanted:
        if style in EMOJI_STYLES:
            yield from emoji_pictures(style, cache, table)
        elif style in PORTRAIT_STYLES:
            yield from portraits(style, cache, config.portraits_per_style)
        elif style == "groceries":
            yield from groceries(cache, config.groceries_per_class)
        elif style == "landscape":
            yield from landscapes(cache)


def build(out: str | Path, cache: str | Path, config: BuildConfig, *, workers: int | None = None) -> Path:
    """Fetch, draw and write the whole pack; returns its path."""
    with multiprocessing.Pool(workers) as pool:
        drawn = pool.imap(partial(_draw, config), collect(config, Path(cache)), chunksize=16)
        rows = [row for row in drawn if row is not None]
    return write_pack(out, config.px, rows)


def _draw(config: BuildConfig, raw: RawPicture) -> tuple[Picture, bytes] | None:
    image = render(raw, config.px)
    if image is None:
        log.warning("%s is empty; left out", raw.key)
        return None
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=config.quality, alpha_quality=config.alpha_quality, method=6)
    picture = Picture(raw.key, raw.kind, raw.style, raw.group, raw.phrase, raw.subject, raw.flippable)
    return picture, buffer.getvalue()


def summary(rows: Iterable[Picture]) -> str:
    """Pictures per style with licence, as a table for the terminal."""
    counts = Counter(row.style for row in rows)
    lines = [f"{style:16s} {count:6d}  {STYLES[style].licence}" for style, count in sorted(counts.items())]
    return "\n".join([*lines, f"{'in all':16s} {sum(counts.values()):6d}"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the builder."""
    from recipes.tiny.data import Pack

    defaults = BuildConfig()
    parser = part_parser("data", __doc__)
    parser.add_argument("--out", type=Path, required=True, help="the pack to write")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "underdraw" / "packages")
    parser.add_argument("--px", type=int, default=defaults.px)
    parser.add_argument("--quality", type=int, default=defaults.quality, help="WebP quality of the colours")
    parser.add_argument("--portraits", type=int, default=defaults.portraits_per_style, help="per style")
    parser.add_argument("--groceries", type=int, default=defaults.groceries_per_class, help="per class")
    parser.add_argument("--drop", nargs="*", default=[], help=f"styles to leave out, of: {', '.join(STYLES)}")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    config = BuildConfig(
        px=options.px,
        quality=options.quality,
        portraits_per_style=options.portraits,
        groceries_per_class=options.groceries,
        drop=tuple(options.drop),
    )
    path = build(options.out, options.cache, config)
    print(summary(Pack(path).pictures))
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, sha256 {sha256(path)}")


if __name__ == "__main__":
    run(main)
