"""Trains a drafter on samples and, every other batch, on images composed from the training pack.

    python -m recipes.tiny.train_drafter --pack pack192.bin --samples samples --out tiny/drafter-eagle

`underdraw train drafter` trains on samples alone and works for every model.
"""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from recipes.tiny.compose import Composer
from recipes.tiny.data import Pack
from recipes.tiny.paint import Painter
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.models.family import LoadedModel
from underdraw.training.batches import BatchSource, DrafterBatch, FeatureExtractor
from underdraw.training.drafter import DrafterOptions, train_drafter
from underdraw.training.samples import Samples, codes_to_tokens, encode_prompts, shorten

app = typer.Typer(add_completion=False)
MODULE = "recipes.tiny.train_drafter"


@app.command()
def train(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    samples: cli.SamplesFolder,
    out: cli.Out,
    kind: cli.Kind = "eagle",
    layers: cli.Layers = 1,
    ffn: cli.Ffn = 0,
    kv_heads: cli.KvHeads = 0,
    depth: cli.Depth = 7,
    held_out: cli.HeldOut = 64,
    seconds: cli.Seconds = 300.0,
    pause: cli.Pause = math.inf,
    batch: cli.Batch = 16,
    learning_rate: cli.LearningRate = 1e-3,
    report_every: cli.ReportEvery = 15.0,
    evaluate_every: cli.EvaluateEvery = 60.0,
    evaluate_images: cli.EvaluateImages = 16,
    seed: cli.Seed = 0,
    model: options.Model = "tiny",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
) -> None:
    """Train a drafter of the tiny model. The same command continues an interrupted run."""
    settings = DrafterOptions(
        kind=kind, layers=layers, ffn=ffn, kv_heads=kv_heads, depth=depth, seconds=seconds, pause=pause, batch=batch,
        learning_rate=learning_rate, report_every=report_every, evaluate_every=evaluate_every,
        evaluate_images=evaluate_images, seed=seed,
    )  # fmt: skip
    cli.start_logging()
    data, images = Samples.load(samples), Pack(pack)
    target = cli.load_target(model, device, dtype)
    quality = train_drafter(
        target,
        data,
        out,
        settings,
        held_out=held_out,
        more_batches=composed_batches(target, images),
        compiled=target.placement.device.type == "cuda",
        command=f"python -m {MODULE} {shlex.join(sys.argv[1:])}",
    )
    print(f"{out}: loss {quality.loss:.4f}, top-1 acceptance {quality.sampled[0][0]:.2f}; details in README.md")


def composed_batches(model: LoadedModel, pack: Pack) -> BatchSource:
    """Batches of freshly composed training images with their captions."""
    extractor = FeatureExtractor.for_model(model)
    cell = model.image_tokenizer.downsample
    composer = Composer(pack, "train", None, cell)
    painter = Painter(pack, model.placement.device, cell=cell)

    def draw(count: int, generator: torch.Generator) -> DrafterBatch:
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        scenes = composer.draw(count, rng)
        with torch.no_grad():
            codes = model.image_tokenizer.encode(painter.paint(scenes))
        texts = [shorten(model, text) for text in composer.captions(scenes)]
        return extractor.batch(encode_prompts(model, texts), codes_to_tokens(extractor.layout, codes))

    return draw


if __name__ == "__main__":
    sys.exit(main(command=app, name=f"python -m {MODULE}"))
