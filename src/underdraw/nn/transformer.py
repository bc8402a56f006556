"""The decoder-only transformer of every family; `Arch` holds what differs between them.

It knows nothing about KV caches, trees or images: it takes embeddings, RoPE rotations and an attention function.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from underdraw.constants import scalar
from underdraw.errors import ConfigError, check_counts
from underdraw.nn.linear import Linear, PackedLinear, QuantizedLinear
from underdraw.nn.rope import CosSin, Rope, apply_rope, split_cos_sin
from underdraw.nn.row_invariant import linear

MAX_SIZE, MAX_LAYERS, MAX_VOCAB = 2**18, 2**10, 2**24  # far above any model; a damaged file may say anything
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q (R, N, H, D), k (R, N, G, D), v (R, N, G, D)) -> (R, N, H * D)."""


@dataclass(frozen=True, slots=True)
class Arch:
    """The architecture of a decoder."""

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
    qkv_bias: bool = False
    norm: Literal["pre", "post", "pre_skip_first", "sandwich"] = "pre"  # sandwich: before and after each sub-layer
    final_norm: Literal["rms", "none"] = "rms"
    outputs: range | None = None  # token ids that the LM head is restricted to
    head_hidden: int = 0  # width of a hidden layer in the LM head, 0 for a head that is one matrix

    def __post_init__(self) -> None:
        sizes = {"dim": self.dim, "heads": self.heads, "kv_heads": self.num_kv_heads, "ffn": self.ffn}
        check_counts("a decoder", MAX_SIZE, **sizes, head_width=self.head_width, head_hidden=self.head_hidden or 1)
        check_counts("a decoder", MAX_LAYERS, layers=self.layers)
        check_counts("a decoder", MAX_VOCAB, vocab=self.vocab)
        if not 0 <= self.norm_eps <= 1 or not 0 < self.rope.theta < math.inf:
            raise ConfigError(
                f"a decoder with norm_eps {self.norm_eps} and RoPE theta {self.rope.theta} is impossible."
            )
        if self.outputs is not None and not 0 <= self.outputs.start < self.outputs.stop <= self.vocab:
            raise ConfigError(f"the head's tokens {self.outputs} are not among the {self.vocab} of the vocabulary.")
        if self.head_dim is None and self.dim % self.heads:
            raise ConfigError(
                f"dim {self.dim} does not divide into {self.heads} heads; give head_dim or another number of heads."
            )
        if self.heads % self.num_kv_heads:
            raise ConfigError(f"{self.heads} heads cannot share {self.num_kv_heads} key-value heads; use a divisor.")
        self.rope.check(self.head_width)

    @property
    def head_width(self) -> int:
        """D, the dimensions of one head."""
        return self.head_dim or self.dim // self.heads

    @property
    def num_kv_heads(self) -> int:
        """G, the number of heads of keys and values; fewer than `heads` in grouped-query attention."""
        return self.kv_heads or self.heads


def rms_normalize(x: Tensor, eps: float) -> Tensor:
    """x divided by its root mean square along the last dimension, computed in float32. F.rms_norm is slower."""
    if x.dtype != torch.float32:
        return rms_normalize(x.float(), eps).to(x.dtype)
    squares = (x * x).sum(-1, keepdim=True)
    if x.is_cpu:
        return x * torch.add(scalar(eps), squares, alpha=1 / x.shape[-1]).rsqrt_()
    return x * squares.div_(x.shape[-1]).add_(eps).rsqrt_()


def cast_like(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the dtype of x, which differs under autocast."""
    return weight if weight.dtype == x.dtype else weight.to(x.dtype)


class RMSNorm(nn.Module):
    """RMS norm, computed in float32 and rounded to the input's dtype before the weight is applied."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_normalize(x, self.eps) * cast_like(self.weight, x)


class HeadNorm(nn.Module):
    """Weight (and bias) of a QK norm over the width of each head, shared by all heads or one per head."""

    def __init__(self, kind: Literal["layer", "rms"], heads: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, width))
        self.bias = nn.Parameter(torch.zeros(heads, width)) if kind == "layer" else None

    def apply_affine_(self, x: Tensor) -> None:
        """Scale and shift normalised heads x (R, N, H, D) in place."""
        x.mul_(cast_like(self.weight, x))
        if self.bias is not None:
            x.add_(cast_like(self.bias, x))


class DecoderLayer(nn.Module):
    """Attention and SwiGLU FFN, with fused QKV and gate-up matrices.

    Submodules are used through `linear(x, module.weight)` and `.forward`: on a CPU, the hook checks of `__call__` take
    longer than some of the work.
    """

    def __init__(self, arch: Arch, index: int) -> None:
        super().__init__()
        self.arch, self.index = arch, index
        q_width, kv_width = arch.heads * arch.head_width, arch.num_kv_heads * arch.head_width
        self.qkv: PackedLinear | QuantizedLinear = PackedLinear(arch.dim, q_width + 2 * kv_width)
        self.qkv_bias = nn.Parameter(torch.zeros(q_width + 2 * kv_width)) if arch.qkv_bias else None
        self.out: PackedLinear | QuantizedLinear = PackedLinear(q_width, arch.dim)
        self.gate_up: PackedLinear | QuantizedLinear = PackedLinear(arch.dim, 2 * arch.ffn)
        self.down: PackedLinear | QuantizedLinear = PackedLinear(arch.ffn, arch.dim)
        skip = arch.norm == "pre_skip_first" and index == 0
        self.attention_norm = nn.Identity() if skip else RMSNorm(arch.dim, arch.norm_eps)
        self.ffn_norm = RMSNorm(arch.dim, arch.norm_eps)
        self.attention_out_norm, self.ffn_out_norm = (
            RMSNorm(arch.dim, arch.norm_eps) if arch.norm == "sandwich" else nn.Identity() for _ in range(2)
        )
        self.q_norm = self.k_norm = None
        if arch.qk_norm != "none":
            per_head = arch.qk_norm_heads == "per_head"
            self.q_norm = HeadNorm(arch.qk_norm, arch.heads if per_head else 1, arch.head_width)
            self.k_norm = HeadNorm(arch.qk_norm, arch.num_kv_heads if per_head else 1, arch.head_width)

    def project_qkv(self, x: Tensor) -> Tensor:
        """Norm and fused QKV projection: (R, N, dim) -> (R, N, (H + 2 G) D)."""
        normed = x if self.arch.norm == "post" else self.attention_norm.forward(x)
        return linear(normed, self.qkv.weight, None if self.qkv_bias is None else cast_like(self.qkv_bias, normed))

    def pre_attention(self, x: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """Everything before attention: x (R, N, dim) -> q (R, N, H, D), k and v (R, N, G, D)."""
        arch = self.arch
        qkv = self.project_qkv(x).view(*x.shape[:-1], -1, arch.head_width)  # (R, N, H + 2 G, D)
        qk, v = qkv.split_with_sizes([arch.heads + arch.num_kv_heads, arch.num_kv_heads], -2)
        if self.q_norm is not None and self.k_norm is not None:
            qk = self._qk_norm(qk, self.q_norm, self.k_norm)
        q, k = apply_rope(qk, cos_sin, arch.rope.pairing).split_with_sizes([arch.heads, arch.num_kv_heads], -2)
        return q, k, v

    def _qk_norm(self, x: Tensor, q: HeadNorm, k: HeadNorm) -> Tensor:
        """Norm over the width of queries and keys x (R, N, H + G, D), rounded before the affines are applied."""
        x = F.layer_norm(x, x.shape[-1:], eps=1e-5) if self.arch.qk_norm == "layer" else rms_normalize(x, 1e-5)
        q.apply_affine_(x.narrow(-2, 0, self.arch.heads))
        k.apply_affine_(x.narrow(-2, self.arch.heads, self.arch.num_kv_heads))
        return x

    def post_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """Everything after attention: layer input x (R, N, dim), attention output (R, N, H * D) -> (R, N, dim)."""
        if self.arch.norm == "post":
            x = x + self.attention_norm.forward(linear(attended, self.out.weight))
            return x + self.ffn_norm.forward(self.ffn(x))
        x = x + self.attention_out_norm.forward(linear(attended, self.out.weight))
        return x + self.ffn_out_norm.forward(self.ffn(self.ffn_norm.forward(x)))

    def ffn(self, x: Tensor) -> Tensor:
        """SwiGLU: (R, N, dim) -> (R, N, dim)."""
        gate, up = linear(x, self.gate_up.weight).split_with_sizes([self.arch.ffn, self.arch.ffn], -1)
        # Not F.silu: its bits depend on the element's position once several threads share a tensor.
        activated = gate / (torch.exp(-gate) + (scalar(1.0) if x.is_cpu else 1))
        return linear(activated * up, self.down.weight)


class MLPHead(nn.Module):
    """LM head with a hidden GELU layer and biases; `weight` is that of the last matrix, one row per output."""

    def __init__(self, dim: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.hidden = Linear(dim, hidden)
        self.out = Linear(hidden, outputs)

    @property
    def weight(self) -> Tensor:
        return self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x).float()
        # Not F.gelu: its bits depend on the element's position, as F.silu's do.
        return self.out((hidden * 0.5 * (1 + torch.erf(hidden * 2**-0.5))).to(x.dtype))


class Transformer(nn.Module):
    """Embedding, decoder layers, final norm and LM head."""

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
        """Embeddings (R, N, dim) and rotation (R, N, 2, D / 2) to the features (R, N, dim) that the LM head reads."""
        cos_sin = split_cos_sin(self.arch.rope.cos_sin(rotation, x.dtype))
        for index, layer in enumerate(self.blocks):
            q, k, v = layer.pre_attention(x, cos_sin)  # type: ignore[operator]
            x = layer.post_attention(x, attend(index, q, k, v))  # type: ignore[operator]
        return self.norm(x)

    def logits(self, features: Tensor) -> Tensor:
        """Float32 logits over the LM head's outputs."""
        return self.head(features).float()


def causal_attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over whole sequences without a KV cache, for training."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
    )
    return out.transpose(1, 2).flatten(2)
