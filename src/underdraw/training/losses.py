"""How far a drafter is from its target, several tokens ahead: what training lowers.

The drafter is run as it will be in a tree. An EAGLE net reads its own outputs from the second level on, and each level
attends to committed places and to its own path. A block net answers all levels at random roots in one pass. The loss
is the cross-entropy to the target's guided distribution, averaged over levels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.drafters.block import BlockNet
from underdraw.drafters.eagle import EagleNet, above_tokens
from underdraw.nn.transformer import Attend, Transformer
from underdraw.training.teacher import Lesson, combined


def distance(draft: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of draft logits to the target's distribution: (..., K), (..., K) -> (...)."""
    return -(target.float().softmax(-1) * draft.float().log_softmax(-1)).sum(-1)


def roots_of(lesson: Lesson, count: int, generator: torch.Generator) -> Tensor:
    """Random steps (B, count) that a tree may stand on."""
    layout = lesson.layout
    batch = lesson.raster.shape[0]
    picked = torch.rand(batch, count, generator=generator) * (layout.stop - 1 - layout.start) + layout.start
    return picked.long().to(lesson.raster.device)


class BlockLoss(nn.Module):
    """The block net at some roots of every picture."""

    def __init__(self, net: BlockNet, teacher: Transformer) -> None:
        super().__init__()
        self.net = net
        self.teacher = [teacher]  # in a list, so that its weights are not this module's

    def forward(self, lesson: Lesson, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss, and the loss of each level (D,); roots (B, M)."""
        draft, target, valid = self.ahead(lesson, roots, guidance)
        loss = distance(draft, target) * valid
        levels = loss.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
        return levels.mean(), levels.detach()

    def ahead(self, lesson: Lesson, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guided logits of draft and target (B, M, D, K), and which of them count (B, M, D)."""
        net, layout, copies = self.net, lesson.layout, lesson.copies
        batch, trees, depth = *roots.shape, net.slots.shape[0]
        order = torch.arange(depth, device=roots.device)
        steps = roots[..., None] + 1 + order  # (B, M, D)
        valid = (steps < layout.stop) & ~layout.is_row_end(steps)
        steps = steps.clamp(max=layout.stop - 1).flatten(1)
        spread = roots.repeat_interleave(depth, dim=1)
        above = above_tokens(lesson.raster, layout, steps.repeat(copies, 1), spread, copies)
        slots = net.slots.repeat(trees, 1) + net.slot_above(net.embed_above(above))
        stream = net.embed_inputs(lesson.tokens, lesson.features, lesson.above)
        split_cos_sin = net.body.arch.rope.image_rotation(layout, steps.repeat(copies, 1), lesson.offset)
        split_cos_sin = torch.cat([lesson.rotation, split_cos_sin], dim=1)
        mask = self._mask(lesson, roots, depth)
        features = net.body(torch.cat([stream, slots.to(stream.dtype)], dim=1), split_cos_sin, _masked(mask))
        features = features[:, stream.shape[1] :]
        before = lesson.raster.gather(1, steps - 1).repeat(copies, 1)
        mixed = net.mix(net.markov_feature(features), net.project_tokens(before))
        draft = combined(net.body.logits(features) + net.markov_out(mixed).float(), guidance, copies)
        with torch.no_grad():
            target = lesson.logits(self.teacher[0], steps, guidance)
        shape = (batch, trees, depth, -1)
        return draft.view(shape), target.view(shape), valid

    def _mask(self, lesson: Lesson, roots: Tensor, depth: int) -> Tensor:
        """(R, 1, T + M D, T + M D): places look back; slots look at places up to their root and at earlier slots."""
        length, trees = lesson.tokens.shape[1], roots.shape[1]
        place = torch.arange(length, device=roots.device)
        back = (place[:, None] >= place).expand(len(lesson.places), length, length)
        root = lesson.places[:, None] + roots.repeat(lesson.copies, 1) - lesson.layout.start  # (R, M)
        seen = (place <= root[..., None]).repeat_interleave(depth, dim=1)  # (R, M D, T)
        slot = torch.arange(trees * depth, device=roots.device)
        own = (slot[:, None] // depth == slot // depth) & (slot[:, None] >= slot)
        own = own.expand(len(lesson.places), -1, -1)
        lower = torch.cat([seen, own], dim=2)
        return torch.cat([F.pad(back, (0, trees * depth)), lower], dim=1)[:, None]


def _masked(mask: Tensor) -> Attend:
    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask,
            enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
        return out.transpose(1, 2).flatten(2)

    return attend


class EagleLoss(nn.Module):
    """The EAGLE net at every place of every picture, `depth` levels deep on its own features."""

    def __init__(self, net: EagleNet, teacher: Transformer, depth: int) -> None:
        super().__init__()
        self.net, self.depth = net, depth
        self.teacher = [teacher]

    def forward(self, lesson: Lesson, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss, and the loss of each level (D,). Roots are not needed: every place is one."""
        levels = [
            (distance(draft, target) * valid).sum() / valid.sum().clamp(min=1)
            for draft, target, valid in self._levels(lesson, guidance)
        ]
        return torch.stack(levels).mean(), torch.stack(levels).detach()

    def ahead(self, lesson: Lesson, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guided logits of draft and target (B, M, D, K) after roots (B, M), and which of them count (B, M, D)."""
        columns: list[tuple[Tensor, ...]] = []
        last = lesson.layout.stop - lesson.layout.start - 2
        for level, (draft, target, valid) in enumerate(self._levels(lesson, guidance)):
            index = roots - lesson.layout.start + level  # of the step that this level tells
            inside, index = index <= last, index.clamp(max=last)
            wide = index[..., None].expand(-1, -1, draft.shape[-1])
            columns.append((draft.gather(1, wide), target.gather(1, wide), valid.gather(1, index) & inside))
        draft, target, valid = (torch.stack(parts, dim=2) for parts in zip(*columns, strict=True))
        return draft, target, valid

    def _levels(self, lesson: Lesson, guidance: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each level, guided logits of draft and target (B, S, K) at all steps, and which of them count (B, S)."""
        net, layout, copies = self.net, lesson.layout, lesson.copies
        batch = lesson.raster.shape[0]
        steps = torch.arange(layout.start + 1, layout.stop, device=lesson.raster.device).expand(batch, -1)  # told
        with torch.no_grad():
            target = lesson.logits(self.teacher[0], steps, guidance)
        place = lesson.places[:, None] + steps.repeat(copies, 1) - 1 - layout.start  # (R, S) of the token before
        free = ~layout.is_row_end(steps)
        attention = Unrolled(net.body.arch.layers)
        features, found = lesson.features, []
        for level in range(self.depth):
            x = net.embed_inputs(lesson.tokens, features.to(lesson.features.dtype), lesson.above)
            out = net.body(x, lesson.rotation, attention.level(level))
            picked = out.gather(1, place[..., None].expand(-1, -1, out.shape[-1]))
            draft = combined(net.body.logits(picked), guidance, copies)
            found.append((draft, target, free & (steps > layout.start + level)))
            features = F.pad(out[:, :-1], (0, 0, 1, 0))
        return found


class Unrolled:
    """Attention of level j: committed places up to j before a query's own, then one place of each level since."""

    def __init__(self, layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def level(self, level: int) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            share = q.shape[2] // k.shape[2]
            q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)))
            keys, values = self.keys[layer], self.values[layer]
            keys.append(k)
            values.append(v)
            length = q.shape[2]
            place = torch.arange(length, device=q.device)
            scores = (q @ keys[0].transpose(-1, -2)).float()
            scores = scores.masked_fill(place > place[:, None] - level, -torch.inf)
            if level:
                # A root that would stand before the sequence does not count; it still needs something to look at.
                scores = scores.masked_fill((place[:, None] < level) & (place == 0), 0.0)
            path = [F.pad(keys[m], (0, 0, level - m, 0))[:, :, :length] for m in range(1, level + 1)]
            told = [F.pad(values[m], (0, 0, level - m, 0))[:, :, :length] for m in range(1, level + 1)]
            scores = torch.cat([scores, *((q * one).sum(-1, keepdim=True).float() for one in path)], dim=-1)
            weights = (scores * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
            out = weights[..., :length] @ values[0]
            for index, one in enumerate(told):
                out = out + weights[..., length + index, None] * one
            return out.transpose(1, 2).flatten(2)

        return attend
