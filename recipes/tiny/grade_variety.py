"""Measures how much images of one prompt differ between seeds, and how uncertain the model is, by kind of image.

python -m recipes.tiny.grade_variety --out variety.json
python -m recipes.tiny.grade_variety --temperature 0.7 --top-p 0.9 --out defaults.json --sheet seeds.jpg
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from torch import Tensor

from recipes.tiny.samples import Batch, GradingOptions, generate_codes
from underdraw.bench.environment import describe_machine
from underdraw.bench.sections import portable_settings
from underdraw.cli import options
from underdraw.cli.app import main
from underdraw.errors import ConfigError
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.io import read_json
from underdraw.pipeline import Pipeline

app = typer.Typer(add_completion=False)
PROMPTS_ON_SHEET = 2  # of each kind


def equal_codes(codes: Tensor) -> float:
    """The share of cells with equal codes in two images (N, H, W) of one prompt, averaged over all pairs."""
    return float(np.mean([(codes[i] == codes[j]).float().mean().item() for i, j in combinations(range(len(codes)), 2)]))


def load_kinds(path: Path) -> dict[str, list[str]]:
    """Prompts by kind of image, from a JSON file."""
    content = read_json(path, "prompts by kind")
    if not isinstance(content, dict) or not all(isinstance(texts, list) and texts for texts in content.values()):
        raise ConfigError(f"{path} must hold a JSON object with a list of prompts for every kind of image.")
    return content


def measure_kinds(
    pipe: Pipeline, kinds: Mapping[str, Sequence[str]], *, seeds: int, batch: int, **sampling: Any
) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """By kind: equal codes between seeds and mean entropy; and the codes (prompts, seeds, H, W)."""
    entries, drawn = [], {}
    for kind, texts in kinds.items():
        prompts = [text for text in texts for _ in range(seeds)]
        numbers = [seed for _ in texts for seed in range(seeds)]
        result = generate_codes(pipe, prompts, numbers, batch, **sampling, token_stats="keep")
        codes = result.codes.unflatten(0, (len(texts), seeds))
        drawn[kind] = codes
        shares = [equal_codes(images) for images in codes]
        entries.append({
            "name": kind, "prompts": len(texts), "equal_codes": round(float(np.mean(shares)), 4),
            "equal_codes_by_prompt": [round(share, 4) for share in shares],
            "entropy": round(result.entropy, 4), "top1": round(result.top1, 4),
        })  # fmt: skip
    return entries, drawn


def seeds_sheet(pipe: Pipeline, kinds: Mapping[str, Sequence[str]], drawn: Mapping[str, Tensor], path: Path) -> None:
    """A contact sheet with all seeds of the first prompts of each kind in a row."""
    codes, captions = [], []
    for kind, texts in kinds.items():
        for text, images in list(zip(texts, drawn[kind], strict=True))[:PROMPTS_ON_SHEET]:
            codes.append(images)
            captions += [text] * len(images)
    tokenizer = pipe.model.image_tokenizer
    images = [
        image for grid in codes for image in pixels_to_images(tokenizer.decode(grid.to(pipe.device)).float().cpu())
    ]
    contact_sheet(images, path, captions=captions, per_row=len(codes[0]) * 2, width=160)


@dataclass(frozen=True, kw_only=True)
class VarietyOptions(GradingOptions):
    batch: Batch = 4
    sheet: Annotated[
        Path | None, typer.Option(metavar="IMAGE", help="Also write a contact sheet: seeds of one prompt in a row.")
    ] = None


@app.command()
@options.grouped
def variety(
    grading: VarietyOptions,
    prompts: Annotated[Path, typer.Option(metavar="JSON", help="Prompts by kind of image.")] = Path(
        "benchmarks/prompts_kinds.json"
    ),
    seeds: Annotated[int, typer.Option(min=2, metavar="COUNT", help="Images of each prompt.")] = 4,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Share of the most likely codes; 1 is all.")] = 1.0,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Prompts of each kind.")] = 8,
) -> None:
    """Measure equal codes between seeds, and entropy, by kind of image."""
    grading.check()
    kinds = {kind: texts[:limit] for kind, texts in load_kinds(prompts).items()}
    pipe = grading.load()
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p}
    entries, drawn = measure_kinds(pipe, kinds, seeds=seeds, batch=grading.batch, **sampling)
    request = pipe.request(next(iter(kinds.values()))[0], seed=0, **sampling)
    record = {
        "kind": "variety", "model": pipe.model.name, "settings": portable_settings(pipe.settings(request)),
        "seeds": seeds, "temperature": temperature, "kinds": entries, "machine": describe_machine(pipe.device),
    }  # fmt: skip
    if grading.sheet is not None:
        seeds_sheet(pipe, kinds, drawn, grading.sheet)
    grading.save(record)


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.grade_variety"))
