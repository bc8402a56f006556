"""Samples for training drafters: images as token ids, sampled from the target or encoded from image files.

They are stored in safetensors shards, each written atomically, so sampling can be interrupted at any time and
continues with the first missing shard.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from underdraw.drafters.trained import target_fingerprint
from underdraw.errors import CheckpointError, ConfigError, UnsupportedError
from underdraw.io import FolderLock, parse_json, path_inside, read_text, remove_unfinished, split_lines
from underdraw.layout import Layout
from underdraw.models.config import ImageSize
from underdraw.models.family import LoadedModel
from underdraw.nn.weights import open_safetensors, read_safetensors_header, write_safetensors
from underdraw.pipeline import Pipeline
from underdraw.protocols import Prompt
from underdraw.run_folder import ALONE, Rank
from underdraw.shards import ImageSource, find_shards, list_shard, read_source


@dataclass(frozen=True, slots=True)
class Samples:
    """Texts and the token ids of their images, in order of the shards that they were read from."""

    texts: tuple[str, ...]
    tokens: Tensor  # (N, steps) int64
    folder: Path
    shard_size: int  # images per shard; the last shard may have fewer
    rows: Tensor  # (N,) index among all samples in `folder`

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def load(cls, folder: str | Path) -> Samples:
        """All samples in a folder."""
        paths = sorted(Path(folder).glob("samples-*.safetensors"))
        if not paths:
            raise CheckpointError(f"{folder} holds no samples; create them with `underdraw train samples`.")
        texts: list[str] = []
        tokens = []
        try:
            for path in paths:
                part = _read_texts(path)
                with open_safetensors(path) as file:
                    tokens.append(file.get_tensor("tokens").long())
                if tokens[-1].ndim != 2 or tokens[-1].shape[1] != tokens[0].shape[1] or len(tokens[-1]) != len(part):
                    raise ValueError(f"{len(part)} texts and tokens of the shape {tuple(tokens[-1].shape)}")
                texts.extend(part)
        except (CheckpointError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the samples in {path} are damaged ({error}); delete the file and run `underdraw train samples` again."
            ) from error
        return cls(tuple(texts), torch.cat(tokens), Path(folder), len(tokens[0]), torch.arange(len(texts)))

    def check_model(self, model: LoadedModel) -> None:
        """Raise if the samples are those of another model, by the metadata of the shards and by their tokens."""
        expected, shard = fingerprint(model), min(self.folder.glob("samples-*.safetensors"))
        saved = _read_settings(shard).get("model", expected)
        if saved != expected:
            raise ConfigError(f"the samples in {self.folder} are those of {saved}, and {model.name} is {expected}.")
        vocab, steps = model.target.net.arch.vocab, expected["steps"]
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if self.tokens.shape[1] != steps or not 0 <= low <= high < vocab:
            raise ConfigError(
                f"the samples in {self.folder} have {self.tokens.shape[1]} tokens from {low} to {high} each, and "
                f"images of {model.name} have {steps} tokens below {vocab}; create samples with this model."
            )

    def split(self, held_out: int) -> tuple[Samples, Samples]:
        """Samples for training, and those of the last `held_out` texts for evaluation."""
        names = list(dict.fromkeys(self.texts))
        if held_out < 1 or len(names) <= held_out:
            allowed = f"use --held-out 1 to {len(names) - 1}, or" if len(names) > 1 else "please"
            raise ConfigError(
                f"the samples have {len(names)} different texts, too few for --held-out {held_out}; {allowed} create "
                "samples of more texts."
            )
        evaluation = set(names[-held_out:])
        is_evaluation = torch.tensor([text in evaluation for text in self.texts])
        return self._select(~is_evaluation), self._select(is_evaluation)

    def _select(self, mask: Tensor) -> Samples:
        index = mask.nonzero()[:, 0]
        texts = tuple(self.texts[row] for row in index.tolist())
        return Samples(texts, self.tokens[index], self.folder, self.shard_size, self.rows[index])


def generate_samples(
    model: LoadedModel,
    texts: Sequence[str],
    folder: str | Path,
    *,
    batch: int = 64,
    seed: int = 0,
    temperatures: Sequence[float] = (),
    rank: Rank = ALONE,
) -> Samples:
    """Sample an image for each text with the model's default settings; shards cycle through `temperatures`.

    Ranks share the shards of a folder; each returns what is there when it has finished its own.
    """
    layout, pipe = model.make_layout(model.resolve_size(None, None)), Pipeline(model, drafter="forced", tree="none")
    pipe.set_progress_bar_config(disable=True)
    settings = {"model": fingerprint(model), "seed": seed, "temperatures": list(temperatures)}
    with FolderLock(rank.lock_folder(Path(folder)), "samples"):
        for shard, start, path in _missing_shards(Path(folder), texts, batch, settings, rank):
            part = list(texts[start : start + batch])
            temperature = temperatures[shard % len(temperatures)] if temperatures else None
            seeds = list(range(seed + start, seed + start + len(part)))
            codes = pipe(part, seed=seeds, temperature=temperature, output_type="codes").images
            _write(path, codes_to_tokens(layout, codes), part, settings)
        return Samples.load(folder)


def encode_samples(
    model: LoadedModel,
    images: Sequence[tuple[str, ImageSource]],
    folder: str | Path,
    *,
    batch: int = 64,
    rank: Rank = ALONE,
) -> Samples:
    """Encode image files with their captions; images are cropped to the model's aspect ratio and resized."""
    size = model.resolve_size(None, None)
    texts, settings = [text for text, _ in images], {"model": fingerprint(model), "seed": None, "temperatures": None}
    with FolderLock(rank.lock_folder(Path(folder)), "samples"):
        for _, start, path in _missing_shards(Path(folder), texts, batch, settings, rank):
            pixels = [_read_pixels(file, size) for _, file in images[start : start + batch]]
            codes = model.image_tokenizer.encode(torch.stack(pixels).to(model.placement.device)).cpu()
            _write(path, codes_to_tokens(model.make_layout(size), codes), texts[start : start + batch], settings)
        return Samples.load(folder)


def fingerprint(model: LoadedModel) -> dict[str, Any]:
    """What samples depend on: the family, the sizes of the decoder and the layout of its images."""
    layout = model.make_layout(model.resolve_size(None, None))
    sizes = target_fingerprint(model.target)
    return {"family": model.family, **sizes, "grid": [layout.height, layout.width], "steps": layout.steps}


def _missing_shards(
    folder: Path, texts: Sequence[str], batch: int, settings: Mapping[str, Any], rank: Rank
) -> Iterator[tuple[int, int, Path]]:
    """Number, first row and path of this rank's shards that are not written yet."""
    if rank.world == 1:  # other ranks may be writing
        remove_unfinished(folder)
    is_hidden = None if rank.rank == 0 else True  # None shows it on a terminal
    for shard, start in enumerate(tqdm(range(0, len(texts), batch), desc="samples", unit="shard", disable=is_hidden)):
        if not rank.draws(shard):
            continue
        path = folder / f"samples-{shard:05d}.safetensors"
        if not path.exists():
            yield shard, start, path
            continue
        if _read_texts(path) != list(texts[start : start + batch]):
            raise ConfigError(
                f"{path} holds samples of other texts; give a new --out folder, or the same texts and --batch."
            )
        saved = _read_settings(path)
        for name, value in saved.items():
            if value != settings[name]:
                raise ConfigError(
                    f"{path} holds samples with {name} {value!r}, not {settings[name]!r}; give a new --out folder, or "
                    f"the same {name}."
                )


def _read_settings(path: Path) -> dict[str, Any]:
    """The model, seed and temperatures of a shard; {} for shards without them."""
    try:
        settings = parse_json(read_safetensors_header(path)[1].get("settings", "{}"))
        return {name: settings[name] for name in ("model", "seed", "temperatures")} if settings else {}
    except (ValueError, KeyError, TypeError):
        raise CheckpointError(f"the settings in {path} are damaged; delete the file and sample it again.") from None


def _read_texts(path: Path) -> list[str]:
    """The texts of a shard."""
    texts = parse_json(read_safetensors_header(path)[1].get("texts", "null"))
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{path} holds no samples; delete the file and run `underdraw train samples` again.")
    return texts


def _read_pixels(source: ImageSource, size: ImageSize) -> Tensor:
    """An image file as (3, height, width) in [-1, 1]."""
    import PIL.ImageOps

    fitted = PIL.ImageOps.fit(read_source(source), (size.width, size.height))
    return torch.from_numpy(np.asarray(fitted, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)


def codes_to_tokens(layout: Layout, codes: Tensor) -> Tensor:
    """Token ids of whole images (B, steps) from code grids (B, height, width): the inverse of `layout.grid`."""
    if layout.preview is not None:
        raise UnsupportedError("images cannot be encoded for a model that draws a preview first; sample them from it.")
    batch = codes.shape[0]

    def column(ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=codes.device).expand(batch, len(ids))

    rows = codes.view(batch, layout.height, layout.width) + layout.codes.start
    if layout.row_end is not None:
        rows = torch.nn.functional.pad(rows, (0, 1), value=layout.row_end)
    return torch.cat([column(layout.prologue), rows.flatten(1), column(layout.epilogue)], dim=1)


def encode_prompts(model: LoadedModel, texts: Sequence[str]) -> list[Prompt]:
    return [model.make_prompt(text, None, model.resolve_size(None, None)) for text in texts]


def shorten(model: LoadedModel, text: str) -> str:
    """The text without the last words that exceed the model's prompt length."""
    words = text.split(" ")
    while len(words) > 1:
        try:
            model.make_prompt(" ".join(words), None, model.resolve_size(None, None))
            break
        except ConfigError:
            words.pop()
    return " ".join(words)


def read_captioned_images(folder: Path) -> list[tuple[str, ImageSource]]:
    """Prompts and images of a run of `underdraw generate` in any format, or of another folder with metadata.jsonl."""
    if shards := find_shards(folder):
        return [(str(row["prompt"]), source) for shard in shards for row, source in list_shard(shard)]
    names = ("metadata.jsonl", "manifest.jsonl")  # the second was written by version 0.1
    path = next((folder / name for name in names if (folder / name).exists()), None)
    if path is None:
        raise ConfigError(f"{folder} has no {names[0]}; it needs one, with a prompt and a file_name per line.")
    pairs: list[tuple[str, ImageSource]] = []
    for number, line in enumerate(split_lines(read_text(path, "metadata of images")), start=1):
        try:
            row = parse_json(line)
            name = row["file_name"] if "file_name" in row else row["file"]
            pairs.append((str(row["prompt"]), path_inside(folder, name, f"line {number} of {path}", ConfigError)))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"line {number} of {path} has no prompt and file_name ({error}).") from None
    return pairs


def _write(path: Path, tokens: Tensor, texts: Sequence[str], settings: Mapping[str, Any]) -> None:
    metadata = {"texts": json.dumps(list(texts)), "settings": json.dumps(dict(settings))}
    write_safetensors(path, {"tokens": tokens.to(torch.int32)}, metadata)
