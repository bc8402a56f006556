"""Prompts: what may be one, and files of them as their publishers release them: PartiPrompts, COCO, or one a line.

The published files are not part of the package. Whatever is malformed is refused with its place in the file. Nothing
here knows how many words a model reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from underdraw.errors import ConfigError, unknown

PARTI_COLUMNS = ("Prompt", "Category", "Challenge", "Note")


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """A published set of prompts: what its file is called and where it comes from."""

    files: tuple[str, ...]  # the first that is there is read
    address: str


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
    """Refuse what is not a few words in some script."""
    check_text(text)
    if not str(text).strip():
        raise ConfigError("the prompt is empty; say in a few words what to draw.")


def check_text(text: object) -> None:
    """Refuse what is not text in some script."""
    if not isinstance(text, str):
        raise ConfigError(f"a prompt must be text, not {type(text).__name__}.")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"the prompt {text!r} holds bytes that are no UTF-8 text; type it again.") from None


def load_prompts(source: str, data: Path | None = None) -> list[str]:
    """The prompts of a file, or of a published set whose file lies in the folder `data`."""
    path = _published(source, data) if source in SETS else Path(source).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {what}; give a file of prompts or one of {', '.join(SETS)}.")
    readers: dict[str, Callable[[Path, str], list[str]]] = {".tsv": _parti, ".json": _coco, ".txt": _lines, "": _lines}
    if path.suffix.lower() not in readers:
        raise unknown("kind of prompt file", path.suffix, [suffix for suffix in readers if suffix])
    prompts = readers[path.suffix.lower()](path, _text(path))
    if not prompts:
        raise ConfigError(f"{path} holds no prompts; it needs at least one.")
    return prompts


def _published(name: str, data: Path | None) -> Path:
    known = SETS[name]
    if data is None:
        raise ConfigError(
            f"{name} needs the published file {known.files[0]}; fetch it from {known.address} and name its folder with "
            "--data FOLDER or UNDERDRAW_DATA."
        )
    for file in known.files:
        if (data / file).is_file():
            return data / file
    raise ConfigError(f"{data} holds no {known.files[0]}; fetch it from {known.address} into that folder.")


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(f"line {line} of {path} is not UTF-8 text; save the file as UTF-8.") from None


def _lines(path: Path, text: str) -> list[str]:
    """One prompt a line; empty lines are skipped."""
    for number, line in enumerate(text.splitlines(), start=1):
        if "\0" in line:
            raise ConfigError(f"line {number} of {path} holds a zero byte; give a text file with one prompt a line.")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _parti(path: Path, text: str) -> list[str]:
    """The first column of a table with the columns of PartiPrompts. Quotation marks are part of the prompts."""
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    header = tuple(lines[0].rstrip("\r").split("\t")) if lines else ()
    if header != PARTI_COLUMNS:
        raise ConfigError(f"line 1 of {path} is not the header {', '.join(PARTI_COLUMNS)} with tabs between.")
    prompts = []
    for number, line in enumerate(lines[1:], start=2):
        cells = line.rstrip("\r").split("\t")
        if len(cells) != len(PARTI_COLUMNS):
            raise ConfigError(f"line {number} of {path} has {len(cells)} columns, not {len(PARTI_COLUMNS)}.")
        if not cells[0].strip():
            raise ConfigError(f"line {number} of {path} has an empty prompt.")
        prompts.append(cells[0].strip())
    return prompts


def _coco(path: Path, text: str) -> list[str]:
    """One caption an image, the one with the lowest id, in the order of image ids."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"line {error.lineno} of {path} is not valid JSON ({error.msg}).") from None
    rows = document.get("annotations") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f'{path} has no list "annotations"; give a captions file of COCO.')
    first: dict[int, tuple[int, str]] = {}
    for index, row in enumerate(rows):
        image, identity, caption = _annotation(path, index, row)
        if image not in first or identity < first[image][0]:
            first[image] = identity, caption
    return [first[image][1] for image in sorted(first)]


def _annotation(path: Path, index: int, row: Any) -> tuple[int, int, str]:
    """Image id, own id and caption of one annotation."""
    where = f'number {index} of "annotations" in {path}'
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is no object but {type(row).__name__}.")
    image, identity, caption = (row.get(key) for key in ("image_id", "id", "caption"))
    if not isinstance(image, int) or not isinstance(identity, int) or not isinstance(caption, str):
        raise ConfigError(f"{where} needs whole numbers image_id and id and a text caption.")
    if not caption.strip():
        raise ConfigError(f"{where} has an empty caption.")
    return image, identity, " ".join(caption.split())
