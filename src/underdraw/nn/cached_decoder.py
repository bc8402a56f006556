"""A decoder with its KV cache, as targets and drafters use it: append tokens or tree nodes, get their features."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from underdraw.constants import arange_cached, constant
from underdraw.nn.attention import (
    AttentionBackend,
    AttentionMask,
    TreeMask,
    attend,
    attend_cpu,
    slot_blocks,
    uses_tree_kernel,
)
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.layer_functions import CacheView, LayerFunctions, run_layers
from underdraw.nn.numerics import Numerics, eager_backend
from underdraw.nn.row_invariant import sum_block
from underdraw.nn.transformer import Transformer


class CachedDecoder:
    """A decoder and the KV cache of its R rows."""

    def __init__(self, net: Transformer, rows: int, capacity: int, numerics: Numerics = "row-invariant") -> None:
        self.net = net
        self.cache = KVCache(net.arch, rows, capacity, net.embedding.weight)
        self._eager = eager_backend(numerics, net.embedding.weight.device)
        self.layer_functions: LayerFunctions
        self.attention_backend: AttentionBackend
        self.layer_functions, self.attention_backend = self._eager
        self._depths: list[Tensor] = []  # (B, N) of the nodes in the cache, on a CPU

    def reset(self) -> None:
        """Remove every token and run eagerly again."""
        self.cache.reset()
        self.layer_functions, self.attention_backend = self._eager

    def fix_span(self, count: int, quantum: int) -> int:
        """`KVCache.fix_span`; the tree kernel reads only slots in use, so its span is the whole cache."""
        return self.cache.fix_span(count, self.cache.capacity if self._uses_tree_kernel() else quantum)

    def append(self, x: Tensor, cos_sin: Tensor, counts: Tensor, host_counts: Sequence[int]) -> Tensor:
        """Commit the first `counts` (R,) of N tokens x (R, N, dim) with cos_sin (R, N, 2, D); features (R, N, dim).

        `host_counts` are the counts on the host. Tokens past a row's count are computed and dropped.
        """
        self.cache.drop_nodes()
        index = arange_cached(x.shape[1], x.device)
        features = self._run(x, cos_sin, index[None], (index[:, None] >= index)[None], spread=0)
        self.cache.commit(counts, host_counts)
        return features

    def append_with_nodes(
        self, x: Tensor, cos_sin: Tensor, counts: Tensor, host_counts: Sequence[int], depths: Tensor, visible: Tensor
    ) -> Tensor:
        """`append` with other inputs behind the tokens, at `depths` (B, N), each seeing `visible` (B, N, N) of them."""
        self.cache.drop_nodes()
        features = self._run(x, cos_sin, depths, visible, spread=x.shape[1] - 1)
        self.cache.commit(counts, host_counts)
        return features

    def append_nodes(self, x: Tensor, cos_sin: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """Add N tree nodes x (R, N, dim) to the M in the cache; features (R, N, dim).

        Rows are copies of B images, with depths (B, N) and ancestors (B, N, M + N).
        """
        return self._run(x, cos_sin, depths, ancestors, spread=ancestors.shape[-1] - 1)

    def logits(self, features: Tensor) -> Tensor:
        """Float32 logits (R, N, K) of features (R, N, dim)."""
        return self.layer_functions.select(self.net.arch, features).logits(self.net, features)

    def _run(self, x: Tensor, cos_sin: Tensor, depths: Tensor, ancestors: Tensor, spread: int) -> Tensor:
        """Write keys and values of N nodes behind those in the cache; attend to committed tokens and ancestors."""
        cache = self.cache
        if cache.num_nodes == 0:
            self._depths = []
        slots, length = cache.reserve(x.shape[1])
        if x.is_cpu:
            self._depths.append(depths)
        attention = self._attention(self._mask(ancestors, depths, spread, length), length)
        values = cache.values[..., : self.net.arch.head_width]
        keys_by_layer, values_by_layer = (part.flatten(1, 3).unbind() for part in (cache.keys, values))
        view = CacheView(keys_by_layer, values_by_layer, slots, attention)
        return run_layers(self.net, x, cos_sin, view, self.layer_functions)

    def _attention(self, mask: AttentionMask | TreeMask, length: int) -> Callable[[int, Tensor], Tensor]:
        """How a layer attends to the first `length` slots: (layer, q) -> (R, N, H * D)."""
        keys, values = self.cache.keys[:, :, :, :length], self.cache.values[:, :, :, :length]
        if isinstance(mask, TreeMask) or not keys.is_cpu:
            layers = list(zip(keys.unbind(), values.unbind(), strict=True))
            return lambda layer, q: attend(q, *layers[layer], mask, self.attention_backend)
        flat = list(zip(keys.flatten(1, 2).transpose(2, 3).unbind(), values.flatten(1, 2).unbind(), strict=True))
        return lambda layer, q: attend_cpu(q, *flat[layer], mask)

    def _uses_tree_kernel(self) -> bool:
        return uses_tree_kernel(self.attention_backend, self.cache.keys[0], self.net.arch.heads)

    def _mask(self, ancestors: Tensor, depths: Tensor, spread: int, length: int) -> AttentionMask | TreeMask:
        """The mask of ancestors (B, N, M + N) over `length` cache slots."""
        arch, cache, device = self.net.arch, self.cache, self.cache.length.device
        if self._uses_tree_kernel():
            return TreeMask(cache.length, ancestors, depths)
        slots = arange_cached(length + 1, device)[1:]
        always_never, seen_masked = (True, False), (0.0, -torch.inf)
        bias = self.layer_functions.attention_bias(
            ancestors,
            cache.length,
            slots,
            constant(always_never, torch.bool, device),
            constant(seen_masked, torch.float32 if cache.keys.is_cpu else cache.keys.dtype, device),
        )
        if not bias.is_cpu:
            return AttentionMask(bias[:, None])
        depths = self._depths[0]
        size = sum_block(arch.num_kv_heads)
        if length > size:
            depths = torch.cat(self._depths, dim=1).clamp_(min=0)
            depths = depths.repeat(len(cache.length) // len(depths), 1)
        min_committed = min(cache.host_lengths) if cache.span is None else 0
        blocks = slot_blocks(cache.length, depths, spread, min_committed, length, arch.num_kv_heads, size)
        return AttentionMask.for_cpu(bias, blocks, arch.heads, arch.num_kv_heads)
