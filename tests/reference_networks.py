"""Independent implementations of networks for parity tests, on plain state dicts. They share no code with src."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

State = Mapping[str, Tensor]


# Image tokenizers


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def group_norm(x: Tensor, state: State, name: str) -> Tensor:
    """Group norm with 32 groups, written out."""
    batch, channels, height, width = x.shape
    groups = x.reshape(batch, 32, -1)
    groups = (groups - groups.mean(-1, keepdim=True)) / (groups.var(-1, unbiased=False, keepdim=True) + 1e-6).sqrt()
    x = groups.reshape(batch, channels, height, width)
    return x * state[f"{name}.weight"][:, None, None] + state[f"{name}.bias"][:, None, None]


def conv(x: Tensor, state: State, name: str, **options: int) -> Tensor:
    return F.conv2d(x, state[f"{name}.weight"], state[f"{name}.bias"], **options)


def residual(x: Tensor, state: State, name: str) -> Tensor:
    hidden = conv(swish(group_norm(x, state, f"{name}.norm1")), state, f"{name}.conv1", padding=1)
    hidden = conv(swish(group_norm(hidden, state, f"{name}.norm2")), state, f"{name}.conv2", padding=1)
    if f"{name}.nin_shortcut.weight" in state:
        x = conv(x, state, f"{name}.nin_shortcut")
    return x + hidden


def attention(x: Tensor, state: State, name: str) -> Tensor:
    normed = group_norm(x, state, f"{name}.norm")
    q, k, v = (conv(normed, state, f"{name}.{part}").flatten(2) for part in "qkv")  # (B, C, L)
    weights = torch.einsum("bci,bcj->bij", q, k) / math.sqrt(q.shape[1])
    mixed = torch.einsum("bij,bcj->bci", weights.softmax(-1), v).reshape(x.shape)
    return x + conv(mixed, state, f"{name}.proj_out")


def level(x: Tensor, state: State, name: str, block: str) -> Tensor:
    index = 0
    while f"{name}.{block}.{index}.conv1.weight" in state:
        x = residual(x, state, f"{name}.{block}.{index}")
        if f"{name}.attn.{index}.q.weight" in state:
            x = attention(x, state, f"{name}.attn.{index}")
        index += 1
    return x


def middle(x: Tensor, state: State, name: str, parts: tuple[str, str, str]) -> Tensor:
    x = residual(x, state, f"{name}.{parts[0]}")
    x = attention(x, state, f"{name}.{parts[1]}")
    return residual(x, state, f"{name}.{parts[2]}")


NAMES = {
    "chameleon": ("down", "up", "block", ("block_1", "attn_1", "block_2")),
    "llamagen": ("conv_blocks", "conv_blocks", "res", ("0", "1", "2")),
}


def vq_cells(state: State, pixels: Tensor, kind: str) -> Tensor:
    """Pixels to unquantised cells (B, D, H, W)."""
    down, _, block, mid = NAMES[kind]
    x = conv(pixels, state, "encoder.conv_in", padding=1)
    index = 0
    while f"encoder.{down}.{index}.{block}.0.conv1.weight" in state:
        x = level(x, state, f"encoder.{down}.{index}", block)
        if f"encoder.{down}.{index}.downsample.conv.weight" in state:
            padded = torch.zeros(*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1)
            padded[:, :, :-1, :-1] = x
            x = conv(padded, state, f"encoder.{down}.{index}.downsample.conv", stride=2)
        index += 1
    x = middle(x, state, "encoder.mid", mid)
    x = conv(swish(group_norm(x, state, "encoder.norm_out")), state, "encoder.conv_out", padding=1)
    return conv(x, state, "quant_conv")


def vq_encode(state: State, pixels: Tensor, kind: str) -> Tensor:
    cells, book = vq_cells(state, pixels, kind).permute(0, 2, 3, 1), state["quantize.embedding.weight"]
    if kind == "llamagen":  # both at length 1
        cells, book = cells / cells.norm(dim=-1, keepdim=True), book / book.norm(dim=-1, keepdim=True)
    return (cells[..., None, :] - book).pow(2).sum(-1).argmin(-1)


def vq_decode(state: State, codes: Tensor, kind: str) -> Tensor:
    _, up, block, mid = NAMES[kind]
    book = state["quantize.embedding.weight"]
    if kind == "llamagen":
        book = book / book.norm(dim=-1, keepdim=True)
    x = conv(book[codes].permute(0, 3, 1, 2), state, "post_quant_conv")
    x = middle(conv(x, state, "decoder.conv_in", padding=1), state, "decoder.mid", mid)
    count = len({name.split(".")[2] for name in state if name.startswith(f"decoder.{up}.")})
    order = range(count) if kind == "llamagen" else reversed(range(count))  # by execution, or by resolution
    for index in order:
        x = level(x, state, f"decoder.{up}.{index}", block)
        if f"decoder.{up}.{index}.upsample.conv.weight" in state:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = conv(x, state, f"decoder.{up}.{index}.upsample.conv", padding=1)
    return conv(swish(group_norm(x, state, "decoder.norm_out")), state, "decoder.conv_out", padding=1)


def spatial_norm(x: Tensor, cells: Tensor, state: State, name: str) -> Tensor:
    """MoVQ's norm: scaled and shifted by the quantised cells, enlarged to the feature map."""
    factor = x.shape[2] // cells.shape[2]
    large = cells.repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    normed = group_norm(x, state, f"{name}.norm_layer")
    return normed * conv(large, state, f"{name}.conv_y") + conv(large, state, f"{name}.conv_b")


def movq_block(x: Tensor, cells: Tensor, state: State, name: str) -> Tensor:
    hidden = conv(swish(spatial_norm(x, cells, state, f"{name}.norm1")), state, f"{name}.conv1", padding=1)
    hidden = conv(swish(spatial_norm(hidden, cells, state, f"{name}.norm2")), state, f"{name}.conv2", padding=1)
    return (conv(x, state, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in state else x) + hidden


def movq_attention(x: Tensor, cells: Tensor, state: State, name: str) -> Tensor:
    normed = spatial_norm(x, cells, state, f"{name}.norm")
    q, k, v = (conv(normed, state, f"{name}.{part}").flatten(2) for part in "qkv")  # (B, C, L)
    weights = (torch.einsum("bci,bcj->bij", q, k) * q.shape[1] ** -0.5).softmax(-1)
    return x + conv(torch.einsum("bij,bcj->bci", weights, v).reshape(x.shape), state, f"{name}.proj_out")


def movq_decode(state: State, codes: Tensor) -> Tensor:
    """MoVQGAN's decoder on codes (B, H, W), from the authors' state dict."""
    cells = state["quantize.embedding.weight"][codes].permute(0, 3, 1, 2)
    x = conv(conv(cells, state, "post_quant_conv"), state, "decoder.conv_in", padding=1)
    x = movq_block(x, cells, state, "decoder.mid.block_1")
    x = movq_attention(x, cells, state, "decoder.mid.attn_1")
    x = movq_block(x, cells, state, "decoder.mid.block_2")
    count = len({name.split(".")[2] for name in state if name.startswith("decoder.up.")})
    for index in reversed(range(count)):
        name, part = f"decoder.up.{index}", 0
        while f"{name}.block.{part}.conv1.weight" in state:
            x = movq_block(x, cells, state, f"{name}.block.{part}")
            if f"{name}.attn.{part}.q.weight" in state:
                x = movq_attention(x, cells, state, f"{name}.attn.{part}")
            part += 1
        if index:
            x = conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3), state, f"{name}.upsample.conv", padding=1)
    return conv(swish(spatial_norm(x, cells, state, "decoder.norm_out")), state, "decoder.conv_out", padding=1)


# Chameleon's decoder in the layout of Lumina-mGPT, with one row of query and key norms for all heads


def chameleon_features(state: State, tokens: Tensor, heads: int) -> Tensor:
    """Last hidden states (L, D) of tokens (L,) at positions 0, 1, ..."""
    x, layer = state["model.embed_tokens.weight"][tokens], 0
    length, dim = x.shape
    half = dim // heads // 2
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    rotation = torch.polar(torch.ones_like(angles), angles)[:, None]  # (L, 1, half)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    while f"model.layers.{layer}.mlp.up_proj.weight" in state:
        part = {name.split(".", 3)[3]: value for name, value in state.items() if f".layers.{layer}." in name}
        normed = rms(x, part["input_layernorm.weight"], 1e-5)
        q, k, v = ((normed @ part[f"self_attn.{name}_proj.weight"].T).reshape(length, heads, -1) for name in "qkv")
        q, k = (
            F.layer_norm(value, value.shape[-1:]) * part[f"self_attn.{name}_norm.weight"]
            + part[f"self_attn.{name}_norm.bias"]
            for name, value in (("q", q), ("k", k))
        )
        q, k = (torch.complex(value[..., :half], value[..., half:]) * rotation for value in (q, k))
        scores = torch.einsum("ihd,jhd->hij", q, k.conj()).real / math.sqrt(2 * half)
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", weights, v).reshape(length, dim) @ part["self_attn.o_proj.weight"].T
        normed = rms(x, part["post_attention_layernorm.weight"], 1e-5)
        gate, up = (normed @ part[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (swish(gate) * up) @ part["mlp.down_proj.weight"].T
        layer += 1
    return rms(x, state["model.norm.weight"], 1e-5)


# LlamaGen, from a state dict of its authors' format


def rotation_table(side: int, width: int, prefix: int) -> Tensor:
    """Complex rotations (prefix + side * side, width / 2); zero for the prefix."""
    half = width // 2
    rates = 10000.0 ** (-torch.arange(0, half, 2) / half)
    table = torch.zeros(prefix + side * side, half, dtype=torch.complex64)
    for cell in range(side * side):
        angles = torch.cat([cell // side * rates, cell % side * rates])
        table[prefix + cell] = torch.polar(torch.ones_like(angles), angles)
    return table


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def llamagen_hidden(
    state: State, x: Tensor, table: Tensor, heads: int, visible: Tensor, eps: float = 1e-5
) -> list[Tensor]:
    """Hidden states (L, D) after every layer, and after the final norm; visible (L, L) masks what a row attends to."""
    hidden_states, layer = [], 0
    length, dim = x.shape
    while f"layers.{layer}.attention.wo.weight" in state:
        name = f"layers.{layer}"
        normed = rms(x, state[f"{name}.attention_norm.weight"], eps)
        q, k, v = (normed @ state[f"{name}.attention.wqkv.weight"].T).reshape(length, 3, heads, -1).unbind(1)
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.reshape(length, heads, -1, 2)) * table[:length, None])
            .flatten(2)
            for part in (q, k)
        )  # fmt: skip
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~visible, -math.inf).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(length, dim)
        x = x + mixed @ state[f"{name}.attention.wo.weight"].T
        normed = rms(x, state[f"{name}.ffn_norm.weight"], eps)
        gate, up = (normed @ state[f"{name}.feed_forward.{part}.weight"].T for part in ("w1", "w3"))
        x = x + (swish(gate) * up) @ state[f"{name}.feed_forward.w2.weight"].T
        hidden_states.append(x)
        layer += 1
    return [*hidden_states, rms(x, state["norm.weight"], eps)]


def llamagen_prefix(state: State, features: Tensor) -> Tensor:
    """Caption features to embeddings."""
    hidden = features @ state["cls_embedding.cap_proj.fc1.weight"].T
    hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    return hidden @ state["cls_embedding.cap_proj.fc2.weight"].T


def llamagen_visible(mask: Tensor, length: int) -> Tensor:
    """Causal, with the prompt's padding hidden from every row but its own: mask (P,) -> (length, length)."""
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    visible[:, : mask.shape[0]] &= mask.bool()
    return visible | torch.eye(length, dtype=torch.bool)


def llamagen_logits(state: State, prefix: Tensor, mask: Tensor, codes: Tensor, side: int, heads: int) -> Tensor:
    """Logits of the first token and of the one after each of `codes` (N,): (N + 1, K)."""
    x = torch.cat([prefix, state["tok_embeddings.weight"][codes]])
    table = rotation_table(side, x.shape[1] // heads, prefix.shape[0])
    features = llamagen_hidden(state, x, table, heads, llamagen_visible(mask, x.shape[0]))[-1]
    return features[prefix.shape[0] - 1 :] @ state["output.weight"].T
