"""Copy the tensors of a checkpoint into our parameters, by rules that are plain data.

A `WeightRule` maps a tensor name to a parameter, or to some rows of it: q, k and v share one matrix here. Parameters
are allocated once, on their device and in their dtype, and filled while the files are read tensor by tensor, so the
weights never exist twice in memory. This module is independent of the families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from underdraw.errors import CapacityError, CheckpointError
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import Placement
from underdraw.models.family import ModelSpec
from underdraw.nn.linear import QuantizedLinear, to_input_major
from underdraw.nn.memory import physical_memory
from underdraw.nn.quantization import make_quantized
from underdraw.nn.quantized_weight import QuantizedWeight, is_quantized
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.nn.weights import SCALE

M = TypeVar("M", bound=nn.Module)
ROPE_BUFFERS = r".*rotary_emb\.inv_freq$"  # saved by some versions of transformers; we compute these frequencies
_MAX_LISTED = 6  # names that an error message lists before it counts the rest


@dataclass(frozen=True, slots=True)
class WeightRule:
    """A tensor of the checkpoint and the parameter it fills; `{i}` stands for the layer index in both names."""

    tensor: str
    parameter: str
    rows: str = ""  # which rows of the parameter it fills, a key of `row_ranges`; by default all
    tensor_rows: str = ""  # which rows of the tensor are copied, a key of `row_ranges`; by default all


HF_DECODER = (
    WeightRule("embed_tokens.weight", "embedding.weight"),
    WeightRule("norm.weight", "norm.weight"),
    WeightRule("layers.{i}.input_layernorm.weight", "blocks.{i}.attention_norm.weight"),
    WeightRule("layers.{i}.post_attention_layernorm.weight", "blocks.{i}.ffn_norm.weight"),
    WeightRule("layers.{i}.self_attn.q_proj.weight", "blocks.{i}.qkv.weight", rows="q"),
    WeightRule("layers.{i}.self_attn.k_proj.weight", "blocks.{i}.qkv.weight", rows="k"),
    WeightRule("layers.{i}.self_attn.v_proj.weight", "blocks.{i}.qkv.weight", rows="v"),
    WeightRule("layers.{i}.self_attn.o_proj.weight", "blocks.{i}.out.weight"),
    WeightRule("layers.{i}.mlp.gate_proj.weight", "blocks.{i}.gate_up.weight", rows="gate"),
    WeightRule("layers.{i}.mlp.up_proj.weight", "blocks.{i}.gate_up.weight", rows="up"),
    WeightRule("layers.{i}.mlp.down_proj.weight", "blocks.{i}.down.weight"),
)
"""The decoder of a transformers checkpoint, without its prefix (such as `model.`) and its head."""
HF_QK_NORM = tuple(
    WeightRule(f"layers.{{i}}.self_attn.{which}_norm.{part}", f"blocks.{{i}}.{which}_norm.{part}")
    for which in "qk"
    for part in ("weight", "bias")
)
HF_QKV_BIAS = tuple(
    WeightRule(f"layers.{{i}}.self_attn.{part}_proj.bias", "blocks.{i}.qkv_bias", rows=part) for part in "qkv"
)
HF_HEAD = WeightRule("lm_head.weight", "head.weight", tensor_rows="outputs")
"""The head, cut to the image codes, since text logits are never needed."""
Rules = Mapping[str, Iterable[WeightRule]]
"""Rules by the prefix of their tensor names, such as {"model.": HF_DECODER, "": [HF_HEAD]}."""


@dataclass(frozen=True, slots=True)
class WeightDestination:
    """Memory that a tensor of the checkpoint is copied into: a parameter or a slice of its rows."""

    memory: Tensor  # of a quantised matrix a meta tensor, for its shape
    tensor_rows: slice | None = None  # copy only these rows of the checkpoint's tensor
    quantized: QuantizedLinear | None = None  # quantise the tensor into this matrix
    rows: slice = field(default_factory=lambda: slice(None))  # of the quantised matrix

    def fill(self, name: str, tensor: Tensor, scale: Tensor | None, checkpoint: str) -> None:
        """Copy or quantise a tensor of the checkpoint; `scale` is that of a tensor that was saved quantised."""
        if scale is None and self.memory.is_floating_point() and not tensor.is_floating_point():
            raise CheckpointError(
                f"{name} of {checkpoint} holds {str(tensor.dtype).removeprefix('torch.')} values without scales; it is "
                "incomplete or was quantised by another program: load the weights that it was made from."
            )
        stored = None if scale is None else QuantizedWeight.from_stored(tensor, scale)
        if self.quantized is None:
            tensor = tensor if stored is None else stored.dequantize()
            rows = tensor if self.tensor_rows is None else tensor[self.tensor_rows]
            self.memory.copy_(_match_shape(name, rows, self.memory.shape, checkpoint))
            return
        if stored is not None and stored.format != self.quantized.format:
            raise CheckpointError(
                f"{checkpoint} was saved with {stored.format} weights and cannot be loaded with "
                f"{self.quantized.format}; load the checkpoint that it was made from."
            )
        shape = tensor.shape if stored is None else torch.Size((stored.values.shape[0], stored.inputs))
        _match_shape(name, torch.empty(shape, device="meta"), self.memory.shape, checkpoint)
        self.quantized.fill(self.rows, tensor if stored is None else stored)
        self.quantized.sources[name] = self.rows


Destinations = Mapping[str, WeightDestination]
"""By tensor name of the checkpoint."""


def row_ranges(arch: Arch) -> dict[str, slice]:
    """Row ranges that rules refer to: the parts of fused matrices, and the image codes ("outputs") in a full head."""
    q_rows, kv_rows = arch.heads * arch.head_width, arch.num_kv_heads * arch.head_width
    outputs = arch.outputs or range(arch.vocab)
    return {
        "q": slice(0, q_rows),
        "k": slice(q_rows, q_rows + kv_rows),
        "v": slice(q_rows + kv_rows, q_rows + 2 * kv_rows),
        "gate": slice(0, arch.ffn),
        "up": slice(arch.ffn, 2 * arch.ffn),
        "outputs": slice(outputs.start, outputs.stop),
    }


def decoder_destinations(
    net: Transformer, rules: Rules, rows: Mapping[str, slice] | None = None
) -> dict[str, WeightDestination]:
    """Apply the rules to every layer of a decoder: {prefix + tensor name: destination}.

    `rows` adds row ranges of the family. Rules for parameters that this architecture lacks (norms) are skipped.
    """
    ranges = {**row_ranges(net.arch), **(rows or {})}
    parameters: dict[str, Tensor | QuantizedLinear] = dict(net.named_parameters())
    parameters |= {
        f"{name}.weight": module for name, module in net.named_modules() if isinstance(module, QuantizedLinear)
    }
    destinations = {}
    for prefix, rule in ((prefix, rule) for prefix, part in rules.items() for rule in part):
        for layer in range(net.arch.layers if "{i}" in rule.tensor else 1):
            parameter = parameters.get(rule.parameter.format(i=layer))
            if parameter is None:
                continue
            part = ranges[rule.rows] if rule.rows else slice(None)
            destinations[prefix + rule.tensor.format(i=layer)] = (
                WeightDestination(parameter.data[part], ranges[rule.tensor_rows] if rule.tensor_rows else None)
                if isinstance(parameter, Tensor)
                else WeightDestination(parameter.shape_of(part), quantized=parameter, rows=part)
            )
    return destinations


def module_destinations(
    module: nn.Module, prefix: str = "", rename: Callable[[str], str] = str
) -> dict[str, WeightDestination]:
    """Every tensor of a module's state dict as a destination, under prefix + rename(name)."""
    state = module.state_dict(keep_vars=False)
    return {prefix + rename(name): WeightDestination(tensor) for name, tensor in state.items()}


def allocate(build: Callable[[], M], placement: Placement) -> M:
    """Build a module with uninitialised weights on its device and in its dtype."""
    with torch.device("meta"):
        module = build().to(placement.dtype)
        if is_quantized(placement.weights):
            make_quantized(module, placement.weights)
    needed, memory = sum(value.nbytes for value in module.state_dict().values()), physical_memory()
    if placement.device.type == "cpu" and needed > memory:
        raise CapacityError(
            f"the configuration describes weights of {needed / 2**30:.0f} GiB, and this machine has "
            f"{memory / 2**30:.0f} GiB of memory; use a smaller model or dtype, or a GPU."
        )
    if placement.device.type == "cpu":
        to_input_major(module)  # on meta tensors this sets strides; the memory is then allocated with them
    return module.to_empty(device=placement.device).eval().requires_grad_(False)


def load_decoder(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    placement: Placement,
    rules: Rules,
    *,
    rows: Mapping[str, slice] | None = None,
    others: Destinations | None = None,
    ignored: Sequence[str] = (),
) -> DecoderTarget:
    """Allocate a decoder and copy its weights by rules, and those of `others`, networks in the same files.

    `rows` adds row ranges that rules refer to; `ignored` are patterns as in `copy_weights`.
    """
    net = allocate(lambda: Transformer(spec.arch), placement)
    destinations = {**decoder_destinations(net, rules, rows), **(others or {})}
    copy_weights(checkpoint, destinations, [ROPE_BUFFERS, *ignored])
    return DecoderTarget(net, max_positions=spec.max_positions)


def copy_weights(checkpoint: Checkpoint, destinations: Destinations, ignored: Sequence[str] = ()) -> None:
    """Copy a checkpoint's tensors to their destinations; missing and unexpected tensors are errors.

    `ignored` are regular expressions, matched from the start of the name, for tensors that are not needed.
    """
    shapes = checkpoint.shapes()
    missing = [name for name in destinations if name not in shapes]
    scale_names = {name + SCALE for name in destinations if name + SCALE in shapes}
    expected = destinations.keys() | scale_names
    unexpected = [name for name in shapes if name not in expected and not any(re.match(p, name) for p in ignored)]
    if "fc.weight" not in destinations:
        refuse_drafter(checkpoint.name, shapes)
    problems = [
        f"{verb} {_list_names(names)}" for verb, names in (("lacks", missing), ("has unexpected", unexpected)) if names
    ]
    if problems:
        raise CheckpointError(f"{checkpoint.name} {' and '.join(problems)}; it is incomplete or another kind of model.")
    scales = dict(checkpoint.tensors(scale_names)) if scale_names else {}
    for name, tensor in checkpoint.tensors(destinations):
        destinations[name].fill(name, tensor, scales.get(name + SCALE), checkpoint.name)
    for destination in destinations.values():
        if destination.quantized is not None:
            destination.quantized.pack()


def refuse_drafter(name: str, tensor_names: Container[str]) -> None:
    """Raise an error if the tensors are those of an EAGLE drafter; its config.json looks like its target's."""
    if "fc.weight" in tensor_names:
        raise CheckpointError(f"{name} is a drafter, not a model; pass it with --drafter.")


def _match_shape(name: str, tensor: Tensor, shape: torch.Size, checkpoint: str) -> Tensor:
    """Check the shape; a q/k norm saved with one row per tensor-parallel shard is repeated for the shard's heads."""
    if tensor.shape == shape:
        return tensor
    if "_norm." in name and tensor.ndim == len(shape) == 2 and tensor.shape[1] == shape[1]:
        heads_per_shard, rest = divmod(shape[0], max(1, tensor.shape[0]))
        if not rest:
            return tensor.repeat_interleave(heads_per_shard, dim=0)
    raise CheckpointError(
        f"{name} of {checkpoint} has the shape {tuple(tensor.shape)}, but its configuration says {tuple(shape)}; "
        "the configuration belongs to other weights."
    )


def _list_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
