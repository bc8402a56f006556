"""Trains the tiny family's image tokenizer: `python -m recipes.tiny.train_tokenizer --pack P --lpips L --out DIR`.

L1 + L2 + LPIPS on composed pictures, and a loss that makes codes repeat where the picture does. AdamW with a cosine
over a budget of seconds, an exponential moving average of the weights, which is what is written. The same command goes
on from the folder that it wrote: exactly, or, where only the weights are left, with fresh moments behind a warm-up.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from recipes.tiny.compose import COLOURS, Composer, Painter, Recipe, Scenes
from recipes.tiny.data import Pack
from recipes.tiny.lpips import LPIPS
from underdraw.images import contact_sheet, pixels_to_images
from underdraw.tokenizers.fsq import FSQArch, FSQTokenizer, load_tokenizer, save_tokenizer
from underdraw.training.checkpoint import load_state
from underdraw.training.command import run, trainer_parser
from underdraw.training.optim import follow
from underdraw.training.trainer import spend

log = logging.getLogger(__name__)

SMOKE_ARCH = FSQArch(
    encoder_widths=(16, 32, 32, 48),
    encoder_blocks=(0, 1, 1, 1),
    decoder_widths=(48, 32, 32, 16),
    decoder_blocks=(1,) * 4,
)
# Flips cost nothing here, and size and place may vary more than a model of the codes would like.
RECIPE = Recipe(flip=0.5, small=0.35, pair=0.18, style_weights={})


@dataclass(frozen=True, slots=True)
class TokenizerTraining:
    """Options of one run. `seconds` counts training, not loading, compiling or measuring.

    A run that ends at `pause` seconds, or is interrupted, goes on when it is started again.
    """

    seconds: float = 240.0
    pause: float = math.inf
    batch: int = 64
    learning_rate: float = 4e-4
    warmup: int = 100
    ema: float = 0.998
    weight_decay: float = 1e-4
    l2_weight: float = 0.5
    lpips_weight: float = 1.0
    steady_weight: float = 0.2  # how much codes should repeat where the picture does
    held_out: int = 256
    report_every: float = 15.0
    evaluate_every: float = 60.0
    compile: Literal["auto", "on", "off"] = "auto"
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Quality:
    """What a tokenizer is worth, on held-out pictures."""

    psnr: float  # dB, mean over pictures
    l1: float
    lpips: float
    codes_used: int
    perplexity: float
    kept: float  # share of cells inside a sprite whose code stays when the background changes
    repeated: float  # share of neighbouring cells with the same pixels that have the same code

    def __str__(self) -> str:
        return (
            f"held-out PSNR {self.psnr:.2f} dB, L1 {self.l1:.4f}, LPIPS {self.lpips:.4f}, "
            f"{self.codes_used} codes used, perplexity {self.perplexity:.0f}, codes kept {self.kept:.3f}, "
            f"repeated {self.repeated:.3f}"
        )


class Evaluator:
    """Measures a tokenizer on a fixed set of pictures of subjects no training picture shows."""

    def __init__(self, pack: Pack, painter: Painter, lpips: LPIPS | None, count: int) -> None:
        composer = Composer(pack, "held-out", dataclasses.replace(RECIPE, flip=0.0), painter.sizes.cell)
        rng = np.random.default_rng(1)
        self.scenes = composer.draw(count, rng)
        self.painter, self.lpips = painter, lpips
        plain = dataclasses.replace(composer.recipe, photo=0, landscape=0, pair=0, small=0, scenery=0)
        self._twins = self._on_two_backgrounds(Composer(pack, "held-out", plain).draw(min(count, 64), rng), rng)

    def _on_two_backgrounds(self, scenes: Scenes, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        colours = rng.permuted(np.tile(np.arange(len(COLOURS)), (len(scenes), 1)), axis=1)[:, :2]
        first, second = (
            self.painter.paint(dataclasses.replace(scenes, top=colours[:, side], bottom=colours[:, side]))
            for side in (0, 1)
        )
        return first, second

    @torch.no_grad()
    def measure(self, model: FSQTokenizer, sheet: Path | None = None) -> Quality:
        """Quality of a model, and a contact sheet with originals above reconstructions if asked for."""
        device = self.painter.device
        psnr, l1, lpips, codes, shown = [], [], [], [], []
        for start in range(0, len(self.scenes), 32):
            part = Scenes(*(getattr(self.scenes, f.name)[start : start + 32] for f in dataclasses.fields(Scenes)))
            pixels = self.painter.paint(part)
            with _autocast(device):
                made = model(pixels)
                out = made.pixels.float().clamp(-1, 1)
                if self.lpips is not None:
                    lpips.append(self.lpips(out, pixels).item() * len(pixels))
            psnr.append(-10 * torch.log10((out - pixels).square().mean((1, 2, 3)) / 4))
            l1.append((out - pixels).abs().mean((1, 2, 3)))
            codes.append(made.codes.flatten())
            if start == 0 and sheet is not None:
                shown = [half for eight in zip(pixels.split(8), out.split(8), strict=True) for half in eight]
        if sheet is not None:
            contact_sheet(pixels_to_images(torch.cat(shown)), sheet)
        usage = torch.bincount(torch.cat(codes), minlength=model.arch.codes).double()
        usage = usage / usage.sum()
        return Quality(
            psnr=torch.cat(psnr).mean().item(),
            l1=torch.cat(l1).mean().item(),
            lpips=sum(lpips) / len(self.scenes) if lpips else math.nan,
            codes_used=int((usage > 0).sum()),
            perplexity=math.exp(torch.special.entr(usage).sum().item()),
            kept=self._kept(model),
            repeated=self._repeated(model),
        )

    def _kept(self, model: FSQTokenizer) -> float:
        """A cell that looks the same on two backgrounds is covered by the sprite; does it also keep its code?"""
        first, second = self._twins
        same = (first == second).all(1)  # (B, H, W)
        covered = -nn.functional.max_pool2d(-same.float()[:, None], model.downsample)[:, 0] > 0.5  # (B, H/f, W/f)
        with _autocast(self.painter.device):
            agree = model.encode(first) == model.encode(second)
        return (agree & covered).sum().item() / max(1, covered.sum().item())

    def _repeated(self, model: FSQTokenizer) -> float:
        """On the twins, which have plain backgrounds."""
        first, _ = self._twins
        with _autocast(self.painter.device):
            codes = model.encode(first)
        same = [(codes.roll(1, axis) == codes)[equal] for axis, equal in alike(first, model.downsample)]
        return torch.cat(same).float().mean().item()


def alike(pixels: Tensor, cell: int) -> list[tuple[int, Tensor]]:
    """For rows and columns, the axis and which cells (B, H, W) have the very pixels of the one before them."""
    found = []
    for axis in (1, 2):
        differs = (pixels - pixels.roll(cell, axis + 1)).abs().amax(1, keepdim=True)  # (B, 1, H f, W f)
        equal = nn.functional.max_pool2d(differs, cell)[:, 0] == 0
        equal.select(axis, 0).fill_(False)  # the first one has none before it
        found.append((axis, equal))
    return found


def unsteadiness(latents: Tensor, pixels: Tensor, cell: int) -> Tensor:
    """How far unrounded cells (B, H, W, D) lie from a level, and from the cells that show the very same pixels.

    The second half of a batch shows the sprites of the first half on other backgrounds. A code that lies close to its
    level, and repeats where the picture repeats, is a code that the next model can predict.
    """
    loss = (latents - latents.round().detach()).square().mean()
    for axis, equal in alike(pixels, cell):
        loss = loss + _mean((latents - latents.roll(1, axis)).square().mean(-1), equal)
    first, second = pixels.chunk(2)
    same = nn.functional.max_pool2d((first - second).abs().amax(1, keepdim=True), cell)[:, 0] == 0
    one, two = latents.chunk(2)
    return loss + _mean((one - two).square().mean(-1), same)


def _mean(values: Tensor, where: Tensor) -> Tensor:
    return (values * where).sum() / where.sum().clamp(min=1)


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


class Trainer:
    """One run: a model, its average, and the loop."""

    def __init__(
        self, model: FSQTokenizer, composer: Composer, painter: Painter, lpips: LPIPS | None, options: TokenizerTraining
    ) -> None:
        self.options, self.composer, self.painter = options, composer, painter
        self.device = painter.device
        self.model = model.to(self.device).train()
        self.average = copy.deepcopy(model).eval().requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), options.learning_rate, (0.9, 0.99), weight_decay=options.weight_decay,
            fused=self.device.type == "cuda",
        )  # fmt: skip
        compiled = options.compile == "on" or (options.compile == "auto" and self.device.type == "cuda")
        self._reconstruct = torch.compile(self.model) if compiled else self.model
        self._lpips = torch.compile(lpips) if compiled and lpips is not None else lpips
        self._rng: np.random.Generator | None = None
        self.steps, self.warm, self.seconds = 0, 0, 0.0  # all steps; steps with these moments; training time

    def state(self) -> dict[str, Any]:
        """Everything that the next run needs to go on as if nothing had happened."""
        return {
            "model": self.model.state_dict(), "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps, "warm": self.warm, "seconds": self.seconds,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["average"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.warm, self.seconds = state["steps"], state["warm"], state["seconds"]

    def rate(self, share: float) -> float:
        """Learning rate when `share` of the budget is spent."""
        cosine = max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, share)))
        return self.options.learning_rate * cosine * min(1.0, (self.warm + 1) / self.options.warmup)

    def step(self, share: float) -> dict[str, Tensor]:
        """One batch; returns losses that are still on the device."""
        options = self.options
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(share)
        with torch.no_grad():
            pixels = self._twins()
        with _autocast(self.device):
            made = self._reconstruct(pixels)
            drawn = made.pixels.float()
            lpips = self._lpips(drawn, pixels) if self._lpips is not None else drawn.new_zeros(())
        difference = drawn - pixels
        l1, l2 = difference.abs().mean(), difference.square().mean()
        steady = unsteadiness(made.latents.float(), pixels, self.model.downsample)
        loss = l1 + options.l2_weight * l2 + options.lpips_weight * lpips + options.steady_weight * steady
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        self.warm += 1
        follow(self.average.parameters(), self.model.parameters(), options.ema, self.steps)
        return {"loss": loss.detach(), "l1": l1.detach(), "lpips": lpips.detach(), "unsteady": steady.detach()}

    def _twins(self) -> Tensor:
        """A batch of pictures, the second half with the first half's sprites on other backgrounds."""
        if self._rng is None:  # never the pictures of an earlier run
            self._rng = np.random.default_rng(self.options.seed + self.steps)
        scenes = self.composer.draw(self.options.batch // 2, self._rng)
        others = self.composer.draw(self.options.batch // 2, self._rng)
        sprites = scenes.rows[:, 0] >= 0
        backdrop = np.where(sprites & (others.rows[:, 0] < 0), -1, others.backdrop)  # a photograph is no background
        twins = dataclasses.replace(
            scenes,
            top=np.where(sprites, others.top, scenes.top),
            bottom=np.where(sprites, others.bottom, scenes.bottom),
            backdrop=np.where(sprites, backdrop, scenes.backdrop),
            backdrop_view=others.backdrop_view,
            backdrop_soft=others.backdrop_soft & sprites,
        )
        return torch.cat([self.painter.paint(scenes), self.painter.paint(twins)])


def train(trainer: Trainer, evaluator: Evaluator, out: Path) -> Quality:
    """Run the budget out, saving and measuring now and then; returns the quality of the averaged weights."""
    options = trainer.options

    def show(sheet: Path | None = None) -> Quality:
        save_tokenizer(out, trainer.average, {"step": trainer.steps, "seconds": round(trainer.seconds)})
        quality = evaluator.measure(trainer.average, sheet)
        log.info("%6.0f s  %s", trainer.seconds, quality)
        return quality

    def known() -> dict[str, str]:
        return {"psnr": f"{show().psnr:.2f}"}

    spend(trainer, options, out, trainer.step, known, every=options.evaluate_every, batch=options.batch)
    return show(out / "sheet.png")


def _parser() -> argparse.ArgumentParser:
    defaults = TokenizerTraining()
    parser = trainer_parser("tokenizer", __doc__, defaults)
    parser.add_argument(
        "--lpips", type=Path, help="LPIPS weights of recipes.tiny.lpips; without them pictures come out soft"
    )
    parser.add_argument("--init", type=Path, help="start from these weights instead of random ones; levels may differ")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default=defaults.compile)
    parser.add_argument("--levels", type=int, nargs="+", default=[8, 5, 5, 5], help="of each dimension of a code")
    parser.add_argument("--encoder-norm", choices=("cell", "group"), default="cell")
    parser.add_argument("--encoder-padding", choices=("zeros", "replicate"), default="replicate")
    parser.add_argument("--steady-weight", type=float, default=defaults.steady_weight)
    parser.add_argument("--evaluate-every", type=float, default=defaults.evaluate_every, help="seconds; also saves")
    parser.add_argument("--smoke", action="store_true", help="a small model on a small part of the pack")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the tokenizer's training."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    settings = TokenizerTraining(
        seconds=options.seconds,
        pause=options.pause,
        batch=options.batch,
        learning_rate=options.learning_rate,
        held_out=16 if options.smoke else TokenizerTraining().held_out,
        report_every=options.report_every,
        evaluate_every=options.evaluate_every,
        compile=options.compile,
        steady_weight=options.steady_weight,
        seed=options.seed,
    )
    arch = dataclasses.replace(
        SMOKE_ARCH if options.smoke else FSQArch(), levels=tuple(options.levels),
        encoder_norm=options.encoder_norm, encoder_padding=options.encoder_padding,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):  # weights are drawn on the CPU, the same for every device
        torch.manual_seed(options.seed)
        model = FSQTokenizer(arch)
    known: dict[str, Any] = {}
    state = load_state(options.out)
    if (options.out / "model-0.safetensors").exists():
        model, known = load_tokenizer(options.out)
    elif options.init and state is None:
        model.load_state_dict(load_tokenizer(options.init)[0].state_dict())
    sides = [sum(p.numel() for p in side.parameters()) / 1e6 for side in (model.encoder, model.decoder)]
    log.info("encoder %.1f M, decoder %.1f M parameters", *sides)
    pack = Pack(options.pack).thinned(25 if options.smoke else 1)
    painter = Painter(pack, options.device, cell=model.downsample)
    log.info("%d pictures on %s", len(pack), options.device)
    lpips = LPIPS(options.lpips).to(options.device) if options.lpips else None
    evaluator = Evaluator(pack, painter, lpips, settings.held_out)
    trainer = Trainer(model, Composer(pack, "train", RECIPE, model.downsample), painter, lpips, settings)
    if state is not None:
        trainer.restore(state)
    elif known:
        trainer.steps, trainer.seconds = known["step"], known["seconds"]
    if trainer.steps:
        log.info("continuing %s at step %d, %.0f s", options.out, trainer.steps, trainer.seconds)
    train(trainer, evaluator, options.out)


if __name__ == "__main__":
    run(main)
