"""Trains the image tokenizer: `python -m recipes.tiny.train_tokenizer --pack P --lpips L --out DIR`.

L1 + L2 + LPIPS on composed images, and a consistency loss that gives equal pixels equal codes: a model of the codes
should not have to memorise noise, and drafting depends on it.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from torch import Tensor, nn

from recipes.tiny.compose import Composer, SceneConfig
from recipes.tiny.data import Pack
from recipes.tiny.lpips import LPIPS
from recipes.tiny.paint import Painter
from recipes.tiny.tokenizer_quality import TokenizerEvaluator, TokenizerQuality, equals_previous_cell
from underdraw.cli import options
from underdraw.cli import train as cli
from underdraw.cli.app import main
from underdraw.errors import ConfigError
from underdraw.models.loading import resolve_placement
from underdraw.tokenizers.fsq import FSQArch, FSQTokenizer, load_tokenizer, save_tokenizer
from underdraw.training.trainer import WEIGHTS, Trainer, TrainingOptions, autocast

log = logging.getLogger(__name__)
app = typer.Typer(add_completion=False)

SMOKE_ARCH = FSQArch(
    encoder_widths=(16, 32, 32, 48),
    encoder_blocks=(0, 1, 1, 1),
    decoder_widths=(48, 32, 32, 16),
    decoder_blocks=(1,) * 4,
)
# The tokenizer sees more small sprites and pairs than the decoder, which has to memorise positions.
SCENES = SceneConfig(small=0.35, pair=0.18, style_weights={})


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerOptions(TrainingOptions):
    """Options of the tokenizer's training."""

    seconds: float = 240.0
    batch: int = 64
    learning_rate: float = 4e-4
    weight_decay: float = 1e-4
    l2_weight: float = 0.5
    lpips_weight: float = 1.0
    consistency_weight: float = 0.2


def consistency_loss(latents: Tensor, pixels: Tensor, cell: int) -> Tensor:
    """Distance of latents (B, H, W, D) to their level, and to the latents of cells with the same pixels.

    Cells with the same pixels are neighbours, and twins: the second half of a batch shows the sprites of the first
    half on other backgrounds.
    """
    loss = (latents - latents.round().detach()).square().mean()
    for axis, is_equal in equals_previous_cell(pixels, cell):
        loss = loss + _masked_mean((latents - latents.roll(1, axis)).square().mean(-1), is_equal)
    first, second = pixels.chunk(2)
    is_equal = nn.functional.max_pool2d((first - second).abs().amax(1, keepdim=True), cell)[:, 0] == 0
    latents, twins = latents.chunk(2)
    return loss + _masked_mean((latents - twins).square().mean(-1), is_equal)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum().clamp(min=1)


class TokenizerTrainer(Trainer):
    """Trains an image tokenizer on composed images."""

    options: TokenizerOptions

    def __init__(
        self,
        model: FSQTokenizer,
        composer: Composer,
        painter: Painter,
        lpips: LPIPS | None,
        evaluator: TokenizerEvaluator,
        options: TokenizerOptions,
        *,
        compiled: bool = False,
    ) -> None:
        self.composer, self.painter, self.evaluator = composer, painter, evaluator
        self.device = painter.device
        self.model = model.to(self.device).train()
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)
        parameters, ema = dict(self.model.named_parameters()), dict(self.ema_model.named_parameters())
        optimizer = torch.optim.AdamW(
            parameters.values(),
            options.learning_rate,
            (0.9, 0.99),
            weight_decay=options.weight_decay,
            fused=self.device.type == "cuda",
        )
        super().__init__(options, parameters, ema, [optimizer])
        self._reconstruct = torch.compile(self.model) if compiled else self.model
        self._lpips = torch.compile(lpips) if compiled and lpips is not None else lpips
        self._rng: np.random.Generator | None = None

    def learning_rate(self, progress: float) -> float:
        """A cosine over the whole budget."""
        cosine = max(0.02, 0.5 + 0.5 * math.cos(math.pi * min(1.0, progress)))
        return self.options.learning_rate * cosine * min(1.0, (self.warm_steps + 1) / self.options.warmup)

    def compute_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        options = self.options
        with torch.no_grad():
            pixels = self._twin_images()
        with autocast(self.device):
            reconstruction = self._reconstruct(pixels)
            decoded = reconstruction.pixels.float()
            lpips = self._lpips(decoded, pixels) if self._lpips is not None else decoded.new_zeros(())
        difference = decoded - pixels
        l1, l2 = difference.abs().mean(), difference.square().mean()
        consistency = consistency_loss(reconstruction.latents.float(), pixels, self.model.downsample)
        loss = l1 + options.l2_weight * l2 + options.lpips_weight * lpips + options.consistency_weight * consistency
        return loss, {"loss": loss, "l1": l1, "lpips": lpips, "consistency": consistency}

    def _twin_images(self) -> Tensor:
        """A batch of images, the second half with the first half's sprites on other backgrounds."""
        if self._rng is None:  # a resumed run draws new images
            self._rng = np.random.default_rng(self.options.seed + self.steps)
        scenes = self.composer.draw(self.options.batch // 2, self._rng)
        others = self.composer.draw(self.options.batch // 2, self._rng)
        has_sprite = scenes.rows[:, 0] >= 0
        # A photograph that fills an image is not a background.
        backdrop = np.where(has_sprite & (others.rows[:, 0] < 0), -1, others.backdrop)
        twins = dataclasses.replace(
            scenes,
            top=np.where(has_sprite, others.top, scenes.top),
            bottom=np.where(has_sprite, others.bottom, scenes.bottom),
            backdrop=np.where(has_sprite, backdrop, scenes.backdrop),
            backdrop_view=others.backdrop_view,
            backdrop_soft=others.backdrop_soft & has_sprite,
        )
        return torch.cat([self.painter.paint(scenes), self.painter.paint(twins)])

    def measure_and_save(self, out: Path, sheet: Path | None = None) -> TokenizerQuality:
        """Write the EMA weights and measure them on held-out subjects."""
        save_tokenizer(out, self.ema_model, self.progress())
        quality = self.evaluator.measure(self.ema_model, sheet)
        log.info("%6.0f s  %s", self.seconds, quality)
        return quality

    def evaluate(self, out: Path) -> dict[str, str]:
        return {"psnr": f"{self.measure_and_save(out).psnr:.2f}"}


def initial_model(arch: FSQArch, out: Path, init: Path | None, seed: int) -> FSQTokenizer:
    """The tokenizer of an earlier run in `out`, or a new one, with the weights in `init` if given."""
    if (out / WEIGHTS).exists():
        return load_tokenizer(out)[0]
    with torch.random.fork_rng(devices=[]):  # on the CPU, so that all devices start with the same weights
        torch.manual_seed(seed)
        model = FSQTokenizer(arch)
    if init is not None:
        model.load_state_dict(load_tokenizer(init)[0].state_dict())
    return model


def parse_levels(text: str) -> tuple[int, ...]:
    """'8,5,5,5' -> (8, 5, 5, 5)."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--levels {text} is not a list of whole numbers with commas between, like 8,5,5,5."
        ) from None


@app.command()
def train_tokenizer(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    out: cli.Out,
    lpips: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of recipes.tiny.lpips; images get blurry without them.")
    ] = None,
    init: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Start from this tokenizer; its levels may differ.")
    ] = None,
    levels: Annotated[str, typer.Option(help="Levels of each dimension of a code.")] = "8,5,5,5",
    encoder_norm: Annotated[Literal["cell", "group"], typer.Option()] = "cell",
    encoder_padding: Annotated[Literal["zeros", "replicate"], typer.Option()] = "replicate",
    consistency_weight: Annotated[float, typer.Option(min=0, help="Weight of the consistency loss.")] = 0.2,
    seconds: cli.Seconds = 240.0,
    pause: cli.Pause = math.inf,
    batch: Annotated[int, typer.Option(min=2, help="Images per batch, half of them twins.")] = 64,
    learning_rate: cli.LearningRate = 4e-4,
    report_every: cli.ReportEvery = 15.0,
    evaluate_every: cli.EvaluateEvery = 60.0,
    compile: cli.Compile = "auto",
    device: options.Device = "auto",
    seed: cli.Seed = 0,
    smoke: Annotated[bool, typer.Option("--smoke", help="A small model, to try things.")] = False,
    every_nth: Annotated[int, typer.Option(min=1, help="Use only every N-th image of the pack.")] = 1,
) -> None:
    """Train the image tokenizer. The same command continues an interrupted run."""
    settings = TokenizerOptions(
        seconds=seconds, pause=pause, batch=batch, learning_rate=learning_rate, consistency_weight=consistency_weight,
        report_every=report_every, evaluate_every=evaluate_every, seed=seed,
    )  # fmt: skip
    cli.start_logging()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    arch = dataclasses.replace(
        SMOKE_ARCH if smoke else FSQArch(),
        levels=parse_levels(levels),
        encoder_norm=encoder_norm,
        encoder_padding=encoder_padding,
    )
    images = Pack(pack).every_nth(every_nth)
    model = initial_model(arch, out, init, seed)
    sizes = [sum(p.numel() for p in part.parameters()) / 1e6 for part in (model.encoder, model.decoder)]
    torch_device = resolve_placement(device, "float32").device
    log.info("encoder %.1f M, decoder %.1f M parameters; %d images on %s", *sizes, len(images), torch_device)
    painter = Painter(images, torch_device, cell=model.downsample)
    loss = LPIPS(lpips).to(torch_device) if lpips is not None else None
    evaluator = TokenizerEvaluator(images, painter, loss, SCENES, 16 if smoke else 256)
    composer = Composer(images, "train", SCENES, model.downsample)
    is_compiled = compile == "on" or (compile == "auto" and torch_device.type == "cuda")
    trainer = TokenizerTrainer(model, composer, painter, loss, evaluator, settings, compiled=is_compiled)
    trainer.resume(out)
    trainer.train(out)
    print(f"{out}: {trainer.measure_and_save(out, out / 'sheet.png')}")


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.train_tokenizer"))
