"""Random weights for benchmarks/batching.py: whose images accept as many tokens as recorded images of the same windows.

Random weights accept nothing, so accepted lengths are forced on them. `record` draws images of all kinds with a real
model and with chains of several lengths; a shorter chain verifies guesses less often before they are needed, so its
accepted lengths are not those of a longer one cut off. `ReplayBySeed` then does all the work of `exact` and accepts
what the recorded image of that seed accepted at that step with that window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from underdraw import Pipeline
from underdraw.bench.replay import Trace, load_traces, save_traces
from underdraw.history import History
from underdraw.models.family import ImageSize, LoadedModel, Placement, SamplingDefaults
from underdraw.models.random_weights import model_shape, random_target
from underdraw.protocols import Prompt
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.exact import match_all_nodes

PREFIX = "random:"
WINDOWS = (1, 3, 7, 15, 31)  # tokens that recorded chains guess


def record(pipe: Pipeline, prompts: Sequence[str], file: Path) -> None:
    """Draw an image of every prompt with every window, and write the accepted lengths of all passes."""
    pipe.drafter, traces = "jacobi", []
    pipe.set_progress_bar_config(disable=True)
    request = pipe.request(prompts, seed=0, top_p=1.0)
    for window in WINDOWS:
        pipe.tree = f"chain:depth={window}"
        histories = [History(pipe.model.make_layout(request.size)) for _ in prompts]
        results = list(pipe.stream(request, histories))
        for index, prompt in enumerate(prompts):
            passes = [result for result in results if result.sequence == index]
            about = {"model": pipe.model.name, "window": window, "prompt": prompt, "seed": index}
            about["temperature"] = request.temperature
            traces.append(Trace(tuple(p.plan for p in passes), tuple(p.accepted for p in passes), about))
        mean = np.mean([trace.tokens_per_pass for trace in traces[-len(prompts) :]])
        print(f"window of {window} tokens: {mean:.2f} tokens per pass, {len(prompts)} images", flush=True)
    save_traces(file, traces)


def lengths_by_step(traces: Sequence[Trace]) -> tuple[Tensor, Tensor]:
    """Windows (W,) and accepted lengths (W, images, steps) of images recorded with chains.

    A step in the middle of a recorded pass gets what was left of it.
    """
    chains = [trace for trace in traces if max(plan.branch for plan in trace.plans) == 1]
    longest = [max(plan.depth for plan in trace.plans) for trace in chains]
    windows = sorted(set(longest))
    by_window = [[t for t, depth in zip(chains, longest, strict=True) if depth == window] for window in windows]
    steps = min(sum(trace.accepted) + len(trace.accepted) for trace in chains)
    table = np.zeros((len(windows), len(by_window[0]), steps), dtype=np.int64)
    for row, recorded in zip(table, by_window, strict=True):
        for lengths, trace in zip(row, recorded, strict=True):
            left = np.concatenate([np.arange(accepted, -1, -1) for accepted in trace.accepted])
            lengths[:] = left[:steps]
    return torch.tensor(windows), torch.from_numpy(table)


@dataclass(frozen=True, slots=True, eq=False)
class ReplayBySeed:
    """The verifier of random weights: image `seed` accepts what a recorded image accepted at the same step."""

    windows: Tensor  # (W,) tokens of recorded chains, ascending
    lengths: Tensor  # (W, images, steps)
    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        chosen = noise_window.sampler.layout.token_ids(noise_window.sample(logits, tree.depths + 1))  # (B, N)
        reach = noise_window.steps.shape[1]
        match_all_nodes(tree, reach, chosen)  # only for its time
        depth = tree.depths.amax(1)  # (B,)
        length = torch.minimum(self._recorded(depth, noise_window), depth)
        node = (tree.depths == length[:, None]).int().argmax(1)
        ancestors = tree.ancestors.gather(1, node[:, None, None].expand(-1, 1, tree.size))  # (B, 1, N)
        index, level = (torch.arange(count, device=node.device) for count in (tree.size, reach))
        path = ((ancestors & (tree.depths[:, None] == level[:, None])) * index).amax(-1)  # (B, reach)
        return AcceptedPath(path, length, chosen.gather(1, node[:, None])[:, 0], chosen)

    def _recorded(self, depth: Tensor, noise_window: NoiseWindow) -> Tensor:
        """Accepted lengths (B,) with the longest recorded chain that is no longer than `depth` (B,).

        A picture is cut to a few rows; whether they are the top, the middle or the bottom follows from the seed.
        """
        seeds, steps = noise_window.sampler.seeds, noise_window.steps[:, 0] - 1
        _, images, recorded_steps = self.lengths.shape
        window = (self.windows[:, None] <= depth).sum(0).sub(1).clamp(min=0)
        step = (steps + seeds // images % 3 * (recorded_steps // 3)) % recorded_steps
        return self.lengths[window, seeds % images, step]


def random_pipeline(name: str, placement: Placement, rows: int, drafter: str, traces: Path) -> Pipeline:
    """A pipeline of random weights in a published shape. Prompts have as many tokens as the text has words."""
    shape = model_shape(name)
    layout = replace(shape.layout, height=min(rows, shape.layout.height))
    token = next(i for i in range(1, shape.arch.vocab) if i not in layout.codes)

    def make_prompt(text: str, negative: str | None, size: ImageSize) -> Prompt:
        return Prompt((token,) * (8 + 2 * len(text.split())), (token,) * 2)

    class NoPixels:
        downsample, codebook = 1, torch.zeros(1, 1)

    model = LoadedModel(
        family="random",
        name=PREFIX + name,
        target=random_target(shape.arch, placement),
        image_tokenizer=NoPixels(),  # type: ignore[arg-type]
        defaults=SamplingDefaults(shape.guidance, top_k=shape.top_k, top_p=shape.top_p),
        sizes=(ImageSize(layout.height, layout.width),),
        make_layout=lambda size: layout,
        make_prompt=make_prompt,
    )
    windows, lengths = (table.to(placement.device) for table in lengths_by_step(load_traces(traces)))
    return Pipeline(model, drafter=drafter, verifier=ReplayBySeed(windows, lengths))
