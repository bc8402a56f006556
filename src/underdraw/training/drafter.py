"""Trains a drafter for any target on samples of that target: `train_drafter`, or `underdraw train drafter`.

The drafter learns the target's features and guided distributions several tokens ahead (`losses`). The folder it is
written to is a drafter that pipelines load, with a model card, and what the same command continues from.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from underdraw.calibration import Calibration
from underdraw.drafters.block import BlockNet
from underdraw.drafters.eagle import Eagle, EagleNet
from underdraw.drafters.trained import SHARED_WEIGHTS, build_net, make_drafter, save_drafter, target_fingerprint
from underdraw.errors import DivergedError, check_counts
from underdraw.io import FolderLock, atomic_write_text
from underdraw.models.family import LoadedModel
from underdraw.nn.linear import to_input_major
from underdraw.pipeline import Pipeline
from underdraw.training.batches import BatchSource, FeatureExtractor, alternate, cache_features, sample_batches
from underdraw.training.losses import BlockLoss, EagleLoss, random_roots
from underdraw.training.quality import DrafterCard, DrafterQuality, QualityMeter
from underdraw.training.samples import Samples, encode_prompts
from underdraw.training.trainer import MAX_COUNT, Trainer, TrainingOptions, TrainingProcesses, autocast, muon_and_adamw

log = logging.getLogger(__name__)
EVALUATION_BATCH = 8
# Trees that tokens per pass are measured with, at temperatures 1 and 0.
EVALUATION_TREES = {1.0: "confidence:nodes=16,depth=6,top_k=4", 0.0: "confidence:nodes=16,depth=12,top_k=2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOptions(TrainingOptions):
    """Options of a drafter's training."""

    kind: Literal["eagle", "block"] = "block"
    accumulate: int = 1  # batches per optimiser step
    depth: int = 12  # levels to look ahead
    layers: int = 2
    ffn: int = 0  # 0: as wide as the target's
    kv_heads: int = 0  # 0: as many as the target has
    markov_dim: int = 128  # block only
    roots: int = 24  # block only: roots per image
    guidance_spread: float = 0.6  # guidance varies by this share, so that the drafter is good around the default
    evaluate_images: int = 16  # held-out samples per evaluation

    def __post_init__(self) -> None:
        super(DrafterOptions, self).__post_init__()
        counts = ("accumulate", "depth", "layers", "markov_dim", "roots", "evaluate_images")
        check_counts("a drafter's training", MAX_COUNT, **{name: getattr(self, name) for name in counts})

    def sizes(self, target_ffn: int) -> dict[str, Any]:
        """The sizes in the metadata of the drafter's weights, from which its net is built again."""
        common = {"layers": self.layers, "ffn": self.ffn or target_ffn, "kv_heads": self.kv_heads or None}
        if self.kind == "eagle":
            return {**common, "above": True}
        return {**common, "slots": self.depth, "markov_dim": self.markov_dim}


def initialise(net: EagleNet, seed: int) -> None:
    """Small normal matrices, and zeros where the net should start by doing nothing."""
    generator = torch.Generator().manual_seed(seed)
    residual_scale = 0.02 / math.sqrt(2 * net.body.arch.layers)
    with torch.no_grad():
        for name, parameter in trained_parameters(net).items():
            if "norm" in name:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            elif parameter.ndim < 2 or name in ("missing", "markov_out.weight"):
                parameter.zero_()
            else:
                scale = residual_scale if name.endswith(("out.weight", "down.weight")) else 0.02
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def trained_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters except the embedding and head, which are the target's."""
    return {name: value for name, value in net.named_parameters() if not name.startswith(SHARED_WEIGHTS)}


class DrafterTrainer(Trainer):
    """Trains an EAGLE or block net on batches of a target's features."""

    options: DrafterOptions

    def __init__(
        self,
        model: LoadedModel,
        options: DrafterOptions,
        batches: BatchSource,
        held_out: Samples,
        *,
        processes: TrainingProcesses | None = None,
        compiled: bool = False,
    ) -> None:
        self.model, self.batches, self.held_out = model, batches, held_out
        self.sizes = options.sizes(model.target.net.arch.ffn)
        self.accumulate = options.accumulate
        net = build_net(model.target, options.kind, self.sizes)
        initialise(net, options.seed)
        self.net = net.to(model.placement.device).train()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(not name.startswith(SHARED_WEIGHTS))
        parameters = trained_parameters(self.net)
        matrices = [
            p for n, p in parameters.items() if n.startswith("body.blocks.") and p.ndim == 2 and "_norm" not in n
        ]
        optimizers = muon_and_adamw(matrices, parameters.values(), options.weight_decay)
        super().__init__(options, parameters, copy.deepcopy(parameters), optimizers, processes)
        self._wrapped = self.processes.wrap(self._loss_of(self.net))
        self._loss = torch.compile(self._wrapped) if compiled else self._wrapped
        self.calibration = Calibration()

    def fixed_options(self) -> dict[str, Any]:
        return {"kind": self.options.kind, "target": target_fingerprint(self.model.target), **self.sizes}

    def saved_options(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        return {"kind": metadata.get("drafter"), "target": metadata.get("target"), **metadata.get("sizes", {})}

    def _loss_of(self, net: EagleNet) -> BlockLoss | EagleLoss:
        target = self.model.target.net
        return BlockLoss(net, target) if isinstance(net, BlockNet) else EagleLoss(net, target, self.options.depth)

    def compute_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        batch = self.batches(self.options.batch, self.generator)
        roots = random_roots(batch, self.options.roots, self.generator)
        with autocast(self.model.placement.device):
            loss, _ = self._loss(batch, roots, self._random_guidance())
        return loss, {"loss": loss}

    def synchronise(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.processes.no_sync(self._wrapped)

    def _random_guidance(self) -> Tensor:
        """A guidance scale around the model's default."""
        scale, spread = self.model.defaults.guidance, self.options.guidance_spread
        factor = torch.empty(()).uniform_(-spread, spread, generator=self.generator).exp()
        return (1 + (scale - 1) * factor).to(self.model.placement.device)

    def _ema_net(self) -> EagleNet:
        """The net with EMA weights, in the model's dtype, as a pipeline would load it."""
        net = build_net(self.model.target, self.options.kind, self.sizes)
        net.load_state_dict({name: value.detach() for name, value in self.ema_parameters.items()}, strict=False)
        placement = self.model.placement
        net = net.to(placement.device, placement.dtype).eval()
        for parameter in trained_parameters(net).values():
            parameter.requires_grad_(False)
        if placement.device.type == "cpu":
            to_input_major(net)
        return net

    def drafter(self) -> Eagle:
        """The drafter with EMA weights."""
        return make_drafter(self._ema_net(), self.model.target, self.calibration)

    @torch.no_grad()
    def measure(self) -> DrafterQuality:
        """Loss, acceptance and calibration on held-out samples at the model's default guidance."""
        loss, generator = self._loss_of(self._ema_net()), torch.Generator().manual_seed(1)
        device, samples = self.model.placement.device, self.held_out
        extractor, meter = FeatureExtractor.for_model(self.model), QualityMeter(device)
        guidance = torch.tensor(self.model.defaults.guidance, device=device)
        count = min(self.options.evaluate_images, len(samples))
        for start in range(0, count, EVALUATION_BATCH):
            part = slice(start, min(start + EVALUATION_BATCH, count))
            batch = extractor.batch(encode_prompts(self.model, samples.texts[part]), samples.tokens[part].to(device))
            meter.add(*loss.logits(batch, random_roots(batch, 16, generator), guidance))
        return meter.result()

    def measure_and_save(self, out: Path) -> DrafterQuality:
        """Measure, fit the calibration, and write the drafter."""
        quality = self.measure()
        if not math.isfinite(quality.loss):
            raise DivergedError(f"the held-out loss after step {self.steps} is not finite")
        self.calibration = quality.calibration
        if self.processes.is_main:
            save_drafter(out, self.drafter(), self.model.target, self.sizes, self.progress(), "int8")
        return quality

    @torch.no_grad()
    def tokens_per_pass(self, texts: Sequence[str], temperature: float) -> float:
        """Tokens per pass of the pipeline with the drafter as trained so far."""
        pipe = Pipeline(self.model, drafter=self.drafter(), tree=EVALUATION_TREES[temperature])
        return pipe(list(texts), seed=0, temperature=temperature, output_type="codes").stats.tokens_per_pass

    def evaluate(self, out: Path) -> dict[str, str]:
        quality = self.measure_and_save(out)
        tokens_per_pass = f"{self.tokens_per_pass(self.held_out.texts[:4], 1.0):.2f}"
        log.info("%5.0f s  %s; %s tokens per pass", self.seconds, quality, tokens_per_pass)
        return {"accepted": f"{quality.sampled[0][0]:.2f}", "tokens/pass": tokens_per_pass}

    def card(self, quality: DrafterQuality, command: str) -> str:
        """The drafter's README."""
        options, model = self.options, self.model
        device = model.placement.device
        machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU"
        steps = f"{self.steps} steps of {options.batch * options.accumulate} images"
        texts = self.held_out.texts[:8]
        card = DrafterCard(
            model=model.name,
            kind=options.kind,
            parameters=sum(value.numel() for value in self.ema_parameters.values()),
            training=f"{self.seconds:.0f} s ({steps}) on {machine}, torch {torch.__version__}",
            command=command,
            evaluation=f"{min(options.evaluate_images, len(self.held_out))} samples of texts that were held out from "
            f"training, guidance {model.defaults.guidance:g}",
            quality=quality,
            tokens_per_pass=", ".join(
                f"{self.tokens_per_pass(texts, temperature):.2f} at T={temperature:g} (`{tree}`)"
                for temperature, tree in EVALUATION_TREES.items()
            ),
        )
        return card.markdown()


def train_drafter(
    model: LoadedModel,
    samples: Samples,
    out: Path,
    options: DrafterOptions,
    *,
    held_out: int = 64,
    keep_features: bool = False,
    more_batches: BatchSource | None = None,
    compiled: bool = False,
    processes: TrainingProcesses | None = None,
    command: str = "underdraw train drafter",
) -> DrafterQuality:
    """Train a drafter, or continue the training in `out`; returns its quality on the held-out texts.

    `keep_features` caches the target's features in the folder of the samples; `more_batches` gives every second batch.
    """
    processes = processes or TrainingProcesses()
    samples.check_model(model)
    training, evaluation = samples.split(held_out)
    extractor = FeatureExtractor.for_model(model)
    if keep_features and processes.is_main:
        cache_features(samples, model, extractor)
    processes.wait()
    batches = sample_batches(model, extractor, training, use_cache=keep_features)
    if more_batches is not None:
        batches = alternate(batches, more_batches)
    trainer = DrafterTrainer(model, options, batches, evaluation, processes=processes, compiled=compiled)
    with FolderLock(out, "a drafter") if processes.is_main else nullcontext():
        trainer.resume(out)
        log.info("%.1f M parameters", sum(value.numel() for value in trainer.ema_parameters.values()) / 1e6)
        trainer.train(out)
        quality = trainer.measure_and_save(out)
        log.info("%5.0f s  %s", trainer.seconds, quality)
        if processes.is_main:
            atomic_write_text(out / "README.md", trainer.card(quality, command))
        return quality
