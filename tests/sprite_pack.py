"""A small training pack: subjects in three styles, landscapes, photographs; every picture looks different."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.tiny.data import Pack, Picture, write_pack

PX = 64
STYLES = ("fluent-3d", "noto", "twemoji")
BARE = "emoji 7"  # has no picture in the last style


def write(path: Path, subjects: int = 60) -> Pack:
    rows = [
        (Picture(f"{style}/{n:03d}", "sprite", style, "objects", f"a t{n}", f"emoji {n}", True), webp(sprite(n, place)))
        for place, style in enumerate(STYLES)
        for n in range(subjects)
        if (f"emoji {n}", style) != (BARE, STYLES[-1])
    ]
    for n in range(8):
        land = Picture(f"landscape/{n}", "landscape", "landscape", "places", "a beach", f"land {n}", True)
        shop = Picture(f"groceries/{n}", "photo", "groceries", "food-drink", "pears", f"fruit {n}", True)
        rows += [(land, webp(sprite(n, 3))), (shop, webp(sprite(n, 4)))]
    return Pack(write_pack(path, PX, rows))


def sprite(number: int, style: int) -> np.ndarray:
    """Blocks of colours that tell the subject, with a stripe that tells the style."""
    blocks = np.random.default_rng(number).integers(0, 256, (4, 4, 3))
    pixels = np.full((PX, PX, 4), 255, np.uint8)
    pixels[..., :3] = np.kron(blocks, np.ones((PX // 4, PX // 4, 1)))
    pixels[PX // 2 : PX // 2 + 2, :, :3] = 60 * style
    return pixels


def webp(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()
