"""Trains the tiny family's decoder: `python -m recipes.tiny.train_decoder --pack P --tokenizer T --out D`.

Pictures are composed and encoded on the fly; captions stand before the codes as a prefix of fixed length and are
dropped now and then, so that guidance has an unconditional model to push away from. Features also learn to foretell
the codes after the next one, which adds nothing to the model that is kept and gives a drafter something to read.
Matrices inside the blocks are trained with Muon, the rest with AdamW. The rate is constant until the last part of the
budget and then falls. The same command goes on from the folder that it wrote: exactly, or, where only the weights are
left, with fresh moments behind a short warm-up.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import math
import queue
import shutil
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from recipes.tiny.compose import Composer, Painter, Recipe, Scenes
from recipes.tiny.data import Pack
from recipes.tiny.multi_token_loss import Foresight, Scorer
from recipes.tiny.text import caption_texts, learn
from underdraw.drafters.forced import Forced
from underdraw.engine.decode import decode_tokens
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.layout import Layout
from underdraw.models.tiny import tiny_arch
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Transformer
from underdraw.nn.weights import load_weights, save_weights
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Prompt
from underdraw.sampling import Sampler
from underdraw.tokenizers.fsq import FSQTokenizer, load_tokenizer
from underdraw.tokenizers.text import TextTokenizer
from underdraw.training.checkpoint import load_state
from underdraw.training.command import run, trainer_parser
from underdraw.training.optim import follow, optimizers, set_rate, step_all
from underdraw.training.trainer import spend
from underdraw.verifiers.exact import Exact

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelTraining:
    """Options of one run. `seconds` counts training, not loading, compiling or drawing samples.

    A run that ends at `pause` seconds, or is interrupted, goes on when it is started again.
    """

    seconds: float = 1000.0
    pause: float = math.inf
    batch: int = 256
    learning_rate: float = 1.5e-3
    warmup: int = 200
    decay: float = 0.25  # last share of the budget, in which the rate falls
    ema: float = 0.9985
    weight_decay: float = 0.05
    caption_dropout: float = 0.1
    foresight: int = 8  # codes after the next one that features learn to foretell; 0: none
    foresight_weight: float = 0.3
    report_every: float = 20.0
    save_every: float = 240.0
    evaluated: int = 256  # pictures of each split
    seed: int = 0


def initialise(net: Transformer, seed: int) -> None:
    """Normal weights, with the matrices that write into the residual stream scaled down by depth."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if parameter.ndim < 2 or "_norm" in name:
                continue
            scale = 0.02 / math.sqrt(2 * net.arch.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def inherit(net: Transformer, folder: Path, codebook: Tensor, text: int) -> None:
    """Weights of a tiny model; a code of another codebook starts as the nearest one of that model's own."""
    weights, _ = load_weights(folder / "decoder")
    known = load_tokenizer(folder / "tokenizer")[0].codebook
    nearest = torch.cdist(codebook, known).argmin(1)
    rows = weights["embedding.weight"]
    weights["embedding.weight"] = torch.cat([rows[:text], rows[text + nearest]])
    weights["head.weight"] = weights["head.weight"][nearest]
    net.load_state_dict(weights)


class Feeder:
    """Draws scenes and encodes their captions in a thread of its own."""

    def __init__(self, composer: Composer, text: TextTokenizer, batch: int, dropout: float, seed: int) -> None:
        self._queue: queue.Queue[tuple[Scenes, Tensor]] = queue.Queue(16)
        self._arguments = (composer, text, batch, dropout, np.random.default_rng(seed))
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        composer, text, batch, dropout, rng = self._arguments
        while True:
            scenes = composer.draw(batch, rng)
            captions = composer.captions(scenes)
            captions = [
                "" if drop else caption for caption, drop in zip(captions, rng.random(batch) < dropout, strict=True)
            ]
            self._queue.put((scenes, torch.tensor(text.encode_batch(captions))))

    def get(self) -> tuple[Scenes, Tensor]:
        return self._queue.get()


class Trainer:
    """One run: the decoder, its average, two optimisers and the loop."""

    def __init__(
        self, net: Transformer, layout: Layout, text: TextTokenizer, tokenizer: FSQTokenizer, painter: Painter,
        composer: Composer, options: ModelTraining,
    ) -> None:  # fmt: skip
        self.options, self.layout, self.text, self.painter, self.composer = options, layout, text, painter, composer
        self.device = painter.device
        self.net = net.to(self.device).train()
        self.average = copy.deepcopy(net).eval().requires_grad_(False)
        self.tokenizer = tokenizer.to(self.device).eval().requires_grad_(False)
        cuda = self.device.type == "cuda"
        self.foresight = Foresight(Scorer(self.net, layout, text.max_length), options.foresight).to(self.device)
        self._loss = torch.compile(self.foresight) if cuda else self.foresight
        self._encode = torch.compile(self.tokenizer.encode) if cuda else self.tokenizer.encode
        matrices = [p for n, p in self.net.blocks.named_parameters() if p.ndim == 2 and "_norm" not in n]
        inside = {id(p) for p in matrices}
        others = [p for p in self.foresight.parameters() if id(p) not in inside]
        self._optimizers = optimizers(matrices, others, options.weight_decay)
        self._feeder: Feeder | None = None
        self.steps, self.warm, self.seconds = 0, 0, 0.0  # all steps; steps with these moments; training time

    def state(self) -> dict[str, Any]:
        """Everything that the next run needs to go on as if nothing had happened."""
        return {
            "net": self.net.state_dict(), "average": self.average.state_dict(), "ahead": self.foresight.ahead.detach(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "steps": self.steps, "warm": self.warm, "seconds": self.seconds,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.average.load_state_dict(state["average"])
        self.foresight.ahead.data.copy_(state["ahead"])
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.steps, self.warm, self.seconds = state["steps"], state["warm"], state["seconds"]

    def batch(self) -> tuple[Scenes, Tensor]:
        """Scenes and the ids of their captions; never those that an earlier run has seen."""
        if self._feeder is None:
            options = self.options
            self._feeder = Feeder(
                self.composer, self.text, options.batch, options.caption_dropout, options.seed + self.steps
            )
        return self._feeder.get()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def encoding(self) -> torch.autocast:
        """Codes are told by rounding: bfloat16 would give 4 % of the cells another code than float32 does."""
        return torch.autocast(self.device.type, torch.float16, enabled=self.device.type == "cuda")

    def rate(self, share: float) -> float:
        """Learning rate when `share` of the budget is spent."""
        fall = min(1.0, (1 - share) / self.options.decay)
        return self.options.learning_rate * max(0.01, fall) * min(1.0, (self.warm + 1) / self.options.warmup)

    def step(self, share: float) -> Tensor:
        """One batch; the mean loss, still on the device."""
        set_rate(self._optimizers, self.rate(share))
        scenes, text = self.batch()
        with torch.no_grad(), self.encoding():
            codes = self._encode(self.painter.paint(scenes)).flatten(1)
        order = np.random.default_rng((self.options.seed, self.steps)).permutation(self.options.foresight)
        further = torch.from_numpy(order[:2] + 1)  # two of them a step, for the sake of time
        with self.autocast():
            loss, ahead = self._loss(text.to(self.device, non_blocking=True), codes, further.to(self.device))
        (loss + self.options.foresight_weight * ahead).backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        step_all(self._optimizers)
        self.steps += 1
        self.warm += 1
        follow(self.average.parameters(), self.net.parameters(), self.options.ema, self.steps)
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, composer: Composer, count: int, rivals: int = 8) -> dict[str, float]:
        """Loss with and without captions, and how often the true caption beats `rivals` - 1 others."""
        scenes = composer.draw(count, np.random.default_rng(1))
        captions = composer.captions(scenes)
        scorer = Scorer(self.average, self.layout, self.text.max_length).to(self.device)
        codes = []
        for start in range(0, count, 64):
            part = Scenes(*(getattr(scenes, f.name)[start : start + 64] for f in dataclasses.fields(Scenes)))
            codes.append(self.tokenizer.encode(self.painter.paint(part)).flatten(1))
        everything = torch.cat(codes)
        with self.autocast():

            def losses(texts: Sequence[str]) -> Tensor:
                ids = torch.tensor(self.text.encode_batch(texts), device=self.device)
                parts = [scorer(ids[i : i + 64], everything[i : i + 64]).mean(1) for i in range(0, count, 64)]
                return torch.cat(parts).float()

            true, empty = losses(captions), losses([""] * count)
            others = [losses(captions[shift:] + captions[:shift]) for shift in range(1, rivals)]
        won = (true < torch.stack(others)).all(0).float().mean()
        return {"loss": true.mean().item(), "unconditional": empty.mean().item(), "caption": won.item()}

    @torch.no_grad()
    def draw(self, prompts: Sequence[str], path: Path, *, guidance: float, top_k: int) -> None:
        """A contact sheet of the averaged model's pictures, decoded by the engine itself."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        target = DecoderTarget(copy.deepcopy(self.average).to(dtype), image_offset=self.text.max_length)
        empty = tuple(self.text.encode_batch([""])[0])
        rows = [Prompt(tuple(ids), empty) for ids in self.text.encode_batch(prompts)]
        sampler = Sampler(self.layout, range(len(rows)), top_k=top_k, device=self.device)
        tokens = decode_tokens(target, Forced(), NoTree(), Exact(), rows, sampler, guidance=guidance)
        codes = self.layout.grid(tokens).to(self.device)
        with self.autocast():
            pixels = torch.cat([self.tokenizer.decode(part).float() for part in codes.split(16)])
        contact_sheet(pixels_to_images(pixels), path, captions=prompts)


def about(net: Transformer, layout: Layout, text: TextTokenizer, progress: dict[str, Any]) -> dict[str, Any]:
    """What the weights' file says of itself."""
    size = {"dim": net.arch.dim, "layers": net.arch.layers, "text": text.size, "codes": len(layout.codes)}
    return {"kind": "underdraw-tiny", "arch": size, "grid": [layout.height, layout.width], "progress": progress}


def train(trainer: Trainer, out: Path, held_out: Composer, prompts: Sequence[str]) -> None:
    """Run the budget out, saving, measuring and drawing now and then."""
    options = trainer.options
    if trainer.seconds >= min(options.seconds, options.pause):
        return
    spend(
        trainer, options, out, lambda share: {"loss": trainer.step(share)},
        lambda: show(trainer, out, held_out, prompts, [(3.0, 256)]), every=options.save_every, batch=options.batch,
    )  # fmt: skip
    show(trainer, out, held_out, prompts, [(3.0, 256), (2.0, 0)])


def show(
    trainer: Trainer, out: Path, held_out: Composer, prompts: Sequence[str], settings: Sequence[tuple[float, int]]
) -> dict[str, str]:
    """Write the averaged weights, measure them and draw a sheet for each pair of guidance and top-k."""
    progress = {"steps": trainer.steps, "seconds": round(trainer.seconds)}
    state = trainer.average.state_dict()
    save_weights(out, state, about(trainer.net, trainer.layout, trainer.text, progress), "int8")
    seen, unseen = (trainer.evaluate(part, trainer.options.evaluated) for part in (trainer.composer, held_out))
    log.info("%5.0f s  training subjects %s  held-out subjects %s", trainer.seconds, _short(seen), _short(unseen))
    for guidance, top_k in settings:
        trainer.draw(prompts, out / f"sheet-g{guidance:g}-k{top_k}.png", guidance=guidance, top_k=top_k)
    return {"held-out": f"{unseen['loss']:.3f}"}


def _short(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in values.items())


def _parser() -> argparse.ArgumentParser:
    defaults = ModelTraining()
    parser = trainer_parser("model", __doc__, defaults)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="folder of the trained image tokenizer",
    )
    parser.add_argument("--init", type=Path, help="start from this tiny model; its tokenizer may have other codes")
    parser.add_argument("--prompts", type=Path, help="text file, one prompt a line, for the contact sheets")
    parser.add_argument("--save-every", type=float, default=defaults.save_every, help="seconds")
    parser.add_argument("--decay", type=float, default=defaults.decay, help="last share, in which the rate falls")
    parser.add_argument("--smoke", action="store_true", help="a small model on a small part of the pack")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the model's training."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    pack = Pack(options.pack).thinned(25 if options.smoke else 1)
    tokenizer, _ = load_tokenizer(options.tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    vocabulary = options.out / "text.json"
    if not vocabulary.exists() and options.init:
        shutil.copyfile(options.init / "decoder" / "text.json", vocabulary)
    elif not vocabulary.exists():
        learn(caption_texts(pack)).save(vocabulary)
    text = TextTokenizer.load(vocabulary)
    side = pack.px // tokenizer.downsample
    layout = Layout(side, side, range(text.size, text.size + tokenizer.arch.codes))
    arch = tiny_arch(text.size, tokenizer.arch.codes, **({"dim": 128, "layers": 2} if options.smoke else {}))
    net = Transformer(arch)
    initialise(net, options.seed)
    known, state = {}, load_state(options.out)
    if state is None and (options.out / "model-0.safetensors").exists():
        weights, about_them = load_weights(options.out)
        net.load_state_dict(weights)
        known = about_them["progress"]
    elif state is None and options.init:
        inherit(net, options.init, tokenizer.codebook, text.size)
    log.info(
        "%.1f M parameters, %d text tokens, %d x %d codes",
        sum(p.numel() for p in net.parameters()) / 1e6,
        text.size,
        side,
        side,
    )
    painter = Painter(pack, options.device, cell=tokenizer.downsample)
    settings = ModelTraining(
        seconds=options.seconds, pause=options.pause, decay=options.decay, batch=options.batch,
        learning_rate=options.learning_rate, save_every=options.save_every, report_every=options.report_every,
        seed=options.seed,
        evaluated=4 if options.smoke else ModelTraining().evaluated,
    )  # fmt: skip
    composer, held_out = (Composer(pack, split, Recipe(), tokenizer.downsample) for split in ("train", "held-out"))
    prompts = (
        options.prompts.read_text().splitlines()
        if options.prompts
        else held_out.captions(held_out.draw(16, np.random.default_rng(2)))
    )
    trainer = Trainer(net, layout, text, tokenizer, painter, composer, settings)
    if state is not None:
        trainer.restore(state)
    elif known:
        trainer.steps, trainer.seconds = known["steps"], known["seconds"]
    if trainer.steps:
        log.info("continuing %s at step %d, %.0f s", options.out, trainer.steps, trainer.seconds)
    train(trainer, options.out, held_out, prompts[: 4 if options.smoke else 64])


if __name__ == "__main__":
    run(main)
