"""Modules that transformers and diffusers load from a folder: every weight is there and finite, damage is one sentence.

The libraries fill in random weights for missing ones, and raise errors of any class for damaged files.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from underdraw.errors import CheckpointError, UnderdrawError, first_line
from underdraw.io import check_regular
from underdraw.models.progress_bars import library_progress_bars
from underdraw.nn.weights import check_finite


@contextmanager
def reading_folder(folder: Path, what: str) -> Iterator[None]:
    """Refuse pipes and devices in the folder, and turn every error of a library that reads it into one sentence."""
    for path in folder.rglob("*"):
        if not path.is_dir():
            check_regular(path, what, CheckpointError)
    try:
        with library_progress_bars():
            yield
    except UnderdrawError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{folder} cannot be loaded as {what} ({reason}); download it again.") from None


def load_module(library_class: Any, folder: Path, what: str, **options: Any) -> Any:
    """A module of transformers with its weights from a folder."""
    with reading_folder(folder, what):
        module, info = library_class.from_pretrained(folder, local_files_only=True, output_loading_info=True, **options)
        if missing := sorted(info["missing_keys"]):
            raise ValueError(f"the weights {missing[0]} are missing")
        check_finite(dict(module.named_parameters()), str(folder))
        return module
