"""From names to a loaded model: device and type, the family of a checkpoint, and what it was saved with."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from underdraw.errors import CapacityError, CheckpointError, ConfigError, UnderdrawError, UnsupportedError
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import Family, LoadedModel, Placement
from underdraw.registry import families

SAVED_CHOICES_FILE = (
    "underdraw.json"  # beside a checkpoint's own files: which drafter, tree and verifier it was saved with
)
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


def read_saved_choices(path: Path) -> dict[str, str]:
    """The drafter, tree and verifier that a checkpoint was saved with, as far as it says."""
    file = path / SAVED_CHOICES_FILE
    if not path.is_dir() or not file.exists():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); mend or delete it.") from None
    if not isinstance(settings, dict) or not all(isinstance(value, str) for value in settings.values()):
        raise ConfigError(f"{file} must hold names of a drafter, a tree and a verifier; mend or delete it.")
    return settings
