"""Write a loaded model and a pipeline's choice of drafter, tree and verifier as a folder, or upload it."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from underdraw.errors import ConfigError, UnsupportedError, first_line
from underdraw.models.checkpoint import SAVED_CHOICES_FILE, Checkpoint
from underdraw.models.family import LoadedModel
from underdraw.models.hub import COMPANIONS


def save_checkpoint(
    model: LoadedModel, choices: dict[str, str], folder: str | Path, drafter_folder: Path | None = None
) -> Path:
    """Copy the model's files and write `choices` (drafter, tree, verifier) into a new folder.

    Files that its authors publish elsewhere (image tokenizers, text encoders) are copied too, so that the folder loads
    offline, and so is `drafter_folder`, for a drafter that did not come with the model. The default image size is
    recorded. The folder appears complete or not at all.
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
        _copy_companions(model, copy)
        if not model.requires_size:
            choices = {**choices, "size": str(model.sizes[0])}
        (copy / SAVED_CHOICES_FILE).write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        copy.replace(folder)
    return folder


def _copy_companions(model: LoadedModel, copy: Path) -> None:
    """Copy the companions that the copied folder lacks, downloading those that no prompt has needed yet."""
    source = model.checkpoint
    for companion in source.companions if source is not None else ():
        if Checkpoint(copy, model.name).find_companion(companion.names, nearby=False) is not None:
            continue
        path = source.find_or_download(companion.names, companion.hub_id) if source is not None else copy
        target = copy / COMPANIONS / (path.name if path.is_file() else companion.folder_name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target)
        else:
            shutil.copy(path, target)


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
