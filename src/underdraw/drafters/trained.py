"""Trained drafters on disk: a folder of safetensors whose metadata name the kind, the sizes and the target.

Embedding and head are the target's and are not stored. A drafter of another target is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from underdraw.calibration import Calibration
from underdraw.drafters.block import BlockDrafter, BlockNet
from underdraw.drafters.eagle import DrafterKind, Eagle, EagleNet
from underdraw.errors import CheckpointError, first_line
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch
from underdraw.nn.weights import load_weights, save_weights

FILE_KIND = "underdraw-drafter"
SHARED_WEIGHTS = ("body.embedding.", "body.head.")  # the target's, not stored


def drafter_arch(target: Arch, *, layers: int, ffn: int, kv_heads: int | None = None) -> Arch:
    """A small decoder with the width, positions and codes of the target."""
    return dataclasses.replace(
        target, layers=layers, ffn=ffn, kv_heads=kv_heads or target.kv_heads, norm="pre", final_norm="rms"
    )


def build_net(target: DecoderTarget, kind: DrafterKind, sizes: Mapping[str, Any]) -> EagleNet:
    """An untrained network for a target, sharing the target's embedding and head."""
    net = _outline(target, kind, sizes).to_empty(device="cpu")
    net.body.embedding, net.body.head = target.net.embedding, target.net.head
    return net


def make_drafter(net: EagleNet, target: DecoderTarget, calibration: Calibration) -> Eagle:
    """The drafter of a trained network."""
    return (BlockDrafter if isinstance(net, BlockNet) else Eagle)(net, calibration, target.image_offset)


def _outline(target: DecoderTarget, kind: DrafterKind, sizes: Mapping[str, Any]) -> EagleNet:
    """The network of `build_net` without memory for its weights, and without embedding and head."""
    arch = drafter_arch(target.net.arch, layers=sizes["layers"], ffn=sizes["ffn"], kv_heads=sizes.get("kv_heads"))
    with torch.device("meta"):
        net = (
            EagleNet(arch, arch.dim, above=bool(sizes["above"]))
            if kind == "eagle"
            else BlockNet(arch, arch.dim, slots=sizes["slots"], markov_dim=sizes["markov_dim"])
        )
        net.body.embedding, net.body.head = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    return net


def _check_shapes(net: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise a ValueError unless the weights have the names and shapes of the network's."""
    expected = {name: tuple(value.shape) for name, value in net.state_dict().items()}
    actual = {name: tuple(value.shape) for name, value in weights.items()}
    for name in {**expected, **actual}:
        if expected.get(name) != actual.get(name):
            raise ValueError(f"{name} has the shape {actual.get(name)} instead of {expected.get(name)}")


def target_fingerprint(target: DecoderTarget) -> dict[str, Any]:
    """The sizes of a target that a drafter depends on."""
    arch = target.net.arch
    outputs = arch.outputs or range(arch.vocab)
    return {"dim": arch.dim, "vocab": arch.vocab, "codes": [outputs.start, outputs.stop]}


def save_drafter(
    folder: str | Path,
    drafter: Eagle,
    target: DecoderTarget,
    sizes: Mapping[str, Any],
    progress: Mapping[str, Any],
    precision: Literal["bf16", "int8"] = "bf16",
) -> None:
    """Write weights, sizes, calibration and the fingerprint of the target."""
    state = {name: value for name, value in drafter.net.state_dict().items() if not name.startswith(SHARED_WEIGHTS)}
    metadata = {
        "kind": FILE_KIND,
        "drafter": drafter.kind,
        "sizes": dict(sizes),
        "calibration": dataclasses.asdict(drafter.calibration or Calibration()),
        "target": target_fingerprint(target),
        "progress": dict(progress),
    }
    save_weights(folder, state, metadata, precision)


def load_drafter(folder: str | Path, target: DecoderTarget) -> Eagle:
    """The drafter in a folder, on the target's device and in its dtype."""
    weights, metadata = load_weights(folder)
    if metadata.get("kind") != FILE_KIND:
        raise CheckpointError(f"{folder} holds no drafter (its kind is {metadata.get('kind')!r}, not {FILE_KIND!r}).")
    fingerprint = target_fingerprint(target)
    if metadata.get("target") != fingerprint:
        raise CheckpointError(
            f"the drafter in {folder} was trained for a target with {metadata.get('target')}, and this one has "
            f"{fingerprint}; use the drafter of this model or train one with `underdraw train drafter`."
        )
    try:
        values = metadata["calibration"]
        calibration = Calibration(values["slope"], tuple(values["biases"]), values["miss"])
        if metadata["drafter"] not in get_args(DrafterKind):
            raise ValueError(f"{metadata['drafter']!r} is no kind of drafter")
        _check_shapes(_outline(target, metadata["drafter"], metadata["sizes"]), weights)
        net = build_net(target, metadata["drafter"], metadata["sizes"])
        net.load_state_dict(weights, strict=False)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the drafter in {folder} cannot be loaded, its description does not match its weights "
            f"({type(error).__name__}: {first_line(error)}); fetch or train it again."
        ) from error
    weight = target.net.embedding.weight
    net = net.to(weight.device, weight.dtype).eval().requires_grad_(False)
    return make_drafter(net, target, calibration)
