"""Measures an image tokenizer on images of held-out subjects: reconstruction, use of codes, consistency of codes."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from recipes.tiny.compose import Composer, SceneConfig, Scenes
from recipes.tiny.data import Pack
from recipes.tiny.lpips import LPIPS
from recipes.tiny.paint import Painter
from recipes.tiny.palette import COLOURS
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.tokenizers.fsq import FSQTokenizer
from underdraw.training.trainer import autocast

BATCH, TWINS = 32, 64


@dataclass(frozen=True, slots=True)
class TokenizerQuality:
    """Quality on held-out images."""

    psnr: float  # dB, mean over images
    l1: float
    lpips: float
    codes_used: int
    perplexity: float
    kept: float  # share of cells inside a sprite that keep their code on another background
    repeated: float  # share of cells with the pixels of the cell before them that also have its code

    def __str__(self) -> str:
        return (
            f"held-out PSNR {self.psnr:.2f} dB, L1 {self.l1:.4f}, LPIPS {self.lpips:.4f}, {self.codes_used} codes "
            f"used, perplexity {self.perplexity:.0f}, codes kept {self.kept:.3f}, repeated {self.repeated:.3f}"
        )


class TokenizerEvaluator:
    """Measures tokenizers on a fixed set of images of held-out subjects."""

    def __init__(self, pack: Pack, painter: Painter, lpips: LPIPS | None, config: SceneConfig, count: int) -> None:
        config = dataclasses.replace(config, flip=0.0)
        rng = np.random.default_rng(1)
        self.scenes = Composer(pack, "held-out", config, painter.sizes.cell).draw(count, rng)
        self.painter, self.lpips = painter, lpips
        plain = dataclasses.replace(config, photo=0, landscape=0, pair=0, small=0, scenery=0)
        self._twins = self._on_two_backgrounds(Composer(pack, "held-out", plain).draw(min(count, TWINS), rng), rng)

    def _on_two_backgrounds(self, scenes: Scenes, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        colours = rng.permuted(np.tile(np.arange(len(COLOURS)), (len(scenes), 1)), axis=1)[:, :2]
        first, second = (
            self.painter.paint(dataclasses.replace(scenes, top=colours[:, side], bottom=colours[:, side]))
            for side in (0, 1)
        )
        return first, second

    @torch.no_grad()
    def measure(self, model: FSQTokenizer, sheet: Path | None = None) -> TokenizerQuality:
        """Measure a model; `sheet` is an image file for originals above their reconstructions."""
        psnr, l1, lpips, codes = [], [], [], []
        for start in range(0, len(self.scenes), BATCH):
            pixels = self.painter.paint(self.scenes[start : start + BATCH])
            with autocast(self.painter.device):
                reconstruction = model(pixels)
                decoded = reconstruction.pixels.float().clamp(-1, 1)
                if self.lpips is not None:
                    lpips.append(self.lpips(decoded, pixels).item() * len(pixels))
            psnr.append(-10 * torch.log10((decoded - pixels).square().mean((1, 2, 3)) / 4))
            l1.append((decoded - pixels).abs().mean((1, 2, 3)))
            codes.append(reconstruction.codes.flatten())
            if start == 0 and sheet is not None:
                rows = [row for pair in zip(pixels.split(8), decoded.split(8), strict=True) for row in pair]
                contact_sheet(pixels_to_images(torch.cat(rows)), sheet, per_row=8)
        usage = torch.bincount(torch.cat(codes), minlength=model.arch.codes).double()
        usage = usage / usage.sum()
        return TokenizerQuality(
            psnr=torch.cat(psnr).mean().item(),
            l1=torch.cat(l1).mean().item(),
            lpips=sum(lpips) / len(self.scenes) if lpips else math.nan,
            codes_used=int((usage > 0).sum()),
            perplexity=math.exp(torch.special.entr(usage).sum().item()),
            kept=self._kept(model),
            repeated=self._repeated(model),
        )

    def _kept(self, model: FSQTokenizer) -> float:
        """Of the cells with equal pixels on two backgrounds, which a sprite covers: the share with equal codes."""
        first, second = self._twins
        is_equal = (first == second).all(1)  # (B, H, W)
        is_covered = -nn.functional.max_pool2d(-is_equal.float()[:, None], model.downsample)[:, 0] > 0.5
        with autocast(self.painter.device):
            has_same_code = model.encode(first) == model.encode(second)  # (B, H/f, W/f)
        return (has_same_code & is_covered).sum().item() / max(1, is_covered.sum().item())

    def _repeated(self, model: FSQTokenizer) -> float:
        """Measured on the twins, which have plain backgrounds."""
        first, _ = self._twins
        with autocast(self.painter.device):
            codes = model.encode(first)
        repeats = [(codes.roll(1, axis) == codes)[mask] for axis, mask in equals_previous_cell(first, model.downsample)]
        return torch.cat(repeats).float().mean().item()


def equals_previous_cell(pixels: Tensor, cell: int) -> list[tuple[int, Tensor]]:
    """For rows and columns: the axis, and which cells (B, H, W) have exactly the pixels of the cell before them."""
    masks = []
    for axis in (1, 2):
        difference = (pixels - pixels.roll(cell, axis + 1)).abs().amax(1, keepdim=True)  # (B, 1, H f, W f)
        is_equal = nn.functional.max_pool2d(difference, cell)[:, 0] == 0
        is_equal.select(axis, 0).fill_(False)  # the first cell has none before it
        masks.append((axis, is_equal))
    return masks
