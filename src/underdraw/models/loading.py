"""Load models and drafters by name: resolve device and dtype, detect the family or format, run its loader."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import nn

from underdraw.drafters.trained import load_drafter
from underdraw.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    UnderdrawError,
    UnsupportedError,
    first_line,
    unknown,
)
from underdraw.io import expand_user, read_json
from underdraw.models.checkpoint import SAVED_CHOICES_FILE, TRAINED_BY_UNDERDRAW, Checkpoint, open_checkpoint
from underdraw.models.config import Placement
from underdraw.models.family import Family, LoadedModel
from underdraw.models.hub import HubOptions, download, is_hub_id
from underdraw.models.lantern_drafters import load_lantern_head
from underdraw.nn.memory import GIB, free_bytes
from underdraw.nn.quantization import decoder_bytes
from underdraw.nn.quantized_weight import WEIGHT_FORMATS, WeightFormat
from underdraw.nn.weights import check_finite
from underdraw.protocols import Drafter
from underdraw.registry import drafters, families, parse

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_placement(device: str | torch.device, dtype: str | torch.dtype) -> Placement:
    """Turn names into a device and a dtype. `auto` means CUDA with bfloat16 if available, else the CPU with float32."""
    try:
        resolved = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N.") from None
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; use auto, cpu, cuda or cuda:N.")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r} does not exist, torch sees {torch.cuda.device_count()} CUDA devices; use cpu "
            "or one of them."
        )
    if isinstance(dtype, torch.dtype):
        if dtype not in DTYPES.values():
            raise ConfigError(f"dtype {dtype} is not supported; use {', '.join(DTYPES)}.")
        return Placement(resolved, dtype)
    if dtype == "auto":
        return Placement(resolved, torch.float32 if resolved.type == "cpu" else torch.bfloat16)
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}.")
    return Placement(resolved, DTYPES[dtype])


def all_families() -> list[Family]:
    """Every registered family, those of other installed packages included."""
    return [families.get(name) for name in families.names()]  # type: ignore[misc]


def find_family(checkpoint: Checkpoint) -> Family | None:
    return next((family for family in all_families() if family.matches(checkpoint)), None)


def detect_family(checkpoint: Checkpoint) -> Family:
    """The family that the checkpoint belongs to; an error if it belongs to none."""
    family = find_family(checkpoint)
    if family is None:
        model_type = checkpoint.config.get("model_type", "no model_type")
        raise UnsupportedError(
            f"{checkpoint.name} ({model_type}) is of no supported family; supported are {', '.join(families.names())}."
        )
    return family


def open_model(name: str | Path, hub: HubOptions | None = None) -> Checkpoint:
    """Open a model's checkpoint; a hub repository of another kind is refused before its weights are downloaded."""

    def check(folder: Path) -> tuple[str, ...]:
        checkpoint = Checkpoint.from_path(folder, str(name))
        # Without a configuration the family is detected by tensor names, which need the weights.
        is_described = checkpoint.config or (folder / "model_index.json").exists()
        return detect_family(checkpoint).folders if is_described else ()

    return open_checkpoint(name, hub, check)


def load_model(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Load a checkpoint with its family's loader; whatever is wrong with its files is reported in one sentence."""
    with explain_errors(checkpoint.name, placement):
        family = detect_family(checkpoint)
        check_weights_fit(family, checkpoint, placement)
        model = family.load(checkpoint, placement)
        parts = {"decoder": model.target.net, "projection": model.target.projection, "tokenizer": model.image_tokenizer}
        for name, part in parts.items():
            check_module(part, f"the {name} of {checkpoint.name}")
        return model


@contextmanager
def explain_errors(name: str, placement: Placement) -> Iterator[None]:
    """Turn whatever goes wrong while files are loaded into one sentence that names them."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"{name} does not fit into the memory of {placement.device}.") from error
    except UnderdrawError:
        raise
    except MemoryError as error:
        raise CapacityError(f"{name} does not fit into the memory of this machine.") from error
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read ({error}); check its files.") from error
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError, AssertionError) as error:
        raise CheckpointError(
            f"{name} cannot be loaded, its files do not match ({type(error).__name__}: {first_line(error)})."
        ) from error


def check_weights_fit(family: Family, checkpoint: Checkpoint, placement: Placement) -> None:
    """Raise a CapacityError for weights that do not fit into a GPU's free memory, with the formats that would."""
    free = free_bytes(placement.device)
    if free is None or family.read_spec is None:
        return
    arch = family.read_spec(checkpoint).arch
    sizes = {name: decoder_bytes(arch, name, placement.dtype) for name in WEIGHT_FORMATS}
    if sizes[placement.weights] <= free:
        return
    fitting = [f"{name} ({size / GIB:.1f} GiB)" for name, size in sizes.items() if size <= free]
    advice = f"use weights {' or '.join(fitting)}" if fitting else "free memory or use a smaller model"
    kind = str(placement.dtype).removeprefix("torch.") if placement.weights == "full" else placement.weights
    raise CapacityError(
        f"{checkpoint.name} has {sizes[placement.weights] / GIB:.1f} GiB of weights in {kind} and {free / GIB:.1f} GiB "
        f"are free on {placement.device}; {advice}."
    )


def resolve_weights(checkpoint: Checkpoint, weights: str) -> WeightFormat:
    """The format of the decoder's matrices: `auto` is what the checkpoint was saved with."""
    if weights not in ("auto", *WEIGHT_FORMATS):
        raise unknown("weights", weights, ("auto", *WEIGHT_FORMATS))
    saved = checkpoint.read_json(SAVED_CHOICES_FILE).get("weights", "full")
    if saved not in WEIGHT_FORMATS or (weights not in ("auto", saved) and saved != "full"):
        raise ConfigError(
            f"{checkpoint.name} was saved with {saved} weights and cannot be loaded with {weights}; leave the option "
            "out, or load the checkpoint that it was made from."
        )
    return cast(WeightFormat, saved if weights == "auto" else weights)


def read_saved_choices(checkpoint: Checkpoint, model: LoadedModel) -> dict[str, str]:
    """The drafter, tree and verifier that a pipeline was saved with, completed by the defaults."""
    choices = {"drafter": "auto", "tree": "auto", "verifier": "exact"}
    file = checkpoint.path / SAVED_CHOICES_FILE
    if checkpoint.path.is_dir() and file.exists():
        saved = read_json(file, "the settings of a saved pipeline")
        if not isinstance(saved, dict) or not all(isinstance(value, str) for value in saved.values()):
            raise ConfigError(f"{file} must map drafter, tree and verifier to names; fix or delete it.")
        choices |= {key: value for key, value in saved.items() if key in choices}
    folder = checkpoint.folder / choices["drafter"]
    if choices["drafter"] not in [path.name for path in model.drafter_folders] and folder.is_dir():
        choices["drafter"] = str(folder)  # a drafter that was copied into the folder when the pipeline was saved
    return choices


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter and the name that records and `from_pretrained` use for it."""

    name: str
    drafter: Drafter
    source: Path | str | None = None  # folder or hub id of its files; None for a drafter without weights


def load_drafter_by_name(spec: str | Drafter, model: LoadedModel) -> LoadedDrafter:
    """Load "auto", a drafter shipped with the model, a registered one, a folder or an `owner/name` of the hub."""
    if not isinstance(spec, str):
        if isinstance(spec, type) or not callable(getattr(spec, "open", None)) or not hasattr(spec, "proposes"):
            raise ConfigError(f"a drafter must be a name or have an open() method, which {spec!r} lacks.")
        return LoadedDrafter(drafters.describe(spec), spec)
    shipped = {path.name: path for path in model.drafter_folders}
    name = spec
    if spec == "auto":
        name = next(iter(shipped), "jacobi-tree")
        if not shipped:
            log.warning("%s comes without a drafter; drafting with jacobi-tree, which needs no weights.", model.name)
    if name not in shipped and parse(name).name in drafters.names():
        return LoadedDrafter(name, drafters.build(name))
    source = shipped.get(name, name)
    if not expand_user(source).is_dir() and not is_hub_id(name):
        raise ConfigError(
            f"there is no drafter {spec!r}; use auto, one of {', '.join([*shipped, *drafters.names()])}, a folder or "
            "an owner/name of the Hugging Face hub."
        )
    return LoadedDrafter(name, load_drafter_files(source, model), source)


def load_drafter_files(source: str | Path, model: LoadedModel) -> Drafter:
    """Load the weights of a drafter, in our format or LANTERN's; one that was trained for another target is refused."""
    folder = expand_user(source)
    if not folder.is_dir():
        folder = download(str(source), replace(model.hub, revision=None))  # `revision` is the model repository's
    is_trained = (folder / TRAINED_BY_UNDERDRAW).exists()
    with explain_errors(f"the drafter {source}", model.placement):
        drafter: Drafter = load_drafter(folder, model.target) if is_trained else load_lantern_head(folder, model)
        check_module(getattr(drafter, "net", None), f"the drafter {source}")
        return drafter


def check_module(module: object, source: str) -> None:
    """Raise if weights are not finite, as they are on their device; a value may be too large for float16."""
    if isinstance(module, nn.Module):
        check_finite(dict(chain(module.named_parameters(), module.named_buffers())), source)
