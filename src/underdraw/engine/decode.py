"""The decoding loop: draft a tree, check it in one target pass, keep the path that the target agrees with.

The same loop runs plain autoregression (policy `none`), every drafter, every policy and every verifier. One small
tensor a pass travels from the device to the host: how much was accepted, the new tokens and, if asked for, how sure the
target was of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.step import REST, StepRunner
from underdraw.engine.step import TokenStatsMode as TokenStatsMode
from underdraw.errors import ConfigError
from underdraw.history import History, StepResult, TokenStats
from underdraw.protocols import Drafter, Prompt, Target, TreePolicy, Verifier
from underdraw.sampling import Sampler
from underdraw.tree import Proposal


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    policy: TreePolicy,
    verifier: Verifier,
    prompts: Sequence[Prompt],
    sampler: Sampler,
    *,
    guidance: float = 1.0,
    proposal: Proposal | None = None,
    histories: list[History] | None = None,
    token_stats: TokenStatsMode = "skip",
    graphs: GraphCache | None = None,
) -> Iterator[StepResult]:
    """Yield one Step for every image of every target pass, until all images are complete.

    The images' tokens and records are in `histories`, one per prompt, which the caller may pass in to keep. With
    `graphs`, passes are captured and replayed where they can be.
    """
    proposal = check(verifier, proposal, prompts, sampler, guidance)
    layout = sampler.layout
    histories = fresh(histories, len(prompts), sampler)
    if graphs is None:
        session = target.open(prompts, layout, guidance=guidance)
        draft = drafter.open(prompts, layout, session.prefill, guidance=guidance)
        passes = StepRunner(session, draft, verifier, sampler, proposal, token_stats)
    else:
        passes = graphs.open(target, drafter, verifier, prompts, sampler, guidance, proposal, token_stats)
    device = passes.session.prefill.logits.device
    if sampler.device != device:
        raise ConfigError(f"the sampler is on {sampler.device} and the model on {device}; put both on one device.")
    for history, seed, (token, *law) in zip(
        histories, sampler.seeds.tolist(), passes.sample_first().tolist(), strict=True
    ):
        history.seed = seed
        history.record_first(int(token), TokenStats(*law) if law else None)
    place = [layout.start] * len(prompts)  # steps of the roots
    index = 0
    while not all(history.done for history in histories):
        began = time.perf_counter()
        live = [not history.done for history in histories]
        wanted = [
            policy.plan(history, step) if alive else REST
            for history, step, alive in zip(histories, place, live, strict=True)
        ]
        plans, news = passes.step(wanted, place)
        seconds = time.perf_counter() - began
        for image in (image for image, alive in enumerate(live) if alive):
            new = news[image]
            length = len(new.ranks)
            step = StepResult(
                index, image, place[image], length, plans[image], new.tokens, new.ranks, seconds, new.token_stats
            )
            histories[image].record(step)
            place[image] += length + 1
            yield step
        index += 1


def collect_passes(steps: Iterator[StepResult], max_passes: int | None = None) -> list[StepResult]:
    """Run a decode to its end, or for `max_passes` passes; returns the results of its first image."""
    results = []
    for step in steps:
        if step.sequence == 0:
            results.append(step)
            if len(results) == max_passes:
                break
    return results


def fresh(histories: list[History] | None, count: int, sampler: Sampler) -> list[History]:
    """The caller's histories if they can be written to, or new ones."""
    if histories is None:
        return [History(sampler.layout) for _ in range(count)]
    if len(histories) != count:
        raise ConfigError(f"{len(histories)} histories came with {count} prompts; give one history per prompt.")
    start = sampler.layout.start
    if any(h.layout != sampler.layout or h.passes or h.next_step != start for h in histories):
        raise ConfigError("histories must be new ones of the sampler's layout; make them with History(layout).")
    return histories


def check_guidance(guidance: float) -> None:
    if not guidance >= 0 or guidance == float("inf"):
        raise ConfigError(f"guidance {guidance} must be a number of at least 0; 1 turns it off.")


def check(
    verifier: Verifier, proposal: Proposal | None, prompts: Sequence[Prompt], sampler: Sampler, guidance: float
) -> Proposal:
    """Refuse what cannot be decoded, and settle the proposal."""
    if len(prompts) != len(sampler):
        raise ConfigError(f"{len(prompts)} prompts came with {len(sampler)} seeds; give one seed per prompt.")
    check_guidance(guidance)
    if proposal is None:
        return verifier.proposals[0]
    if proposal not in verifier.proposals:
        name = type(verifier).__name__.lower()
        raise ConfigError(
            f"the {proposal!r} proposal with the {name} verifier would bias the images; "
            f"use {' or '.join(verifier.proposals)}."
        )
    return proposal
