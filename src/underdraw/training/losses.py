"""Losses of drafters: cross-entropy to the target's guided distribution, several tokens ahead, averaged over levels.

The drafter runs as it will in a tree. An EAGLE net reads its own outputs from the second level on, and each level
attends to committed positions and to its own path. A block net predicts all levels at random roots in one pass.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.drafters.block import BlockNet
from underdraw.drafters.eagle import EagleNet, above_tokens
from underdraw.nn.transformer import Attend, Transformer
from underdraw.training.batches import DrafterBatch, guided_logits


def cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of draft logits to the target's distribution: (..., K), (..., K) -> (...)."""
    return -(target.float().softmax(-1) * draft.float().log_softmax(-1)).sum(-1)


def random_roots(batch: DrafterBatch, count: int, generator: torch.Generator) -> Tensor:
    """Random steps (B, count) that a draft tree may start from."""
    layout = batch.layout
    share = torch.rand(batch.images.shape[0], count, generator=generator)
    return (share * (layout.stop - 1 - layout.start) + layout.start).long().to(batch.images.device)


class BlockLoss(nn.Module):
    """Loss of a block net at some roots of every image."""

    def __init__(self, net: BlockNet, target: Transformer) -> None:
        super().__init__()
        self.net = net
        self.target = [target]  # in a list, so that its weights are not parameters of this module

    def forward(self, batch: DrafterBatch, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss, and the loss of each level (D,); roots (B, M)."""
        draft, target, valid = self.logits(batch, roots, guidance)
        loss = cross_entropy(draft, target) * valid
        levels = loss.sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
        return levels.mean(), levels.detach()

    def logits(self, batch: DrafterBatch, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guided logits of draft and target (B, M, D, K), and which of them count (B, M, D)."""
        net, layout, copies = self.net, batch.layout, batch.copies
        images, trees, depth = *roots.shape, net.slots.shape[0]
        levels = torch.arange(depth, device=roots.device)
        steps = roots[..., None] + 1 + levels  # (B, M, D)
        valid = (steps < layout.stop) & ~layout.is_row_end(steps)
        steps = steps.clamp(max=layout.stop - 1).flatten(1)
        root_of_slot = roots.repeat_interleave(depth, dim=1)
        above = above_tokens(batch.images, layout, steps.repeat(copies, 1), root_of_slot, copies)
        slots = net.slots.repeat(trees, 1) + net.slot_above(net.embed_above(above))
        committed = net.embed_inputs(batch.tokens, batch.features, batch.above)
        rotation = net.body.arch.rope.image_rotation(layout, steps.repeat(copies, 1), batch.offset)
        rotation = torch.cat([batch.rotation, rotation], dim=1)
        mask = self._mask(batch, roots, depth)
        features = net.body(torch.cat([committed, slots.to(committed.dtype)], dim=1), rotation, _attend_with(mask))
        features = features[:, committed.shape[1] :]
        previous = batch.images.gather(1, steps - 1).repeat(copies, 1)
        mixed = net.mix(net.markov_feature(features), net.project_tokens(previous))
        draft = guided_logits(net.body.logits(features) + net.markov_out(mixed).float(), guidance, copies)
        with torch.no_grad():
            target = batch.target_logits(self.target[0], steps, guidance)
        shape = (images, trees, depth, -1)
        return draft.view(shape), target.view(shape), valid

    def _mask(self, batch: DrafterBatch, roots: Tensor, depth: int) -> Tensor:
        """(R, 1, T + M D, T + M D): positions are causal; slots see positions up to their root and earlier slots."""
        rows, length, trees = len(batch.first), batch.tokens.shape[1], roots.shape[1]
        position = torch.arange(length, device=roots.device)
        causal = (position[:, None] >= position).expand(rows, length, length)
        root = batch.first[:, None] + roots.repeat(batch.copies, 1) - batch.layout.start  # (R, M)
        committed = (position <= root[..., None]).repeat_interleave(depth, dim=1)  # (R, M D, T)
        slot = torch.arange(trees * depth, device=roots.device)
        same_tree = (slot[:, None] // depth == slot // depth) & (slot[:, None] >= slot)
        slot_rows = torch.cat([committed, same_tree.expand(rows, -1, -1)], dim=2)
        return torch.cat([F.pad(causal, (0, trees * depth)), slot_rows], dim=1)[:, None]


def _attend_with(mask: Tensor) -> Attend:
    def attend(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        is_grouped = q.shape[2] != k.shape[2]
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=is_grouped)
        return out.transpose(1, 2).flatten(2)

    return attend


class EagleLoss(nn.Module):
    """Loss of an EAGLE net at every position of every image, `depth` levels deep on its own features."""

    def __init__(self, net: EagleNet, target: Transformer, depth: int) -> None:
        super().__init__()
        self.net, self.depth = net, depth
        self.target = [target]  # in a list, so that its weights are not parameters of this module

    def forward(self, batch: DrafterBatch, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss, and the loss of each level (D,). `roots` is not used: every position is one."""
        levels = [
            (cross_entropy(draft, target) * valid).sum() / valid.sum().clamp(min=1)
            for draft, target, valid in self._levels(batch, guidance)
        ]
        return torch.stack(levels).mean(), torch.stack(levels).detach()

    def logits(self, batch: DrafterBatch, roots: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Guided logits of draft and target (B, M, D, K) after roots (B, M), and which of them count (B, M, D)."""
        columns: list[tuple[Tensor, ...]] = []
        last = batch.layout.stop - batch.layout.start - 2
        for level, (draft, target, valid) in enumerate(self._levels(batch, guidance)):
            index = roots - batch.layout.start + level  # of the step that this level predicts
            inside, index = index <= last, index.clamp(max=last)
            wide = index[..., None].expand(-1, -1, draft.shape[-1])
            columns.append((draft.gather(1, wide), target.gather(1, wide), valid.gather(1, index) & inside))
        draft, target, valid = (torch.stack(parts, dim=2) for parts in zip(*columns, strict=True))
        return draft, target, valid

    def _levels(self, batch: DrafterBatch, guidance: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For each level, guided logits of draft and target (B, S, K) at all steps, and which of them count (B, S)."""
        net, layout, copies = self.net, batch.layout, batch.copies
        images = batch.images.shape[0]
        steps = torch.arange(layout.start + 1, layout.stop, device=batch.images.device).expand(images, -1)
        with torch.no_grad():
            target = batch.target_logits(self.target[0], steps, guidance)
        index = batch.first[:, None] + steps.repeat(copies, 1) - 1 - layout.start  # (R, S) of the token before
        is_free = ~layout.is_row_end(steps)
        attention = UnrolledAttention(net.body.arch.layers)
        features, levels = batch.features, []
        for level in range(self.depth):
            x = net.embed_inputs(batch.tokens, features.to(batch.features.dtype), batch.above)
            out = net.body(x, batch.rotation, attention.level(level))
            draft = net.body.logits(out.gather(1, index[..., None].expand(-1, -1, out.shape[-1])))
            is_valid = is_free & (steps > layout.start + level)
            levels.append((guided_logits(draft, guidance, copies), target, is_valid))
            features = F.pad(out[:, :-1], (0, 0, 1, 0))
        return levels


class UnrolledAttention:
    """Attention of level j: committed positions up to j before the query, then one position of each level since."""

    def __init__(self, layers: int) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(layers)]

    def level(self, level: int) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = q.shape[2] // k.shape[2]
            q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
            keys, values = self.keys[layer], self.values[layer]
            keys.append(k)
            values.append(v)
            length = q.shape[2]
            position = torch.arange(length, device=q.device)
            scores = (q @ keys[0].transpose(-1, -2)).float()
            scores = scores.masked_fill(position > position[:, None] - level, -torch.inf)
            if level:
                # Roots before the sequence do not count, but softmax needs at least one score that is not -inf.
                scores = scores.masked_fill((position[:, None] < level) & (position == 0), 0.0)
            # Level m of the path that ends at a query lies level - m positions before it.
            path_keys = [F.pad(keys[m], (0, 0, level - m, 0))[:, :, :length] for m in range(1, level + 1)]
            path_values = [F.pad(values[m], (0, 0, level - m, 0))[:, :, :length] for m in range(1, level + 1)]
            path_scores = [(q * path_key).sum(-1, keepdim=True).float() for path_key in path_keys]
            weights = torch.cat([scores, *path_scores], dim=-1) * q.shape[-1] ** -0.5
            weights = weights.softmax(-1).to(v.dtype)
            out = weights[..., :length] @ values[0]
            for index, path_value in enumerate(path_values):
                out = out + weights[..., length + index, None] * path_value
            return out.transpose(1, 2).flatten(2)

        return attend
