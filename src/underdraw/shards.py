"""Shards of generated images that other tools read: tar files for WebDataset, Parquet files. The same bytes every time.

A shard holds images in the order of their indices. Nothing in it depends on when, where or in which order they were
drawn: tar headers have no time and no user, Parquet has row groups of a fixed size.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal

from underdraw.errors import ConfigError, UnderdrawError, first_line
from underdraw.extras import require_package
from underdraw.io import MAX_JSON_BYTES, atomic_write, check_regular, parse_json

if TYPE_CHECKING:
    from PIL.Image import Image

Format = Literal["folder", "webdataset", "parquet"]
SUFFIXES: Mapping[Format, str] = {"webdataset": ".tar", "parquet": ".parquet"}
ROW_GROUP = 64  # rows of a Parquet row group, which readers load at once
EXTRA_COLUMN = "extra_columns"  # JSON of columns that the first prompts of a file did not have
NESTED = ("settings", "versions", "codes")  # fields that Parquet stores as JSON text
KINDS: Mapping[str, str] = {  # Parquet types of the fields of every row
    "index": "int64", "id": "string", "repeat": "int64", "prompt": "string", "seed": "int64", "model": "string",
    "revision": "string", "passes": "int64", "tokens": "int64", "tokens_per_pass": "float64", "mean_depth": "float64",
    "mean_nodes": "float64", "plain_passes": "int64", "identical": "bool_",
    **dict.fromkeys(NESTED, "string"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A PNG file and the row that describes it."""

    png: bytes
    row: dict[str, Any]

    @property
    def index(self) -> int:
        return int(self.row["index"])


def shard_name(number: int, shard_format: Format) -> str:
    return f"shard-{number:06d}{SUFFIXES[shard_format]}"


def find_shards(folder: Path) -> list[Path]:
    """The shards of a folder in the order of their numbers; files of other names are not ours."""
    paths = (path for suffix in SUFFIXES.values() for path in folder.glob(f"shard-*{suffix}"))
    return sorted(path for path in paths if path.stem.removeprefix("shard-").isdecimal())


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever is wrong with a shard into one sentence; tar and Arrow raise errors of many classes."""
    check_regular(path, "a shard of images")
    try:
        yield
    except UnderdrawError:
        raise
    except Exception as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise ConfigError(f"{path} is damaged ({reason}); delete it and run its command again.") from None


def check_row(row: Any) -> None:
    """Raise a ValueError or KeyError unless a row describes an image: its index, prompt and statistics of passes."""
    if not isinstance(row, dict) or type(row["index"]) is not int or row["index"] < 0:
        raise ValueError("a row needs a whole number as index")
    numbers = [row[key] for key in ("passes", "tokens", "mean_depth", "mean_nodes")]
    if not isinstance(row["prompt"], str) or not all(type(number) in (int, float) for number in numbers):
        raise ValueError("a row needs a prompt and numbers of passes and tokens")
    if type(row.get("identical", True)) is not bool:
        raise ValueError("a row says whether its image is identical, or nothing")


def write_shard(path: Path, images: Iterable[StoredImage], columns: Mapping[str, str]) -> None:
    """Write a shard atomically. `columns` has the Parquet types of the prompts' further columns."""
    with atomic_write(path) as file:
        if path.suffix == ".tar":
            _write_tar(file, images)
        else:
            _write_parquet(file, images, columns)


def read_shard(path: Path) -> Iterator[StoredImage]:
    """The images of a shard, one after another."""
    with _reading(path):
        for image in _read_tar(path) if path.suffix == ".tar" else _read_parquet(path):
            check_row(image.row)
            yield image


def _write_tar(file: BinaryIO, images: Iterable[StoredImage]) -> None:
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for image in images:
            row = json.dumps(image.row, ensure_ascii=False, sort_keys=True).encode()
            members = {"png": image.png, "txt": str(image.row["prompt"]).encode(), "json": row}
            for suffix, content in members.items():
                header = tarfile.TarInfo(f"{image.index:09d}.{suffix}")  # no time, no user
                header.size = len(content)
                archive.addfile(header, io.BytesIO(content))


def _read_tar(path: Path) -> Iterator[StoredImage]:
    with tarfile.open(path, mode="r|") as archive:  # a stream: members in order, nothing is kept
        png = b""
        for member in archive:
            content = _open_member(archive, member)
            if content is not None and member.name.endswith(".png"):
                png = content.read()
            elif content is not None and member.name.endswith(".json"):
                yield StoredImage(png, parse_json(content.read()))


def _open_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes] | None:
    """The content of a file in a tar file; a sparse one may claim to be larger than any disk."""
    if member.size > MAX_JSON_BYTES:
        raise ValueError(f"{member.name} has {member.size} bytes")
    return archive.extractfile(member)


@dataclass(frozen=True, slots=True)
class ShardImage:
    """Where an image lies in a shard, so that it can be read without reading the shard."""

    path: Path
    start: int  # first byte in a tar file, row in a Parquet file
    size: int  # bytes in a tar file

    def __str__(self) -> str:
        return f"{self.path} at {self.start}"

    def read(self) -> bytes:
        """The bytes of its PNG."""
        with _reading(self.path):
            if self.path.suffix != ".tar":
                png: bytes = _png_column(self.path, self.start // ROW_GROUP)[self.start % ROW_GROUP]
                return png
            with open(self.path, "rb") as file:
                file.seek(self.start)
                return file.read(self.size)


ImageSource = Path | ShardImage


def read_source(source: ImageSource) -> Image:
    """An image file, or an image in a shard, as RGB."""
    from underdraw.images import read_image  # imports Pillow

    return read_image(source.path, source.read()) if isinstance(source, ShardImage) else read_image(source)


@lru_cache(maxsize=4)
def _png_column(path: Path, group: int) -> list[bytes]:
    """The PNG files of a row group; images are read in order, so few groups are kept."""
    parquet = require_package("pyarrow.parquet", "formats", f"reading {path}")
    with parquet.ParquetFile(path) as file:
        return [image["bytes"] for image in file.read_row_group(group, columns=["image"])["image"].to_pylist()]


def list_shard(path: Path) -> Iterator[tuple[dict[str, Any], ShardImage]]:
    """Rows of a shard and where their images are; the images themselves are not read."""
    with _reading(path):
        for row, image in _list_tar(path) if path.suffix == ".tar" else _list_parquet(path):
            check_row(row)
            yield row, image


def _list_tar(path: Path) -> Iterator[tuple[dict[str, Any], ShardImage]]:
    with tarfile.open(path, mode="r:") as archive:  # skips over the images
        image = ShardImage(path, 0, 0)
        for member in archive:
            content = _open_member(archive, member)
            if member.name.endswith(".png"):
                image = ShardImage(path, member.offset_data, member.size)
            elif content is not None and member.name.endswith(".json"):
                yield parse_json(content.read()), image


def _list_parquet(path: Path) -> Iterator[tuple[dict[str, Any], ShardImage]]:
    for number, row in enumerate(_parquet_rows(path, with_images=False)):
        yield row, ShardImage(path, number, 0)


def column_kind(value: object) -> str | None:
    """The Parquet type of a value of a prompt file; None where it may have any."""
    if value is None:
        return None
    if type(value) is int and not -(2**63) <= value < 2**63:
        return "json"
    for kind, name in ((bool, "bool_"), (int, "int64"), (float, "float64"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "json"


def infer_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Parquet types of the columns that some prompts have; a column of several types is stored as JSON text."""
    kinds: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            kind = column_kind(value)
            kinds.setdefault(name, set()).update(() if kind is None else {kind})
    return {name: _common_kind(seen) for name, seen in kinds.items()}


def _common_kind(kinds: set[str]) -> str:
    if kinds == {"int64", "float64"}:
        return "float64"
    return next(iter(kinds), "string") if len(kinds) < 2 else "json"


def _fits(value: object, kind: str) -> bool:
    """Whether a column of this type can hold the value."""
    return value is None or _common_kind({column_kind(value) or kind, kind}) == kind


def _parquet_schema(columns: Mapping[str, str]) -> Any:
    arrow = require_package("pyarrow", "formats", "--format parquet")
    kinds = {**columns, **KINDS, EXTRA_COLUMN: "string"}
    fields = [arrow.field(name, getattr(arrow, kind.replace("json", "string"))()) for name, kind in kinds.items()]
    image = arrow.field("image", arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())]))
    # Hugging Face `datasets` then decodes the column to pictures.
    features: dict[str, Any] = {"image": {"_type": "Image"}}
    dtypes = (kind.replace("json", "string").replace("bool_", "bool") for kind in kinds.values())
    features |= {name: {"dtype": dtype, "_type": "Value"} for name, dtype in zip(kinds, dtypes, strict=True)}
    metadata = {"huggingface": json.dumps({"info": {"features": features}}), "underdraw": json.dumps(dict(columns))}
    return arrow.schema([image, *fields], metadata=metadata)


def _parquet_row(image: StoredImage, columns: Mapping[str, str]) -> dict[str, Any]:
    """A row of the table; what does not fit its column is JSON text, or part of EXTRA_COLUMN."""
    result: dict[str, Any] = {"image": {"bytes": image.png, "path": f"{image.index:09d}.png"}}
    extra = {}
    for name, value in image.row.items():
        if name in KINDS:
            result[name] = json.dumps(value, sort_keys=True) if name in NESTED and value is not None else value
        elif value is not None and columns.get(name) == "json":
            result[name] = json.dumps(value, ensure_ascii=False, sort_keys=True)
        elif name in columns and _fits(value, columns[name]):
            result[name] = value
        else:
            extra[name] = value
    if extra:
        result[EXTRA_COLUMN] = json.dumps(extra, ensure_ascii=False, sort_keys=True)
    return result


def _write_parquet(file: BinaryIO, images: Iterable[StoredImage], columns: Mapping[str, str]) -> None:
    arrow = require_package("pyarrow", "formats", "--format parquet")
    parquet = require_package("pyarrow.parquet", "formats", "--format parquet")
    schema = _parquet_schema(columns)
    with parquet.ParquetWriter(file, schema) as writer:
        group: list[dict[str, Any]] = []
        for image in images:
            group.append(_parquet_row(image, columns))
            if len(group) == ROW_GROUP:
                writer.write_table(arrow.Table.from_pylist(group, schema=schema))
                group.clear()
        if group:
            writer.write_table(arrow.Table.from_pylist(group, schema=schema))


def _read_parquet(path: Path) -> Iterator[StoredImage]:
    for row in _parquet_rows(path, with_images=True):
        yield StoredImage(row.pop("image")["bytes"], row)


def _parquet_rows(path: Path, *, with_images: bool) -> Iterator[dict[str, Any]]:
    """The rows as they were before `_parquet_row`."""
    parquet = require_package("pyarrow.parquet", "formats", f"reading {path}")
    with parquet.ParquetFile(path) as file:
        columns = parse_json(file.schema_arrow.metadata[b"underdraw"])
        as_json = {*NESTED, *(name for name, kind in columns.items() if kind == "json")}
        names = [name for name in file.schema_arrow.names if with_images or name != "image"]
        for batch in file.iter_batches(batch_size=ROW_GROUP, columns=names):
            for row in batch.to_pylist():
                extra = parse_json(row.pop(EXTRA_COLUMN) or "{}")
                values = {key: value for key, value in row.items() if value is not None}
                values |= {key: parse_json(values[key]) for key in as_json & values.keys()}
                yield {**values, **extra}
