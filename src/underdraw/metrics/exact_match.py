"""Runs as `underdraw generate` writes them in any format, pairs of images by their index, and exact match.

An image is identified by the index in its row, never by its position in a listing. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError
from underdraw.images import read_image
from underdraw.io import IMAGE_SUFFIXES, JsonlStore, unpack_grid
from underdraw.shards import ImageSource, find_shards, list_shard, read_source

METADATA = ("metadata.jsonl", "manifest.jsonl")  # the second was written by version 0.1


@dataclass(frozen=True, slots=True)
class GeneratedImage:
    """One image of a folder."""

    source: ImageSource  # its file, or where it lies in a shard
    prompt: str
    packed_codes: Any  # as packed by `pack_grid`; None if its row does not hold them

    def codes(self) -> NDArray[np.int32] | None:
        if self.packed_codes is None:
            return None
        return unpack_grid(self.packed_codes, f"the row of {self.source}")


@dataclass(frozen=True, slots=True)
class ImagePairs:
    """Images with the same index in two folders, in the order of their indices."""

    indices: list[int]
    ours: list[GeneratedImage]
    theirs: list[GeneratedImage]
    only_ours: int
    only_theirs: int


def read_images(path: Path) -> dict[int, GeneratedImage]:
    """The images of a run in any format, by index; or a single image file, with index 0. Pixels are not read."""
    if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES:
        return {0: GeneratedImage(path, _png_prompt(path), None)}
    images = dict(_list_images(path))  # of two rows of an image the later one counts
    if not images:
        raise ConfigError(f"{path} holds no images; generate some into {path} first.")
    return images


def _metadata_file(folder: Path) -> Path | None:
    return next((folder / name for name in METADATA if (folder / name).is_file()), None)


def _list_images(folder: Path) -> Iterator[tuple[int, GeneratedImage]]:
    """Index and image of every row of a run."""
    metadata, shards = _metadata_file(folder), find_shards(folder)
    if metadata is None and not shards:
        raise ConfigError(
            f"{folder} has no {METADATA[0]} and no shards; name a folder written by `underdraw generate --prompts`, or "
            "an image file."
        )
    if metadata is not None:
        for number, row in enumerate(JsonlStore(metadata).read(), start=1):
            yield _parse_row(folder, row, f"line {number} of {metadata}")
        return
    for shard in shards:
        for row, source in list_shard(shard):
            yield row["index"], GeneratedImage(source, row["prompt"], row.get("codes"))


def _png_prompt(path: Path) -> str:
    """The prompt that `underdraw generate` stores in a PNG; empty for other images."""
    return str(read_image(path).info.get("prompt", ""))


def _parse_row(folder: Path, row: dict[str, Any], source: str) -> tuple[int, GeneratedImage]:
    index, prompt, file = row.get("index"), row.get("prompt"), row.get("file_name", row.get("file"))
    is_valid = isinstance(index, int) and isinstance(file, str) and isinstance(prompt, str)
    if not is_valid or Path(str(file)).name != file:
        raise ConfigError(f"{source} needs an integer index, a file name and a text prompt; generate the folder again.")
    if not (folder / str(file)).is_file():
        raise ConfigError(f"{source} names {file}, which is missing; generate it again with the same command.")
    return int(str(index)), GeneratedImage(folder / str(file), str(prompt), row.get("codes"))


def pair_images(ours: dict[int, GeneratedImage], theirs: dict[int, GeneratedImage]) -> ImagePairs:
    """The images with the same index; they must have the same prompts."""
    indices = sorted(set(ours) & set(theirs))
    if not indices:
        raise ConfigError("the two folders have no image indices in common; compare folders of the same prompts.")
    for index in indices:
        prompts = ours[index].prompt, theirs[index].prompt
        if prompts[0] != prompts[1]:
            raise ConfigError(
                f"image {index} has the prompt {prompts[0]!r} in one folder and {prompts[1]!r} in the other; "
                "compare folders of the same prompts."
            )
    pairs = [ours[index] for index in indices], [theirs[index] for index in indices]
    return ImagePairs(indices, *pairs, len(ours) - len(indices), len(theirs) - len(indices))


def find_images(folder: Path) -> Sequence[ImageSource]:
    """All images of a folder, of a run or any others: a reference set, whose order does not matter."""
    if folder.is_file() or _metadata_file(folder) is not None or find_shards(folder):
        return [image.source for image in read_images(folder).values()]
    paths = (
        sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES) if folder.is_dir() else []
    )
    if not paths:
        raise ConfigError(f"{folder} holds no images; name a folder with {', '.join(IMAGE_SUFFIXES)} files.")
    return paths


def read_pixels(source: ImageSource) -> NDArray[np.uint8]:
    """An image as (height, width, 3)."""
    return np.asarray(read_source(source))


def exact_match(pairs: ImagePairs) -> dict[str, Any]:
    """Number and share of pairs with identical pixels, and the share of equal codes if both folders hold codes."""
    identical = [
        np.array_equal(read_pixels(ours.source), read_pixels(theirs.source))
        for ours, theirs in zip(pairs.ours, pairs.theirs, strict=True)
    ]
    result: dict[str, Any] = {
        "pictures": len(identical), "identical": int(sum(identical)), "rate": round(float(np.mean(identical)), 6)
    }  # fmt: skip
    ours, theirs = stack_codes(pairs.ours), stack_codes(pairs.theirs)
    if ours is not None and theirs is not None and ours.shape == theirs.shape:
        result["equal_codes"] = round(float((ours == theirs).mean()), 6)
    return result


def stack_codes(images: Sequence[GeneratedImage]) -> NDArray[np.int32] | None:
    """Codes (N, rows, cols) of images of one size; None if a row does not hold them."""
    codes = [grid for grid in (image.codes() for image in images) if grid is not None]
    if len(codes) < len(images):
        return None
    if len({grid.shape for grid in codes}) > 1:
        raise ConfigError("the images of a folder have codes of different sizes; compare folders of one size.")
    return np.stack(codes)
