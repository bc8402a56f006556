"""What underdraw knows: its families, and what a checkpoint is before it is loaded.

Only names, shapes and configurations are read. Nothing here prints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from underdraw.errors import UnsupportedError
from underdraw.models.checkpoint import EMBEDDED, WEIGHTS, Checkpoint, open_checkpoint, tensor_shapes
from underdraw.models.family import Family, ModelSpec, Placement
from underdraw.nn.transformer import Arch, Transformer
from underdraw.nn.weights import SCALE
from underdraw.registry import families

BYTES = {"float32": 4, "bfloat16": 2}
_OURS = "model-0.safetensors"  # the first file of a drafter that our own training has written


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that drawing takes in one number format: the decoder, and the cache of one picture with guidance."""

    weights: int
    cache: int


@dataclass(frozen=True, slots=True)
class Report:
    """What a checkpoint is."""

    name: str
    kind: Literal["model", "drafter", "image tokenizer"]
    family: str
    files: int
    bytes: int
    decoder: dict[str, int] = field(default_factory=dict)
    image_tokenizer: dict[str, int] = field(default_factory=dict)  # of checkpoints that hold it in a folder `tokenizer`
    sizes: list[str] = field(default_factory=list)
    settings: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Memory] = field(default_factory=dict)
    drafters: list[str] = field(default_factory=list)
    note: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def list_families() -> list[dict[str, Any]]:
    """Every family with its published checkpoints and drafters."""
    found = []
    for name in families.names():
        family: Family = families.get(name)  # type: ignore[assignment]
        found.append(
            {
                "family": family.name,
                "summary": family.summary,
                "published": [
                    {**asdict(item), "parameters": _embedded_parameters(item.id)} for item in family.published
                ],
                "drafters": [head.id for head in family.drafters],
            }
        )
    return found


def _embedded_parameters(name: str) -> dict[str, int]:
    """Parameters of the parts of a checkpoint that comes with the package, counted from its files."""
    if name not in EMBEDDED:
        return {}
    folder = open_checkpoint(name).folder
    return {"decoder": count_parameters(folder / "decoder"), "image tokenizer": count_parameters(folder / "tokenizer")}


def count_parameters(folder: Path) -> int:
    """Parameters in the safetensors files of a folder; the scales of 8-bit rows are no parameters."""
    shapes = [tensor_shapes(path) for path in folder.glob("model-*.safetensors")]
    return sum(shape.numel() for part in shapes for name, shape in part.items() if not name.endswith(SCALE))


def inspect(checkpoint: Checkpoint) -> Report:
    """What a folder, file or repository holds."""
    part = _part(checkpoint)
    if part is not None:
        return part
    every: list[Family] = [families.get(name) for name in families.names()]  # type: ignore[misc]
    family = next((family for family in every if family.matches(checkpoint)), None)
    if family is None:
        raise UnsupportedError(
            f"{checkpoint.name} is nothing that underdraw knows: no model of {', '.join(families.names())}, "
            "no drafter and no image tokenizer."
        )
    known = _description(family, checkpoint)
    size = known.sizes[0]
    local = [f"drafter {path.name} beside the weights" for path in checkpoint.drafter_folders()]
    heads = [
        head.id for head in family.drafters if (head.hidden_size, head.image_side) == (known.arch.dim, size.height)
    ]
    return Report(
        name=checkpoint.name,
        kind="model",
        family=family.name,
        decoder=_decoder(known.arch),
        image_tokenizer=_image_tokenizer(checkpoint),
        sizes=[str(size) for size in known.sizes],
        settings=asdict(known.defaults),
        memory=_memory(known),
        drafters=[*local, *heads] or ["jacobi"],
        note="" if local or heads else "no drafter was published for it; jacobi needs none",
        **_files(checkpoint),
    )


def _part(checkpoint: Checkpoint) -> Report | None:
    """A drafter or an image tokenizer, which belong to a model and are none."""
    if (checkpoint.path / _OURS).exists():
        note = "trained by underdraw; it knows its target and is refused by others"
        return Report(checkpoint.name, "drafter", "underdraw", note=note, **_files(checkpoint))
    files = _weights(checkpoint)
    shapes = tensor_shapes(files[0]) if files else {}
    if "fc.weight" in shapes and "embed_tokens.weight" in shapes:
        vocab, dim = shapes["embed_tokens.weight"]
        note = f"an EAGLE head for models of width {dim} with {vocab} tokens; name it after --drafter"
        return Report(checkpoint.name, "drafter", "eagle", note=note, **_files(checkpoint))
    if "quantize.embedding.weight" in shapes and "tok_embeddings.weight" not in shapes:
        codes, dim = shapes["quantize.embedding.weight"]
        note = f"{codes} codes of {dim} numbers; it belongs beside its model"
        return Report(checkpoint.name, "image tokenizer", "vqgan", note=note, **_files(checkpoint))
    return None


def _description(family: Family, checkpoint: Checkpoint) -> ModelSpec:
    if family.read_spec is not None:
        return family.read_spec(checkpoint)
    model = family.load(checkpoint, Placement(torch.device("cpu"), torch.float32))  # small enough to ask the model
    return ModelSpec(model.target.net.arch, model.defaults, model.sizes, model.make_layout)


def _files(checkpoint: Checkpoint) -> dict[str, Any]:
    paths = _weights(checkpoint) or sorted(checkpoint.path.glob("*/*.safetensors"))  # ours lie in folders of their own
    return {"files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}


def _weights(checkpoint: Checkpoint) -> list[Path]:
    """The files of weights right here, none where there are only folders."""
    here = checkpoint.path.is_file() or any(path.suffix in WEIGHTS for path in checkpoint.path.iterdir())
    return checkpoint.shards() if here else []


def _decoder(arch: Arch) -> dict[str, int]:
    return {
        "parameters": _parameters(arch), "layers": arch.layers, "width": arch.dim, "heads": arch.heads,
        "key_value_heads": arch.groups, "tokens": arch.vocab, "codes": len(arch.outputs or range(arch.vocab)),
    }  # fmt: skip


def _image_tokenizer(checkpoint: Checkpoint) -> dict[str, int]:
    folder = checkpoint.folder / "tokenizer"
    return {"parameters": count_parameters(folder)} if (folder / _OURS).exists() else {}


def _parameters(arch: Arch) -> int:
    """Of the decoder as it is loaded: with its head cut to the image codes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(arch).parameters())


def _memory(known: ModelSpec) -> dict[str, Memory]:
    arch, places = known.arch, known.make_layout(known.sizes[0]).steps
    numbers = 2 * arch.layers * arch.groups * arch.width * places * 2  # keys and values of two rows
    return {name: Memory(_parameters(arch) * size, numbers * size) for name, size in BYTES.items()}
