"""A decoder's static KV cache: R rows of committed tokens, with the nodes of a draft tree behind them.

Slots 0..length-1 of a row hold its committed tokens in order, so after every `compact` the cache is what a fresh
prefill would have left.

Lengths are on the device, at a fixed address; the host keeps a copy, `host_lengths`, so that a pass need not read more
slots than are in use. A pass that is captured as a CUDA graph cannot ask the host: it reads a fixed `span` of slots,
and the host learns only afterwards, by `sync_lengths`, how many tokens it committed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from underdraw.constants import arange_cached
from underdraw.errors import CapacityError
from underdraw.nn.attention import allocate_cache, triton_available
from underdraw.nn.transformer import Arch

_SLOT_MULTIPLE = 64  # the capacity and the slots that an eager pass reads are multiples of this


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


class KVCache:
    """Keys and values of all layers for R rows, each with its own length."""

    def __init__(self, arch: Arch, rows: int, capacity: int, like: Tensor) -> None:
        self.capacity = _round_up(capacity, _SLOT_MULTIPLE)
        kv_heads = arch.num_kv_heads
        shape = (arch.layers, rows, kv_heads, self.capacity, arch.head_width)
        self.keys, self.values = allocate_cache(shape, like)
        self.length = torch.zeros(rows, dtype=torch.int64, device=like.device)  # (R,) committed tokens
        self.host_lengths = [0] * rows
        self.num_nodes = 0  # tree nodes behind the committed tokens
        self.span: int | None = None  # slots that a captured pass reads
        head_starts = torch.arange(0, rows * kv_heads * self.capacity, self.capacity, device=like.device)
        self._head_starts = head_starts.view(rows, 1, kv_heads)
        self._first_node_slots: Tensor | None = None  # (R, 1, G) computed once a pass

    def reset(self) -> None:
        """Remove every token."""
        self.drop_nodes()
        self.length.zero_()
        self.host_lengths, self.span = [0] * len(self.host_lengths), None

    def fix_span(self, count: int, quantum: int) -> int:
        """Fix the number of slots that the next pass reads, enough for `count` new tokens; return that number.

        It is a multiple of the quantum, or the whole capacity, so that few different passes have to be captured.
        """
        used = max(self.host_lengths) + count
        self._check_capacity(used)
        self._first_node_slots = None
        self.span = min(_round_up(used, quantum), self.capacity)
        return self.span

    def reserve(self, count: int) -> tuple[Tensor, int]:
        """Slots (R, N, G) of `count` new nodes, as rows of (R * G * capacity, D), and how many slots the pass reads."""
        first, last = self.num_nodes, self.num_nodes + count
        length = self.span
        if length is None:
            used = max(self.host_lengths) + last
            self._check_capacity(used)
            length = min(_round_up(used, _SLOT_MULTIPLE), self.capacity)
        self.num_nodes = last
        if self._first_node_slots is None:
            self._first_node_slots = self.length[:, None, None] + self._head_starts
        return self._first_node_slots + arange_cached(last, self.length.device)[first:, None], length

    def commit(self, counts: Tensor, host_counts: Sequence[int]) -> None:
        """Commit the first `counts` (R,) nodes of each row and drop the others; `host_counts` are the same on the host.

        In a captured pass the host's part is done by `sync_lengths` after the pass.
        """
        self.drop_nodes()
        self.length += counts
        if self.span is None:
            self.sync_lengths(host_counts)

    def compact(self, path: Tensor, counts: Tensor, host_counts: Sequence[int]) -> None:
        """Move the nodes of `path` (R, D), which starts at node 0, together; commit the first `counts` (R,) of them."""
        depth = path.shape[1]
        if depth > 1 and triton_available(path.device):
            from underdraw.kernels.compact import compact

            compact(self.keys, self.values, path, counts, self.length)
        elif depth > 1:
            source = self.length[:, None] + path  # (R, D)
            target = (self.length[:, None] + arange_cached(depth, path.device)).clamp(max=self.capacity - 1)
            row = arange_cached(path.shape[0], path.device)[:, None]
            self.keys[:, row, :, target] = self.keys[:, row, :, source]
            self.values[:, row, :, target] = self.values[:, row, :, source]
        self.commit(counts, host_counts)

    def copy_rows(self, source: KVCache, source_rows: Sequence[int], rows: Sequence[int]) -> None:
        """Overwrite `rows` by the committed tokens of `source_rows` of another cache of any capacity."""
        used = [source.host_lengths[row] for row in source_rows]
        count, device = max(used), self.length.device
        self._check_capacity(count)
        index, source_index = (torch.tensor(list(part), device=device) for part in (rows, source_rows))
        for keys, source_keys in ((self.keys, source.keys), (self.values, source.values)):
            for layer in range(len(keys)):  # by layer, since indexing copies what it reads
                keys[layer, index, :, :count] = source_keys[layer, source_index, :, :count]
        self.length[index] = source.length[source_index]
        for row, length in zip(rows, used, strict=True):
            self.host_lengths[row] = length

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Remove the tokens of some rows."""
        self.length[torch.tensor(list(rows), device=self.length.device)] = 0
        for row in rows:
            self.host_lengths[row] = 0

    def drop_nodes(self) -> None:
        """Drop the tree nodes."""
        self.num_nodes, self._first_node_slots = 0, None

    def sync_lengths(self, host_counts: Sequence[int]) -> None:
        """Add the tokens that were committed to each row to the host's lengths."""
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, host_counts, strict=True)]

    def _check_capacity(self, used: int) -> None:
        if used > self.capacity:
            raise CapacityError(
                f"{used} tokens do not fit a KV cache of {self.capacity}; open the session with more capacity."
            )
