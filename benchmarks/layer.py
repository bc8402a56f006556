"""A layer of a published shape for few rows: its products by cuBLAS and by `nn.slim`, the layer, and attention.

    python benchmarks/layer.py --model anole-7b          # on a GPU
    TRITON_INTERPRET=1 python benchmarks/layer.py --model toy   # the same steps on a CPU: its times mean nothing

Every layer has weights of its own, more than a cache holds, and all of them are one captured graph.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.bench.engine import device_ms
from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import CudaGraphPass
from underdraw.kernels import fused_layer as slim
from underdraw.kernels.tree_attention import tree_attention
from underdraw.models.loading import resolve_placement
from underdraw.models.random_weights import model_shape, random_target
from underdraw.nn.attention import AttentionMask, attend
from underdraw.nn.layer_functions import PLAIN, LayerFunctions
from underdraw.nn.transformer import DecoderLayer, Transformer

CAPACITY = 1088  # slots of a cache
PLACES = ((1, 300), (1, 600), (1, 1000), (64, 600))  # nodes, and slots that they look at


class Layers:
    """The blocks of a decoder, and inputs for them."""

    def __init__(self, net: Transformer, cuda: bool) -> None:
        self.net, self.arch, self.cuda = net, net.arch, cuda
        self.blocks: list[DecoderLayer] = list(net.blocks)  # type: ignore[arg-type]

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.net.head.weight.device, dtype=self.net.head.weight.dtype)

    def us(self, work: Callable[[], Tensor], count: int) -> float:
        """Microseconds of one of `count` equal parts of the work."""
        if self.cuda:
            for _ in range(2):
                work()
            graph = CudaGraphPass(work)
            work = lambda: graph.replay() or graph.out  # noqa: E731
        return round(1000 * device_ms(work, repeats=7 if self.cuda else 1) / count, 2)

    def products(self) -> dict[str, dict[str, float]]:
        """The four products of two rows."""
        arch, blocks = self.arch, self.blocks
        x, inner, attended = (self.normal(1, 2, n) for n in (arch.dim, arch.ffn, arch.heads * arch.width))
        scaled = slim.Scaled(x, torch.ones(128, 16, device=x.device), 1e-5)
        ours: dict[str, Callable[[DecoderLayer], Tensor]] = {
            "qkv": lambda b: slim.product(scaled, b.qkv.weight)[0],
            "out": lambda b: slim.product(attended, b.out.weight, residual=x, norm=b.ffn_norm)[0],
            "gate_up": lambda b: slim.product(scaled, b.gate_up.weight, gated=True)[0],
            "down": lambda b: slim.product(inner, b.down.weight, residual=x, norm=b.ffn_norm)[0],
        }
        given = {"qkv": x, "out": attended, "gate_up": x, "down": inner}

        def linear(name: str) -> Tensor:
            return [functional.linear(given[name], getattr(block, name).weight) for block in blocks][-1]

        def fused(name: str) -> Tensor:
            return [ours[name](block) for block in blocks][-1]

        count = len(blocks)
        return {
            name: {"linear": self.us(partial(linear, name), count), "slim": self.us(partial(fused, name), count)}
            for name in ours
        }

    def layer(self, regions: LayerFunctions, count: int) -> float:
        """A layer without its attention, over two rows of so many nodes."""
        arch = self.arch
        x, attended = self.normal(2, count, arch.dim), self.normal(2, count, arch.heads * arch.width)
        turn = self.normal(2, count, 1, arch.width), self.normal(2, count, 1, arch.width)
        keys, values = (self.normal(2 * arch.groups * CAPACITY, arch.width) for _ in range(2))
        first = torch.arange(0, len(keys), CAPACITY, device=x.device).view(2, 1, arch.groups)
        slots = first + torch.arange(count, device=x.device)[:, None]

        def work() -> Tensor:
            y = x
            for block, after in pairwise(self.blocks):
                y, _ = regions.between(block, after, y, attended, turn, keys, values, slots)
            return y

        return self.us(work, len(self.blocks) - 1)

    def attention(self, count: int, committed: int) -> dict[str, float]:
        """So many nodes over so many slots: torch's way and ours."""
        arch, device = self.arch, self.net.head.weight.device
        q = self.normal(2, count, arch.heads, arch.width)
        keys, values = (self.normal(len(self.blocks), 2, arch.groups, CAPACITY, arch.width) for _ in range(2))
        known, ancestors = torch.full((2,), committed, device=device), torch.ones(1, count, count, dtype=torch.bool)
        length = -(-(committed + count) // 256) * 256
        bias = torch.zeros(2, 1, count, length, device=device, dtype=q.dtype)
        bias[..., committed + count :] = -torch.inf
        ancestors, pairs = ancestors.to(device), list(zip(keys, values, strict=True))
        ways: dict[str, Callable[[], Tensor]] = {
            "torch": lambda: [attend(q, k[:, :, :length], v[:, :, :length], AttentionMask(bias)) for k, v in pairs][-1],
            "split": lambda: [tree_attention(q, k, v, known, ancestors) for k, v in pairs][-1],
        }
        return {name: self.us(work, len(pairs)) for name, work in ways.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="anole-7b", help="a shape of `underdraw bench engine`")
    parser.add_argument("--layers", type=int, default=6, help="how many, each with weights of its own")
    given = parser.parse_args()
    place = resolve_placement("auto", "auto")
    cuda = place.device.type == "cuda"
    arch = replace(model_shape(given.model).arch, layers=given.layers, vocab=64, outputs=None)
    layers = Layers(random_target(arch, place).net, cuda)
    whole = compiled_layer_functions() if cuda else PLAIN
    found = {
        "model": given.model, "dtype": str(place.dtype), "products_us": layers.products(),
        "layer_us": {
            2 * n: {"compiled": layers.layer(whole, n), "slim": layers.layer(slim.REGIONS, n)}
            for n in ((1, 8, 16) if cuda else (1,))
        },
        "attention_us": {f"{n} over {m}": layers.attention(n, m) for n, m in (PLACES if cuda else PLACES[:1])},
    }  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
