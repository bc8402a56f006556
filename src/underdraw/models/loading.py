"""Load models and drafters by name: resolve device and dtype, detect the family or format, run its loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatch
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
from underdraw.models.family import Family, LoadedModel, ModelSpec
from underdraw.models.hub import (
    DRAFTER_FOLDERS,
    HubOptions,
    RepositoryFile,
    check_repository,
    download,
    is_hub_id,
    missing_files,
    select_weights,
)
from underdraw.models.lantern_drafters import load_lantern_head
from underdraw.models.remote import RemoteCheckpoint, UnknownShapesError
from underdraw.models.transformers_layout import refuse_other_quantizers
from underdraw.nn.linear import pack_weights
from underdraw.nn.memory import GIB, free_bytes, physical_memory
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
        count = torch.cuda.device_count()
        seen = f"{count} CUDA devices, from cuda:0 on; use one of them or cpu" if count else "no CUDA device; use cpu"
        raise ConfigError(f"device {str(device)!r} does not exist, torch sees {seen}.")
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
    """The family that the checkpoint belongs to; an error if it belongs to none, or if others have quantised it."""
    family = find_family(checkpoint)
    if family is None:
        model_type = checkpoint.config.get("model_type", "no model_type")
        raise UnsupportedError(
            f"{checkpoint.name} ({model_type}) is of no supported family; supported are {', '.join(families.names())}."
        )
    refuse_other_quantizers(checkpoint)
    return family


def unsupported(name: str) -> UnsupportedError:
    """The error for a checkpoint that is nothing we know."""
    return UnsupportedError(
        f"{name} is not supported: it is neither a model of a family ({', '.join(families.names())}) nor a drafter nor "
        "an image tokenizer."
    )


def is_described(checkpoint: Checkpoint) -> bool:
    """Whether its small files identify the family; without a configuration, only tensor names do."""
    return bool(checkpoint.config) or (checkpoint.folder / "model_index.json").exists()


@dataclass(frozen=True, slots=True)
class UnloadedModel:
    """A model whose weights are not read yet, and perhaps not downloaded: what can be refused at once."""

    family: Family
    checkpoint: Checkpoint

    def read_spec(self) -> ModelSpec | None:
        """What the configuration says; None if that takes the weights, as with pickles of the hub."""
        if self.family.read_spec is None:
            return None
        with suppress(UnknownShapesError), explain_errors(self.checkpoint.name):
            return self.family.read_spec(self.checkpoint)
        return None

    def check_size(self, height: int | None, width: int | None) -> None:
        """Raise a ConfigError for an image size that the model does not draw."""
        spec, are_sides = self.read_spec(), all(isinstance(side, int | None) for side in (height, width))
        if spec is not None and are_sides:  # else the request names the wrong type
            spec.resolve_size(self.checkpoint.name, height, width)

    def check_text(self) -> None:
        """Raise an error if the text tokenizer cannot be loaded, or a package that it needs is missing."""
        if self.family.load_text is not None:
            with explain_errors(self.checkpoint.name):
                self.family.load_text(self.checkpoint)

    def check_pixels(self) -> None:
        """Raise an UnsupportedError if only codes could be drawn."""
        self.family.check_pixels()


CheckModel = Callable[[UnloadedModel], None]
"""Raises an error for a model that is of no use to the caller."""


@dataclass(frozen=True, slots=True)
class CheckImages:
    """A `CheckModel`: the model must be able to draw pictures of a size."""

    height: int | None = None
    width: int | None = None

    def __call__(self, model: UnloadedModel) -> None:
        model.check_pixels()
        model.check_size(self.height, self.width)


def open_model(name: str | Path, hub: HubOptions | None = None, check: CheckModel | None = None) -> Checkpoint:
    """Open a model's checkpoint; a hub repository of another kind is refused before its weights are downloaded.

    So is one that `check` raises an error for. It is called once; if nothing has to be downloaded, with the files.
    """
    hub, is_checked = hub or HubOptions(), check is None

    def check_files(folder: Path, files: Sequence[RepositoryFile]) -> tuple[str, ...]:
        nonlocal is_checked
        checkpoint = Checkpoint.from_path(folder, str(name), hub)
        if not is_described(checkpoint):
            return ()
        with explain_errors(checkpoint.name):
            family = detect_family(checkpoint)
        weights = tuple(file for file in select_weights(files, family.all_folders) if not file.is_companion)
        if check is not None and missing_files(checkpoint.name, hub, weights):
            check(UnloadedModel(family, RemoteCheckpoint(folder, str(name), checkpoint.config, hub, [], weights)))
            is_checked = True
        return _needed_folders(family, checkpoint.name)

    checkpoint = open_checkpoint(name, hub, check_files)
    if check is not None and not is_checked:
        with explain_errors(checkpoint.name):
            family = detect_family(checkpoint)
        check(UnloadedModel(family, checkpoint))
    return checkpoint


def open_for_loading(
    name: str | Path,
    hub: HubOptions,
    placement: Placement,
    weights: str = "auto",
    drafter: str | Drafter = "auto",
    check: CheckModel | None = None,
) -> tuple[Checkpoint, Placement]:
    """Open a model, and complete the placement by its format of weights: `weights`, or with "auto" the saved one.

    Weights are not downloaded if they do not fit into memory, if prompts could not be read, if there is no such drafter
    on the hub, or if `check` raises.
    """

    def check_model(model: UnloadedModel) -> None:
        if check is not None:
            check(model)
        if isinstance(model.checkpoint, RemoteCheckpoint):
            if isinstance(drafter, str) and is_hub_id(drafter) and not expand_user(drafter).is_dir():
                check_repository(drafter, replace(hub, revision=None))
            model.check_text()
            check_weights_fit(model.family, model.checkpoint, placed(model.checkpoint))

    def placed(checkpoint: Checkpoint) -> Placement:
        return replace(placement, weights=resolve_weights(checkpoint, weights))

    checkpoint = open_model(name, hub, check_model)
    return checkpoint, placed(checkpoint)


def _needed_folders(family: Family, name: str) -> tuple[str, ...]:
    """The subfolders whose weights are downloaded: those for pixels only if what decodes them is installed."""
    try:
        family.check_pixels()
    except UnsupportedError as error:
        log.warning("%s is downloaded without %s: %s", name, ", ".join(family.pixel_folders), error)
        return family.folders
    return family.all_folders


def load_model(checkpoint: Checkpoint, placement: Placement) -> LoadedModel:
    """Load a checkpoint with its family's loader; whatever is wrong with its files is reported in one sentence."""
    with explain_errors(checkpoint.name, placement):
        family = detect_family(checkpoint)
        check_weights_fit(family, checkpoint, placement)
        model = family.load(checkpoint, placement)
        parts = {"decoder": model.target.net, "projection": model.target.projection, "tokenizer": model.image_tokenizer}
        for name, part in parts.items():
            check_module(part, f"the {name} of {checkpoint.name}")
        for part in (model.target.net, model.target.projection):
            if part is not None:
                pack_weights(part)
        return model


@contextmanager
def explain_errors(name: str, placement: Placement | None = None) -> Iterator[None]:
    """Turn whatever goes wrong while files are loaded into one sentence that names them."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        device = "this machine" if placement is None else placement.device
        raise CapacityError(f"{name} does not fit into the memory of {device}.") from error
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
    """Raise a CapacityError for weights that do not fit into a GPU's free memory, with the formats that would.

    On a CPU that is checked when memory is allocated, but for weights that would have to be downloaded first.
    """
    free = free_bytes(placement.device)
    if free is None and not isinstance(checkpoint, RemoteCheckpoint):
        return
    spec, memory = UnloadedModel(family, checkpoint).read_spec(), physical_memory() if free is None else free
    if spec is None:
        return
    sizes = {name: decoder_bytes(spec.arch, name, placement.dtype) for name in WEIGHT_FORMATS}
    if sizes[placement.weights] <= memory:
        return
    choices = [f"weights {name} ({size / GIB:.1f} GiB)" for name, size in sizes.items() if size <= memory]
    narrow = decoder_bytes(spec.arch, placement.weights, torch.bfloat16)
    if placement.dtype == torch.float32 and narrow <= memory:
        choices.append(f"dtype bfloat16 ({narrow / GIB:.1f} GiB)")
    advice = f"use {' or '.join(choices)}" if choices else "free memory or use a smaller model"
    kind = str(placement.dtype).removeprefix("torch.") if placement.weights == "full" else placement.weights
    limit = f"this machine has {memory / GIB:.1f} GiB" if free is None else f"{free / GIB:.1f} GiB are free"
    raise CapacityError(
        f"{checkpoint.name} has {sizes[placement.weights] / GIB:.1f} GiB of weights in {kind} and {limit} on "
        f"{placement.device}; {advice}."
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
        check_drafter(spec)
        return LoadedDrafter(drafters.describe(spec), spec)
    shipped = {path.name: path for path in model.drafter_folders}
    name = spec
    if spec == "auto":
        name = next(iter(shipped), "jacobi-tree")
        if not shipped:
            log.warning("%s comes without a drafter; drafting with jacobi-tree, which needs no weights.", model.name)
    if name not in shipped and parse(name).name in drafters.names():
        return LoadedDrafter(name, drafters.build(name))
    if name not in shipped:
        check_drafter(name, shipped)
    source = shipped.get(name, name)
    return LoadedDrafter(name, load_drafter_files(source, model), source)


def check_drafter(spec: str | Drafter, shipped: Iterable[str] | None = None) -> None:
    """Raise a ConfigError for what is no drafter: an object without its methods, or a name that is nowhere.

    `shipped` are the names of those that come with the model; None before its files are known.
    """
    if not isinstance(spec, str):
        if isinstance(spec, type) or not callable(getattr(spec, "open", None)) or not hasattr(spec, "proposes"):
            raise ConfigError(f"a drafter must be a name or have an open() method, which {spec!r} lacks.")
        return
    if spec == "auto" or (shipped is None and fnmatch(spec, DRAFTER_FOLDERS)):
        return
    if parse(spec).name in drafters.names():
        drafters.build(spec)
    elif not expand_user(spec).is_dir() and not is_hub_id(spec):
        names = [*(shipped or ()), *drafters.names()]
        raise ConfigError(
            f"there is no drafter {spec!r}; use auto, one of {', '.join(names)}, a folder or an owner/name of the "
            "Hugging Face hub."
        )


def load_drafter_files(source: str | Path, model: LoadedModel) -> Drafter:
    """Load the weights of a drafter, in our format or LANTERN's; one that was trained for another target is refused."""
    folder = expand_user(source)
    if not folder.is_dir():
        folder = download(str(source), replace(model.hub, revision=None))  # `revision` is the model repository's
    is_trained = (folder / TRAINED_BY_UNDERDRAW).exists()
    with explain_errors(f"the drafter {source}", model.placement):
        drafter: Drafter = load_drafter(folder, model.target) if is_trained else load_lantern_head(folder, model)
        net = getattr(drafter, "net", None)
        if isinstance(net, nn.Module):
            check_module(net, f"the drafter {source}")
            pack_weights(net)
        return drafter


def check_module(module: object, source: str) -> None:
    """Raise if weights are not finite, as they are on their device; a value may be too large for float16."""
    if isinstance(module, nn.Module):
        check_finite(dict(chain(module.named_parameters(), module.named_buffers())), source)
