"""The decoding loop: draft a tree, check it in one target pass, keep the path that the target agrees with.

The same loop runs plain autoregression (policy `none`), every drafter, every policy and every verifier. One small
tensor a pass travels from the device to the host: how much was accepted, and the new tokens.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from underdraw.errors import ConfigError
from underdraw.history import History, Step
from underdraw.plan import TreePlan
from underdraw.protocols import Drafter, Outcome, Prompt, Request, Target, TreePolicy, Verifier
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree, Limits, Proposal, Verdict, envelope


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
) -> Iterator[Step]:
    """Yield one Step for every image of every target pass, until all images are complete.

    The images' tokens and records are in `histories`, one per prompt, which the caller may pass in to keep.
    """
    proposal = check(verifier, proposal, prompts, sampler, guidance)
    layout = sampler.layout
    histories = fresh(histories, len(prompts), sampler)
    session = target.open(prompts, layout, guidance=guidance)
    draft = drafter.open(prompts, layout, session.first, guidance=guidance)
    device = session.first.logits.device
    if sampler.device != device:
        raise ConfigError(f"the sampler is on {sampler.device} and the model on {device}; put both on one device.")
    for history, seed in zip(histories, sampler.seeds.tolist(), strict=True):
        history.seed = seed
    steps = torch.full((len(prompts),), layout.start, device=device)  # (B,) step of each root
    draws = sampler.draws(steps - 1, 1)
    root = layout.tokens(draws.choose(session.first.logits, torch.ones_like(steps)[:, None]))[:, 0]
    for history, token in zip(histories, root.tolist(), strict=True):
        history.begin(token)
    place = [layout.start] * len(prompts)  # the host's copy of `steps`
    index = 0
    moved: int | None = 1
    while not all(history.done for history in histories):
        began = time.perf_counter()
        live = [not history.done for history in histories]
        plans = [
            policy.plan(history, step).cut(layout.stop - 2 - step) if alive else TreePlan(0, 1, 1, 1)
            for history, step, alive in zip(histories, place, live, strict=True)
        ]
        plan = envelope([p for p, alive in zip(plans, live, strict=True) if alive])
        limits = None if all(p == plan for p in plans) else Limits.of(plans, device)
        draws = sampler.draws(steps, plan.depth + 1, draws, moved)
        tree = draft.draft(Request(root, steps, plan, draws, proposal, limits))
        output = session.run(tree, steps)
        verdict = verifier.verify(tree, output.logits, draws)
        lengths, tokens, ranks = _fetch(tree, verdict, plan.depth)
        counts = [length + 1 if alive else 0 for length, alive in zip(lengths, live, strict=True)]
        committed = verdict.length + 1
        if not all(live):
            committed = committed * torch.tensor(live, device=device)
        outcome = Outcome(tree, verdict.narrow(max(counts) - 1), output, draws, committed, tuple(counts))
        session.commit(outcome)
        draft.commit(outcome)
        root, steps = verdict.next_token, steps + committed
        moved = counts[0] if len(set(counts)) == 1 else None
        seconds = time.perf_counter() - began
        for image in (image for image, alive in enumerate(live) if alive):
            length = lengths[image]
            new, rank = tuple(tokens[image][: length + 1]), tuple(ranks[image][:length])
            step = Step(index, image, place[image], length, plans[image], new, rank, seconds)
            histories[image].write(step)
            place[image] += length + 1
            yield step
        index += 1


def _fetch(tree: DraftTree, verdict: Verdict, depth: int) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """The one copy to the host: accepted lengths, and the new tokens and ranks of each image."""
    below = verdict.path[:, 1 : depth + 1]
    order = torch.arange(below.shape[1] + 1, device=below.device)
    drafted = torch.nn.functional.pad(tree.tokens.gather(1, below), (0, 1))
    tokens = torch.where(order == verdict.length[:, None], verdict.next_token[:, None], drafted)
    packed: list[list[int]] = torch.cat([verdict.length[:, None], tokens, tree.ranks.gather(1, below)], dim=1).tolist()
    split = 2 + below.shape[1]
    return [row[0] for row in packed], [row[1:split] for row in packed], [row[split:] for row in packed]


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


def check(
    verifier: Verifier, proposal: Proposal | None, prompts: Sequence[Prompt], sampler: Sampler, guidance: float
) -> Proposal:
    """Refuse what cannot be decoded, and settle the proposal."""
    if len(prompts) != len(sampler):
        raise ConfigError(f"{len(prompts)} prompts came with {len(sampler)} seeds; give one seed per prompt.")
    if not guidance >= 0 or guidance == float("inf"):
        raise ConfigError(f"guidance {guidance} must be a number of at least 0; 1 turns it off.")
    if proposal is None:
        return verifier.proposals[0]
    if proposal not in verifier.proposals:
        name = type(verifier).__name__.lower()
        raise ConfigError(
            f"the {proposal!r} proposal with the {name} verifier would bias the images; "
            f"use {' or '.join(verifier.proposals)}."
        )
    return proposal
