"""Where a drafter's lessons come from: samples, kept features of samples, or pictures composed on the fly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from underdraw.models.family import LoadedModel
from underdraw.training.samples import Samples, kept_features, prompts_of, raster_of, shortened
from underdraw.training.teacher import Lesson, Teacher

Draw = Callable[[int, torch.Generator], Lesson]
"""A source of lessons of so many pictures."""


def from_samples(model: LoadedModel, teacher: Teacher, samples: Samples) -> Draw:
    """Lessons from samples, at random; with kept features from one shard at a time."""
    device = model.placement.device

    def draw(count: int, generator: torch.Generator) -> Lesson:
        shards = max(1, len(samples) // max(1, samples.shard)) if samples.folder else 0
        shard = int(torch.randint(max(1, shards), (), generator=generator))
        kept = kept_features(samples, shard, device) if shards else None
        if kept is None:
            rows = torch.randint(len(samples), (count,), generator=generator)
            prompts = prompts_of(model, [samples.texts[row] for row in rows.tolist()])
            return teacher.lesson(prompts, samples.tokens[rows].to(device))
        rows = torch.randint(kept.lengths.shape[0] // teacher.copies, (count,), generator=generator)
        raster = samples.tokens[shard * samples.shard + rows].to(device)
        return teacher.lay_out(kept.pick(rows, teacher.copies), raster)

    return draw


def from_pack(model: LoadedModel, teacher: Teacher, pack: Path) -> Draw:
    """Lessons from pictures that are composed now; captions in the tiny family's own words."""
    from recipes.tiny.compose import Composer, Painter
    from recipes.tiny.data import Pack

    device, pictures = model.placement.device, Pack(pack)
    composer = Composer(pictures, "train", None, model.image_tokenizer.downsample)
    painter = Painter(pictures, device, cell=model.image_tokenizer.downsample)

    def draw(count: int, generator: torch.Generator) -> Lesson:
        rng = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
        scenes = composer.draw(count, rng)
        with torch.no_grad():
            codes = model.image_tokenizer.encode(painter.paint(scenes))
        texts = [shortened(model, text) for text in composer.captions(scenes)]
        return teacher.lesson(prompts_of(model, texts), raster_of(teacher.layout, codes))

    return draw


def alternating(first: Draw, second: Draw) -> Draw:
    """One lesson from each, in turn by chance."""
    return lambda count, generator: (first if torch.rand((), generator=generator) < 0.5 else second)(count, generator)
