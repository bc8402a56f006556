"""The one decoder: every family is a setting of `Arch`.

The network knows nothing about caches, trees or images: it is given embeddings, rotations and a way to attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.constants import scalar
from underdraw.errors import ConfigError
from underdraw.nn.rope import CosSin, Rope, apply_rope, split_cos_sin
from underdraw.nn.row_invariant import Linear, PackedLinear, linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (R, N, H, D), k (R, N, G, D), v (R, N, G, D)) -> (R, N, H * D)."""


@dataclass(frozen=True, slots=True)
class Arch:
    """Everything that tells one decoder from another."""

    dim: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    rope: Rope
    kv_heads: int | None = None
    head_dim: int | None = None
    norm_eps: float = 1e-5
    qk_norm: Literal["none", "layer", "rms"] = "none"
    qk_norm_heads: Literal["shared", "per_head"] = "shared"
    norm: Literal["pre", "post", "pre_skip_first"] = "pre"
    final_norm: Literal["rms", "none"] = "rms"
    outputs: range | None = None  # vocabulary rows that the head is cut to
    head_hidden: int = 0  # width of a hidden layer in the head, 0 for a head that is one matrix

    def __post_init__(self) -> None:
        if self.head_dim is None and self.dim % self.heads:
            raise ConfigError(
                f"dim {self.dim} does not divide into {self.heads} heads; give head_dim or another number of heads."
            )
        if self.heads % self.groups:
            raise ConfigError(f"{self.heads} heads cannot share {self.groups} key-value heads; use a divisor.")
        self.rope.check(self.width)

    @property
    def width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.dim // self.heads

    @property
    def groups(self) -> int:
        """Key-value heads."""
        return self.kv_heads or self.heads


def unit(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square along the last dimension, computed in float32. F.rms_norm takes longer."""
    if x.dtype != torch.float32:
        return unit(x.float(), eps).to(x.dtype)
    size = (x * x).sum(-1, keepdim=True)
    if x.is_cpu:
        return x * torch.add(scalar(eps), size, alpha=1 / x.shape[-1]).rsqrt_()
    return x * size.div_(x.shape[-1]).add_(eps).rsqrt_()


def same_type(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the type of x, which differs under autocast."""
    return weight if weight.dtype == x.dtype else weight.to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 and rounded before the weight is applied."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return unit(x, self.eps) * same_type(self.weight, x)


class HeadNorm(nn.Module):
    """The affine of a norm over the width of each head: one for all heads or one per head."""

    def __init__(self, kind: Literal["layer", "rms"], heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width)) if kind == "layer" else None

    def scale(self, x: Tensor) -> None:
        """Apply it to heads x (R, N, H, D), in place."""
        x.mul_(same_type(self.weight, x))
        if self.bias is not None:
            x.add_(same_type(self.bias, x))


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, with fused qkv and gate-up matrices.

    Parts are not called as modules: looking for hooks takes a CPU longer than some of the work.
    """

    def __init__(self, arch: Arch, index: int) -> None:
        super().__init__()
        self.arch, self.index = arch, index
        inner, shared = arch.heads * arch.width, arch.groups * arch.width
        self.qkv = PackedLinear(arch.dim, inner + 2 * shared)
        self.out = PackedLinear(inner, arch.dim)
        self.gate_up = PackedLinear(arch.dim, 2 * arch.ffn)
        self.down = PackedLinear(arch.ffn, arch.dim)
        skip = arch.norm == "pre_skip_first" and index == 0
        self.attention_norm = nn.Identity() if skip else RMSNorm(arch.dim, arch.norm_eps)
        self.ffn_norm = RMSNorm(arch.dim, arch.norm_eps)
        self.q_norm = self.k_norm = None
        if arch.qk_norm != "none":
            per_head = arch.qk_norm_heads == "per_head"
            self.q_norm = HeadNorm(arch.qk_norm, arch.heads if per_head else 1, arch.width)
            self.k_norm = HeadNorm(arch.qk_norm, arch.groups if per_head else 1, arch.width)

    def heads(self, x: Tensor) -> Tensor:
        """Queries, keys and values as they leave their product: (R, N, (H + 2 G) D)."""
        return linear(x if self.arch.norm == "post" else self.attention_norm.forward(x), self.qkv.weight)

    def before(self, x: Tensor, turn: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """Everything before attention: x (R, N, dim) -> q (R, N, H, D), k and v (R, N, G, D)."""
        arch = self.arch
        heads = self.heads(x).view(*x.shape[:-1], -1, arch.width)  # (R, N, H + 2 G, D)
        both, v = heads.split_with_sizes([arch.heads + arch.groups, arch.groups], -2)
        if self.q_norm is not None and self.k_norm is not None:
            both = self._head_norm(both, self.q_norm, self.k_norm)
        q, k = apply_rope(both, turn, arch.rope.pairing).split_with_sizes([arch.heads, arch.groups], -2)
        return q, k, v

    def _head_norm(self, x: Tensor, q: HeadNorm, k: HeadNorm) -> Tensor:
        """Norm over the width of queries and keys x (R, N, H + G, D), rounded before the affines are applied."""
        x = F.layer_norm(x, x.shape[-1:], eps=1e-5) if self.arch.qk_norm == "layer" else unit(x, 1e-5)
        q.scale(x.narrow(-2, 0, self.arch.heads))
        k.scale(x.narrow(-2, self.arch.heads, self.arch.groups))
        return x

    def after(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention: the block's input x (R, N, dim) and what was attended to (R, N, H * D)."""
        if self.arch.norm == "post":
            x = x + self.attention_norm.forward(linear(attended, self.out.weight))
            return x + self.ffn_norm.forward(self.ffn(x))
        x = x + linear(attended, self.out.weight)
        return x + self.ffn(self.ffn_norm.forward(x))

    def ffn(self, x: Tensor) -> Tensor:
        gate, up = linear(x, self.gate_up.weight).split_with_sizes([self.arch.ffn, self.arch.ffn], -1)
        one = scalar(1.0) if x.is_cpu else 1
        gated = gate / (torch.exp(-gate) + one)  # F.silu rounds by place once threads share a tensor
        return linear(gated * up, self.down.weight)


class MLPHead(nn.Module):
    """A head with a hidden layer and biases; `weight` is that of the last matrix, one row an output."""

    def __init__(self, dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = Linear(dim, hidden)
        self.out = Linear(hidden, outputs)

    @property
    def weight(self) -> Tensor:
        return self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        wide = self.hidden(x).float()
        return self.out((wide * 0.5 * (1 + torch.erf(wide * 2**-0.5))).to(x.dtype))  # F.gelu rounds by place


class Transformer(nn.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.embedding = nn.Embedding(arch.vocab, arch.dim)
        self.blocks = nn.ModuleList(DecoderLayer(arch, index) for index in range(arch.layers))
        self.norm = RMSNorm(arch.dim, arch.norm_eps) if arch.final_norm == "rms" else nn.Identity()
        outputs = len(arch.outputs) if arch.outputs is not None else arch.vocab
        self.head: Linear | MLPHead = (
            MLPHead(arch.dim, arch.head_hidden, outputs) if arch.head_hidden else Linear(arch.dim, outputs, bias=False)
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def forward(self, x: Tensor, rotation: Tensor, attend: Attend) -> Tensor:
        """Embeddings (R, N, dim) and rotation (R, N, 2, width / 2) to features (R, N, dim): what the head reads."""
        turn = split_cos_sin(self.arch.rope.cos_sin(rotation, x.dtype))
        for index, block in enumerate(self.blocks):
            q, k, v = block.before(x, turn)  # type: ignore[operator]
            x = block.after(x, attend(index, q, k, v))  # type: ignore[operator]
        return self.norm(x)

    def logits(self, features: Tensor) -> Tensor:
        """Float32 logits over the head's outputs."""
        return self.head(features).float()


def causal(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend to everything before, no cache: for training on whole sequences."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2).flatten(2)
