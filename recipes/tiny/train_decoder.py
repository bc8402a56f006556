"""Trains the decoder: `python -m recipes.tiny.train_decoder --pack P --tokenizer T --out D`.

Images are composed and encoded on the fly. Captions are a prefix of fixed length, dropped now and then so that
classifier-free guidance has an unconditional model. A multi-token prediction loss shapes the features for drafters.
"""

from __future__ import annotations

import copy
import logging
import math
import queue
import shutil
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from recipes.tiny.compose import Composer, SceneConfig, Scenes
from recipes.tiny.data import Pack
from recipes.tiny.multi_token_loss import MultiTokenLoss, NextTokenLoss
from recipes.tiny.paint import Painter
from recipes.tiny.text_tokenizer import caption_texts, learn_vocabulary
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.images import contact_sheet
from underdraw.layout import Layout
from underdraw.models.family import ImageSize, LoadedModel, SamplingDefaults
from underdraw.models.loading import resolve_placement
from underdraw.models.tiny import tiny_arch
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Transformer
from underdraw.nn.weights import load_weights, save_weights
from underdraw.pipeline import Pipeline
from underdraw.prompts import load_prompts
from underdraw.protocols import Prompt
from underdraw.tokenizers.fsq import FSQTokenizer, load_tokenizer
from underdraw.tokenizers.text import TextTokenizer
from underdraw.training.trainer import Trainer, TrainingOptions, autocast, muon_and_adamw

log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False)
EVALUATION_BATCH = 64
# Guidance and top-k of the contact sheets; the first one is drawn at every evaluation.
SHEETS = ((3.0, 256), (2.0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderOptions(TrainingOptions):
    """Options of the decoder's training."""

    seconds: float = 1000.0
    batch: int = 256
    learning_rate: float = 1.5e-3
    warmup: int = 200
    decay: float = 0.25
    ema: float = 0.9985
    weight_decay: float = 0.05
    caption_dropout: float = 0.1
    future_tokens: int = 8  # codes after the next one that the multi-token loss predicts; 0: none
    future_weight: float = 0.3
    report_every: float = 20.0
    evaluate_every: float = 240.0
    evaluate_images: int = 256  # of each split


def initialise(net: Transformer, seed: int) -> None:
    """Normal weights; matrices that write into the residual stream are scaled down by depth."""
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 0.02 / math.sqrt(2 * net.arch.layers)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim < 2 or "_norm" in name:
                continue
            scale = residual_scale if name.endswith(("out.weight", "down.weight")) else 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def initialise_from(net: Transformer, folder: Path, codebook: Tensor, text_size: int) -> None:
    """Weights of another tiny model; each code starts as the nearest code in that model's codebook."""
    weights, _ = load_weights(folder / "decoder")
    other_codebook = load_tokenizer(folder / "tokenizer")[0].codebook
    nearest = torch.cdist(codebook, other_codebook).argmin(1)
    rows = weights["embedding.weight"]
    weights["embedding.weight"] = torch.cat([rows[:text_size], rows[text_size + nearest]])
    weights["head.weight"] = weights["head.weight"][nearest]
    net.load_state_dict(weights)


class BatchPrefetcher:
    """Draws scenes and encodes their captions in a background thread."""

    def __init__(self, composer: Composer, text: TextTokenizer, batch: int, dropout: float, seed: int) -> None:
        self._queue: queue.Queue[tuple[Scenes, Tensor]] = queue.Queue(16)
        self._arguments = (composer, text, batch, dropout, np.random.default_rng(seed))
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        composer, text, batch, dropout, rng = self._arguments
        while True:
            scenes = composer.draw(batch, rng)
            captions = composer.captions(scenes)
            is_dropped = rng.random(batch) < dropout
            captions = ["" if drop else caption for caption, drop in zip(captions, is_dropped, strict=True)]
            self._queue.put((scenes, torch.tensor(text.encode_batch(captions))))

    def get(self) -> tuple[Scenes, Tensor]:
        return self._queue.get()


class DecoderTrainer(Trainer):
    """Trains a text-to-image decoder on composed images."""

    options: DecoderOptions

    def __init__(
        self,
        net: Transformer,
        layout: Layout,
        text: TextTokenizer,
        tokenizer: FSQTokenizer,
        painter: Painter,
        composers: tuple[Composer, Composer],
        options: DecoderOptions,
        prompts: Sequence[str] = (),
    ) -> None:
        """`composers` are those of training and held-out subjects, `prompts` those of the contact sheets."""
        self.layout, self.text, self.painter, self.prompts = layout, text, painter, prompts
        self.composer, self.held_out_composer = composers
        self.device = painter.device
        self.net = net.to(self.device).train()
        self.ema_net = copy.deepcopy(net).eval().requires_grad_(False)
        self.tokenizer = tokenizer.to(self.device).eval().requires_grad_(False)
        next_token = NextTokenLoss(self.net, layout, text.max_length)
        self.multi_token = MultiTokenLoss(next_token, options.future_tokens).to(self.device)
        matrices = [p for name, p in self.net.blocks.named_parameters() if p.ndim == 2 and "_norm" not in name]
        optimizers = muon_and_adamw(matrices, self.multi_token.parameters(), options.weight_decay)
        parameters, ema = dict(self.net.named_parameters()), dict(self.ema_net.named_parameters())
        super().__init__(options, parameters, ema, optimizers)
        is_cuda = self.device.type == "cuda"
        self._loss = torch.compile(self.multi_token) if is_cuda else self.multi_token
        self._encode = torch.compile(self.tokenizer.encode) if is_cuda else self.tokenizer.encode
        self._prefetcher: BatchPrefetcher | None = None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "projections": self.multi_token.projections.detach()}

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.multi_token.projections.data.copy_(state["projections"])

    def compute_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        if self._prefetcher is None:  # a resumed run draws new images
            self._prefetcher = BatchPrefetcher(
                self.composer, self.text, options.batch, options.caption_dropout, options.seed + self.steps
            )
        scenes, text = self._prefetcher.get()
        # bfloat16 would round 4 % of the FSQ codes to other codes than float32 does; float16 does not.
        with torch.no_grad(), autocast(self.device, torch.float16):
            codes = self._encode(self.painter.paint(scenes)).flatten(1)
        # Two of the later codes per step: predicting all of them would double the time of a step.
        order = np.random.default_rng((options.seed, self.steps)).permutation(options.future_tokens)
        offsets = torch.from_numpy(order[:2] + 1).to(self.device)
        with autocast(self.device):
            loss, future = self._loss(text.to(self.device, non_blocking=True), codes, offsets)
        return loss + options.future_weight * future, {"loss": loss}

    @torch.no_grad()
    def measure(self, composer: Composer, count: int, candidates: int = 8) -> dict[str, float]:
        """Loss with and without captions, and how often the true caption is the best of `candidates`."""
        scenes = composer.draw(count, np.random.default_rng(1))
        captions = composer.captions(scenes)
        next_token = NextTokenLoss(self.ema_net, self.layout, self.text.max_length).to(self.device)
        starts = range(0, count, EVALUATION_BATCH)
        parts = [self.painter.paint(scenes[start : start + EVALUATION_BATCH]) for start in starts]
        codes = torch.cat([self.tokenizer.encode(pixels).flatten(1) for pixels in parts])

        def losses(texts: Sequence[str]) -> Tensor:
            ids = torch.tensor(self.text.encode_batch(texts), device=self.device)
            batches = zip(ids.split(EVALUATION_BATCH), codes.split(EVALUATION_BATCH), strict=True)
            return torch.cat([next_token(*batch).mean(1) for batch in batches]).float()

        with autocast(self.device):
            true, empty = losses(captions), losses([""] * count)
            others = [losses(captions[shift:] + captions[:shift]) for shift in range(1, candidates)]
        best = (true < torch.stack(others)).all(0).float().mean()
        return {"loss": true.mean().item(), "unconditional": empty.mean().item(), "caption": best.item()}

    def model(self) -> LoadedModel:
        """The decoder with EMA weights and its tokenizers, for pipelines."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        side = self.layout.height * self.tokenizer.downsample, self.layout.width * self.tokenizer.downsample

        def make_prompt(words: str, negative: str | None, _: ImageSize) -> Prompt:
            condition, unconditional = self.text.encode_batch([words, negative or ""])
            return Prompt(tuple(condition), tuple(unconditional))

        return LoadedModel(
            family="tiny",
            name="the decoder in training",
            target=DecoderTarget(copy.deepcopy(self.ema_net).to(dtype), image_offset=self.text.max_length),
            image_tokenizer=self.tokenizer,
            defaults=SamplingDefaults(guidance=2.0),
            sizes=(ImageSize(*side),),
            make_layout=lambda _: self.layout,
            make_prompt=make_prompt,
        )

    def evaluate(self, out: Path, sheets: Sequence[tuple[float, int]] = SHEETS[:1]) -> dict[str, str]:
        """Write the EMA weights, measure them, and draw a contact sheet for each guidance and top-k."""
        metadata = decoder_metadata(self.net, self.layout, self.text, self.progress())
        save_weights(out, self.ema_net.state_dict(), metadata, "int8")
        splits = self.composer, self.held_out_composer
        training, held_out = (self.measure(composer, self.options.evaluate_images) for composer in splits)
        texts = [", ".join(f"{name} {value:.3f}" for name, value in values.items()) for values in (training, held_out)]
        log.info("%5.0f s  training subjects %s; held-out subjects %s", self.seconds, *texts)
        pipe = Pipeline(self.model(), drafter="forced", tree="none", compile="off")
        pipe.set_progress_bar_config(disable=True)
        for guidance, top_k in sheets if self.prompts else ():
            images = pipe(list(self.prompts), seed=0, guidance_scale=guidance, top_k=top_k).images
            contact_sheet(images, out / f"sheet-g{guidance:g}-k{top_k}.png", captions=self.prompts)
        return {"held-out": f"{held_out['loss']:.3f}"}


def decoder_metadata(net: Transformer, layout: Layout, text: TextTokenizer, progress: dict[str, Any]) -> dict[str, Any]:
    """The metadata of the decoder's weights, from which models/tiny.py builds it."""
    sizes = {"dim": net.arch.dim, "layers": net.arch.layers, "text": text.size, "codes": len(layout.codes)}
    return {"kind": "underdraw-tiny", "arch": sizes, "grid": [layout.height, layout.width], "progress": progress}


def load_vocabulary(out: Path, init: Path | None, pack: Pack) -> TextTokenizer:
    """The vocabulary in `out`; if there is none yet, that of the model in `init`, or a new one of the captions."""
    path = out / "text.json"
    if not path.exists():
        out.mkdir(parents=True, exist_ok=True)
        if init is not None:
            shutil.copyfile(init / "decoder" / "text.json", path)
        else:
            learn_vocabulary(caption_texts(pack)).save(path)
    return TextTokenizer.load(path)


@app.command()
def train_decoder(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    tokenizer: Annotated[Path, typer.Option(metavar="FOLDER", help="The trained image tokenizer.")],
    out: cli.Out,
    init: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Start from this tiny model; its codes may differ.")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(metavar="FILE", help="Prompts of the contact sheets, one per line.")
    ] = None,
    seconds: cli.Seconds = 1000.0,
    pause: cli.Pause = math.inf,
    batch: cli.Batch = 256,
    learning_rate: cli.LearningRate = 1.5e-3,
    decay: Annotated[float, typer.Option(help="Last share of the budget, in which the learning rate falls.")] = 0.25,
    report_every: cli.ReportEvery = 20.0,
    evaluate_every: cli.EvaluateEvery = 240.0,
    device: options.Device = "auto",
    seed: cli.Seed = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A small model, to try things.")] = False,
    every_nth: Annotated[int, typer.Option(min=1, help="Use only every N-th image of the pack.")] = 1,
) -> None:
    """Train the decoder. The same command continues an interrupted run."""
    settings = DecoderOptions(
        seconds=seconds, pause=pause, batch=batch, learning_rate=learning_rate, decay=decay,
        report_every=report_every, evaluate_every=evaluate_every, evaluate_images=4 if smoke else 256, seed=seed,
    )  # fmt: skip
    cli.start_logging()
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    images = Pack(pack).every_nth(every_nth)
    image_tokenizer, _ = load_tokenizer(tokenizer)
    codes, cell = image_tokenizer.arch.codes, image_tokenizer.downsample
    text = load_vocabulary(out, init, images)
    side = images.px // cell
    layout = Layout(side, side, range(text.size, text.size + codes))
    net = Transformer(tiny_arch(text.size, codes, **({"dim": 128, "layers": 2} if smoke else {})))
    initialise(net, seed)
    if init is not None:
        initialise_from(net, init, image_tokenizer.codebook, text.size)
    count = sum(p.numel() for p in net.parameters()) / 1e6
    log.info("%.1f M parameters, %d text tokens, %d x %d codes", count, text.size, side, side)
    painter = Painter(images, resolve_placement(device, "float32").device, cell=cell)
    composer, held_out = (Composer(images, split, SceneConfig(), cell) for split in ("train", "held-out"))
    if prompts is not None:
        texts = load_prompts(prompts)
    else:
        texts = held_out.captions(held_out.draw(16, np.random.default_rng(2)))
    trainer = DecoderTrainer(
        net, layout, text, image_tokenizer, painter, (composer, held_out), settings, texts[: 4 if smoke else 64]
    )
    trainer.resume(out)
    trainer.train(out)
    shown = trainer.evaluate(out, SHEETS)
    print(f"{out}: step {trainer.steps}, {trainer.seconds:.0f} s, loss on held-out subjects {shown['held-out']}")


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.train_decoder"))
