"""A decoder over a cache, in regions that reach from one attention to the next.

A region holds what follows the attention of one block, what comes before that of the next, and the writing of the new
keys and values. Compiled, that is a few kernels around the matrix products. As it is, it is what `Transformer.forward`
does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from underdraw.nn.attention import seen
from underdraw.nn.rope import CosSin, split_cos_sin
from underdraw.nn.transformer import Arch, DecoderLayer, Transformer


def enter(block: DecoderLayer, x: Tensor, turn: CosSin, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """Write a block's keys and values to `slots` (R, N, G) of flat caches (R * G * L, D); its queries (R, N, H, D)."""
    q, k, v = block.before(x, turn)
    keys.index_put_((slots,), k)
    values.index_put_((slots,), v)
    return q


def between(
    block: DecoderLayer,
    after: DecoderLayer,
    x: Tensor,
    attended: Tensor,
    turn: CosSin,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> tuple[Tensor, Tensor]:
    """From one block's attention to that of the block after it, whose caches these are: its input and its queries."""
    x = block.after(x, attended)
    return x, enter(after, x, turn, keys, values, slots)


def joined(block: DecoderLayer, after: DecoderLayer, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
    """The same up to the product of the block after it: its input, and its heads (R, N, (H + 2 G) D)."""
    x = block.after(x, attended)
    return x, after.heads(x)


def leave(block: DecoderLayer, norm: nn.Module, x: Tensor, attended: Tensor) -> Tensor:
    """What follows the last attention, the final norm included."""
    return norm.forward(block.after(x, attended))


@dataclass(frozen=True, slots=True)
class LayerFunctions:
    """The regions, and the mask before them, as functions: as they are written, or compiled once for all layers."""

    enter: Callable[..., Tensor] = enter
    between: Callable[..., tuple[Tensor, Tensor]] = between
    leave: Callable[[DecoderLayer, nn.Module, Tensor, Tensor], Tensor] = leave
    seen: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] = seen
    logits: Callable[[Transformer, Tensor], Tensor] = Transformer.logits
    fits: Callable[[Arch, Tensor], bool] = lambda arch, x: True
    few: LayerFunctions | None = None  # which take the place of these for the nodes x (R, N, dim) that they fit

    def suited(self, arch: Arch, x: Tensor) -> LayerFunctions:
        return self.few if self.few is not None and self.few.fits(arch, x) else self


PLAIN = LayerFunctions()


@dataclass(frozen=True, slots=True)
class CacheView:
    """Where each layer's new keys and values go, and how a layer attends: (layer, q (R, N, H, D)) -> (R, N, H * D)."""

    keys: Sequence[Tensor]  # a layer (R * G * L, D)
    values: Sequence[Tensor]
    slots: Tensor  # (R, N, G)
    attend: Callable[[int, Tensor], Tensor]


def run_layers(
    net: Transformer, x: Tensor, cos_sin: Tensor, caches: CacheView, regions: LayerFunctions = PLAIN
) -> Tensor:
    """Embeddings (R, N, dim) and their rotation's factors (R, N, 2, width) to features (R, N, dim) for the head."""
    turn, regions = split_cos_sin(cos_sin), regions.suited(net.arch, x)
    blocks: list[DecoderLayer] = list(net.blocks)  # type: ignore[arg-type]
    q = regions.enter(blocks[0], x, turn, caches.keys[0], caches.values[0], caches.slots)
    for layer, (block, after) in enumerate(pairwise(blocks)):
        places = caches.keys[layer + 1], caches.values[layer + 1], caches.slots
        x, q = regions.between(block, after, x, caches.attend(layer, q), turn, *places)
    return regions.leave(blocks[-1], net.norm, x, caches.attend(len(blocks) - 1, q))
