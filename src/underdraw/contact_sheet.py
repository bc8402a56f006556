"""Contact sheets: many small pictures on one PNG or JPEG, with or without captions, to be looked at."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from underdraw.errors import UnsupportedError

_LINE = 11
QUALITY = 80  # of JPEG files


def contact_sheet(
    pixels: Tensor, path: str | Path, *, captions: Sequence[str] = (), columns: int = 8, caption_lines: int = 4,
    width: int | None = None,
) -> Path:  # fmt: skip
    """Write pictures in [-1, 1] row by row, scaled to a width if one is given."""  # pixels (N, 3, H, W)
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise UnsupportedError("contact sheets need Pillow; run: pip install pillow") from error
    if width is not None:
        size = (round(pixels.shape[2] * width / pixels.shape[3]), width)
        pixels = F.interpolate(pixels.float(), size=size, mode="bilinear", antialias=True)
    images = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().movedim(1, -1).cpu().numpy()
    count, height, width, _ = images.shape
    text = caption_lines * _LINE + 4 if captions else 0
    rows = -(-count // columns)
    sheet = np.full((rows * (height + text + 4), columns * (width + 4), 3), 255, dtype=np.uint8)
    for place, image in enumerate(images):
        y, x = place // columns * (height + text + 4), place % columns * (width + 4)
        sheet[y : y + height, x : x + width] = image
    picture = Image.fromarray(sheet)
    draw = ImageDraw.Draw(picture)
    for place, caption in enumerate(captions[:count]):
        y, x = place // columns * (height + text + 4) + height, place % columns * (width + 4)
        for line, words in enumerate(textwrap.wrap(caption, width // 6)[:caption_lines]):
            draw.text((x, y + line * _LINE), words, fill="black")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, quality=QUALITY)
    return path
