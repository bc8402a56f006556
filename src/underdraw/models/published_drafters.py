"""Drafters from folders and from the hub: those of our own training, and the EAGLE heads that LANTERN has published.

A published head is one decoder layer over [token embedding; target feature] with an embedding of its own and the
target's head. One that was made for another target is refused. Beside it may lie LANTERN's table of nearest codes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.block import BlockDrafter
from underdraw.drafters.eagle import Eagle, EagleNet
from underdraw.drafters.loading import load_drafter
from underdraw.drafters.padded_eagle import PaddedEagle
from underdraw.errors import CheckpointError, ConfigError
from underdraw.models.checkpoint import Checkpoint, HubOptions, fetch, is_hub_id, read_json
from underdraw.models.family import Placement
from underdraw.models.transformers_layout import ROTARY
from underdraw.models.weight_map import (
    HF_DECODER,
    HF_QK_NORM,
    WeightDestination,
    allocate,
    copy_weights,
    decoder_destinations,
)
from underdraw.nn.row_invariant import Linear
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch
from underdraw.verifiers.lantern import nearest_neighbours

_FIRST = "layers.0."


def open_drafter(name: str | Path, target: DecoderTarget, hub: HubOptions | None = None) -> Eagle | BlockDrafter:
    """The drafter in a folder, or behind an `owner/name` of the hub, if it fits the target."""
    folder = find_drafter_folder(name, hub)
    if (folder / "model-0.safetensors").exists():
        return load_drafter(folder, target)
    return load_lantern_head(folder, target)


def find_drafter_folder(name: str | Path, hub: HubOptions | None = None) -> Path:
    """A drafter's files, fetched if need be."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    if is_hub_id(str(name)):
        return fetch(str(name), replace(hub or HubOptions(), revision=None))  # the revision is the model's
    raise ConfigError(f"there is no drafter {str(name)!r}; give a folder or an owner/name of the Hugging Face hub.")


def load_lantern_head(folder: Path, target: DecoderTarget) -> Eagle:
    """An EAGLE head in LANTERN's layout, on the target's device and in its type."""
    config = read_json(folder / "config.json") if (folder / "config.json").exists() else {}
    checkpoint = Checkpoint(folder, str(folder), config)
    arch = _head_arch(checkpoint, target)
    weight = target.net.head.weight
    net = allocate(
        lambda: _headless(arch, bias="fc.bias" in checkpoint.shapes()), Placement(weight.device, weight.dtype)
    )
    slots = decoder_destinations(net.body, (*HF_DECODER, *(HF_QK_NORM if arch.qk_norm != "none" else ())))
    slots |= {f"fc.{name}": WeightDestination(value.data) for name, value in net.fc.named_parameters()}
    copy_weights(checkpoint, slots, [ROTARY])
    if (upscale := float(config.get("embed_upscale", 1.0))) > 1:
        net.body.embedding.weight.data.mul_(upscale)
    net.body.head = target.net.head
    if target.projection is not None:
        return PaddedEagle(net, Calibration(), target.image_offset)
    return Eagle(net, Calibration(), target.image_offset)


def _headless(arch: Arch, *, bias: bool) -> EagleNet:
    net = EagleNet(arch, arch.dim, above=False, bias=bias)
    net.body.head = Linear(1, 1, bias=False)  # the target's own takes its place
    return net


def _head_arch(checkpoint: Checkpoint, target: DecoderTarget) -> Arch:
    """The head's decoder, or why it is none for this target."""
    shapes, own = checkpoint.shapes(), target.net.arch
    for name in ("embed_tokens.weight", "fc.weight", f"{_FIRST}self_attn.k_proj.weight", f"{_FIRST}mlp.up_proj.weight"):
        if name not in shapes:
            raise CheckpointError(f"{checkpoint.name} holds no EAGLE head: it has no {name}.")
    (vocab, dim), (_, inputs) = shapes["embed_tokens.weight"], shapes["fc.weight"]
    norm = f"{_FIRST}self_attn.q_norm.weight"
    if (vocab, dim, inputs, norm in shapes) != (own.vocab, own.dim, 2 * own.dim, own.qk_norm == "layer"):
        given = f"{vocab} tokens, width {dim} and {'a' if norm in shapes else 'no'} query norm"
        wanted = f"{own.vocab} tokens, width {own.dim} and {'a' if own.qk_norm == 'layer' else 'no'} query norm"
        raise CheckpointError(
            f"the drafter {checkpoint.name} was made for a target with {given}, and this one has {wanted}; "
            "use the drafter of this model."
        )
    return replace(
        own,
        layers=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
        ffn=shapes[f"{_FIRST}mlp.up_proj.weight"][0],
        kv_heads=shapes[f"{_FIRST}self_attn.k_proj.weight"][0] // own.width,
        norm_eps=float(checkpoint.config.get("rms_norm_eps", own.norm_eps)),
        qk_norm_heads="shared" if shapes.get(norm, (1,))[0] == 1 else "per_head",
        norm="pre" if f"{_FIRST}input_layernorm.weight" in shapes else "pre_skip_first",
        final_norm="none",
    )


def load_nearest_codes(codebook: Tensor, k: int, folder: Path | None = None) -> Tensor:
    """The k nearest other codes of each code: LANTERN's table if the folder has it, else from the codebook (K, D)."""
    count = codebook.shape[0]
    path = None if folder is None else folder / f"top_{count - 1}_indices.npy"
    if path is None or not path.exists():
        return nearest_neighbours(codebook, k)
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again or delete it.") from error
    if table.ndim != 2 or table.shape[0] != count or table.shape[1] < min(k, count - 1):
        raise CheckpointError(
            f"{path} has the shape {table.shape} where {count} codes need {(count, count - 1)}; delete or replace it."
        )
    chosen = np.ascontiguousarray(table[:, :k]).astype(np.int64)
    if chosen.min() < 0 or chosen.max() >= count:
        raise CheckpointError(f"{path} names codes outside 0 to {count - 1}; delete or replace it.")
    return torch.from_numpy(chosen).to(codebook.device)
