"""What a trainer needs to go on exactly where it stopped: weights, averages, moments and how far it came.

The state stands beside the weights as `state.pt`, and is replaced in one rename: a run that is killed at any moment
goes on from its last save.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

from underdraw.errors import CheckpointError

FILE = "state.pt"


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Tensors, numbers and lists or dicts of them."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{FILE}.part"
    torch.save(state, part)
    part.replace(folder / FILE)


def load_state(folder: Path) -> dict[str, Any] | None:
    """The state of the run in a folder, or None where there is none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise CheckpointError(
            f"{path} is damaged ({str(error).splitlines()[0]}); delete it to go on from the saved weights alone."
        ) from error
    return state
