"""From the names of a checkpoint to our parameters: rules as data, and one loop that copies.

A rule says where a tensor of the checkpoint goes: our parameter, and which of its rows (q, k and v share one matrix).
Parameters are allocated once, on their device and in their type, and filled tensor by tensor while the files are
streamed, so that no second copy of the weights ever exists. Nothing here knows a family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from underdraw.errors import CheckpointError
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import Placement
from underdraw.nn.row_invariant import input_major
from underdraw.nn.transformer import Arch, Transformer

M = TypeVar("M", bound=nn.Module)
_SHOWN = 6  # names that an error lists before it counts the rest


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A tensor of the checkpoint and our parameter; `{i}` stands for the layer in both.

    `part` names the rows of our parameter that it fills; `cut` the rows of the tensor that are wanted.
    """

    name: str
    into: str
    part: str = ""
    cut: str = ""


HF_DECODER = (
    WeightRule("embed_tokens.weight", "embedding.weight"),
    WeightRule("norm.weight", "norm.weight"),
    WeightRule("layers.{i}.input_layernorm.weight", "blocks.{i}.attention_norm.weight"),
    WeightRule("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.ffn_norm.weight"),
    WeightRule("layers.{i}.self_attn.q_proj.weight", "blocks.{i}.qkv.weight", part="q"),
    WeightRule("layers.{i}.self_attn.k_proj.weight", "blocks.{i}.qkv.weight", part="k"),
    WeightRule("layers.{i}.self_attn.v_proj.weight", "blocks.{i}.qkv.weight", part="v"),
    WeightRule("layers.{i}.self_attn.o_proj.weight", "blocks.{i}.out.weight"),
    WeightRule("layers.{i}.mlp.gate_proj.weight", "blocks.{i}.gate_up.weight", part="gate"),
    WeightRule("layers.{i}.mlp.up_proj.weight", "blocks.{i}.gate_up.weight", part="up"),
    WeightRule("layers.{i}.mlp.down_proj.weight", "blocks.{i}.down.weight"),
)
"""The decoder of a transformers checkpoint, below its prefix."""
HF_QK_NORM = tuple(
    WeightRule(f"layers.{{i}}.self_attn.{which}_norm.{what}", f"blocks.{{i}}.{which}_norm.{what}")
    for which in "qk"
    for what in ("weight", "bias")
)


@dataclass(frozen=True, slots=True)
class WeightDestination:
    """Where a tensor goes: a parameter or some of its rows, and which of its own rows are taken."""

    into: Tensor
    cut: slice | None = None


def parts(arch: Arch) -> dict[str, slice]:
    """The rows that the parts of fused matrices take, and the rows of a full head that ours keeps."""
    inner, shared = arch.heads * arch.width, arch.groups * arch.width
    outputs = arch.outputs or range(arch.vocab)
    return {
        "q": slice(0, inner),
        "k": slice(inner, inner + shared),
        "v": slice(inner + shared, inner + 2 * shared),
        "gate": slice(0, arch.ffn),
        "up": slice(arch.ffn, 2 * arch.ffn),
        "outputs": slice(outputs.start, outputs.stop),
    }


def decoder_destinations(
    net: Transformer, rules: Iterable[WeightRule], prefix: str = "", rows: Mapping[str, slice] | None = None
) -> dict[str, WeightDestination]:
    """The rules written out for every layer of a decoder. `rows` are parts of the family's own."""
    known, own = {**parts(net.arch), **(rows or {})}, dict(net.named_parameters())
    slots = {}
    for rule in rules:
        for layer in range(net.arch.layers if "{i}" in rule.name else 1):
            if (name := rule.into.format(i=layer)) not in own:
                continue  # a norm that this architecture does without
            into = own[name].data
            slots[prefix + rule.name.format(i=layer)] = WeightDestination(
                into[known[rule.part]] if rule.part else into, known[rule.cut] if rule.cut else None
            )
    return slots


def module_destinations(
    module: nn.Module, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, WeightDestination]:
    """Every tensor of a module under its own name, or what `rename` makes of that, behind a prefix."""
    return {
        prefix + rename(name): WeightDestination(tensor) for name, tensor in module.state_dict(keep_vars=False).items()
    }


def allocate(make: Callable[[], M], placement: Placement) -> M:
    """An uninitialised module on its device, in its type, with its matrices as that device likes them."""
    with torch.device("meta"):
        module = make().to(placement.dtype)
    if placement.device.type == "cpu":
        input_major(module)  # strides only, as yet
    return module.to_empty(device=placement.device).eval().requires_grad_(False)


def copy_weights(checkpoint: Checkpoint, slots: Mapping[str, WeightDestination], ignored: Sequence[str] = ()) -> None:
    """Copy a checkpoint into its slots; names that match an `ignored` pattern from their start on are passed over."""
    shapes = checkpoint.shapes()
    missing = [name for name in slots if name not in shapes]
    unexpected = [name for name in shapes if name not in slots and not any(re.match(p, name) for p in ignored)]
    if "fc.weight" not in slots:
        refuse_drafter(checkpoint.name, shapes)
    if missing or unexpected:
        raise CheckpointError(
            f"{checkpoint.name} lacks {_names(missing)} and has {_names(unexpected)} that its family does not know; "
            "it is incomplete or another kind of model."
        )
    for name, tensor in checkpoint.tensors(slots):
        slot = slots[name]
        slot.into.copy_(_fitting(name, tensor if slot.cut is None else tensor[slot.cut], slot.into, checkpoint))


def refuse_drafter(name: str, shapes: Container[str]) -> None:
    """Say what it is if a published drafter was given for a model; their configurations look alike."""
    if "fc.weight" in shapes:
        raise CheckpointError(f"{name} is a drafter and draws nothing by itself; name it after --drafter.")


def _fitting(name: str, tensor: Tensor, into: Tensor, checkpoint: Checkpoint) -> Tensor:
    """`tensor` in the shape of its place. Fewer rows are those of shards, and each serves its share of the heads."""
    if tensor.shape == into.shape:
        return tensor
    if "_norm." in name and tensor.ndim == into.ndim == 2 and tensor.shape[1] == into.shape[1]:
        share, rest = divmod(into.shape[0], max(1, tensor.shape[0]))
        if not rest:
            return tensor.repeat_interleave(share, dim=0)
    raise CheckpointError(
        f"{name} of {checkpoint.name} has the shape {tuple(tensor.shape)} where its configuration says "
        f"{tuple(into.shape)}; the configuration belongs to other weights."
    )


def _names(names: Sequence[str]) -> str:
    if not names:
        return "nothing"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
