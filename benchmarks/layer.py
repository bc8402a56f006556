"""Time one decoder layer of a published shape for few rows: its GEMMs, the layer without attention, and attention.

    python benchmarks/layer.py --model anole-7b          # on a GPU
    TRITON_INTERPRET=1 python benchmarks/layer.py --model toy   # the same steps on a CPU: its times mean nothing

GEMMs run by cuBLAS and by `kernels.fused_layer`, attention by torch and by `kernels.tree_attention`. Every layer has
its own weights, more than the L2 cache holds, and all layers are one CUDA graph.
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

from underdraw.bench.instrumentation import device_ms
from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import CudaGraphPass
from underdraw.kernels.fused_layer import DeferredNorm, fused_linear
from underdraw.kernels.tree_attention import tree_attention
from underdraw.models.loading import resolve_placement
from underdraw.models.random_weights import model_shape, random_target
from underdraw.nn.attention import AttentionMask, attend
from underdraw.nn.fused_layers import FUSED
from underdraw.nn.layer_functions import EAGER, LayerFunctions
from underdraw.nn.transformer import DecoderLayer, RMSNorm, Transformer

CAPACITY = 1088  # slots of a KV cache
ATTENTION_SIZES = ((1, 300), (1, 600), (1, 1000), (64, 600))  # nodes, and committed slots


class Layers:
    """The layers of a decoder, and random inputs for them."""

    def __init__(self, net: Transformer, cuda: bool) -> None:
        self.net, self.arch, self.cuda = net, net.arch, cuda
        self.layers: list[DecoderLayer] = list(net.blocks)  # type: ignore[arg-type]

    def normal(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, device=self.net.head.weight.device, dtype=self.net.head.weight.dtype)

    def us(self, work: Callable[[], Tensor], count: int) -> float:
        """Microseconds of one of the `count` equal parts of the work."""
        if self.cuda:
            for _ in range(2):
                work()
            graph = CudaGraphPass(work)
            work = lambda: graph.replay() or graph.out  # noqa: E731
        return round(1000 * device_ms(work, repeats=7 if self.cuda else 1) / count, 2)

    def gemms(self) -> dict[str, dict[str, float]]:
        """The four GEMMs of a layer for two rows."""
        arch, layers = self.arch, self.layers
        x, hidden, attended = (self.normal(1, 2, n) for n in (arch.dim, arch.ffn, arch.heads * arch.head_width))
        normed = DeferredNorm(x, torch.ones(128, 16, device=x.device), 1e-5)

        def then_norm(inputs: Tensor, weight: Tensor, norm: RMSNorm) -> Tensor:
            return fused_linear(inputs, weight, residual=x, norm_weight=norm.weight, norm_eps=norm.eps)[0]

        fused_gemms: dict[str, Callable[[DecoderLayer], Tensor]] = {
            "qkv": lambda layer: fused_linear(normed, layer.qkv.weight)[0],
            "out": lambda layer: then_norm(attended, layer.out.weight, layer.ffn_norm),
            "gate_up": lambda layer: fused_linear(normed, layer.gate_up.weight, gated=True)[0],
            "down": lambda layer: then_norm(hidden, layer.down.weight, layer.ffn_norm),
        }
        inputs = {"qkv": x, "out": attended, "gate_up": x, "down": hidden}

        def linear(name: str) -> Tensor:
            return [functional.linear(inputs[name], getattr(layer, name).weight) for layer in layers][-1]

        def fused(name: str) -> Tensor:
            return [fused_gemms[name](layer) for layer in layers][-1]

        count = len(layers)
        return {
            name: {"linear": self.us(partial(linear, name), count), "fused": self.us(partial(fused, name), count)}
            for name in fused_gemms
        }

    def layer(self, functions: LayerFunctions, count: int) -> float:
        """A layer without its attention, over two rows of `count` nodes."""
        arch, width = self.arch, self.arch.head_width
        x, attended = self.normal(2, count, arch.dim), self.normal(2, count, arch.heads * width)
        cos_sin = self.normal(2, count, 1, width), self.normal(2, count, 1, width)
        keys, values = (self.normal(2 * arch.num_kv_heads * CAPACITY, width) for _ in range(2))
        head_starts = torch.arange(0, len(keys), CAPACITY, device=x.device).view(2, 1, arch.num_kv_heads)
        slots = head_starts + torch.arange(count, device=x.device)[:, None]

        def work() -> Tensor:
            y = x
            for layer, next_layer in pairwise(self.layers):
                y, _ = functions.layer_to_layer(layer, next_layer, y, attended, cos_sin, keys, values, slots)
            return y

        return self.us(work, len(self.layers) - 1)

    def attention(self, count: int, committed: int) -> dict[str, float]:
        """Attention of `count` nodes over `committed` slots, by torch and by the tree kernel."""
        arch, device = self.arch, self.net.head.weight.device
        q = self.normal(2, count, arch.heads, arch.head_width)
        shape = (len(self.layers), 2, arch.num_kv_heads, CAPACITY, arch.head_width)
        caches = list(zip(self.normal(*shape), self.normal(*shape), strict=True))
        lengths = torch.full((2,), committed, device=device)
        ancestors = torch.ones(1, count, count, dtype=torch.bool, device=device)
        length = -(-(committed + count) // 256) * 256
        bias = torch.zeros(2, 1, count, length, device=device, dtype=q.dtype)
        bias[..., committed + count :] = -torch.inf
        mask = AttentionMask(bias)
        backends: dict[str, Callable[[], Tensor]] = {
            "sdpa": lambda: [attend(q, k[:, :, :length], v[:, :, :length], mask) for k, v in caches][-1],
            "tree": lambda: [tree_attention(q, k, v, lengths, ancestors) for k, v in caches][-1],
        }
        return {name: self.us(work, len(caches)) for name, work in backends.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="anole-7b", help="a shape of `underdraw bench engine`")
    parser.add_argument("--layers", type=int, default=6, help="number of layers, each with its own weights")
    options = parser.parse_args()
    placement = resolve_placement("auto", "auto")
    cuda = placement.device.type == "cuda"
    arch = replace(model_shape(options.model).arch, layers=options.layers, vocab=64, outputs=None)
    layers = Layers(random_target(arch, placement).net, cuda)
    compiled = compiled_layer_functions() if cuda else EAGER
    record = {
        "model": options.model,
        "dtype": str(placement.dtype),
        "gemms_us": layers.gemms(),
        "layer_us": {
            2 * n: {"compiled": layers.layer(compiled, n), "fused": layers.layer(FUSED, n)}
            for n in ((1, 8, 16) if cuda else (1,))
        },
        "attention_us": {
            f"{nodes} over {slots}": layers.attention(nodes, slots)
            for nodes, slots in (ATTENTION_SIZES if cuda else ATTENTION_SIZES[:1])
        },
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
