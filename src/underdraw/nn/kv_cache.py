"""Stream: a decoder with its static key-value cache, R rows of text and image tokens that grow, branch and are pruned.

`extend` appends tokens for good, `branch` adds tree nodes behind them, `keep` makes one path of the tree permanent
and forgets the rest. Targets and drafters alike are streams. Slots 0..length-1 of a row hold its committed tokens in
order, so after every `keep` the cache is what a fresh prefill would have left.

Lengths live on the device, in a tensor that stays where it is; the host keeps a copy of its own, `known`, to look at no
more slots than needed. A pass that is captured and replayed cannot ask the host: it looks at a fixed `span` of slots,
what it commits is not known to the host while it runs, which is told afterwards by `note`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from underdraw.constants import arange_cached, constant
from underdraw.errors import CapacityError
from underdraw.nn.attention import (
    AttentionMask,
    Kernel,
    TreeMask,
    allocate_cache,
    attend,
    attend_cpu,
    splits,
    windows,
)
from underdraw.nn.layer_functions import PLAIN, CacheView, run_layers
from underdraw.nn.row_invariant import block
from underdraw.nn.transformer import Transformer


class KVCache:
    """R rows of one decoder, each with its own length."""

    def __init__(self, net: Transformer, rows: int, capacity: int) -> None:
        arch = net.arch
        weight = net.head.weight
        self.net = net
        self.capacity = -(-capacity // 64) * 64
        shape = (arch.layers, rows, arch.groups, self.capacity, arch.width)
        self.keys, self.values = allocate_cache(shape, weight)
        self.length = torch.zeros(rows, dtype=torch.int64, device=weight.device)  # (R,) committed tokens
        self.host_lengths = [0] * rows  # `length` on the host
        heads = torch.arange(0, rows * arch.groups * self.capacity, self.capacity, device=weight.device)
        self.heads = heads.view(rows, 1, arch.groups)  # where each head's slots begin
        self.ends: Tensor | None = None  # (R, 1, G) slots behind the committed tokens, as this pass found them
        self.nodes = 0  # tree nodes now in the cache
        self.depths: list[Tensor] = []  # (B, N) of those nodes, on a CPU
        self.span: int | None = None  # how many slots a captured pass looks at
        self.regions = PLAIN
        self.kernel: Kernel = "fused"

    def reset(self) -> None:
        """Forget every token."""
        self.drop_nodes()
        self.length.zero_()
        self.host_lengths, self.span, self.regions, self.kernel = [0] * len(self.host_lengths), None, PLAIN, "fused"

    def fix_span(self, more: int, quantum: int) -> int:
        """Make the next pass look at a fixed number of slots, enough for `more` new tokens; returns that number.

        It is a multiple of the quantum, or all of them, if attention reads no more than is there.
        """
        used = max(self.host_lengths) + more
        self._check(used)
        self.ends = None
        quantum = self.capacity if self._splits() else quantum
        self.span = min(-(-used // quantum) * quantum, self.capacity)
        return self.span

    def append(self, x: Tensor, cos_sin: Tensor, counts: Tensor, host_counts: Sequence[int]) -> Tensor:
        """Append the first `counts` (R,) of N tokens x (R, N, dim) with factors (R, N, 2, width); features (R, N, dim).

        `known` are the counts on the host. Tokens past a row's count are computed and forgotten.
        """
        self.drop_nodes()
        index = arange_cached(x.shape[1], x.device)
        features = self._run(x, cos_sin, index[None], (index[:, None] >= index)[None], spread=0)
        self._grow(counts, host_counts)
        return features

    def append_with_nodes(
        self, x: Tensor, cos_sin: Tensor, counts: Tensor, host_counts: Sequence[int], depths: Tensor, before: Tensor
    ) -> Tensor:
        """`extend`, with nodes behind the new tokens: `depths` (B, N) and what each sees of them, before (B, N, N)."""
        self.drop_nodes()
        features = self._run(x, cos_sin, depths, before, spread=x.shape[1] - 1)
        self._grow(counts, host_counts)
        return features

    def append_nodes(self, x: Tensor, cos_sin: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Add N tree nodes x (R, N, dim) to the M there are: features (R, N, dim).

        Rows are copies of B images, with depths (B, N) and ancestors (B, N, M + N).
        """
        return self._run(x, cos_sin, depths, ancestors, spread=ancestors.shape[-1] - 1)

    def drop_nodes(self) -> None:
        """Drop the tree nodes."""
        self.nodes, self.depths, self.ends = 0, [], None

    def compact(self, path: Tensor, counts: Tensor, host_counts: Sequence[int]) -> None:
        """Commit the first `counts` (R,) nodes of `path` (R, D), which starts at node 0, and forget the others."""
        moved = path.shape[1]
        if moved > 1:
            source = self.length[:, None] + path  # (R, D)
            target = (self.length[:, None] + arange_cached(moved, path.device)).clamp(max=self.capacity - 1)
            row = arange_cached(path.shape[0], path.device)[:, None]
            self.keys[:, row, :, target] = self.keys[:, row, :, source]
            self.values[:, row, :, target] = self.values[:, row, :, source]
        self._grow(counts, host_counts)

    def sync_lengths(self, host_counts: Sequence[int]) -> None:
        """The host's part of a commit: so many tokens have come to each row."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, host_counts, strict=True)]

    def _grow(self, counts: Tensor, host_counts: Sequence[int]) -> None:
        self.drop_nodes()
        self.length += counts
        if self.span is None:
            self.sync_lengths(host_counts)

    def _check(self, used: int) -> None:
        if used > self.capacity:
            raise CapacityError(
                f"{used} tokens do not fit a cache of {self.capacity}; open the session with more capacity."
            )

    def _run(self, x: Tensor, cos_sin: Tensor, depths: Tensor, ancestors: Tensor, spread: int) -> Tensor:
        """Write the keys of N new nodes behind the M old ones and attend to prompt, committed tokens and ancestors."""
        before, nodes = self.nodes, self.nodes + x.shape[1]
        length = self.span
        if length is None:
            used = max(self.host_lengths) + nodes
            self._check(used)
            length = min(-(-used // 64) * 64, self.capacity)
        self.nodes = nodes
        if x.is_cpu:
            self.depths.append(depths)
        visible = self._visible(ancestors, spread, length)
        if self.ends is None:
            self.ends = self.length[:, None, None] + self.heads
        slots = self.ends + arange_cached(nodes, x.device)[before:, None]  # (R, N, G)
        new_keys, new_values = (
            cache.flatten(1, 3).unbind() for cache in (self.keys, self.values[..., : self.net.arch.width])
        )
        attention = self._attention(visible, length)
        return run_layers(self.net, x, cos_sin, CacheView(new_keys, new_values, slots, attention), self.regions)

    def _attention(self, visible: AttentionMask | TreeMask, length: int) -> Callable[[int, Tensor], Tensor]:
        """How a layer attends to the first `length` slots."""
        seen = self.keys[:, :, :, :length], self.values[:, :, :, :length]
        if isinstance(visible, TreeMask) or not self.length.is_cpu:
            keys, values = (cache.unbind() for cache in seen)
            return lambda layer, q: attend(q, keys[layer], values[layer], visible, self.kernel)
        flat_keys, flat_values = (cache.flatten(1, 2) for cache in seen)
        keys, values = flat_keys.transpose(2, 3).unbind(), flat_values.unbind()
        return lambda layer, q: attend_cpu(q, keys[layer], values[layer], visible)

    def _splits(self) -> bool:
        return splits(self.kernel, self.keys[0], self.net.arch.heads)

    def _visible(self, ancestors: Tensor, spread: int, length: int) -> AttentionMask | TreeMask:
        """ancestors (B, N, M + N) as what is seen of `length` cache slots."""
        arch, device = self.net.arch, self.length.device
        if self._splits():
            return TreeMask(self.length, ancestors)
        ends, costs = (True, False), (0.0, -torch.inf)
        bias = self.regions.seen(
            ancestors, self.length, arange_cached(length + 1, device)[1:], constant(ends, torch.bool, device),
            constant(costs, self.keys.dtype, device),
        )  # fmt: skip
        if not bias.is_cpu:
            return AttentionMask(bias[:, None])
        first = min(self.host_lengths) if self.span is None else 0
        depths = self.depths[0]
        size = block(bias.dtype, arch.groups)
        if length > size:
            depths = torch.cat(self.depths, dim=1).clamp_(min=0)
            depths = depths.repeat(len(self.length) // len(depths), 1)
        parts = windows(self.length, depths, spread, first, length, arch.groups, size)
        return AttentionMask.of(bias, parts, arch.heads, arch.groups)
