"""Trains a drafter for any target: `underdraw train drafter --model M --samples S --out D`.

The target's features and guided distributions are what it learns, several tokens ahead (`unroll`). Samples come from
the target itself or from encoded pictures (`samples`). The
folder that it writes is a drafter that pipelines load, with its card, and what the same command goes on from: exactly,
or, where only the weights are left, with fresh moments.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from underdraw.calibration import Calibration
from underdraw.drafters.block import BlockDrafter, BlockNet
from underdraw.drafters.eagle import Eagle, EagleNet
from underdraw.drafters.trained import SHARED_WEIGHTS, build_net, save_drafter
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.family import LoadedModel
from underdraw.models.loading import load_model, resolve_placement
from underdraw.nn.row_invariant import to_input_major
from underdraw.nn.weights import load_weights
from underdraw.pipeline import Pipeline
from underdraw.training.checkpoint import load_state
from underdraw.training.command import run, trainer_parser
from underdraw.training.devices import Devices
from underdraw.training.lessons import Draw, from_samples
from underdraw.training.losses import BlockLoss, EagleLoss, roots_of
from underdraw.training.optim import follow, optimizers, set_rate, step_all
from underdraw.training.quality import BEST, Quality, shares
from underdraw.training.samples import Samples, keep_features, prompts_of
from underdraw.training.teacher import Teacher
from underdraw.training.trainer import spend

log = logging.getLogger(__name__)
Kind = Literal["eagle", "block"]


@dataclass(frozen=True, slots=True)
class DrafterTraining:
    """Options of one run. `seconds` counts training, not loading, compiling or measuring."""

    kind: Kind = "block"
    seconds: float = 300.0
    pause: float = math.inf
    batch: int = 32
    accumulate: int = 1  # batches a step
    learning_rate: float = 1e-3
    warmup: int = 100
    decay: float = 0.5  # last share of the budget, in which the rate falls
    ema: float = 0.998
    weight_decay: float = 0.02
    depth: int = 12  # levels to look ahead
    layers: int = 2
    ffn: int = 0  # 0: as wide as the target
    kv_heads: int = 0  # 0: as the target
    markov_dim: int = 128  # block only
    roots: int = 24  # block only: trees a picture
    guidance_spread: float = 0.6  # guidance varies by this share, so that the drafter is good around the default
    report_every: float = 15.0
    measure_every: float = 60.0
    measured: int = 16  # held-out pictures
    seed: int = 0

    def sizes(self, target_ffn: int) -> dict[str, Any]:
        """What the drafter's folder must know to build the net again."""
        common = {"layers": self.layers, "ffn": self.ffn or target_ffn, "kv_heads": self.kv_heads or None}
        if self.kind == "eagle":
            return {**common, "above": True}
        return {**common, "slots": self.depth, "markov_dim": self.markov_dim}


def initialise(net: EagleNet, seed: int) -> None:
    """Small normal matrices, zeros where a net should start by doing nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.startswith(SHARED_WEIGHTS):
                continue
            if "norm" in name:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif parameter.ndim < 2 or name in ("missing", "markov_out.weight"):
                parameter.zero_()
            else:
                scale = (
                    0.02 / math.sqrt(2 * net.body.arch.layers) if name.endswith(("out.weight", "down.weight")) else 0.02
                )
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def own_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained: everything but the target's embedding and head."""
    return {name: value for name, value in net.named_parameters() if not name.startswith(SHARED_WEIGHTS)}


class Trainer:
    """One run: the drafter, its average, two optimisers and the loop."""

    def __init__(
        self, model: LoadedModel, options: DrafterTraining, devices: Devices, *, compiled: bool = False
    ) -> None:
        self.model, self.options, self.devices = model, options, devices
        self.sizes = options.sizes(model.target.net.arch.ffn)
        target, place = model.target, model.placement
        net = build_net(target, options.kind, self.sizes)
        initialise(net, options.seed)
        self.net = net.to(place.device).train()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not name.startswith(SHARED_WEIGHTS))
        self.average = copy.deepcopy(own_parameters(self.net))
        layout = model.make_layout(model.sizes[0])
        self.teacher = Teacher(target, layout, 1 if model.defaults.guidance == 1 else 2)
        self.loss = self._loss(self.net)
        self._wrapped = devices.wrap(self.loss)
        self._run = torch.compile(self._wrapped) if compiled else self._wrapped
        own = own_parameters(self.net)
        matrices = [p for n, p in own.items() if n.startswith("body.blocks.") and p.ndim == 2 and "_norm" not in n]
        inside = {id(p) for p in matrices}
        others = [p for p in own.values() if id(p) not in inside]
        self._optimizers = optimizers(matrices, others, options.weight_decay)
        self._generator = torch.Generator().manual_seed(options.seed * 1009 + devices.index)
        self.steps, self.seconds = 0, 0.0
        self.calibration = Calibration()

    def _loss(self, net: EagleNet) -> BlockLoss | EagleLoss:
        teacher = self.model.target.net
        return BlockLoss(net, teacher) if isinstance(net, BlockNet) else EagleLoss(net, teacher, self.options.depth)

    def rate(self, share: float) -> float:
        """Learning rate when `share` of the budget is spent."""
        fall = min(1.0, (1 - share) / self.options.decay)
        return self.options.learning_rate * max(0.01, fall) * min(1.0, (self.steps + 1) / self.options.warmup)

    def step(self, draw: Draw, share: float) -> Tensor:
        """One step of the optimisers when `share` of the budget is spent; the mean loss, still on the device."""
        options = self.options
        set_rate(self._optimizers, self.rate(share))
        total: Tensor | None = None
        for part in range(options.accumulate):
            lesson = draw(options.batch, self._generator)
            roots = roots_of(lesson, options.roots, self._generator)
            last = part == options.accumulate - 1
            with self.devices.synchronised(self._wrapped, last), self.autocast():
                loss, _ = self._run(lesson, roots, self.guidance())
            self.devices.backward(loss / options.accumulate)
            total = loss.detach() if total is None else total + loss.detach()
        nn.utils.clip_grad_norm_(own_parameters(self.net).values(), 1.0)
        step_all(self._optimizers)
        self.steps += 1
        follow(self.average.values(), own_parameters(self.net).values(), options.ema, self.steps)
        assert total is not None
        return total / options.accumulate

    def guidance(self) -> Tensor:
        """The family's guidance, more or less."""
        own, spread = self.model.defaults.guidance, self.options.guidance_spread
        factor = torch.empty(()).uniform_(-spread, spread, generator=self._generator).exp()
        return (1 + (own - 1) * factor).to(self.model.placement.device)

    def autocast(self) -> torch.autocast:
        kind = self.model.placement.device.type
        return torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda")

    def averaged(self) -> EagleNet:
        """A copy of the net with the averaged weights, as a pipeline would load it."""
        net = build_net(self.model.target, self.options.kind, self.sizes)
        net.load_state_dict({name: value.detach() for name, value in self.average.items()}, strict=False)
        place = self.model.placement
        net = net.to(place.device, place.dtype).eval()
        for parameter in own_parameters(net).values():
            parameter.requires_grad_(False)
        if place.device.type == "cpu":
            to_input_major(net)
        return net

    def drafter(self) -> Eagle | BlockDrafter:
        net, offset = self.averaged(), self.model.target.image_offset
        if isinstance(net, BlockNet):
            return BlockDrafter(net, self.calibration, offset)
        return Eagle(net, self.calibration, offset)

    @torch.no_grad()
    def measure(self, samples: Samples) -> Quality:
        """Loss, acceptance and calibration on held-out samples, at the family's own guidance."""
        loss, generator = self._loss(self.averaged()), torch.Generator().manual_seed(1)
        device, count = self.model.placement.device, min(self.options.measured, len(samples))
        noise = torch.Generator(device).manual_seed(2)
        guidance = torch.tensor(self.model.defaults.guidance, device=device)
        losses: list[Tensor] = []
        ranks: dict[int, list[Tensor]] = {0: [], 1: []}
        scores: list[tuple[Tensor, Tensor]] = []
        for start in range(0, count, 8):
            part = slice(start, min(start + 8, count))
            lesson = self.teacher.lesson(prompts_of(self.model, samples.texts[part]), samples.tokens[part].to(device))
            draft, target, valid = loss.ahead(lesson, roots_of(lesson, 16, generator), guidance)
            losses.append(-(target.softmax(-1) * draft.log_softmax(-1)).sum(-1)[valid].mean())
            for temperature in (0, 1):
                g = torch.empty_like(draft).exponential_(generator=noise).log().neg() if temperature else 0.0
                best = (draft + g).topk(BEST[-1], dim=-1)
                hit = best.indices == (target + g).argmax(-1, keepdim=True)
                rank = torch.where(hit.any(-1), hit.int().argmax(-1), BEST[-1])
                ranks[temperature].append(torch.where(valid, rank, -1).flatten(0, 1).cpu())
                if temperature:
                    scores.append((best.values[valid].float().cpu(), rank[valid].cpu()))
        best_scores, best_ranks = (torch.cat(parts)[:20000] for parts in zip(*scores, strict=True))
        fitted = Calibration.fit(best_scores, best_ranks)
        return Quality(
            float(torch.stack(losses).mean()), shares(torch.cat(ranks[1])), shares(torch.cat(ranks[0])), fitted
        )

    @torch.no_grad()
    def tokens_per_pass(self, texts: Sequence[str], tree: str, temperature: float) -> float:
        """What the engine really gets with the drafter as it is."""
        pipe = Pipeline(self.model, drafter=self.drafter(), tree=tree)
        return pipe(list(texts), seed=0, temperature=temperature, output_type="codes").stats.tokens_per_pass

    def state(self) -> dict[str, Any]:
        return {
            "net": {name: value.detach() for name, value in own_parameters(self.net).items()},
            "average": {name: value.detach() for name, value in self.average.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "generator": self._generator.get_state(), "steps": self.steps, "seconds": self.seconds,
        }  # fmt: skip

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, value in own_parameters(self.net).items():
                value.copy_(state["net"][name])
            for name, value in self.average.items():
                value.copy_(state["average"][name])
        for optimizer, own in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self._generator.set_state(state["generator"])
        self.steps, self.seconds = state["steps"], state["seconds"]

    def begin(self, weights: dict[str, Tensor], seconds: float) -> None:
        """Go on from weights alone, trained for so many seconds, with fresh moments behind a short warm-up."""
        with torch.no_grad():
            for own in (own_parameters(self.net), self.average):
                for name, value in own.items():
                    value.copy_(weights[name])
        self.seconds = seconds


def train(trainer: Trainer, draw: Draw, held_out: Samples, out: Path) -> Quality:
    """Run the budget out, measuring and saving now and then."""
    options = trainer.options

    def show() -> dict[str, str]:
        quality = keep(trainer, held_out, out)
        passes = f"{trainer.tokens_per_pass(held_out.texts[:4], TREE, 1.0):.2f}"
        log.info("%5.0f s  %s; %s tokens per pass", trainer.seconds, quality, passes)
        return {"accepted": f"{quality.sampled[0][0]:.2f}", "tokens/pass": passes}

    spend(
        trainer, options, out, lambda share: {"loss": trainer.step(draw, share)}, show, every=options.measure_every,
        batch=options.batch * options.accumulate, devices=trainer.devices,
    )  # fmt: skip
    quality = keep(trainer, held_out, out)
    log.info("%5.0f s  %s", trainer.seconds, quality)
    return quality


TREE = "confidence:nodes=16,depth=6,top_k=4"
DEEP = "confidence:nodes=16,depth=12,top_k=2"


def keep(trainer: Trainer, held_out: Samples, out: Path) -> Quality:
    """Measure, calibrate, and write the drafter."""
    quality = trainer.measure(held_out)
    trainer.calibration = quality.calibration
    if trainer.devices.main:
        progress = {"steps": trainer.steps, "seconds": round(trainer.seconds)}
        save_drafter(out, trainer.drafter(), trainer.model.target, trainer.sizes, progress, "int8")
    return quality


def card(trainer: Trainer, held_out: Samples, quality: Quality, command: str) -> str:
    """What a user of the drafter wants to know of it, in Markdown."""
    options, model = trainer.options, trainer.model
    count = sum(value.numel() for value in trainer.average.values()) / 1e6
    texts = held_out.texts[:8]
    head = "| level | " + " | ".join(f"T=1, best {n}" for n in BEST) + " | T=0, best 1 |"
    rows = [
        f"| {level} | " + " | ".join(f"{chance:.3f}" for chance in chances) + f" | {greedy[0]:.3f} |"
        for level, (chances, greedy) in enumerate(zip(quality.sampled, quality.greedy, strict=True), start=1)
    ]
    lines = [
        f"# Drafter for {model.name}",
        "",
        f"{'An EAGLE' if options.kind == 'eagle' else 'A block'} drafter of {count:.1f} M parameters (embedding and "
        "head are the target's own), trained for "
        f"{trainer.seconds:.0f} s ({trainer.steps} steps of {options.batch * options.accumulate} pictures) on "
        f"{_machine(model.placement.device)}, torch {torch.__version__}:",
        "",
        "```bash",
        command,
        "```",
        "",
        f"Measured on {min(options.measured, len(held_out))} pictures of texts that training did not see, guidance "
        f"{model.defaults.guidance:g}: loss {quality.loss:.4f} nats. Chance that the target's own token is among the "
        "best few drafted, under shared noise, given that all before it were accepted:",
        "",
        head,
        "|" + "---|" * (len(BEST) + 2),
        *rows,
        "",
        f"Tokens per target pass on {len(texts)} of those texts: "
        f"{trainer.tokens_per_pass(texts, TREE, 1.0):.2f} at T=1 (`{TREE}`), "
        f"{trainer.tokens_per_pass(texts, DEEP, 0.0):.2f} at T=0 (`{DEEP}`).",
        "",
    ]
    return "\n".join(lines)


def _machine(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"


def _parser() -> argparse.ArgumentParser:
    defaults = DrafterTraining()
    parser = trainer_parser("drafter", __doc__, defaults, pack="not used")
    parser.add_argument(
        "--model", default="tiny", help="the target: tiny, a folder, a file, or an owner/name of the hub"
    )
    parser.add_argument("--samples", type=Path, required=True, help="folder that `underdraw train samples` wrote")
    parser.add_argument("--kind", choices=("eagle", "block"), default=defaults.kind)
    parser.add_argument("--dtype", default="auto", help="of the target: auto, float32, bfloat16, float16")
    parser.add_argument("--held-out", type=int, default=64, help="texts of the samples that are kept for measuring")
    parser.add_argument("--keep-features", action="store_true", help="store the target's features beside the samples")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--measure-every", type=float, default=defaults.measure_every, help="seconds")
    for name in ("accumulate", "depth", "layers", "ffn", "kv_heads", "markov_dim", "roots", "measured"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the drafter's training."""
    options = _parser().parse_args(arguments)
    devices = Devices()
    if devices.main:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    torch.set_float32_matmul_precision("high")
    checkpoint = open_checkpoint(options.model)
    place = resolve_placement(devices.device or options.device, options.dtype)
    model = load_model(checkpoint, place)
    samples = Samples.load(options.samples)
    fields = {field.name for field in dataclasses.fields(DrafterTraining)}
    settings = DrafterTraining(**{name: value for name, value in vars(options).items() if name in fields})
    compiled = options.compile == "on" or (options.compile == "auto" and place.device.type == "cuda")
    trainer = Trainer(model, settings, devices, compiled=compiled)
    if options.keep_features and devices.main:
        keep_features(samples, model, trainer.teacher)
    devices.wait()
    lessons, held_out = samples.split(options.held_out)
    draw = from_samples(model, trainer.teacher, samples if options.keep_features else lessons)
    state = load_state(options.out)
    if state is not None:
        trainer.restore(state)
    elif (options.out / "model-0.safetensors").exists():
        weights, about = load_weights(options.out)
        trainer.begin(weights, about["progress"]["seconds"])
    if trainer.seconds:
        log.info("continuing %s at %.0f s", options.out, trainer.seconds)
    log.info("%.1f M parameters", sum(value.numel() for value in trainer.average.values()) / 1e6)
    quality = train(trainer, draw, held_out, options.out)
    if devices.main:
        command = "underdraw train drafter " + " ".join(arguments if arguments is not None else sys.argv[1:])
        (options.out / "README.md").write_text(card(trainer, held_out, quality, command), encoding="utf-8")


if __name__ == "__main__":
    run(main)
