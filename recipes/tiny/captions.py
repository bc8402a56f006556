"""Writes captions of composed pictures, one per line, for `underdraw train samples --prompts`.

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
from underdraw.cli.app import main
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.family import LoadedModel
from underdraw.models.loading import load_model, resolve_placement
from underdraw.training.samples import shortened

app = typer.Typer(add_completion=False)


@app.command()
def captions(
    pack: Annotated[Path, typer.Option(help="Training pack.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Text file to write.")],
    count: Annotated[int, typer.Option(min=1, help="Number of captions.")] = 1024,
    model: options.Model = "tiny",
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Write captions of training pictures, shortened to what the model reads."""
    texts = compose_captions(
        load_model(open_checkpoint(model), resolve_placement("cpu", "auto")), Pack(pack), count, seed
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(texts) + "\n", encoding="utf-8")
    print(f"{out}: {len(texts)} captions")


def compose_captions(model: LoadedModel, pack: Pack, count: int, seed: int = 0) -> list[str]:
    """Captions of `count` composed training pictures."""
    composer = Composer(pack, "train", None, model.image_tokenizer.downsample)
    texts = composer.captions(composer.draw(count, np.random.default_rng(seed)))
    return [shortened(model, text) for text in texts]


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.captions"))
