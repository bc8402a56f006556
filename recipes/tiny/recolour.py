"""Paints sprites in another colour, and names the colour that pixels have.

A sprite is recoloured in its largest region of one hue (or of gray): there the shading is kept, and the colour is
replaced. The rest, such as a fox's white belly or the eyes of a panda, keeps its colour.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recipes.tiny.palette import SPRITE_COLOURS, SPRITE_PALETTE

GRAY = -1.0  # the hue of a region without one
HUES = 36  # bins that hues are counted in
MIN_SHARE = 0.4  # of a sprite's pixels that its region has; below that, a new colour would not look like one
_LUMA = (0.299, 0.587, 0.114)
Region = tuple[float, float]
"""Hue in turns (or GRAY) and median luminance of the pixels that a new colour replaces."""


def _ramp(values: Tensor, low: float, high: float) -> Tensor:
    """0 below `low`, 1 above `high`, linear between them."""
    return ((values - low) / (high - low)).clamp(0, 1)


def _hue_chroma_luma(rgb: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Hue in turns, chroma and luminance of colours (..., 3) in [0, 1]."""
    red, green, blue = rgb.unbind(-1)
    high = rgb.amax(-1)
    chroma = high - rgb.amin(-1)
    safe = chroma.clamp(min=1e-4)
    hue = torch.where(
        high == red,
        (green - blue) / safe,
        torch.where(high == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    return (hue / 6) % 1, chroma, (rgb * rgb.new_tensor(_LUMA)).sum(-1)


def _region_weights(rgb: Tensor, hue: Tensor) -> tuple[Tensor, Tensor]:
    """How much each pixel belongs to the regions of `hue`, which broadcasts, and the luminance of the pixels."""
    its_hue, chroma, luma = _hue_chroma_luma(rgb)
    distance = ((its_hue - hue + 0.5) % 1 - 0.5).abs()
    coloured = (1 - _ramp(distance, 0.09, 0.13)) * _ramp(chroma, 0.06, 0.16)
    gray = (1 - _ramp(chroma, 0.1, 0.18)) * _ramp(luma, 0.18, 0.3)
    return torch.where(hue < 0, gray, coloured), luma


def find_region(pixels: NDArray[np.uint8]) -> Region | None:
    """The region of a sprite (H, W, 4) that can be recoloured, or None if it has many colours."""
    visible = torch.from_numpy(pixels[pixels[..., 3] > 128][:, :3]).float() / 255  # (n, 3)
    if not len(visible):
        return None
    centres = [*((index + 0.5) / HUES for index in range(HUES)), GRAY]
    weights = torch.stack([_region_weights(visible, visible.new_tensor(hue))[0].sum() for hue in centres])
    best = int(weights.argmax())
    if weights[best] < MIN_SHARE * len(visible):
        return None
    its_weights, luma = _region_weights(visible, visible.new_tensor(centres[best]))
    return round(centres[best], 4), round(max(0.15, float(luma[its_weights > 0.5].median())), 4)


def recolour(rgb: Tensor, regions: Tensor, colours: Tensor) -> Tensor:
    """Sprites (n, H, W, 3) in [0, 1] with their regions (n, 2) painted in new colours (n, 3).

    The median luminance of a region becomes the colour itself, darker pixels are shades of it and lighter ones tints.
    """
    hue, median = (part[:, None, None] for part in regions.T)
    weights, luma = _region_weights(rgb, hue)
    shade = (luma / median).clamp(max=1)[..., None]
    tint = _ramp(luma - median, 0, 1)[..., None] / (1 - median).clamp(min=0.1)[..., None]
    colour = colours[:, None, None] * shade
    painted = colour + (1 - colour) * tint.clamp(0, 0.85)
    return rgb + (painted - rgb) * weights[..., None]


def name_colours(rgb: Tensor) -> Tensor:
    """Index in SPRITE_COLOURS of the name that fits each colour (..., 3) in [0, 1], and of its shades and tints."""
    hue, chroma, luma = _hue_chroma_luma(rgb)
    saturation = chroma / rgb.amax(-1).clamp(min=1e-4)
    names = torch.full_like(luma, -1, dtype=torch.int64)
    # Upper ends of hues in degrees; pink and brown are light purples and reds, and dark oranges.
    bounds = ((14, "red"), (40, "orange"), (68, "yellow"), (170, "green"), (250, "blue"), (292, "purple"))
    remaining = torch.ones_like(luma, dtype=torch.bool)
    for bound, name in bounds:
        is_here = remaining & (hue * 360 < bound)
        names[is_here] = SPRITE_COLOURS.index(name)
        remaining &= ~is_here
    degrees = hue * 360
    names[degrees >= 292] = SPRITE_COLOURS.index("pink")
    names[degrees >= 348] = SPRITE_COLOURS.index("red")
    is_warm = (degrees < 14) | (degrees >= 340)
    names[is_warm & (luma > 0.62)] = SPRITE_COLOURS.index("pink")
    names[(degrees >= 8) & (degrees < 50) & (luma < 0.46) & (saturation < 0.85)] = SPRITE_COLOURS.index("brown")
    is_gray = (chroma < 0.12) | ((saturation < 0.2) & (luma < 0.5))
    names[is_gray & (luma > 0.72)] = SPRITE_COLOURS.index("white")
    names[(is_gray | (luma < 0.14)) & (luma < 0.4)] = SPRITE_COLOURS.index("black")
    names[is_gray & (luma >= 0.4) & (luma <= 0.72)] = -1
    return names


def colour_shares(image: Tensor, background_distance: float = 0.12) -> dict[str, float]:
    """Shares of the named colours among the pixels of an image (3, H, W) in [0, 1] that differ from its border."""
    pixels = image.movedim(0, -1)  # (H, W, 3)
    edge = max(1, pixels.shape[0] // 48)
    rows = torch.cat([pixels[:, :edge], pixels[:, -edge:]], 1)  # the left and right borders, row by row
    background = rows.median(1, keepdim=True).values  # gradients run from top to bottom
    subject = pixels[(pixels - background).abs().amax(-1) > background_distance]
    names = name_colours(subject)
    return {name: float((names == index).sum()) / max(1, len(subject)) for index, name in enumerate(SPRITE_COLOURS)}


def palette_tensor(device: torch.device) -> Tensor:
    """The colours of recoloured sprites in [0, 1]."""  # (colours, 3)
    return torch.tensor(list(SPRITE_PALETTE.values()), device=device) / 255
