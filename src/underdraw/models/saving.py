"""Write a loaded model and a pipeline's choice of drafter, tree and verifier as a folder, or upload it."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from underdraw.errors import CapacityError, CheckpointError, ConfigError, UnsupportedError, first_line
from underdraw.io import as_path, make_folder, read_json, read_text
from underdraw.models.checkpoint import INDEX_FILES, SAVED_CHOICES_FILE, read_tensors, tensor_shapes
from underdraw.models.config import UNKNOWN_LICENCE
from underdraw.models.family import LoadedModel
from underdraw.models.hub import COMPANIONS, WEIGHT_SUFFIXES, format_size, is_hub_id
from underdraw.models.progress_bars import library_progress_bars
from underdraw.nn.linear import QuantizedLinear
from underdraw.nn.quantization import quantized_linears
from underdraw.nn.weights import SCALE, read_safetensors_header, write_safetensors
from underdraw.registry import families

_HIDDEN = shutil.ignore_patterns(".*")  # of a clone or an editor: .git alone is as large as the weights
_NOT_UPLOADED = ("state.pt", "*.lock", ".*")  # what only the training of a drafter needs
_TAGS = ["underdraw", "speculative-decoding", "autoregressive-image-generation"]
_HUB_LICENCES = ("apache-2.0", "mit")  # identifiers of the hub; others need a name, and a link where there is one


def save_checkpoint(
    model: LoadedModel, choices: dict[str, str], folder: str | Path, drafter_folder: Path | None = None
) -> Path:
    """Copy the model's files and write `choices` (drafter, tree, verifier) into a new folder.

    Files that its authors publish elsewhere (image tokenizers, text encoders) are copied too, so that the folder loads
    offline, and so is `drafter_folder`, for a drafter that did not come with the model. The default image size is
    recorded. The folder appears complete or not at all.
    """
    folder = as_path(folder, "the folder")
    if model.path is None:
        raise UnsupportedError(f"{model.name} was not loaded from files; there is nothing to copy.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; pass a new one.")
    if model.path.is_dir() and folder.resolve().is_relative_to(model.path.resolve()):
        raise ConfigError(f"{folder} is inside of the model's folder, which would be copied into itself; pass another.")
    companions = _missing_companions(model)
    make_folder(folder.parent)
    _check_room((model.path, *([] if drafter_folder is None else [drafter_folder]), *companions), folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        copy = Path(temporary) / "model"
        if model.path.is_dir():
            shutil.copytree(model.path, copy, ignore=_HIDDEN)
        else:
            copy.mkdir()
            shutil.copy(model.path, copy)
        _write_quantized(model, copy)
        if drafter_folder is not None:
            choices = {**choices, "drafter": f"drafter-{drafter_folder.resolve().name}"}
            shutil.copytree(drafter_folder, copy / choices["drafter"])
        _copy_companions(companions, copy / COMPANIONS)
        if not model.requires_size:
            choices = {**choices, "size": str(model.sizes[0])}
        (copy / SAVED_CHOICES_FILE).write_text(json.dumps(choices, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        copy.replace(folder)
    return folder


def _check_room(sources: Iterable[Path], parent: Path) -> None:
    """Raise a CapacityError if a disk has no room for a copy of files and folders."""
    first, *others = sources
    needed, free = sum(map(_count_bytes, (first, *others))), shutil.disk_usage(parent).free
    if needed > free:
        raise CapacityError(
            f"a copy of {first} needs {format_size(needed)}, but {parent} has {format_size(free)} free; make "
            "room, or use a folder on another disk (TMPDIR for uploads)."
        )


def _count_bytes(source: Path) -> int:
    """Bytes of what is copied of a file or a folder."""
    if source.is_file():
        return source.stat().st_size
    files = (path for path in source.rglob("*") if path.is_file())
    visible = (path for path in files if not any(part.startswith(".") for part in path.relative_to(source).parts))
    return sum(path.stat().st_size for path in visible)


def _write_quantized(model: LoadedModel, copy: Path) -> None:
    """Replace the decoder's matrices in the copied files by the quantised ones, each with its scales."""
    linears = quantized_linears(model.target.net)
    matrices = {name: (linear, rows) for linear in linears for name, rows in linear.sources.items()}
    for path in sorted(copy.rglob("*")) if matrices else ():
        is_drafter = any(part.startswith("drafter") for part in path.relative_to(copy).parts[:-1])
        if path.suffix in WEIGHT_SUFFIXES and not is_drafter and not matrices.keys().isdisjoint(tensor_shapes(path)):
            _replace_matrices(path, matrices)
        elif path.name in INDEX_FILES:
            index = read_json(path, "the index of a checkpoint")
            files = {name + SCALE: file for name, file in index["weight_map"].items() if name in matrices}
            path.write_text(json.dumps({**index, "weight_map": {**index["weight_map"], **files}}), encoding="utf-8")


def _replace_matrices(path: Path, matrices: Mapping[str, tuple[QuantizedLinear, slice]]) -> None:
    """Rewrite a file of weights in its format with some of its matrices quantised."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_tensors(path):
        if name in matrices:
            linear, rows = matrices[name]
            tensors[name], tensors[name + SCALE] = linear.rows(rows).to_stored()
        elif name.removesuffix(SCALE) not in matrices:  # a scale of a matrix that was quantised before
            tensors[name] = tensor.contiguous()
    if path.suffix == ".safetensors":
        metadata = read_safetensors_header(path)[1]
        path.unlink()  # it may be a link into the hub's cache
        write_safetensors(path, tensors, metadata)
    else:
        path.unlink()
        torch.save(tensors, path)


def _missing_companions(model: LoadedModel) -> dict[Path, str]:
    """The companions that are not in the model's folder, and their names in a copy."""
    source, missing = model.checkpoint, {}
    if source is None:
        return {}
    for companion in source.companions:
        if not source.path.is_file() and source.find_companion(companion.candidates, nearby=False) is not None:
            continue
        path = source.find_companion(companion.candidates)
        if path is None and companion.hub_id is not None:
            path = source.find_or_download(companion.names, companion.hub_id)
        if path is None:
            raise CheckpointError(f"{companion.names[0]}, which {model.name} needs, is gone; load the model again.")
        missing[path] = path.name if path.is_file() else companion.folder_name
    return missing


def _copy_companions(companions: Mapping[Path, str], folder: Path) -> None:
    for path, name in companions.items():
        folder.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, folder / name)
        else:
            shutil.copy(path, folder / name)


def save_drafter_repository(
    source: Path | str | None, model: LoadedModel, folder: Path, name: str, base_model: str | None = None
) -> Path:
    """Copy a drafter's files into `folder` as the repository `name`, with a model card.

    The card is the README that training wrote (acceptance by level) with the hub's metadata; one that has metadata
    is not changed. `base_model` is the hub's name of the model, needed if the model was loaded from a folder.
    """
    path = None if source is None else Path(source).expanduser()
    if path is None or not path.is_dir():
        raise UnsupportedError("the drafter in use has no files here to upload; use the folder of a trained one.")
    base_model = base_model or _hub_name(model)
    shutil.copytree(path, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_NOT_UPLOADED))
    call = f'Pipeline.from_pretrained("{base_model or "MODEL"}", drafter="{name}")'
    title = f"# Drafter for {base_model or model.name}\n"
    _write_card(folder, title, call, family=model.family, tags=["drafter", *_TAGS], base_model=base_model)
    return folder


def write_model_card(model: LoadedModel, folder: Path, name: str, base_model: str | None = None) -> None:
    """Write the model card of a folder that `save_checkpoint` has written, to be uploaded as the repository `name`.

    A README with the hub's metadata is not changed. The licence is that of the published checkpoint that was loaded.
    """
    base_model = base_model or _hub_name(model)
    choices = read_json(folder / SAVED_CHOICES_FILE, "the choices of a saved model")
    rows = "".join(f"| {key} | `{value}` |\n" for key, value in choices.items())
    source = f" It was loaded from `{base_model}`." if base_model else ""
    text = (
        f"# {name}\n\nA text-to-image model of the family `{model.family}` with all files that it needs, saved by "
        f"underdraw.{source} What is chosen unless a call says otherwise:\n\n| part | choice |\n|---|---|\n{rows}"
        f"{_describe_companions(model, folder)}"
    )
    weights = choices.get("weights", "full")
    metadata = _licence_metadata(model.family, base_model or model.name)
    if base_model and weights != "full":
        metadata["base_model_relation"] = "quantized"
    tags = [model.family.replace("_", "-"), *([] if weights == "full" else [weights]), *_TAGS]
    call = f'Pipeline.from_pretrained("{name}")'
    _write_card(folder, text, call, family=model.family, tags=tags, base_model=base_model, **metadata)


def _hub_name(model: LoadedModel) -> str | None:
    """The model's repository on the hub; None if it was loaded from a folder or is included in the package."""
    if not is_hub_id(model.name) or Path(model.name).exists():
        return None
    return "/".join(model.name.split("/")[:2])  # without the file of a repository with several models


def _licence_metadata(family: str, name: str) -> dict[str, str]:
    """The hub's metadata about the licence of a published checkpoint; {} for others."""
    published: Any = getattr(families.get(family), "published", ()) if family in families.names() else ()
    item = next((item for item in published if item.id == name or item.id.startswith(f"{name}/")), None)
    if item is None:
        return {}
    if item.licence in _HUB_LICENCES:
        return {"license": item.licence}
    metadata = {"license": "other"}
    if item.licence != UNKNOWN_LICENCE:
        metadata["license_name"] = re.sub(r"[^a-z0-9.]+", "-", item.licence.lower())
    if is_hub_id(item.id):
        metadata["license_link"] = f"https://huggingface.co/{item.id}"
    return metadata


def _describe_companions(model: LoadedModel, folder: Path) -> str:
    """Whose files a saved folder holds besides the model's own."""
    if model.checkpoint is None or not (folder / COMPANIONS).exists():
        return ""
    hub_ids = [companion.hub_id for companion in model.checkpoint.companions if companion.hub_id is not None]
    owners = [f"`{name}`" for name in sorted({"/".join(hub_id.split("/")[:2]) for hub_id in hub_ids})]
    if len(hub_ids) < len(model.checkpoint.companions):
        owners.append("other folders than the model's")
    return f"\n`{COMPANIONS}` holds files of {', '.join(owners)}, under their own licences.\n"


def _write_card(
    folder: Path, text: str, call: str, *, family: str, tags: list[str], base_model: str | None, **metadata: Any
) -> None:
    """Write README.md: the hub's metadata, the folder's README or else `text`, and a way to load the repository."""
    from huggingface_hub import ModelCardData

    card = folder / "README.md"
    text = read_text(card, "a model card") if card.exists() else text
    if text.startswith("---\n"):
        return
    extra: str = getattr(families.get(family), "extra", "families") if family in families.names() else "families"
    data = ModelCardData(
        base_model=base_model, library_name="underdraw", pipeline_tag="text-to-image", tags=tags, **metadata
    )
    use = f"## Use\n\n```py\nfrom underdraw import Pipeline  # pip install 'underdraw[{extra}]'\n\npipe = {call}\n"
    use += 'pipe("a red fox", seed=3).images[0].save("fox.png")\n```\n'
    card.write_text(f"---\n{data.to_yaml()}\n---\n\n{text.rstrip()}\n\n{use}", encoding="utf-8")


def upload_folder(folder: Path, name: str, *, token: str | None, private: bool) -> str:
    """Upload a folder to the Hugging Face hub as the repository `name`; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(token=token)
    try:
        api.create_repo(name, private=private, exist_ok=True)
        with library_progress_bars():
            return str(api.upload_folder(repo_id=name, folder_path=str(folder)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise UnsupportedError(
            f"{name} could not be uploaded to the Hugging Face hub ({first_line(error)}); "
            "check the name and your token."
        ) from error
