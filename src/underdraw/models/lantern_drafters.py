"""LANTERN's published EAGLE heads, and its tables of nearest codes.

A head is one decoder layer over [token embedding; target feature] with a separate embedding; it shares the target's
head. Drafters that `underdraw train drafter` has written are another format, which `drafters.trained` reads.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.eagle import Eagle, EagleNet
from underdraw.drafters.padded_eagle import PaddedEagle
from underdraw.errors import CheckpointError
from underdraw.io import check_regular, expand_user
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import ImageSize
from underdraw.models.family import LoadedModel
from underdraw.models.hub import HubOptions, download_files
from underdraw.models.weight_map import (
    HF_DECODER,
    HF_QK_NORM,
    ROPE_BUFFERS,
    WeightDestination,
    allocate,
    copy_weights,
    decoder_destinations,
)
from underdraw.nn.linear import Linear
from underdraw.nn.transformer import Arch
from underdraw.verifiers.lantern import nearest_neighbours

log = logging.getLogger(__name__)
_LAYER = "layers.0."
_REQUIRED = ("embed_tokens.weight", "fc.weight", f"{_LAYER}self_attn.k_proj.weight", f"{_LAYER}mlp.up_proj.weight")
_LLAMAGEN_GRID = {"t2i": 16, "c2i": 24, "t2i2": 32}  # side of the code grid, by `input_type` of a head's config.json


def load_lantern_head(folder: Path, model: LoadedModel) -> Eagle:
    """Load an EAGLE head in LANTERN's layout, on the target's device and in its dtype."""
    checkpoint, target = Checkpoint.from_path(folder), model.target
    arch = _head_arch(checkpoint, target.net.arch)
    _check_image_size(checkpoint, model)
    net = allocate(lambda: _build_net(arch, bias="fc.bias" in checkpoint.shapes()), model.placement)
    rules = (*HF_DECODER, *(HF_QK_NORM if arch.qk_norm != "none" else ()))
    destinations = decoder_destinations(net.body, {"": rules})
    destinations |= {f"fc.{name}": WeightDestination(value.data) for name, value in net.fc.named_parameters()}
    copy_weights(checkpoint, destinations, [ROPE_BUFFERS])
    if (upscale := float(checkpoint.config.get("embed_upscale", 1.0))) > 1:
        net.body.embedding.weight.data.mul_(upscale)
    net.body.head = target.net.head
    # LlamaGen's heads were trained on prompts padded to their full length.
    drafter = Eagle if target.projection is None else PaddedEagle
    return drafter(net, Calibration(), target.image_offset)


def _build_net(arch: Arch, *, bias: bool) -> EagleNet:
    net = EagleNet(arch, arch.dim, above=False, bias=bias)
    net.body.head = Linear(1, 1, bias=False)  # allocate nothing: the target's head replaces it
    return net


def _head_arch(checkpoint: Checkpoint, target: Arch) -> Arch:
    """The head's decoder, read off its tensors; an error if it does not fit the target."""
    shapes = checkpoint.shapes()
    for name in _REQUIRED:
        if name not in shapes:
            raise CheckpointError(f"{checkpoint.name} holds no EAGLE head: it has no {name}.")
    (vocab, dim), (_, inputs) = shapes["embed_tokens.weight"], shapes["fc.weight"]
    q_norm = f"{_LAYER}self_attn.q_norm.weight"
    if (vocab, dim, inputs, q_norm in shapes) != (target.vocab, target.dim, 2 * target.dim, target.qk_norm == "layer"):
        raise CheckpointError(
            f"the drafter {checkpoint.name} was trained for a target with {_summary(vocab, dim, q_norm in shapes)}, "
            f"and this one has {_summary(target.vocab, target.dim, target.qk_norm == 'layer')}; "
            "use a drafter that was trained for this model."
        )
    return replace(
        target,
        layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        ffn=shapes[f"{_LAYER}mlp.up_proj.weight"][0],
        kv_heads=shapes[f"{_LAYER}self_attn.k_proj.weight"][0] // target.head_width,
        norm_eps=float(checkpoint.config.get("rms_norm_eps", target.norm_eps)),
        qk_norm_heads="shared" if shapes.get(q_norm, (1,))[0] == 1 else "per_head",
        norm="pre" if f"{_LAYER}input_layernorm.weight" in shapes else "pre_skip_first",
        final_norm="none",
    )


def _summary(vocab: int, dim: int, has_q_norm: bool) -> str:
    return f"{vocab} tokens, hidden size {dim} and {'a' if has_q_norm else 'no'} query norm"


def _check_image_size(checkpoint: Checkpoint, model: LoadedModel) -> None:
    """Refuse a LlamaGen head for another image size; only `input_type` in its config.json identifies it."""
    input_type = checkpoint.config.get("input_type")
    supported = ", ".join(map(str, model.sizes))
    if input_type in _LLAMAGEN_GRID:
        side = _LLAMAGEN_GRID[input_type] * model.image_tokenizer.downsample
        if ImageSize(side, side) not in model.sizes:
            raise CheckpointError(
                f"the drafter {checkpoint.name} was trained for {side}x{side} images (input_type {input_type!r}), but "
                f"{model.name} generates {supported}; use a drafter that was trained for this size."
            )
    elif model.target.projection is not None:  # LlamaGen text-to-image, the only family with heads for two sizes
        log.warning(
            "the config.json of the drafter %s does not say for which image size it was trained (input_type); if it "
            "was not %s, few of its tokens will be accepted.",
            checkpoint.name,
            supported,
        )


def load_nearest_codes(
    codebook: Tensor, k: int, drafter: str | Path | None = None, hub: HubOptions | None = None
) -> Tensor:
    """The k nearest other codes of each code, nearest first: (K, k) from a codebook (K, D).

    Read from LANTERN's table `top_{K-1}_indices.npy` if the drafter's folder or hub repository has one, else computed.
    The table is up to 537 MB, so it is not downloaded with the drafter but here, where it is needed.
    """
    count = codebook.shape[0]
    table_name = f"top_{count - 1}_indices.npy"
    folder = None if drafter is None else expand_user(drafter)
    if folder is not None and not folder.is_dir():
        folder = download_files(str(drafter), replace(hub or HubOptions(), revision=None), [table_name])
    if folder is None or not (folder / table_name).exists():
        return nearest_neighbours(codebook, k)
    return _read_table(folder / table_name, count, k).to(codebook.device)


def _read_table(path: Path, count: int, k: int) -> Tensor:
    """The first k columns of a table (count, count - 1) of code indices."""
    check_regular(path, "a table of nearest codes", CheckpointError)
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); download it again or delete it.") from error
    if table.ndim != 2 or table.shape[0] != count or table.shape[1] < min(k, count - 1):
        raise CheckpointError(
            f"{path} has the shape {table.shape}, but {count} codes need {(count, count - 1)}; delete or replace it."
        )
    indices = np.ascontiguousarray(table[:, :k]).astype(np.int64)
    if indices.min() < 0 or indices.max() >= count:
        raise CheckpointError(f"{path} holds indices outside 0 to {count - 1}; delete or replace it.")
    return torch.from_numpy(indices)
