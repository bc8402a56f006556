"""From names to a loaded model: device and type, the family of a checkpoint, and what it was saved with."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from underdraw.errors import CapacityError, CheckpointError, ConfigError, UnderdrawError, UnsupportedError
from underdraw.models.checkpoint import Checkpoint, is_hub_id
from underdraw.models.family import Family, LoadedModel, Placement
from underdraw.models.published_drafters import find_drafter_folder, open_drafter
from underdraw.protocols import Drafter
from underdraw.registry import drafters, families, parse

log = logging.getLogger(__name__)

SAVED_CHOICES_FILE = "underdraw.json"  # in a checkpoint's folder: the drafter, tree and verifier it was saved with
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_placement(device: str | torch.device, dtype: str | torch.dtype) -> Placement:
    """`auto` is the first CUDA device if there is one, bfloat16 there and float32 on a CPU."""
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    except RuntimeError:
        raise ConfigError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:N.") from None
    if place.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {str(device)!r} is not supported; use auto, cpu, cuda or cuda:N.")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {str(device)!r} was asked for and torch sees {torch.cuda.device_count()} CUDA devices; use cpu "
            "or one of them."
        )
    if isinstance(dtype, torch.dtype):
        return Placement(place, dtype)
    if dtype == "auto":
        return Placement(place, torch.float32 if place.type == "cpu" else torch.bfloat16)
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; use auto, {', '.join(DTYPES)}.")
    return Placement(place, DTYPES[dtype])


def detect_family(checkpoint: Checkpoint) -> Family:
    """The family that a checkpoint belongs to."""
    for name in families.names():
        family: Family = families.get(name)  # type: ignore[assignment]
        if family.matches(checkpoint):
            return family
    kind = checkpoint.config.get("model_type", "no model_type")
    raise UnsupportedError(
        f"{checkpoint.name} is of no family that underdraw knows ({kind}); known are {', '.join(families.names())}."
    )


def load_model(checkpoint: Checkpoint, place: Placement) -> LoadedModel:
    """A checkpoint by its family. Files that are not what they should be become one sentence."""
    family = detect_family(checkpoint)
    try:
        return family.load(checkpoint, place)
    except torch.OutOfMemoryError as error:
        raise CapacityError(f"{checkpoint.name} does not fit into the memory of {place.device}.") from error
    except UnderdrawError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{checkpoint.name} cannot be loaded; its files do not fit together ({type(error).__name__}: {reason})."
        ) from error


def read_saved_choices(checkpoint: Checkpoint, model: LoadedModel) -> dict[str, str]:
    """The drafter, tree and verifier that a checkpoint was saved with; "auto" and `exact` where it does not say."""
    choice = {"drafter": "auto", "tree": "auto", "verifier": "exact"}
    file = checkpoint.path / SAVED_CHOICES_FILE
    if checkpoint.path.is_dir() and file.exists():
        try:
            settings = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{file} is not valid JSON ({error}); fix or delete it.") from None
        if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
            raise ConfigError(f"{file} must hold names of a drafter, a tree and a verifier; fix or delete it.")
        choice |= settings
    folder = checkpoint.folder / choice["drafter"]
    if choice["drafter"] not in [path.name for path in model.drafter_folders] and folder.is_dir():
        choice["drafter"] = str(folder)  # a drafter that was saved along
    return choice


@dataclass(frozen=True, slots=True)
class LoadedDrafter:
    """A drafter, the name that records and `from_pretrained` know it by, and the folder of its files, if any."""

    name: str
    drafter: Drafter
    folder: Path | None = None


def load_drafter_by_name(spec: str | Drafter, model: LoadedModel) -> LoadedDrafter:
    """The drafter that `spec` names: "auto", one that came with the model, a registered one, a folder or a hub id."""
    if not isinstance(spec, str):
        if not hasattr(spec, "open"):
            raise ConfigError(f"a drafter must be a name or have an open() method, which {spec!r} lacks.")
        return LoadedDrafter(drafters.describe(spec), spec)
    folders = {path.name: path for path in model.drafter_folders}
    name = spec
    if spec == "auto":
        name = next(iter(folders), "jacobi")
        if not folders:
            log.warning("%s comes without a drafter; drafting with jacobi, which needs no weights.", model.name)
    if name not in folders and parse(name).name in drafters.names():
        return LoadedDrafter(name, drafters.build(name))
    if name not in folders and not Path(name).is_dir() and not is_hub_id(name):
        raise ConfigError(
            f"there is no drafter {spec!r}; use auto, one of {', '.join([*folders, *drafters.names()])}, a folder or "
            "an owner/name of the Hugging Face hub."
        )
    folder = find_drafter_folder(folders.get(name, name), model.hub)
    return LoadedDrafter(name, open_drafter(folder, model.target), folder)
