"""Drafters with weights on disk: a folder of safetensors whose metadata say which kind, which sizes, for which target.

Embedding and head are the target's own and are not stored. A drafter that was made for another target is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from underdraw.calibration import Calibration
from underdraw.drafters.block import BlockDrafter, BlockNet
from underdraw.drafters.eagle import Eagle, EagleNet
from underdraw.errors import CheckpointError
from underdraw.nn.row_invariant import pack_weights
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch
from underdraw.nn.weights import load_weights, save_weights

KIND = "underdraw-drafter"
SHARED = ("body.embedding.", "body.head.")
Trained = Eagle | BlockDrafter


def drafter_arch(target: Arch, *, layers: int, ffn: int, kv_heads: int | None = None) -> Arch:
    """A small decoder beside a target: same width, positions and codes."""
    return dataclasses.replace(
        target, layers=layers, ffn=ffn, kv_heads=kv_heads or target.kv_heads, norm="pre", final_norm="rms"
    )


def build(target: DecoderTarget, kind: Literal["eagle", "block"], sizes: Mapping[str, Any]) -> EagleNet:
    """An untrained drafter for a target, with the target's own embedding and head."""
    arch = drafter_arch(target.net.arch, layers=sizes["layers"], ffn=sizes["ffn"], kv_heads=sizes.get("kv_heads"))
    with torch.device("meta"):
        net = (
            EagleNet(arch, arch.dim, above=bool(sizes["above"]))
            if kind == "eagle"
            else BlockNet(arch, arch.dim, slots=sizes["slots"], markov_dim=sizes["markov_dim"])
        )
        net.body.embedding, net.body.head = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    net = net.to_empty(device="cpu")
    net.body.embedding, net.body.head = target.net.embedding, target.net.head
    return net


def fingerprint(target: DecoderTarget) -> dict[str, Any]:
    """What a drafter must know of its target to fit it."""
    arch = target.net.arch
    outputs = arch.outputs or range(arch.vocab)
    return {"dim": arch.dim, "vocab": arch.vocab, "codes": [outputs.start, outputs.stop]}


def save_drafter(
    folder: str | Path, drafter: Trained, target: DecoderTarget, sizes: Mapping[str, Any], progress: Mapping[str, Any],
    precision: Literal["bf16", "int8"] = "bf16",
) -> None:  # fmt: skip
    """Weights, sizes, calibration and the target they belong to."""
    state = {name: value for name, value in drafter.net.state_dict().items() if not name.startswith(SHARED)}
    about = {
        "kind": KIND,
        "drafter": "block" if isinstance(drafter, BlockDrafter) else "eagle",
        "sizes": dict(sizes),
        "calibration": dataclasses.asdict(drafter.calibration or Calibration()),
        "target": fingerprint(target),
        "progress": dict(progress),
    }
    save_weights(folder, state, about, precision)


def load_drafter(folder: str | Path, target: DecoderTarget) -> Trained:
    """The drafter in a folder, on the target's device and in its type."""
    weights, about = load_weights(folder)
    if about.get("kind") != KIND:
        raise CheckpointError(f"{folder} holds no drafter (its kind is {about.get('kind')!r}, not {KIND!r}).")
    own = fingerprint(target)
    if about["target"] != own:
        raise CheckpointError(
            f"the drafter in {folder} was trained for a target with {about['target']}, and this one has {own}; "
            "use the drafter of this model or train one with `underdraw train drafter`."
        )
    kind, values = about["drafter"], about["calibration"]
    net = build(target, kind, about["sizes"])
    missing = net.load_state_dict(weights, strict=False)
    absent = [name for name in missing.missing_keys if not name.startswith(SHARED)]
    if absent or missing.unexpected_keys:
        raise CheckpointError(
            f"the drafter in {folder} lacks {absent or 'nothing'} and has {missing.unexpected_keys or 'nothing'} "
            "that is not known; fetch or train it again."
        )
    weight = target.net.head.weight
    net = net.to(weight.device, weight.dtype).eval().requires_grad_(False)
    pack_weights(net)
    calibration = Calibration(values["slope"], tuple(values["biases"]), values["miss"])
    make = BlockDrafter if kind == "block" else Eagle
    return make(net, calibration, target.image_offset)  # type: ignore[arg-type]
