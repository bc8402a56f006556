"""Measures on the pixels whether subjects have the colour that their prompts name.

python -m recipes.tiny.grade_colours --out colours.json --sheet colours.jpg
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from torch import Tensor

from recipes.tiny.palette import SPRITE_COLOURS
from recipes.tiny.recolour import colour_shares
from recipes.tiny.samples import GradingOptions, decode_codes, generate_codes
from underdraw.bench.environment import describe_machine
from underdraw.bench.sections import portable_settings
from underdraw.cli import options
from underdraw.cli.app import main
from underdraw.errors import ConfigError
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.prompts import load_prompts

app = typer.Typer(add_completion=False)
_COLOURED = re.compile(rf"an? (?:small |large )?({'|'.join(SPRITE_COLOURS)}) ")


def requested_colour(prompt: str) -> str:
    """The colour of the subject in a prompt such as 'a purple fox, 3D render, on a white background'."""
    match = _COLOURED.match(prompt)
    if match is None:
        raise ConfigError(f"{prompt!r} does not begin with a coloured subject; use one of {', '.join(SPRITE_COLOURS)}.")
    return match[1]


def grade_colour(prompt: str, image: Tensor) -> dict[str, Any]:
    """Whether the requested colour is the most frequent one of the subject in an image (3, H, W) in [0, 1]."""
    shares = colour_shares(image)
    requested = requested_colour(prompt)
    seen = max(shares, key=lambda name: shares[name])
    return {
        "prompt": prompt, "requested": requested, "seen": seen, "share": round(shares[requested], 4),
        "obeyed": seen == requested,
    }  # fmt: skip


def grade_colours(prompts: Sequence[str], images: Tensor) -> list[dict[str, Any]]:
    """`grade_colour` of many images (N, 3, H, W)."""
    return [grade_colour(prompt, image) for prompt, image in zip(prompts, images, strict=True)]


@app.command()
@options.grouped
def colours(
    grading: GradingOptions,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="Prompts that begin with a coloured subject, one per line.")
    ] = "benchmarks/prompts_colours.txt",
    seed: options.Seed = 0,
) -> None:
    """Measure how often the colour of the subject is the requested one, with the model's default settings."""
    grading.check()
    texts = load_prompts(prompts)
    for text in texts:
        requested_colour(text)
    pipe, first = grading.load(), seed or 0
    seeds = range(first, first + len(texts))
    codes = generate_codes(pipe, texts, seeds, grading.batch, silent=grading.silent).codes
    images = decode_codes(pipe, codes)
    graded = grade_colours(texts, images)
    if grading.sheet is not None:
        captions = [f"{entry['prompt']} [{entry['seen']}]" for entry in graded]
        contact_sheet(pixels_to_images(images * 2 - 1), grading.sheet, captions=captions, width=160)
    record = {
        "kind": "colours", "model": pipe.model.name,
        "settings": portable_settings(pipe.settings(pipe.request(texts[0], seed=first))), "seed": first,
        "obeyed": sum(entry["obeyed"] for entry in graded), "prompts": graded, "machine": describe_machine(pipe.device),
    }  # fmt: skip
    grading.save(record)


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.grade_colours"))
