"""Write a loaded model and a pipeline's choice of drafter, tree and verifier as a folder, or upload it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from underdraw.errors import ConfigError, UnsupportedError
from underdraw.models.checkpoint import first_line
from underdraw.models.family import LoadedModel
from underdraw.models.loading import SAVED_CHOICES_FILE


def save_checkpoint(
    model: LoadedModel, choices: dict[str, str], folder: str | Path, drafter_folder: Path | None = None
) -> Path:
    """Copy the model's files and write `choices` (drafter, tree, verifier) into a new folder.

    `drafter_folder` is copied too, for a drafter that did not come with the model. The folder appears complete or not
    at all.
    """
    folder = Path(folder)
    if model.path is None:
        raise UnsupportedError(f"{model.name} was not loaded from files; there is nothing to copy.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; pass a new one.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        copy = Path(temporary) / "model"
        if model.path.is_dir():
            shutil.copytree(model.path, copy)
        else:
            copy.mkdir()
            shutil.copy(model.path, copy)
        if drafter_folder is not None:
            choices = {**choices, "drafter": f"drafter-{drafter_folder.resolve().name}"}
            shutil.copytree(drafter_folder, copy / choices["drafter"])
        (copy / SAVED_CHOICES_FILE).write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        copy.replace(folder)
    return folder


def upload_folder(folder: Path, name: str, *, token: str | None, private: bool) -> str:
    """Upload a folder to the Hugging Face hub as the repository `name`; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=str(folder)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UnsupportedError(
            f"{name} could not be uploaded to the Hugging Face hub ({first_line(error)}); "
            "check the name and your token."
        ) from error
