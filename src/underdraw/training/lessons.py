"""Where a drafter's lessons come from: samples or kept features of samples."""

from __future__ import annotations

from collections.abc import Callable

import torch

from underdraw.models.family import LoadedModel
from underdraw.training.samples import Samples, kept_features, prompts_of
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
