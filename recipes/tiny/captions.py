"""Writes captions of composed images, one per line, for `underdraw train samples --prompts`.

python -m recipes.tiny.captions --pack pack192.bin --out captions.txt
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from recipes.tiny.compose import Composer
from recipes.tiny.data import Pack
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.training.samples import shorten

app = typer.Typer(add_completion=False)


@app.command()
def captions(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Text file to write.")],
    count: Annotated[int, typer.Option("--count", min=1, metavar="COUNT", help="Number of captions.")] = 1024,
    model: options.Model = "tiny",
    seed: cli.Seed = 0,
) -> None:
    """Write captions of training subjects, shortened to the prompt length of the model."""
    target = cli.load_target(model, "cpu", "auto")
    composer = Composer(Pack(pack), "train", None, target.image_tokenizer.downsample)
    texts = composer.captions(composer.draw(count, np.random.default_rng(seed)))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("".join(f"{shorten(target, text)}\n" for text in texts), encoding="utf-8")
    print(f"{out}: {len(texts)} captions")


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.captions"))
