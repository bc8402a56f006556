"""Writes a small training pack: subjects in three styles, portraits, landscapes and photographs, all different."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from recipes.tiny.data import Pack, Picture, write_pack

PX = 64
SUBJECTS = 60
STYLES = ("fluent-3d", "noto", "twemoji")
TWO_STYLES = "emoji 7"  # has no image in the last style
OTHERS = 8  # portraits, landscapes and photographs


def write(path: Path) -> Pack:
    """Write the pack; even sprites may be flipped, every fourth one is a person, and the next one can be recoloured."""
    rows = [
        (
            Picture(
                key=f"{style}/{number:03d}",
                kind="sprite",
                style=style,
                group="objects" if number % 4 else "people",
                phrase=f"a t{number}",
                subject=f"emoji {number}",
                flippable=number % 2 == 0,
                region=(0.1, 0.5) if number % 4 == 1 else None,
            ),
            webp(sprite(number, index)),
        )
        for index, style in enumerate(STYLES)
        for number in range(SUBJECTS)
        if (f"emoji {number}", style) != (TWO_STYLES, STYLES[-1])
    ]
    for n in range(OTHERS):
        portrait = Picture(f"micah/{n}", "portrait", "micah", "people", f"a person with hat {n}", f"portrait {n}", True)
        land = Picture(f"landscape/{n}", "landscape", "landscape", "places", "a beach", f"land {n}", True)
        shop = Picture(f"groceries/{n}", "photo", "groceries", "food-drink", "pears", f"fruit {n}", True)
        rows += [(portrait, webp(sprite(n, 2))), (land, webp(sprite(n, 3))), (shop, webp(sprite(n, 4)))]
    return Pack(write_pack(path, PX, rows))


def sprite(number: int, style: int) -> np.ndarray:
    """Blocks of colours that identify the subject, with a stripe that identifies the style; (PX, PX, 4), opaque."""
    blocks = np.random.default_rng(number).integers(0, 256, (4, 4, 3))
    pixels = np.full((PX, PX, 4), 255, np.uint8)
    pixels[..., :3] = np.kron(blocks, np.ones((PX // 4, PX // 4, 1)))
    pixels[PX // 2 : PX // 2 + 2, :, :3] = 60 * style
    return pixels


def webp(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "WEBP", lossless=True, exact=True)
    return buffer.getvalue()
