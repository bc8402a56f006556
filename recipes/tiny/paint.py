"""Paints scenes on a device, which holds all images at the few sizes in use."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recipes.tiny.compose import Scenes, SpriteSizes
from recipes.tiny.data import Pack
from recipes.tiny.palette import COLOURS, PALETTE
from recipes.tiny.recolour import palette_tensor, recolour
from underdraw.errors import ConfigError

_SOFT = 16  # patches per side that scenery out of focus is averaged over
_TURNED = 0.92  # scale of a turned sprite, whose corners would be cut off otherwise


class Painter:
    """Paints scenes on a device, which holds all images at all sizes as 8-bit RGBA with premultiplied alpha."""

    def __init__(self, pack: Pack, device: torch.device | str, rows: np.ndarray | None = None, cell: int = 8) -> None:
        self.device = torch.device(device)
        self.sizes = SpriteSizes.for_canvas(pack.px, cell)
        palette = torch.tensor([PALETTE[name] for name in COLOURS], device=self.device)
        self._palette = palette.float() / 255  # (colours, 3)
        self._sprite_palette = palette_tensor(self.device)
        regions = [picture.region or (0.0, 0.5) for picture in pack.pictures]
        self._regions = torch.tensor(regions, device=self.device)  # (rows of the pack, 2)
        rows = pack.indices("all") if rows is None else rows
        pixels = pack.pixels(rows)  # (N, px, px, 4) uint8
        sprite = np.array([pack.pictures[row].kind == "sprite" for row in rows], dtype=bool)
        masks = {self.sizes.canvas: ~sprite}  # portraits and photographs fill the canvas
        for size in (self.sizes.large, self.sizes.main, self.sizes.medium, self.sizes.small):
            masks[size] = sprite
        self._banks: dict[int, Tensor] = {}  # size -> (n, size, size, 4) uint8
        self._indices: dict[int, np.ndarray] = {}  # size -> (rows of the pack,) index in the bank
        for size, mask in masks.items():
            self._indices[size] = np.full(len(pack), -1)
            self._indices[size][rows[mask]] = np.arange(mask.sum())
            self._banks[size] = self._resize(pixels[mask], size)

    def _resize(self, pixels: np.ndarray, size: int) -> Tensor:
        bank = torch.empty(len(pixels), size, size, 4, dtype=torch.uint8, device=self.device)
        for start in range(0, len(pixels), 256):
            part = torch.from_numpy(pixels[start : start + 256]).to(self.device).float()  # (n, px, px, 4)
            colour, alpha = part[..., :3], part[..., 3:]
            part = torch.cat([colour * alpha / 255, alpha], -1).movedim(-1, 1)
            if size != part.shape[-1]:
                part = F.interpolate(part, size=(size, size), mode="bilinear", antialias=True)
            bank[start : start + 256] = part.movedim(1, -1).round().clamp(0, 255).to(torch.uint8)
        return bank

    def paint(self, scenes: Scenes) -> Tensor:
        """Pixels (B, 3, px, px) of a batch in [-1, 1], channels last in memory."""
        px = self.sizes.canvas
        top, bottom = (self._palette[self._to(colours)][:, None, None] for colours in (scenes.top, scenes.bottom))
        ramp = torch.linspace(0, 1, px, device=self.device)[:, None, None]
        canvas = (top + (bottom - top) * ramp).expand(-1, px, px, 3).contiguous()  # (B, px, px, 3)
        self._paint_backdrops(canvas, scenes)
        for slot in (0, 1):
            for size in np.unique(scenes.sizes[scenes.rows[:, slot] >= 0, slot]):
                which = np.flatnonzero((scenes.rows[:, slot] >= 0) & (scenes.sizes[:, slot] == size))
                sprites = self._sprites(scenes, which, slot, int(size))
                self._paste(canvas, which, sprites, scenes.x[which, slot], scenes.y[which, slot])
        return canvas.mul_(2).sub_(1).movedim(-1, 1)

    def _paint_backdrops(self, canvas: Tensor, scenes: Scenes) -> None:
        """Cover whole canvases with crops of photographs, flipped or not, in focus or not."""
        which = np.flatnonzero(scenes.backdrop >= 0)
        if not len(which):
            return
        px = self.sizes.canvas
        pictures = self._banks[px][self._to(self._bank_indices(px, scenes.backdrop[which]))][..., :3] / 255.0
        scale, left, top = self._to(scenes.backdrop_view[which].astype(np.float32)).T
        flip = torch.where(self._to(scenes.backdrop_flip[which]), -1.0, 1.0)
        zero = torch.zeros_like(scale)
        cropped = 1 - 1 / scale  # share of the photograph outside the crop, both sides together
        x = torch.stack([flip / scale, zero, cropped * (2 * left - 1)], dim=1)
        y = torch.stack([zero, 1 / scale, cropped * (2 * top - 1)], dim=1)
        grid = F.affine_grid(torch.stack([x, y], dim=1), [len(which), 3, px, px], align_corners=False)
        crops = F.grid_sample(pictures.movedim(-1, 1), grid, padding_mode="border", align_corners=False)
        soft = F.interpolate(F.avg_pool2d(crops, px // _SOFT), size=(px, px), mode="bilinear")
        crops = torch.where(self._to(scenes.backdrop_soft[which])[:, None, None, None], soft, crops)
        canvas[self._to(which)] = crops.movedim(1, -1)

    def _bank_indices(self, size: int, rows: np.ndarray) -> np.ndarray:
        """Indices of rows of the pack in the bank of a size."""
        indices = self._indices[size][rows]
        if (indices < 0).any():
            missing = int(rows[indices < 0][0])
            raise ConfigError(f"row {missing} of the pack is not on the device at {size} px; pass it to the painter.")
        return indices

    def _sprites(self, scenes: Scenes, which: np.ndarray, slot: int, size: int) -> Tensor:
        """Sprites (n, size, size, 4) in [0, 1] as they are pasted: recoloured, mirrored and turned."""
        rows, flips, turns, colours = (
            part[which, slot] for part in (scenes.rows, scenes.flips, scenes.turns, scenes.colours)
        )
        sprites = self._banks[size][self._to(self._bank_indices(size, rows))] / 255.0
        if (chosen := np.flatnonzero(colours >= 0)).size:
            index = self._to(chosen)
            colour, alpha = sprites[index, ..., :3], sprites[index, ..., 3:]
            straight = (colour / alpha.clamp(min=1 / 255)).clamp(max=1)
            regions, targets = self._regions[self._to(rows[chosen])], self._sprite_palette[self._to(colours[chosen])]
            sprites[index, ..., :3] = recolour(straight, regions, targets) * alpha
        sprites = torch.where(self._to(flips)[:, None, None, None], sprites.flip(2), sprites)
        if (chosen := np.flatnonzero(turns)).size:
            index, angle = self._to(chosen), torch.deg2rad(self._to(turns[chosen].astype(np.float32)))
            cos, sin, zero = angle.cos() / _TURNED, angle.sin() / _TURNED, torch.zeros_like(angle)
            rotation = torch.stack([torch.stack([cos, -sin, zero], 1), torch.stack([sin, cos, zero], 1)], 1)
            grid = F.affine_grid(rotation, [len(chosen), 4, size, size], align_corners=False)
            turned = F.grid_sample(sprites[index].movedim(-1, 1), grid, align_corners=False)
            sprites[index] = turned.movedim(1, -1)
        return sprites

    def _paste(self, canvas: Tensor, which: np.ndarray, sprites: Tensor, x: np.ndarray, y: np.ndarray) -> None:
        """Paste sprites (n, size, size, 4) on the canvases `which`, with their top-left corners at x, y."""
        px, size = self.sizes.canvas, sprites.shape[1]
        pixel = torch.arange(px, device=self.device)
        column, row = (pixel - self._to(corner)[:, None] for corner in (x, y))  # (n, px) in the sprite
        is_inside = ((row >= 0) & (row < size))[:, :, None] & ((column >= 0) & (column < size))[:, None]  # (n, px, px)
        row, column = (index.clamp(0, size - 1) for index in (row, column))
        sprite = torch.arange(len(which), device=self.device)[:, None, None]
        picture = sprites[sprite, row[:, :, None], column[:, None]] * is_inside[..., None]  # (n, px, px, 4)
        index = self._to(which)
        canvas[index] = canvas[index] * (1 - picture[..., 3:]) + picture[..., :3]

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)
