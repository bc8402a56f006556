"""Training batches for drafters: what the target computes on whole images, laid out as the drafter will see it.

Position i of a drafter holds token i + 1 and the target's feature of token i. `FeatureExtractor` runs the target over
prompts and whole token sequences of any family; `sample_batches` draws batches from samples on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from underdraw.drafters.eagle import above_tokens
from underdraw.layout import Layout
from underdraw.models.family import LoadedModel
from underdraw.nn.target import DecoderTarget, apply_guidance
from underdraw.nn.transformer import Transformer
from underdraw.nn.weights import open_safetensors, write_safetensors
from underdraw.protocols import Prompt
from underdraw.training.samples import Samples, encode_prompts


@dataclass(frozen=True, slots=True)
class DrafterBatch:
    """B images as R rows of T positions: conditional rows and, with guidance, unconditional rows behind them."""

    layout: Layout
    images: Tensor  # (B, steps) token ids of whole images
    tokens: Tensor  # (R, T) token ids, one position ahead of the features; right-padded
    features: Tensor  # (R, T, D) of the target
    steps: Tensor  # (R, T) step of each token; negative inside the prompt
    above: Tensor  # (R, T, 2) tokens above and above-right of the cell after each token
    rotation: Tensor  # (R, T, 2, half) cosines and sines of the drafter's positions
    offset: Tensor  # (R,) position of step 0
    first: Tensor  # (R,) index in T of the token of step `layout.start`
    copies: int  # R / B

    def target_logits(self, net: Transformer, steps: Tensor, guidance: Tensor | float) -> Tensor:
        """The target's logits after guidance for the tokens at `steps` (B, N): (B, N, K)."""
        # The feature that predicts a token has the index of that token's successor: features lag by one position.
        index = self.first[:, None] + steps.repeat(self.copies, 1) - self.layout.start
        features = self.features.gather(1, index[..., None].expand(-1, -1, self.features.shape[-1]))
        return guided_logits(net.logits(features), guidance, self.copies)


BatchSource = Callable[[int, torch.Generator], DrafterBatch]
"""Draws a batch of so many images."""


def guided_logits(logits: Tensor, guidance: Tensor | float, copies: int) -> Tensor:
    """Logits after guidance, of conditional and unconditional rows: (R, ...) -> (B, ...)."""
    return logits if copies == 1 else apply_guidance(logits, guidance)


@dataclass(frozen=True, slots=True)
class TargetFeatures:
    """The target's features of R rows. Prompts are right-padded."""

    prompt_tokens: Tensor  # (R, P) token ids of the prompts, -1 where the prompt is made of text features
    prompt: Tensor  # (R, P, D)
    image: Tensor  # (R, S, D) from step `layout.start` on
    lengths: Tensor  # (R,) of the prompts
    offset: Tensor  # (R,) position of step 0

    def select(self, images: Tensor, copies: int) -> TargetFeatures:
        """The rows of some of the images (M,), conditional ones first."""
        batch = self.lengths.shape[0] // copies
        rows = torch.cat([images + copy * batch for copy in range(copies)]).to(self.lengths.device)
        return TargetFeatures(
            self.prompt_tokens[rows], self.prompt[rows], self.image[rows], self.lengths[rows], self.offset[rows]
        )


@dataclass(frozen=True, slots=True)
class FeatureExtractor:
    """Runs the target over whole images. `copies` is 2 for models that are sampled with guidance."""

    target: DecoderTarget
    layout: Layout
    copies: int = 2

    @classmethod
    def for_model(cls, model: LoadedModel) -> FeatureExtractor:
        return cls(
            model.target, model.make_layout(model.resolve_size(None, None)), 1 if model.defaults.guidance == 1 else 2
        )

    def batch(self, prompts: Sequence[Prompt], images: Tensor) -> DrafterBatch:
        """Run the target over prompts and the token ids of their images (B, steps)."""
        return self.align(self.features(prompts, images), images)

    @torch.no_grad()
    def features(self, prompts: Sequence[Prompt], images: Tensor) -> TargetFeatures:
        layout, net = self.layout, self.target.net
        session = self.target.open(prompts, layout, guidance=2.0 if self.copies == 2 else 1.0)
        prefill = session.prefill
        rows, count = len(prefill.host_lengths), layout.stop - layout.start
        steps = torch.arange(layout.start, layout.stop, device=images.device).expand(rows, -1)  # (R, S)
        x = net.embed(images.repeat(self.copies, 1)[:, layout.start : layout.stop])
        counts = torch.full_like(prefill.lengths, count)
        image = session.decoder.append(x, session.rope_table(steps), counts, [count] * rows)
        return TargetFeatures(prefill.prefix, prefill.features, image, prefill.lengths, session.offset)

    @torch.no_grad()
    def align(self, features: TargetFeatures, images: Tensor) -> DrafterBatch:
        """Put prompt and image into one row, without the padding between them, and shift tokens by one position."""
        layout, rope = self.layout, self.target.net.arch.rope
        image_tokens = images.repeat(self.copies, 1)[:, layout.start : layout.stop]  # (R, S)
        padded, width = features.prompt.shape[1:]
        index = torch.arange(padded + image_tokens.shape[1], device=images.device)
        image_index = index - features.lengths[:, None]  # (R, P + S), negative in the prompt
        is_image, prompt_index = image_index >= 0, index.clamp(max=padded - 1)
        clamped = image_index.clamp(0, image_tokens.shape[1] - 1)
        tokens = torch.where(
            is_image, image_tokens.gather(1, clamped), features.prompt_tokens[:, prompt_index].clamp(min=0)
        )
        image_features = features.image.gather(1, clamped[..., None].expand(-1, -1, width))
        joined = torch.where(is_image[..., None], image_features, features.prompt[:, prompt_index])
        steps = (image_index[:, 1:] + layout.start).clamp(max=layout.stop - 1)
        last_step = torch.full_like(images[:, 0], layout.stop)  # the image is complete: every cell above is drawn
        offset = features.offset - 1
        prompt_rotation = rope.prompt_rotation(steps.shape[1], images.device)
        image_rotation = rope.image_rotation(layout, steps.clamp(min=0), offset)
        return DrafterBatch(
            layout=layout,
            images=images,
            tokens=tokens[:, 1:],
            features=joined[:, :-1],
            steps=steps,
            above=above_tokens(images, layout, steps + 1, last_step, self.copies),
            rotation=torch.where((steps >= 0)[..., None, None], image_rotation, prompt_rotation),
            offset=offset,
            first=features.lengths - 1,
            copies=self.copies,
        )


def sample_batches(
    model: LoadedModel, extractor: FeatureExtractor, samples: Samples, *, use_cache: bool = False
) -> BatchSource:
    """Random batches of samples. A batch of cached features comes from one shard."""
    device = model.placement.device
    shards = samples.rows // samples.shard_size  # (N,)

    def draw(count: int, generator: torch.Generator) -> DrafterBatch:
        shard = int(shards[torch.randint(len(samples), (), generator=generator)])
        features = read_features(samples.folder, shard, device) if use_cache else None
        if features is None:
            picks = torch.randint(len(samples), (count,), generator=generator)
            prompts = encode_prompts(model, [samples.texts[pick] for pick in picks.tolist()])
            return extractor.batch(prompts, samples.tokens[picks].to(device))
        # The shard may hold samples that are not in `samples`, such as those held out for evaluation.
        members = (shards == shard).nonzero()[:, 0]
        picks = members[torch.randint(len(members), (count,), generator=generator)]
        features = features.select(samples.rows[picks] % samples.shard_size, extractor.copies)
        return extractor.align(features, samples.tokens[picks].to(device))

    return draw


def alternate(first: BatchSource, second: BatchSource) -> BatchSource:
    """Every batch comes from one of two sources, each with probability 1/2."""
    return lambda count, generator: (first if torch.rand((), generator=generator) < 0.5 else second)(count, generator)


def cache_features(samples: Samples, model: LoadedModel, extractor: FeatureExtractor) -> None:
    """Write the target's features of all samples to files in their folder; existing files are kept."""
    size = samples.shard_size
    for start in tqdm(range(0, len(samples), size), desc="features", unit="shard", disable=None):
        path = _features_path(samples.folder, start // size)
        if path.exists():
            continue
        part = slice(start, start + size)
        prompts = encode_prompts(model, samples.texts[part])
        features = extractor.features(prompts, samples.tokens[part].to(model.placement.device))
        write_safetensors(path, {name: getattr(features, name) for name in TargetFeatures.__slots__})


def read_features(folder: Path, shard: int, device: torch.device) -> TargetFeatures | None:
    """The cached features of one shard, or None if there are none."""
    path = _features_path(folder, shard)
    if not path.exists():
        return None
    with open_safetensors(path) as file:
        return TargetFeatures(**{name: file.get_tensor(name).to(device) for name in file.keys()})  # noqa: SIM118


def _features_path(folder: Path, shard: int) -> Path:
    return folder / f"features-{shard:05d}.safetensors"
