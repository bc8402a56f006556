"""Pictures as tokens for a drafter to learn from: drawn by the target itself, or encoded from image files.

They are kept in safetensors shards, each written in one rename, so that making them can be interrupted at any moment
and goes on at the first missing shard. Features may be kept beside them, for targets that are slow to run again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from underdraw.drafters.forced import Forced
from underdraw.engine.decode import decode_tokens
from underdraw.errors import CheckpointError, ConfigError
from underdraw.layout import Layout
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.family import ImageSize, LoadedModel
from underdraw.models.loading import load_model, resolve_placement
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Prompt
from underdraw.sampling import Sampler
from underdraw.training.command import part_parser, run
from underdraw.training.teacher import Rows, Teacher
from underdraw.verifiers.exact import Exact

log = logging.getLogger(__name__)
_ROWS = ("prefix", "before", "behind", "lengths", "offset")


@dataclass(frozen=True, slots=True)
class Samples:
    """Texts, whole rasters, and the folder that features of them may be in."""

    texts: tuple[str, ...]
    tokens: Tensor  # (N, steps) int64
    folder: Path | None = None
    shard: int = 0  # pictures a shard

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def load(cls, folder: str | Path) -> Samples:
        """Everything that `draw_samples` or `encode_samples` wrote."""
        paths = sorted(Path(folder).glob("samples-*.safetensors"))
        if not paths:
            raise CheckpointError(f"{folder} holds no samples; make some with `underdraw train samples`.")
        texts: list[str] = []
        tokens = []
        try:
            for path in paths:
                with safe_open(path, framework="pt") as file:
                    texts.extend(json.loads(file.metadata()["texts"]))
                    tokens.append(file.get_tensor("tokens").long())
        except (SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"the samples in {path} are damaged ({error}); delete the file and make it again."
            ) from error
        return cls(tuple(texts), torch.cat(tokens), Path(folder), len(tokens[0]))

    def split(self, held_out: int) -> tuple[Samples, Samples]:
        """The last `held_out` texts' pictures apart from all others: no text stands on both sides."""
        names = sorted(set(self.texts), key=self.texts.index)
        if held_out < 1 or len(names) <= held_out:
            raise ConfigError(f"{len(names)} different texts cannot spare {held_out} for measuring; make more samples.")
        apart = set(names[-held_out:])
        parts = []
        for wanted in (False, True):
            rows = [row for row, text in enumerate(self.texts) if (text in apart) == wanted]
            parts.append(Samples(tuple(self.texts[row] for row in rows), self.tokens[rows]))
        return parts[0], parts[1]


def draw_samples(
    model: LoadedModel, texts: Sequence[str], folder: str | Path, *, batch: int = 64, seed: int = 0,
    temperatures: Sequence[float] = (), size: ImageSize | None = None,
) -> Samples:  # fmt: skip
    """Let the target draw a picture for each text with the family's settings; shards take turns at `temperatures`."""
    size, own = size or model.sizes[0], model.defaults
    layout, folder = model.make_layout(size), Path(folder)
    for shard, start in enumerate(tqdm(range(0, len(texts), batch), desc="samples", unit="shard", disable=None)):
        part = list(texts[start : start + batch])
        path = folder / f"samples-{shard:05d}.safetensors"
        if _is_of(path, part):
            continue
        prompts = [model.make_prompt(text, None, size) for text in part]
        seeds = range(seed + start, seed + start + len(part))
        temperature = temperatures[shard % len(temperatures)] if temperatures else own.temperature
        sampler = Sampler(
            layout, seeds, temperature=temperature, top_k=own.top_k, top_p=own.top_p, device=model.placement.device
        )
        parts = model.target, Forced(), NoTree(), Exact(), prompts, sampler
        _write(path, decode_tokens(*parts, guidance=own.guidance), part)
    return Samples.load(folder)


def encode_samples(
    model: LoadedModel,
    pictures: Sequence[tuple[str, Path]],
    folder: str | Path,
    *,
    batch: int = 64,
    size: ImageSize | None = None,
) -> Samples:
    """Encode captioned image files; they are cut to the family's aspect ratio and scaled."""
    import PIL.Image
    import PIL.ImageOps

    size = size or model.sizes[0]
    layout, folder = model.make_layout(size), Path(folder)
    for shard, start in enumerate(tqdm(range(0, len(pictures), batch), desc="pictures", unit="shard", disable=None)):
        part = pictures[start : start + batch]
        path = folder / f"samples-{shard:05d}.safetensors"
        if _is_of(path, [text for text, _ in part]):
            continue
        arrays = []
        for _, file in part:
            with PIL.Image.open(file) as image:
                fitted = PIL.ImageOps.fit(image.convert("RGB"), (size.width, size.height))
            arrays.append(np.asarray(fitted, dtype=np.float32) / 127.5 - 1)
        pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).to(model.placement.device)
        _write(path, raster_of(layout, model.image_tokenizer.encode(pixels).cpu()), [text for text, _ in part])
    return Samples.load(folder)


def raster_of(layout: Layout, codes: Tensor) -> Tensor:
    """Whole sequences (B, steps) of code grids (B, height, width): the inverse of `layout.grid`."""
    batch = codes.shape[0]

    def column(ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=codes.device).expand(batch, len(ids))

    rows = codes.view(batch, layout.height, layout.width) + layout.codes.start
    if layout.row_end is not None:
        rows = torch.nn.functional.pad(rows, (0, 1), value=layout.row_end)
    return torch.cat([column(layout.prologue), rows.flatten(1), column(layout.epilogue)], dim=1)


def keep_features(samples: Samples, model: LoadedModel, teacher: Teacher) -> None:
    """Write the target's features of every sample beside it, shard by shard."""
    assert samples.folder is not None, "features are kept beside samples that are on disk"
    for start in tqdm(range(0, len(samples), samples.shard), desc="features", unit="shard", disable=None):
        path = samples.folder / f"features-{start // samples.shard:05d}.safetensors"
        if path.exists():
            continue
        part = slice(start, start + samples.shard)
        rows = teacher.rows(prompts_of(model, samples.texts[part]), samples.tokens[part].to(model.placement.device))
        part_file = path.with_suffix(".part")
        save_file({name: getattr(rows, name).cpu().contiguous() for name in _ROWS}, part_file)
        part_file.replace(path)


def kept_features(samples: Samples, shard: int, device: torch.device) -> Rows | None:
    """The features of one shard, if they were kept."""
    path = (samples.folder or Path()) / f"features-{shard:05d}.safetensors"
    if samples.folder is None or not path.exists():
        return None
    return Rows(**{name: value.to(device) for name, value in load_file(path).items()})


def prompts_of(model: LoadedModel, texts: Sequence[str]) -> list[Prompt]:
    return [model.make_prompt(text, None, model.sizes[0]) for text in texts]


def shortened(model: LoadedModel, text: str) -> str:
    """A text without the last words that the model has no room for."""
    words = text.split(" ")
    while len(words) > 1:
        try:
            model.make_prompt(" ".join(words), None, model.sizes[0])
            break
        except ConfigError:
            words.pop()
    return " ".join(words)


def _is_of(path: Path, texts: list[str]) -> bool:
    """Is this shard written already, and for these texts?"""
    if not path.exists():
        return False
    with safe_open(path, framework="pt") as file:
        if json.loads(file.metadata()["texts"]) != texts:
            raise ConfigError(f"{path} holds samples of other texts; give a new folder or the same texts and batch.")
    return True


def _write(path: Path, tokens: Tensor, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    save_file({"tokens": tokens.to(torch.int32)}, part, metadata={"texts": json.dumps(texts)})
    part.replace(path)


def read_texts(path: Path) -> list[str]:
    """Texts from a file, one a line; empty lines are left out."""
    texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise ConfigError(f"{path} holds no texts; write one a line.")
    return texts


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: draw or encode samples."""
    parser = part_parser("samples", __doc__)
    parser.add_argument(
        "--model", default="tiny", help="the target: tiny, a folder, a file, or an owner/name of the hub"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder; continued if it holds shards")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", type=Path, help="text file, one prompt a line, for the target to draw")
    source.add_argument("--images", type=Path, help="folder with pictures and manifest.jsonl, as `generate` writes it")
    parser.add_argument("--count", type=int, default=1024, help="pictures; prompts are used again if there are fewer")
    parser.add_argument("--batch", type=int, default=64, help="pictures drawn together, and in one shard")
    parser.add_argument("--temperatures", type=float, nargs="*", default=(), help="shards take turns at them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(options.model)
    model = load_model(checkpoint, resolve_placement(options.device, options.dtype))
    if options.images:
        encode_samples(model, read_manifest(options.images), options.out, batch=options.batch)
        return
    texts = read_texts(options.prompts)
    wanted = [texts[index % len(texts)] for index in range(options.count)]
    draw_samples(model, wanted, options.out, batch=options.batch, seed=options.seed, temperatures=options.temperatures)


def read_manifest(folder: Path) -> list[tuple[str, Path]]:
    """Prompts and pictures of a manifest.jsonl."""
    path = folder / "manifest.jsonl"
    if not path.exists():
        raise ConfigError(f"{folder} has no manifest.jsonl; it holds one object with prompt and file a line.")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
            found.append((str(row["prompt"]), folder / str(row["file"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} of {path} is no object with prompt and file ({error}).") from None
    return found


if __name__ == "__main__":
    run(main)
