"""Attention of a few new nodes to a KV cache.

On a CPU the result of a node is bit-identical whatever other nodes are computed with it: the sum over keys is taken
block by block of *sequence positions*, with the softmax normaliser as one more value column. Masked keys add exact
zeros, and the ancestors of a tree node lie in the same order as committed tokens would, so a node of a large tree gets
the bits of the same token decoded alone. On a GPU there are three backends: torch's scaled_dot_product_attention, two
matmuls with a softmax between them, and the Triton kernel `kernels.tree_attention`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from underdraw.constants import scalar
from underdraw.nn.row_invariant import batched_product, column_multiple, padded_rows

AttentionBackend = Literal["sdpa", "matmul", "tree", "auto"]
"""GPU attention: torch's fused kernel, two matmuls and a softmax, `kernels.tree_attention`, or the fastest of them."""
_AUTO_MAX_WIDTH = 128  # head width whose tiles fit the shared memory of every GPU
_AUTO_MAX_HEADS = 132  # heads of all rows; with more of them torch's kernel keeps a GPU busy
_MIN_VALUE_COLUMNS = 16  # a CPU's BLAS adds up fewer columns in another order


@dataclass(frozen=True, slots=True)
class SlotBlock:
    """A range of cache slots that holds all keys of one block of positions."""

    start: int
    stop: int
    mask: Tensor | None  # (R * G, 1, stop - start) float, 0 for slots of other blocks; None if there are none


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """The cache slots that each new node sees, as a bias that is added to scores."""

    bias: Tensor  # (R, 1, N, length); for `attend_cpu` (R * G, M, length)
    blocks: tuple[SlotBlock, ...] = ()  # on a CPU, the slots in the order in which they are summed up

    @classmethod
    def for_cpu(cls, bias: Tensor, blocks: tuple[SlotBlock, ...], heads: int, kv_heads: int) -> AttentionMask:
        """From a float32 bias (R, N, length): repeated for the M queries of each KV head, padding included."""
        rows, count, length = bias.shape
        queries = heads // kv_heads * count
        padded = padded_rows(queries, torch.float32)
        bias = bias[:, None, None].expand(rows, kv_heads, -(-padded // count), count, length)
        return cls(bias.reshape(rows * kv_heads, -1, length)[:, :padded], blocks)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """For `kernels.tree_attention`: a node sees all committed slots, and of the nodes behind them its ancestors."""

    committed: Tensor  # (R,)
    ancestors: Tensor  # (B, N, M); rows are copies of B images
    depths: Tensor  # (B, N) positions of the nodes relative to `committed`


def attention_bias(
    ancestors: Tensor, committed: Tensor, slots: Tensor, always_never: Tensor, seen_masked: Tensor
) -> Tensor:
    """Bias (R, N, L) of N tree nodes over L slots, from ancestors (B, N, M) and committed slots (R,).

    Rows are copies of B images. The last three are constants that a CUDA graph may not create: slots 1, 2, ..., L, the
    booleans (True, False), and what is added to the score of a visible and of a masked slot (0, -inf).
    """
    batch, count, nodes = ancestors.shape
    always, never = always_never.expand(batch, count, 2).split(1, dim=-1)
    visible = torch.cat([always, ancestors, never], dim=-1)  # committed tokens, the M nodes, empty slots
    table = torch.where(visible, seen_masked[0], seen_masked[1])  # (B, N, M + 2)
    column = (slots - committed[:, None]).clamp(0, nodes + 1)  # (R, L) of the table
    index = column.view(-1, batch, 1, len(slots)).expand(-1, -1, count, -1)
    return table.expand(len(index), -1, -1, -1).gather(3, index).flatten(0, 1)


def uses_tree_kernel(backend: AttentionBackend, keys: Tensor, heads: int) -> bool:
    """True if keys (R, G, L, D) are attended to by `kernels.tree_attention`: on request, or where it was fastest."""
    rows, kv_heads, _, width = keys.shape
    if backend == "auto":
        fastest = heads != kv_heads or (keys.dtype != torch.float32 and rows * kv_heads <= _AUTO_MAX_HEADS)
        return fastest and width <= _AUTO_MAX_WIDTH and triton_available(keys.device)
    return backend == "tree"


@functools.cache
def triton_available(device: torch.device) -> bool:
    """True where our Triton kernels run: triton is installed and the GPU has bfloat16 tensor cores."""
    if device.type != "cuda" or not torch.cuda.is_available() or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def slot_blocks(
    committed: Tensor, depths: Tensor, spread: int, min_committed: int, length: int, kv_heads: int, size: int
) -> tuple[SlotBlock, ...]:
    """Blocks of `size` positions over `length` slots.

    A row holds `committed` (R,) tokens, then tree nodes of `depths` (R, M), whose positions are committed + depth. A
    node's slot is at its position or at most `spread` slots after it. `min_committed` is a lower bound of `committed`
    on the host.
    """
    starts = range(0, length, size)
    if len(starts) == 1 or not spread:
        return tuple(SlotBlock(start, min(start + size, length), None) for start in starts)
    slot = torch.arange(length, device=depths.device)
    node = (slot - committed[:, None]).clamp(0, depths.shape[1] - 1)  # (R, length) in each slot
    position = torch.where(slot < committed[:, None], slot, committed[:, None] + depths.gather(1, node))
    blocks = []
    for start in starts:
        stop = start + size
        if stop <= min_committed:
            blocks.append(SlotBlock(start, stop, None))
            continue
        stop = min(stop + spread, length)
        is_inside = position[:, start:stop] // size == start // size
        blocks.append(SlotBlock(start, stop, is_inside[:, None].float().repeat_interleave(kv_heads, dim=0)))
    return tuple(blocks)


def allocate_cache(shape: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Empty caches of keys and values (layers, R, G, L, D), with the device and dtype of `like`.

    On a CPU the slots of keys are contiguous in memory, so that the BLAS multiplies any number of queries alike and a
    few of them faster. Values have one more column, of ones, that sums up to the softmax normaliser, and are padded
    with zero columns.
    """
    layers, *row_shape, width = shape
    if like.device.type != "cpu":
        return like.new_zeros(shape), like.new_zeros(shape)
    values = like.new_zeros(*shape[:-1], value_columns(width))
    values[..., width] = 1
    return like.new_zeros(layers, width, *row_shape).movedim(1, -1), values


def value_columns(width: int) -> int:
    """The columns of cached values on a CPU for heads of a width: also the ones, and zeros."""
    multiple = column_multiple()
    return max(-(-(width + 1) // multiple) * multiple, _MIN_VALUE_COLUMNS)


def attend(
    q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask | TreeMask, backend: AttentionBackend = "sdpa"
) -> Tensor:
    """q (R, N, H, D) against keys and values (R, G, L, D): (R, N, H * D). On a CPU, `attend_cpu` is row-invariant."""
    if isinstance(mask, TreeMask):
        from underdraw.kernels.tree_attention import tree_attention

        return tree_attention(q, keys, values, mask.committed, mask.ancestors, mask.depths)
    rows, count, heads, width = q.shape
    kv_heads = keys.shape[1]
    q = q.transpose(1, 2)
    if backend in ("sdpa", "auto") and heads == kv_heads:  # torch's kernel is slow for grouped queries
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.bias)
    else:
        q = q.reshape(rows, kv_heads, heads // kv_heads * count, width)
        out = _attend_matmul(q, keys, values, mask).view(rows, heads, count, width)
    return out.transpose(1, 2).reshape(rows, count, heads * width)


def _attend_matmul(q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
    """q (R, G, M, D), where M counts the heads of a KV head times N nodes -> (R, G, M, D)."""
    scores = (q @ keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5  # (R, G, M, L)
    scores = scores.unflatten(2, (-1, mask.bias.shape[2])) + mask.bias[:, :, None]
    return scores.softmax(-1).to(values.dtype).flatten(2, 3) @ values


def attend_cpu(q: Tensor, keys: Tensor, values: Tensor, mask: AttentionMask) -> Tensor:
    """Row-invariant: q (R, N, H, D), keys (R * G, D, L) and values (R * G, L, D + 1 or more) -> (R, N, H * D).

    In float32 for every dtype: units for 16-bit numbers divide a sum by its length, which differs between passes.
    """
    dtype, rows, nodes, heads, width = q.dtype, *q.shape
    if dtype != torch.float32:
        q, keys, values = q.float(), keys.float(), values.float()
    count = rows * nodes * heads // len(keys)  # queries of a KV head
    q = q.transpose(1, 2).reshape(-1, count, width) * scalar(width**-0.5)
    padded = mask.bias.shape[1]
    if padded > count:
        q = torch.cat([q] * -(-padded // count), dim=1)[:, :padded]
    weights = batched_product(q, keys, mask.bias)  # (R * G, M, L)
    weights = weights.sub_(weights.amax(-1, keepdim=True)).exp_()
    total = batched_product(weights, values) if len(mask.blocks) == 1 else _sum_blocks(weights, values, mask.blocks)
    if padded > count:
        total = total[:, :count]
    out = total.narrow(-1, 0, width) / total.narrow(-1, width, 1)
    out = out.view(rows, heads, nodes, width).transpose(1, 2).reshape(rows, nodes, heads * width)
    return out if dtype == torch.float32 else out.to(dtype)


def _sum_blocks(weights: Tensor, values: Tensor, blocks: tuple[SlotBlock, ...]) -> Tensor:
    """weights (R * G, M, L) times values, added up block after block."""
    total: Tensor | None = None
    for block in blocks:
        part = weights.narrow(2, block.start, block.stop - block.start)
        if block.mask is not None:
            part = part * block.mask
        block_sum = batched_product(part, values.narrow(1, block.start, block.stop - block.start))
        total = block_sum if total is None else total.add_(block_sum)
    assert total is not None
    return total
