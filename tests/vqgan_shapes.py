"""Tensor names and shapes of published VQGAN files, written independently of src."""

from __future__ import annotations

from collections.abc import Iterable


def _block(name: str, width: int, out: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    for part, shape in (("norm1", (width,)), ("norm2", (out,))):
        yield f"{name}.{part}.weight", shape
        yield f"{name}.{part}.bias", shape
    for part, inputs in (("conv1", width), ("conv2", out)):
        yield f"{name}.{part}.weight", (out, inputs, 3, 3)
        yield f"{name}.{part}.bias", (out,)
    if width != out:
        yield f"{name}.nin_shortcut.weight", (out, width, 1, 1)
        yield f"{name}.nin_shortcut.bias", (out,)


def _attention(name: str, width: int) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield f"{name}.norm.weight", (width,)
    yield f"{name}.norm.bias", (width,)
    for part in ("q", "k", "v", "proj_out"):
        yield f"{name}.{part}.weight", (width, width, 1, 1)
        yield f"{name}.{part}.bias", (width,)


def _conv(name: str, out: int, inputs: int, side: int = 3) -> Iterable[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (out, inputs, side, side)
    yield f"{name}.bias", (out,)


def vqgan_shapes(
    kind: str, widths: tuple[int, ...], codes: int, dim: int, latent: int, blocks: int = 2
) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the files vqgan.ckpt ("chameleon") and vq_ds16_*.pt ("llamagen")."""
    is_chameleon = kind == "chameleon"
    down, up, block = ("down", "up", "block") if is_chameleon else ("conv_blocks", "conv_blocks", "res")
    mid = ("block_1", "attn_1", "block_2") if is_chameleon else ("0", "1", "2")
    last = len(widths) - 1
    for side, outer in (("encoder", down), ("decoder", up)):
        yield from _conv(f"{side}.conv_in", *((widths[0], 3) if side == "encoder" else (widths[-1], latent)))
        for index, width in enumerate(widths):
            encoder = side == "encoder"
            inputs = widths[max(0, index - 1)] if encoder else widths[min(last, index + 1)]
            name = f"{side}.{outer}.{index if encoder or is_chameleon else last - index}"
            for part in range(blocks + (not encoder)):
                yield from _block(f"{name}.{block}.{part}", inputs if part == 0 else width, width)
                if index == last and not is_chameleon:
                    yield from _attention(f"{name}.attn.{part}", width)
            if encoder and index < last:
                yield from _conv(f"{name}.downsample.conv", width, width)
            if not encoder and index > 0:
                yield from _conv(f"{name}.upsample.conv", width, width)
        yield from _block(f"{side}.mid.{mid[0]}", widths[-1], widths[-1])
        yield from _attention(f"{side}.mid.{mid[1]}", widths[-1])
        yield from _block(f"{side}.mid.{mid[2]}", widths[-1], widths[-1])
        end = widths[-1] if side == "encoder" else widths[0]
        yield f"{side}.norm_out.weight", (end,)
        yield f"{side}.norm_out.bias", (end,)
        yield from _conv(f"{side}.conv_out", *((latent, end) if side == "encoder" else (3, end)))
    yield "quantize.embedding.weight", (codes, dim)
    if not is_chameleon:
        yield "quantize.codebook_used", (65536,)
    yield from _conv("quant_conv", dim, latent, 1)
    yield from _conv("post_quant_conv", latent, dim, 1)


def movqgan_shapes(
    widths: tuple[int, ...], codes: int, dim: int, blocks: int = 2
) -> Iterable[tuple[str, tuple[int, ...]]]:
    """Names and shapes of movqgan_270M.ckpt: Chameleon's, with attention at the lowest level and conditional norms."""
    last = len(widths) - 1
    shapes = list(vqgan_shapes("chameleon", widths, codes, dim, dim, blocks))
    for part in range(blocks):
        shapes += _attention(f"encoder.down.{last}.attn.{part}", widths[-1])
    for part in range(blocks + 1):
        shapes += _attention(f"decoder.up.{last}.attn.{part}", widths[-1])
    for name, shape in shapes:
        module, _, kind = name.rpartition(".")
        if not name.startswith("decoder.") or "norm" not in module.rpartition(".")[2]:
            yield name, shape
            continue
        yield f"{module}.norm_layer.{kind}", shape
        for conv in ("conv_y", "conv_b"):
            yield f"{module}.{conv}.{kind}", (*shape, dim, 1, 1) if kind == "weight" else shape
