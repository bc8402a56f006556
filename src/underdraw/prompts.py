"""Validation of prompts, and files of prompts: one per line, or PartiPrompts and COCO as they are published.

The published files are not part of the package. Errors name the line of a malformed entry. How long a prompt may be
depends on the model and is checked there.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw.errors import ConfigError, unknown
from underdraw.io import check_regular, expand_user, parse_json, read_text, split_lines

PARTI_COLUMNS = ("Prompt", "Category", "Challenge", "Note")


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """A published set of prompts: names of its file and where to download it."""

    files: tuple[str, ...]  # the first that exists is read
    url: str


SETS = {
    "parti": PublishedSet(
        ("PartiPrompts.tsv",), "https://raw.githubusercontent.com/google-research/parti/main/PartiPrompts.tsv"
    ),
    "coco": PublishedSet(
        ("captions_val2017.json", "annotations/captions_val2017.json"),
        "http://images.cocodataset.org/annotations/annotations_trainval2017.zip",
    ),
}


def check_prompt(text: object) -> None:
    """Raise a ConfigError unless `text` is a non-empty string."""
    check_text(text)
    if not str(text).strip():
        raise ConfigError("the prompt is empty; describe the image in a few words.")


def check_text(text: object) -> None:
    """Raise a ConfigError unless `text` is a string that can be encoded as UTF-8."""
    if not isinstance(text, str):
        raise ConfigError(f"a prompt must be text, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the prompt {text!r} contains bytes that are not UTF-8 text; type it again.") from None


def load_prompts(source: str, data: Path | None = None) -> list[str]:
    """Read the prompts of a file, or of a published set whose file is in the folder `data`."""
    path = _published_file(source, data) if source in SETS else expand_user(source)
    if path.is_dir() or not os.path.lexists(path):
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {problem}; give a file of prompts or one of {', '.join(SETS)}.")
    check_regular(path, "prompts")  # a pipe cannot be read again when a run is resumed
    readers: dict[str, Callable[[Path, str], list[str]]] = {
        ".tsv": _read_parti,
        ".json": _read_json,
        ".txt": _read_lines,
        "": _read_lines,
    }
    if path.suffix.lower() not in readers:
        raise unknown("prompt file type", path.suffix, [suffix for suffix in readers if suffix])
    prompts = readers[path.suffix.lower()](path, read_text(path, "prompts"))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; it needs at least one.")
    return prompts


def _published_file(name: str, data: Path | None) -> Path:
    published = SETS[name]
    if data is None:
        raise ConfigError(
            f"{name} needs the published file {published.files[0]}; download it from {published.url} and name its "
            "folder with --data FOLDER or UNDERDRAW_DATA."
        )
    for file in published.files:
        if (data / file).is_file():
            return data / file
    raise ConfigError(f"{data} holds no {published.files[0]}; download it from {published.url} into that folder.")


def _read_lines(path: Path, text: str) -> list[str]:
    """One prompt per line; empty lines are skipped."""
    lines = split_lines(text)
    for number, line in enumerate(lines, start=1):
        if "\0" in line:
            raise ConfigError(
                f"line {number} of {path} contains a zero byte; give a text file with one prompt per line."
            )
    return [line.strip() for line in lines if line.strip()]


def _read_parti(path: Path, text: str) -> list[str]:
    """The first column of a PartiPrompts table. Quotation marks are part of the prompts, so no CSV reader."""
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    header = tuple(lines[0].rstrip("\r").split("\t")) if lines else ()
    if header != PARTI_COLUMNS:
        raise ConfigError(f"line 1 of {path} is not the header {', '.join(PARTI_COLUMNS)}, separated by tabs.")
    prompts = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(PARTI_COLUMNS):
            raise ConfigError(f"line {number} of {path} has {len(cells)} columns, not {len(PARTI_COLUMNS)}.")
        if not cells[0].strip():
            raise ConfigError(f"line {number} of {path} has an empty prompt.")
        prompts.append(cells[0].strip())
    return prompts


def load_prompt_kinds(source: str) -> dict[str, str]:
    """The kind of every prompt of a JSON file `{kind: [prompt, ...]}`, kinds in turns; of other files nothing."""
    path = expand_user(source)
    if path.suffix.lower() != ".json" or not path.is_file():
        return {}
    document = _parse_document(path, read_text(path, "prompts"))
    return {} if not isinstance(document, dict) or "annotations" in document else _parse_kinds(path, document)


def _read_json(path: Path, text: str) -> list[str]:
    """Captions of COCO, or prompts by kind of picture."""
    document = _parse_document(path, text)
    if isinstance(document, dict) and document and "annotations" not in document:
        lists = [value for value in document.values() if isinstance(value, list)]
        if len(lists) == len(document):
            return list(_parse_kinds(path, document))
    return _read_coco(path, document)


def _parse_kinds(path: Path, document: dict[str, Any]) -> dict[str, str]:
    """The kind of every prompt, so ordered that the first prompts of all kinds come first."""
    for kind, texts in document.items():
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise ConfigError(f"{kind!r} of {path} must be a list of prompts; write {{kind: [prompt, ...]}}.")
    turns = itertools.zip_longest(*([(text, kind) for text in texts] for kind, texts in document.items()))
    kinds = {text: kind for turn in turns for text, kind in filter(None, turn)}
    if len(kinds) != sum(map(len, document.values())):
        raise ConfigError(f"{path} holds a prompt twice; every prompt needs one kind.")
    return kinds


def _parse_document(path: Path, text: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno} of {path} is not valid JSON ({error.msg}).") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON ({error}).") from None


def _read_coco(path: Path, document: Any) -> list[str]:
    """One caption per image, the one with the lowest id, in the order of image ids."""
    rows = document.get("annotations") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f'{path} has no list "annotations"; give a COCO captions file.')
    first: dict[int, tuple[int, str]] = {}
    for index, row in enumerate(rows):
        image_id, caption_id, caption = _parse_annotation(path, index, row)
        if image_id not in first or caption_id < first[image_id][0]:
            first[image_id] = caption_id, caption
    return [first[image_id][1] for image_id in sorted(first)]


def _parse_annotation(path: Path, index: int, row: Any) -> tuple[int, int, str]:
    """Image id, caption id and caption of one annotation."""
    where = f'number {index} of "annotations" in {path}'
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not an object but {type(row).__name__}.")
    image_id, caption_id, caption = (row.get(key) for key in ("image_id", "id", "caption"))
    if not isinstance(image_id, int) or not isinstance(caption_id, int) or not isinstance(caption, str):
        raise ConfigError(f"{where} needs integers image_id and id and a string caption.")
    if not caption.strip():
        raise ConfigError(f"{where} has an empty caption.")
    return image_id, caption_id, " ".join(caption.split())
