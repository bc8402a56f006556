"""Averages two decoders, one trained on from the other: `python -m recipes.tiny.average BEFORE AFTER --out D`.

Weights on the way between two stages of training are often better than either: the mean keeps what the earlier stage
drew well and the later one has not seen again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from underdraw.cli.app import main
from underdraw.errors import ConfigError
from underdraw.io import atomic_write_text, read_text
from underdraw.nn.weights import load_weights, save_weights

TEXT_FILE = "text.json"  # the text vocabulary, in the folder of the decoder
app = typer.Typer(add_completion=False)


@app.command()
def average(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="Folder of the decoder before the stage.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Folder of the decoder after it.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder of the averaged decoder.")],
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the weights after the stage.")] = 0.5,
) -> None:
    """Write the weighted mean of two decoders of one architecture."""
    (first, about), (second, about_after) = load_weights(before), load_weights(after)
    texts = [read_text(folder / TEXT_FILE, "a text vocabulary") for folder in (before, after)]
    if {**about, "progress": None} != {**about_after, "progress": None} or _shapes(first) != _shapes(second):
        raise ConfigError(f"{before} and {after} have other shapes or settings; average two stages of one training.")
    if texts[0] != texts[1]:
        raise ConfigError(f"{before} and {after} read captions differently; average two stages of one training.")
    mean = {name: first[name].float().lerp(second[name].float(), share) for name in first}
    progress: dict[str, Any] = {**about_after.get("progress", {}), "averaged": share}
    progress.setdefault("before", about.get("progress", {}))
    save_weights(out, mean, {**about_after, "progress": progress}, "int8")
    atomic_write_text(out / TEXT_FILE, texts[0])
    print(f"{out}: {1 - share:g} of {before} and {share:g} of {after}")


def _shapes(weights: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.average"))
