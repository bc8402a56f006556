"""What `underdraw models` prints: the families, and a report on one checkpoint from its headers and configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from underdraw.io import expand_user
from underdraw.models.checkpoint import (
    EMBEDDED_MODELS,
    TRAINED_BY_UNDERDRAW,
    Checkpoint,
    open_checkpoint,
    tensor_shapes,
)
from underdraw.models.config import Placement
from underdraw.models.family import Family, ModelSpec
from underdraw.models.hub import WEIGHT_SUFFIXES, HubOptions, download_small_files, is_hub_id, select_weights
from underdraw.models.loading import all_families, explain_errors, find_family, is_described, unsupported
from underdraw.models.remote import RemoteCheckpoint
from underdraw.nn.quantization import decoder_bytes
from underdraw.nn.quantized_weight import QuantizedFormat
from underdraw.nn.transformer import Arch, Transformer
from underdraw.nn.weights import SCALE, weight_files

_MAX_PART_BYTES = 2 * 10**9  # of image tokenizers, which only their tensors tell from other models
FULL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that generation takes in one dtype or format of weights."""

    weights: int  # of the decoder
    cache: int  # KV cache of one image, with both rows of models that use guidance


@dataclass(frozen=True, slots=True)
class Report:
    """What a checkpoint is; the fields from `decoder` on are those of models, not of drafters or tokenizers."""

    name: str
    kind: Literal["model", "drafter", "image tokenizer"]
    family: str
    files: int
    bytes: int
    decoder: dict[str, int] = field(default_factory=dict)
    image_tokenizer: dict[str, int] = field(default_factory=dict)  # of checkpoints that hold it in a folder `tokenizer`
    sizes: list[str] = field(default_factory=list)
    settings: dict[str, float] = field(default_factory=dict)  # sampling defaults
    memory: dict[str, MemoryEstimate] = field(default_factory=dict)  # by dtype or `weights` option
    drafters: list[str] = field(default_factory=list)
    note: str = ""

    def json(self) -> dict[str, Any]:
        return asdict(self)


def list_families() -> list[dict[str, Any]]:
    """Every family with its published checkpoints and drafters, as JSON values."""
    return [
        {
            "family": family.name,
            "summary": family.summary,
            "published": [{**asdict(item), "parameters": _embedded_parameters(item.id)} for item in family.published],
            "drafters": [drafter.id for drafter in family.drafters],
        }
        for family in all_families()
    ]


def _embedded_parameters(name: str) -> dict[str, int]:
    """Parameters of the parts of a model that is included in the package; {} for others."""
    if name not in EMBEDDED_MODELS:
        return {}
    folder = open_checkpoint(name).folder
    return {
        "decoder": count_stored_parameters(folder / "decoder"),
        "image tokenizer": count_stored_parameters(folder / "tokenizer"),
    }


def count_stored_parameters(folder: Path) -> int:
    """Parameters in the safetensors files of a folder, without the scales of 8-bit rows."""
    shapes = [tensor_shapes(path) for path in weight_files(folder)]
    return sum(shape.numel() for part in shapes for name, shape in part.items() if not name.endswith(SCALE))


def open_for_inspection(name: str, hub: HubOptions | None = None) -> Checkpoint:
    """Open a checkpoint by name; weights of the hub are not downloaded if they are safetensors with a configuration."""
    hub = hub or HubOptions()
    is_local = name in EMBEDDED_MODELS or expand_user(name).exists()
    if is_local or not is_hub_id(name) or name.count("/") > 1 or hub.local_files_only:
        return open_checkpoint(name, hub)
    folder, files = download_small_files(name, hub)
    if folder is None:
        return open_checkpoint(name, hub)
    checkpoint = Checkpoint.from_path(folder, name, hub)
    if not is_described(checkpoint):
        return open_checkpoint(name, hub)
    family = find_family(checkpoint)
    selected = select_weights(files, () if family is None else family.all_folders)
    weights = tuple(file for file in selected if not file.is_companion)
    remote = RemoteCheckpoint(folder, name, checkpoint.config, hub, remote_files=weights)
    if remote.has_headers:
        return remote
    if family is None and sum(file.size for file in weights) > _MAX_PART_BYTES:
        raise unsupported(name)
    return open_checkpoint(name, hub)


def inspect(checkpoint: Checkpoint) -> Report:
    """Report on a folder, file or repository without loading its weights."""
    with explain_errors(checkpoint.name):
        return _inspect(checkpoint)


def _inspect(checkpoint: Checkpoint) -> Report:
    report = _inspect_part(checkpoint)
    if report is not None:
        return report
    family = find_family(checkpoint)
    if family is None:
        raise unsupported(checkpoint.name)
    spec = _read_spec(family, checkpoint)
    wanted = (spec.arch.dim, spec.sizes[0].height)
    shipped = [f"{path.name} (in the checkpoint's folder)" for path in checkpoint.drafter_folders()]
    published = [drafter.id for drafter in family.drafters if (drafter.hidden_size, drafter.image_side) == wanted]
    return Report(
        name=checkpoint.name,
        kind="model",
        family=family.name,
        decoder=_describe_decoder(spec.arch),
        image_tokenizer=_describe_image_tokenizer(checkpoint),
        sizes=[str(size) for size in spec.sizes],
        settings=asdict(spec.defaults),
        memory=estimate_memory(spec),
        drafters=[*shipped, *published] or ["jacobi-tree"],
        note="; ".join(_notes(spec, has_drafter=bool(shipped or published))),
        **_count_files(checkpoint),
    )


def _notes(spec: ModelSpec, *, has_drafter: bool) -> list[str]:
    notes = (
        ["give height and width: its files do not name the image size of its training"] if spec.requires_size else []
    )
    return notes if has_drafter else [*notes, "no trained drafter is published for it; jacobi-tree needs no weights"]


def _inspect_part(checkpoint: Checkpoint) -> Report | None:
    """The report on a drafter or an image tokenizer, which belong to a model; None for anything else."""
    if (checkpoint.path / TRAINED_BY_UNDERDRAW).exists():
        note = "trained by underdraw for one target; other targets are refused"
        return Report(checkpoint.name, "drafter", "underdraw", note=note, **_count_files(checkpoint))
    if isinstance(checkpoint, RemoteCheckpoint):
        shapes = checkpoint.shapes()
    else:
        shapes = tensor_shapes(checkpoint.weight_files()[0]) if _has_weight_files(checkpoint) else {}
    if "fc.weight" in shapes and "embed_tokens.weight" in shapes:
        vocab, dim = shapes["embed_tokens.weight"]
        note = f"an EAGLE head for targets with hidden size {dim} and {vocab} tokens; pass it with --drafter"
        return Report(checkpoint.name, "drafter", "eagle", note=note, **_count_files(checkpoint))
    if "quantize.embedding.weight" in shapes and "tok_embeddings.weight" not in shapes:
        codes, dim = shapes["quantize.embedding.weight"]
        note = f"a codebook of {codes} codes with {dim} dimensions; put it into its model's folder"
        return Report(checkpoint.name, "image tokenizer", "vqgan", note=note, **_count_files(checkpoint))
    return None


def _read_spec(family: Family, checkpoint: Checkpoint) -> ModelSpec:
    if family.read_spec is not None:
        return family.read_spec(checkpoint)
    model = family.load(checkpoint, Placement(torch.device("cpu"), torch.float32))
    return ModelSpec(model.target.net.arch, model.defaults, model.sizes, model.make_layout)


def _has_weight_files(checkpoint: Checkpoint) -> bool:
    path = checkpoint.path
    return path.is_file() or any(file.suffix in WEIGHT_SUFFIXES for file in path.iterdir())


def _count_files(checkpoint: Checkpoint) -> dict[str, Any]:
    if isinstance(checkpoint, RemoteCheckpoint):
        return {"files": len(checkpoint.remote_files), "bytes": sum(file.size for file in checkpoint.remote_files)}
    # Models trained by underdraw keep their weights in subfolders.
    in_subfolders = sorted(checkpoint.path.glob("*/*.safetensors"))
    paths = checkpoint.weight_files() if _has_weight_files(checkpoint) else in_subfolders
    return {"files": len(paths), "bytes": sum(path.stat().st_size for path in paths)}


def _describe_decoder(arch: Arch) -> dict[str, int]:
    return {
        "parameters": count_parameters(arch),
        "layers": arch.layers,
        "width": arch.dim,
        "heads": arch.heads,
        "key_value_heads": arch.num_kv_heads,
        "tokens": arch.vocab,
        "codes": len(arch.outputs or range(arch.vocab)),
    }


def _describe_image_tokenizer(checkpoint: Checkpoint) -> dict[str, int]:
    folder = checkpoint.folder / "tokenizer"
    return {"parameters": count_stored_parameters(folder)} if (folder / TRAINED_BY_UNDERDRAW).exists() else {}


def count_parameters(arch: Arch) -> int:
    """Parameters of the decoder as it is loaded: with its head cut to the image codes."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(arch).parameters())


def estimate_memory(spec: ModelSpec) -> dict[str, MemoryEstimate]:
    """Memory of the decoder and of one image, by dtype and format of weights."""
    arch, tokens = spec.arch, spec.make_layout(spec.sizes[0]).steps
    keys_and_values, guidance_rows = 2, 1 if spec.defaults.guidance == 1 else 2
    cached_values = keys_and_values * guidance_rows * tokens * arch.layers * arch.num_kv_heads * arch.head_width
    full = {
        name: MemoryEstimate(decoder_bytes(arch, "full", dtype), cached_values * dtype.itemsize)
        for name, dtype in FULL_DTYPES.items()
    }
    cache = cached_values * torch.bfloat16.itemsize
    quantized = {
        name: MemoryEstimate(decoder_bytes(arch, name, torch.bfloat16), cache) for name in get_args(QuantizedFormat)
    }
    return {**full, **quantized}
