"""What a drafter learns from: whole pictures as the target sees them, laid out as the drafter will see them.

A drafter's place i holds token i + 1 and the target's feature of token i. `Teacher` runs the target over prompts and
complete rasters and hands out those tensors, for any family; `Lesson` also knows the target's own distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.drafters.eagle import above_tokens
from underdraw.layout import Layout
from underdraw.nn.target import DecoderTarget, apply_guidance
from underdraw.nn.transformer import Transformer
from underdraw.protocols import Prompt


@dataclass(frozen=True, slots=True)
class Lesson:
    """R rows of T places: prompts (conditional rows, then unconditional ones) and the raster behind them."""

    layout: Layout
    raster: Tensor  # (B, steps) token ids of whole pictures
    tokens: Tensor  # (R, T) token ids, one place ahead of the features; right-padded
    features: Tensor  # (R, T, D) of the target
    steps: Tensor  # (R, T) step of each token; negative inside the prompt
    above: Tensor  # (R, T, 2) tokens above and above-right of the cell after each token
    rotation: Tensor  # (R, T, 2, half)
    offset: Tensor  # (R,) of the drafter's rotations
    places: Tensor  # (R,) where the token of step `start` stands
    copies: int

    def logits(self, net: Transformer, steps: Tensor, guidance: Tensor | float) -> Tensor:
        """The target's guided logits of the tokens at `steps` (B, N): (B, N, K)."""
        # The token of a step is told by the feature of the token before it, which shares the place of its successor.
        place = self.places[:, None] + steps.repeat(self.copies, 1) - self.layout.start
        picked = self.features.gather(1, place[..., None].expand(-1, -1, self.features.shape[-1]))
        return combined(net.logits(picked), guidance, self.copies)


def combined(logits: Tensor, guidance: Tensor | float, copies: int) -> Tensor:
    """Guidance over conditional and unconditional rows: (R, ...) -> (B, ...)."""
    return logits if copies == 1 else apply_guidance(logits, guidance)


@dataclass(frozen=True, slots=True)
class Rows:
    """The target's features of R rows, before they are laid out for the drafter. Prompts are right-padded."""

    prefix: Tensor  # (R, P) token ids of the prompts, -1 where they were not tokens
    before: Tensor  # (R, P, D) features of the prompts
    behind: Tensor  # (R, S, D) features of the raster's tokens
    lengths: Tensor  # (R,) of the prompts
    offset: Tensor  # (R,) sequence place of step 0

    def pick(self, images: Tensor, copies: int) -> Rows:
        """The rows of some of the images (M,), conditional ones first."""
        batch = self.lengths.shape[0] // copies
        rows = torch.cat([images + copy * batch for copy in range(copies)]).to(self.lengths.device)
        return Rows(self.prefix[rows], self.before[rows], self.behind[rows], self.lengths[rows], self.offset[rows])


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target as a teacher. `copies` is 2 where pictures are drawn with guidance."""

    target: DecoderTarget
    layout: Layout
    copies: int = 2

    def lesson(self, prompts: Sequence[Prompt], raster: Tensor) -> Lesson:
        """Run the target over prompts and whole rasters (B, steps)."""
        return self.lay_out(self.rows(prompts, raster), raster)

    @torch.no_grad()
    def rows(self, prompts: Sequence[Prompt], raster: Tensor) -> Rows:
        """The target's features, computed now."""
        layout, net = self.layout, self.target.net
        session = self.target.open(prompts, layout, guidance=2.0 if self.copies == 2 else 1.0)
        prefill = session.prefill
        steps = torch.arange(layout.start, layout.stop, device=raster.device).expand(
            len(prefill.host_lengths), -1
        )  # (R, S)
        count = steps.shape[1]
        x = net.embed(raster.repeat(self.copies, 1)[:, layout.start : layout.stop])
        counts, known = torch.full_like(prefill.lengths, count), [count] * len(prefill.host_lengths)
        behind = session.decoder.append(x, session.rope_table(steps), counts, known)
        return Rows(prefill.prefix, prefill.features, behind, prefill.lengths, session.offset)

    @torch.no_grad()
    def lay_out(self, rows: Rows, raster: Tensor) -> Lesson:
        """Prompt and raster in one row, without the gap that padding leaves between them."""
        layout, rope = self.layout, self.target.net.arch.rope
        seen = raster.repeat(self.copies, 1)[:, layout.start : layout.stop]  # (R, S)
        padded, width = rows.before.shape[1:]
        place = torch.arange(padded + seen.shape[1], device=raster.device)
        ahead = place - rows.lengths[:, None]  # (R, P + S) place in the raster, negative in the prompt
        inside, drawn, asked = ahead >= 0, ahead.clamp(0, seen.shape[1] - 1), place.clamp(max=padded - 1)
        tokens = torch.where(inside, seen.gather(1, drawn), rows.prefix[:, asked].clamp(min=0))
        behind = rows.behind.gather(1, drawn[..., None].expand(-1, -1, width))
        features = torch.where(inside[..., None], behind, rows.before[:, asked])
        steps = (ahead[:, 1:] + layout.start).clamp(max=layout.stop - 1)
        nowhere = torch.full_like(raster[:, 0], layout.stop)  # every neighbour above is known
        above = above_tokens(raster, layout, steps + 1, nowhere, self.copies)
        offset = rows.offset - 1
        rotation = rope.image_rotation(layout, steps.clamp(min=0), offset)
        rotation = torch.where(
            (steps >= 0)[..., None, None], rotation, rope.prompt_rotation(steps.shape[1], raster.device)
        )
        return Lesson(
            layout, raster, tokens[:, 1:], features[:, :-1], steps, above, rotation, offset, rows.lengths - 1,
            self.copies,
        )  # fmt: skip
