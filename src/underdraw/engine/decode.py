"""The decoding loop: draft a tree, verify it in one target forward, commit the accepted path, repeat.

The same loop runs plain autoregression (policy `none`), every drafter, every policy and every verifier. One small
tensor per pass is copied from the device to the host: how many tokens were accepted, the new tokens and, if asked for,
their token stats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.step import IDLE_PLAN, StepRunner
from underdraw.engine.step import TokenStatsMode as TokenStatsMode
from underdraw.errors import ConfigError
from underdraw.history import History, StepResult, TokenStats, check_history_list
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.protocols import Drafter, Prompt, Target, TreePolicy, Verifier
from underdraw.ranges import check_guidance
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
    """Yield a StepResult for every image of every target pass, until all images are complete.

    Tokens are recorded in `histories`, one per prompt, which the caller may pass in. With `graphs`, passes are captured
    as CUDA graphs and replayed where possible.
    """
    if len(prompts) != len(sampler):
        raise ConfigError(f"{len(prompts)} prompts came with {len(sampler)} seeds; pass one seed per prompt.")
    check_guidance(guidance)
    proposal = resolve_proposal(verifier, proposal)
    histories = [History(sampler.layout) for _ in prompts] if histories is None else histories
    check_histories(histories, len(prompts), sampler.layout)
    if graphs is None:
        session = target.open(prompts, sampler.layout, guidance=guidance)
        draft = drafter.open(prompts, sampler.layout, session.prefill, guidance=guidance)
        runner = StepRunner(session, draft, verifier, sampler, proposal, token_stats)
    else:
        runner = graphs.open(target, drafter, verifier, prompts, sampler, guidance, proposal, token_stats)
    device = runner.session.prefill.logits.device
    if sampler.device != device:
        raise ConfigError(f"the sampler is on {sampler.device} and the model on {device}; put both on one device.")
    sample_first_tokens(runner, histories, sampler.seeds.tolist())
    root_steps = [sampler.layout.start] * len(prompts)
    while not all(history.done for history in histories):
        plans = [
            IDLE_PLAN if history.done else policy.plan(history, step)
            for history, step in zip(histories, root_steps, strict=True)
        ]
        for _, result in run_pass(runner, plans, histories, root_steps, range(len(prompts))):
            yield result


def run_pass(
    runner: StepRunner,
    plans: Sequence[TreePlan],
    histories: Sequence[History | None],
    root_steps: list[int],
    sequences: Sequence[int],
) -> list[tuple[int, StepResult]]:
    """Run one pass and record it in the histories of the images that have cells left; idle slots have none.

    Moves the steps of their roots behind the new tokens. Returns results with the index of their image in the batch;
    `sequences` are the numbers of the images in the results.
    """
    started = time.perf_counter()
    active = [(image, history) for image, history in enumerate(histories) if history is not None and not history.done]
    grown_plans, accepted = runner.step(plans, root_steps)
    seconds = time.perf_counter() - started
    results = []
    for image, history in active:
        new = accepted[image]
        step = StepResult(
            index=history.passes,
            sequence=sequences[image],
            start=root_steps[image],
            accepted=len(new.ranks),
            plan=grown_plans[image],
            tokens=new.tokens,
            ranks=new.ranks,
            seconds=seconds,
            token_stats=new.token_stats,
        )
        history.record(step)
        root_steps[image] += len(new.tokens)
        results.append((image, step))
    return results


def sample_first_tokens(runner: StepRunner, histories: Sequence[History], seeds: Sequence[int]) -> None:
    """Sample the first token of every image from the prefill and record it."""
    for history, seed, (token, *stats) in zip(histories, seeds, runner.sample_first().tolist(), strict=True):
        history.seed = seed
        history.record_first(int(token), TokenStats(*stats) if stats else None)


def collect_passes(steps: Iterator[StepResult], max_passes: int | None = None) -> list[StepResult]:
    """Run a decode to its end, or for `max_passes` passes; returns the results of its first image."""
    results = []
    for step in steps:
        if step.sequence == 0:
            results.append(step)
            if len(results) == max_passes:
                break
    return results


def resolve_proposal(verifier: Verifier, proposal: Proposal | None) -> Proposal:
    """The proposal to draft with: the verifier's preferred one, or another that it can verify without bias."""
    if proposal is None:
        return verifier.proposals[0]
    if proposal not in verifier.proposals:
        name = type(verifier).__name__.lower()
        raise ConfigError(
            f"the {proposal!r} proposal with the {name} verifier would bias the images; "
            f"use {' or '.join(verifier.proposals)}."
        )
    return proposal


def check_histories(histories: Sequence[History], count: int, layout: Layout) -> None:
    """Raise a ConfigError unless there is a new history of the layout for every prompt."""
    check_history_list(histories)
    if len(histories) != count:
        raise ConfigError(f"{len(histories)} histories came with {count} prompts; pass one history per prompt.")
    if any(h.layout != layout or h.passes or h.next_step != layout.start for h in histories):
        raise ConfigError("histories must be new ones of the sampler's layout; make them with History(layout).")
