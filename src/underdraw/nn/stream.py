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

from underdraw.calibration import constant
from underdraw.errors import CapacityError
from underdraw.nn.attention import (
    Kernel,
    Tree,
    Visible,
    attend,
    attend_in_blocks,
    empty_caches,
    splits,
    windows,
)
from underdraw.nn.number import order
from underdraw.nn.regions import PLAIN, Caches, through
from underdraw.nn.rounding import block
from underdraw.nn.transformer import Transformer


class Stream:
    """R rows of one decoder, each with its own length."""

    def __init__(self, net: Transformer, rows: int, capacity: int) -> None:
        arch = net.arch
        weight = net.head.weight
        self.net = net
        self.capacity = -(-capacity // 64) * 64
        shape = (arch.layers, rows, arch.groups, self.capacity, arch.width)
        self.keys, self.values = empty_caches(shape, weight)
        self.length = torch.zeros(rows, dtype=torch.int64, device=weight.device)  # (R,) committed tokens
        self.known = [0] * rows  # `length` on the host
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
        self.forget()
        self.length.zero_()
        self.known, self.span, self.regions, self.kernel = [0] * len(self.known), None, PLAIN, "fused"

    def fix(self, more: int, quantum: int) -> int:
        """Make the next pass look at a fixed number of slots, enough for `more` new tokens; returns that number.

        It is a multiple of the quantum, or all of them, if attention reads no more than is there.
        """
        used = max(self.known) + more
        self._check(used)
        self.ends = None
        quantum = self.capacity if self._splits() else quantum
        self.span = min(-(-used // quantum) * quantum, self.capacity)
        return self.span

    def extend(self, x: Tensor, factors: Tensor, counts: Tensor, known: Sequence[int]) -> Tensor:
        """Append the first `counts` (R,) of N tokens x (R, N, dim) with factors (R, N, 2, width); features (R, N, dim).

        `known` are the counts on the host. Tokens past a row's count are computed and forgotten.
        """
        self.forget()
        index = order(x.shape[1], x.device)
        features = self._run(x, factors, index[None], (index[:, None] >= index)[None], spread=0)
        self._grow(counts, known)
        return features

    def append(
        self, x: Tensor, factors: Tensor, counts: Tensor, known: Sequence[int], depths: Tensor, before: Tensor
    ) -> Tensor:
        """`extend`, with nodes behind the new tokens: `depths` (B, N) and what each sees of them, before (B, N, N)."""
        self.forget()
        features = self._run(x, factors, depths, before, spread=x.shape[1] - 1)
        self._grow(counts, known)
        return features

    def branch(self, x: Tensor, factors: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Add N tree nodes x (R, N, dim) to the M there are: features (R, N, dim).

        Rows are copies of B images, with depths (B, N) and ancestors (B, N, M + N).
        """
        return self._run(x, factors, depths, ancestors, spread=ancestors.shape[-1] - 1)

    def forget(self) -> None:
        """Drop the tree nodes."""
        self.nodes, self.depths, self.ends = 0, [], None

    def keep(self, path: Tensor, counts: Tensor, known: Sequence[int]) -> None:
        """Commit the first `counts` (R,) nodes of `path` (R, D), which starts at node 0, and forget the others."""
        moved = path.shape[1]
        if moved > 1:
            source = self.length[:, None] + path  # (R, D)
            target = (self.length[:, None] + order(moved, path.device)).clamp(max=self.capacity - 1)
            row = order(path.shape[0], path.device)[:, None]
            self.keys[:, row, :, target] = self.keys[:, row, :, source]
            self.values[:, row, :, target] = self.values[:, row, :, source]
        self._grow(counts, known)

    def note(self, known: Sequence[int]) -> None:
        """The host's part of a commit: so many tokens have come to each row."""
        self.known = [length + count for length, count in zip(self.known, known, strict=True)]

    def _grow(self, counts: Tensor, known: Sequence[int]) -> None:
        self.forget()
        self.length += counts
        if self.span is None:
            self.note(known)

    def _check(self, used: int) -> None:
        if used > self.capacity:
            raise CapacityError(
                f"{used} tokens do not fit a cache of {self.capacity}; open the session with more capacity."
            )

    def _run(self, x: Tensor, factors: Tensor, depths: Tensor, ancestors: Tensor, spread: int) -> Tensor:
        """Write the keys of N new nodes behind the M old ones and attend to prompt, committed tokens and ancestors."""
        before, nodes = self.nodes, self.nodes + x.shape[1]
        length = self.span
        if length is None:
            used = max(self.known) + nodes
            self._check(used)
            length = min(-(-used // 64) * 64, self.capacity)
        self.nodes = nodes
        if x.is_cpu:
            self.depths.append(depths)
        visible = self._visible(ancestors, spread, length)
        if self.ends is None:
            self.ends = self.length[:, None, None] + self.heads
        slots = self.ends + order(nodes, x.device)[before:, None]  # (R, N, G)
        new_keys, new_values = (
            cache.flatten(1, 3).unbind() for cache in (self.keys, self.values[..., : self.net.arch.width])
        )
        attention = self._attention(visible, length)
        return through(self.net, x, factors, Caches(new_keys, new_values, slots, attention), self.regions)

    def _attention(self, visible: Visible | Tree, length: int) -> Callable[[int, Tensor], Tensor]:
        """How a layer attends to the first `length` slots."""
        seen = self.keys[:, :, :, :length], self.values[:, :, :, :length]
        if isinstance(visible, Tree) or not self.length.is_cpu:
            keys, values = (cache.unbind() for cache in seen)
            return lambda layer, q: attend(q, keys[layer], values[layer], visible, self.kernel)
        flat_keys, flat_values = (cache.flatten(1, 2) for cache in seen)
        keys, values = flat_keys.transpose(2, 3).unbind(), flat_values.unbind()
        return lambda layer, q: attend_in_blocks(q, keys[layer], values[layer], visible)

    def _splits(self) -> bool:
        return splits(self.kernel, self.keys[0], self.net.arch.heads)

    def _visible(self, ancestors: Tensor, spread: int, length: int) -> Visible | Tree:
        """ancestors (B, N, M + N) as what is seen of `length` cache slots."""
        arch, device = self.net.arch, self.length.device
        if self._splits():
            return Tree(self.length, ancestors)
        ends, costs = (True, False), (0.0, -torch.inf)
        bias = self.regions.seen(
            ancestors, self.length, order(length + 1, device)[1:], constant(ends, torch.bool, device),
            constant(costs, self.keys.dtype, device),
        )  # fmt: skip
        if not bias.is_cpu:
            return Visible(bias[:, None])
        first = min(self.known) if self.span is None else 0
        depths = self.depths[0]
        size = block(bias.dtype, arch.groups)
        if length > size:
            depths = torch.cat(self.depths, dim=1).clamp_(min=0)
            depths = depths.repeat(len(self.length) // len(depths), 1)
        parts = windows(self.length, depths, spread, first, length, arch.groups, size)
        return Visible.of(bias, parts, arch.heads, arch.groups)
