"""Validation of prompts, and files of prompts: text, JSON lines, CSV, Parquet, PartiPrompts and COCO as published.

Files are read as streams, so ten million prompts need no more memory than one. The published files are not part of the
package. Errors name the line of a malformed entry. How long a prompt may be depends on the model and is checked there.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from underdraw.errors import ConfigError, UnderdrawError, first_line, unknown
from underdraw.extras import require_package
from underdraw.io import MAX_JSON_BYTES, check_regular, expand_user, open_regular, parse_json, read_text

PARTI_COLUMNS = ("Prompt", "Category", "Challenge", "Note")
MAX_ROW_SEED = 2**62 - 1
PARQUET_ROWS = 1024  # read at once


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


@dataclass(frozen=True, slots=True)
class PromptRow:
    """One entry of a prompt file."""

    id: str
    prompt: str
    seed: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # all further columns of the file
    is_numbered: bool = False  # the file has no id for it, so `id` is its number in the file, from 0


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
    """The prompts of a file, or of a published set whose file is in the folder `data`."""
    return [row.prompt for row in PromptFile(source, data)]


class PromptFile:
    """The rows of a prompt file, or of a published set in the folder `data`; every iteration reads the file again."""

    def __init__(self, source: str, data: Path | None = None, limit: int | None = None) -> None:
        path = _published_file(source, data) if source in SETS else expand_user(source)
        if path.is_dir() or not os.path.lexists(path):
            problem = "is a folder" if path.is_dir() else "does not exist"
            raise ConfigError(f"{path} {problem}; give a file of prompts or one of {', '.join(SETS)}.")
        check_regular(path, "prompts")  # a pipe cannot be read again when a run is resumed
        suffix = path.suffix.lower()
        if suffix not in READERS:
            raise unknown("prompt file type", path.suffix, [name for name in READERS if name])
        if suffix == ".parquet":
            require_package("pyarrow.parquet", "formats", f"reading {path}")
        self.path, self._limit, self._read = path, limit, READERS[suffix]

    def __iter__(self) -> Iterator[PromptRow]:
        rows = itertools.islice(self._read(self.path), self._limit)
        first = next(rows, None)
        if first is None:
            raise ConfigError(f"{self.path} holds no prompts; it needs at least one.")
        return itertools.chain([first], rows)


@dataclass(frozen=True, slots=True)
class PromptSummary:
    """How many prompts there are, and a digest of them, so that a run is only resumed with the same prompts."""

    count: int
    sha256: str


def summarize_prompts(rows: Iterable[PromptRow]) -> PromptSummary:
    """Read all rows once; a malformed one raises before anything is drawn."""
    digest, count = hashlib.sha256(), 0
    for row in rows:
        text = json.dumps([row.id, row.prompt, row.seed, row.columns], ensure_ascii=False, sort_keys=True)
        digest.update(text.encode("utf-8", "surrogatepass") + b"\n")
        count += 1
    return PromptSummary(count, digest.hexdigest())


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


def _decoded_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, split at line feeds only and with their line ends; a byte order mark is dropped."""
    with open_regular(path, "prompts") as file:
        lines = iter(lambda: file.readline(MAX_JSON_BYTES), b"")
        for number, raw in enumerate(lines, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ConfigError(f"line {number} of {path} is not UTF-8 text; save the file as UTF-8.") from None
            if "\0" in line:
                raise ConfigError(f"line {number} of {path} contains a zero byte; give a text file of prompts.")
            yield line


def _read_lines(path: Path) -> Iterator[PromptRow]:
    """One prompt per line; empty lines are skipped."""
    prompts = (line.strip() for line in _decoded_lines(path))
    return (PromptRow(str(number), prompt, is_numbered=True) for number, prompt in enumerate(filter(None, prompts)))


def _read_parti(path: Path) -> Iterator[PromptRow]:
    """A PartiPrompts table. Quotation marks are part of the prompts, so no CSV reader."""
    lines = (line.rstrip("\r\n") for line in _decoded_lines(path))
    if tuple(next(lines, "").split("\t")) != PARTI_COLUMNS:
        raise ConfigError(f"line 1 of {path} is not the header {', '.join(PARTI_COLUMNS)}, separated by tabs.")
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        cells = line.split("\t")
        if len(cells) != len(PARTI_COLUMNS):
            raise ConfigError(f"line {number} of {path} has {len(cells)} columns, not {len(PARTI_COLUMNS)}.")
        if not cells[0].strip():
            raise ConfigError(f"line {number} of {path} has an empty prompt.")
        columns = {name.lower(): cell.strip() for name, cell in zip(PARTI_COLUMNS[1:], cells[1:], strict=True)}
        yield PromptRow(str(number - 2), cells[0].strip(), columns=columns, is_numbered=True)


def load_prompt_kinds(source: str) -> dict[str, str]:
    """The kind of every prompt of a JSON file `{kind: [prompt, ...]}`, kinds in turns; of other files nothing."""
    path = expand_user(source)
    if path.suffix.lower() != ".json" or not path.is_file():
        return {}
    document = _parse_document(path, read_text(path, "prompts"))
    return {} if not isinstance(document, dict) or "annotations" in document else _parse_kinds(path, document)


def _read_json(path: Path) -> Iterator[PromptRow]:
    """Captions of COCO, or prompts by kind of picture."""
    document = _parse_document(path, read_text(path, "prompts"))  # one JSON object cannot be read by lines
    if isinstance(document, dict) and document and "annotations" not in document:
        lists = [value for value in document.values() if isinstance(value, list)]
        if len(lists) == len(document) and any(lists):
            rows = enumerate(_parse_kinds(path, document).items())
            return (PromptRow(str(n), text, columns={"kind": kind}, is_numbered=True) for n, (text, kind) in rows)
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


def _read_coco(path: Path, document: Any) -> Iterator[PromptRow]:
    """One caption per image, the one with the lowest id, in the order of image ids, which are the rows' ids."""
    rows = document.get("annotations") if isinstance(document, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f'{path} has no list "annotations"; give a COCO captions file.')
    first: dict[int, tuple[int, str]] = {}
    for index, row in enumerate(rows):
        image_id, caption_id, caption = _parse_annotation(path, index, row)
        if image_id not in first or caption_id < first[image_id][0]:
            first[image_id] = caption_id, caption
    for image_id, (caption_id, caption) in sorted(first.items()):
        yield PromptRow(str(image_id), caption, columns={"caption_id": caption_id})


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


def _read_json_lines(path: Path) -> Iterator[PromptRow]:
    """JSON objects, one per line; empty lines are skipped."""
    count = 0
    for number, line in enumerate(_decoded_lines(path), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not valid JSON ({getattr(error, 'msg', error)}).") from None
        if not isinstance(row, dict):
            raise ConfigError(f'{where} is not an object; write {{"id": ..., "prompt": ...}}.')
        yield _make_row(row, count, where)
        count += 1


def _read_csv(path: Path) -> Iterator[PromptRow]:
    """A comma-separated table with a header; cells may span lines, so errors name the row's last line."""
    reader = csv.reader(_decoded_lines(path), strict=True)
    try:
        header = next(reader, [])
        if "prompt" not in header:
            raise ConfigError(f"line 1 of {path} has no column prompt; name the columns in the first line.")
        if len(set(header)) != len(header):
            raise ConfigError(f"line 1 of {path} names a column twice; give every column a name of its own.")
        count = 0
        for cells in reader:
            where = f"line {reader.line_num} of {path}"
            if not cells:
                continue
            if len(cells) != len(header):
                raise ConfigError(f"{where} has {len(cells)} columns, not {len(header)}.")
            row: dict[str, Any] = dict(zip(header, cells, strict=True))
            if not row.get("seed"):
                row.pop("seed", None)
            elif row["seed"].strip().isdecimal():
                row["seed"] = int(row["seed"])
            yield _make_row(row, count, where)
            count += 1
    except csv.Error as error:
        raise ConfigError(f"line {reader.line_num} of {path} is not CSV ({error}).") from None


def _read_parquet(path: Path) -> Iterator[PromptRow]:
    """A Parquet table. Columns of bytes, such as images, are left out; dates become text."""
    pyarrow = require_package("pyarrow", "formats", f"reading {path}")
    parquet = require_package("pyarrow.parquet", "formats", f"reading {path}")
    try:
        with parquet.ParquetFile(path) as file:
            names = [
                name
                for name, kind in zip(file.schema_arrow.names, file.schema_arrow.types, strict=True)
                if "binary" not in str(kind)
            ]
            if "prompt" not in names:
                raise ConfigError(f"{path} has no text column prompt; its columns are {', '.join(names)}.")
            batches = file.iter_batches(batch_size=PARQUET_ROWS, columns=names)
            rows = itertools.chain.from_iterable(batch.to_pylist() for batch in batches)
            for number, row in enumerate(rows):
                yield _make_row(json.loads(json.dumps(row, default=str)), number, f"row {number} of {path}")
    except UnderdrawError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, ArithmeticError) as error:  # also text that is not UTF-8
        raise ConfigError(f"{path} cannot be read as Parquet ({first_line(error)}).") from None


def _make_row(row: dict[str, Any], number: int, where: str) -> PromptRow:
    """A row of named columns; `number` is its id if it has none."""
    columns = {key: _portable(value) for key, value in row.items() if key not in ("id", "prompt", "seed")}
    identity, prompt, seed = row.get("id"), row.get("prompt"), row.get("seed")
    if not isinstance(prompt, str) or not prompt.strip():
        raise ConfigError(f"{where} has no text in prompt.")
    try:
        check_text(prompt)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} holds characters that are not UTF-8 text (surrogates); remove them.") from None
    is_numbered = identity is None
    if identity is None:
        identity = number
    if isinstance(identity, bool) or not isinstance(identity, str | int):
        raise ConfigError(f"{where} has the id {identity!r}; use text or a whole number.")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_ROW_SEED):
        raise ConfigError(f"{where} has the seed {seed!r}; use a whole number from 0 to 2**62 - 1.")
    return PromptRow(str(identity), prompt.strip(), seed, columns, is_numbered)


def _portable(value: Any) -> Any:
    """A value of a column as JSON and Parquet can hold it: NaN, which pandas writes for missing ones, is none."""
    if isinstance(value, dict):
        return {key: _portable(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_portable(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


READERS: Mapping[str, Callable[[Path], Iterator[PromptRow]]] = {
    ".txt": _read_lines,
    ".jsonl": _read_json_lines,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".json": _read_json,
    ".tsv": _read_parti,
    "": _read_lines,
}
