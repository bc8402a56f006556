"""The decoding loop: draft a tree, check it in one target pass, keep the path that the target agrees with.

The same loop runs plain autoregression (policy `none`), every drafter, every policy and every verifier. One small
tensor a pass travels from the device to the host: how much was accepted, the new tokens and, if asked for, how sure the
target was of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.history import History, Law, Step
from underdraw.plan import TreePlan
from underdraw.protocols import Drafter, Outcome, Prompt, Request, Target, TreePolicy, Verifier
from underdraw.sampling import Draws, Sampler
from underdraw.tree import DraftTree, Limits, Proposal, Verdict, envelope

Laws = Literal["skip", "keep"]
"""Whether entropy and top-1 chance of the target's law at every cell are noted."""


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
    laws: Laws = "skip",
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
    steps = torch.full((len(prompts),), layout.start, device=device)  # (B,) step of each root
    draws = sampler.draws(steps - 1, 1)
    root = _begin(histories, session.first.logits, draws, laws)
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
        if plan.floor:
            plans = _grown(tree, plans)
        output = session.run(tree, steps)
        verdict = verifier.verify(tree, output.logits, draws)
        news = _fetch(tree, verdict, plan.depth, _laws(output.logits, verdict.path, draws) if laws == "keep" else None)
        counts = [len(new.tokens) if alive else 0 for new, alive in zip(news, live, strict=True)]
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
            new = news[image]
            length = len(new.ranks)
            step = Step(index, image, place[image], length, plans[image], new.tokens, new.ranks, seconds, new.laws)
            histories[image].write(step)
            place[image] += length + 1
            yield step
        index += 1


def _grown(tree: DraftTree, plans: list[TreePlan]) -> list[TreePlan]:
    """The plans with the sizes that trees with a floor have really come to, for the record."""
    depths, nodes = tree.depths.amax(1).tolist(), (tree.depths >= 0).sum(1).tolist()
    return [
        replace(plan, depth=depth, nodes=count) if plan.floor else plan
        for plan, depth, count in zip(plans, depths, nodes, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _News:
    """What the host learns of one image's pass."""

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    laws: tuple[Law, ...]


def _begin(histories: list[History], logits: Tensor, draws: Draws, laws: Laws) -> Tensor:
    """Draw the first tokens (B,) from what the prompts said, logits (B, 1, K), and note them."""
    sampler = draws.sampler
    columns = draws.choose(logits, torch.ones_like(draws.steps))
    root: Tensor = sampler.layout.tokens(columns)[:, 0]
    first = root[:, None]
    if laws == "keep":
        first = torch.cat([first.double(), _laws(logits, torch.zeros_like(columns), draws)], dim=1)
    for history, seed, (token, *law) in zip(histories, sampler.seeds.tolist(), first.tolist(), strict=True):
        history.seed = seed
        history.begin(int(token), Law(*law) if law else None)
    return root


def _laws(logits: Tensor, path: Tensor, draws: Draws) -> Tensor:
    """Entropies, then top-1 chances, of the laws at the nodes of a path: (B, N, K), (B, D) -> (B, 2 D) float64."""
    index = path[:, : draws.steps.shape[1]]
    nodes = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    depths = torch.arange(1, index.shape[1] + 1, device=path.device).expand_as(index)
    chances = draws.scaled(nodes, depths).double().softmax(-1)
    return torch.cat([torch.special.entr(chances).sum(-1), chances.amax(-1)], dim=1)


def _fetch(tree: DraftTree, verdict: Verdict, depth: int, laws: Tensor | None) -> list[_News]:
    """The one copy to the host: how far each image came, its new tokens, their ranks and, if given, their laws."""
    below = verdict.path[:, 1 : depth + 1]
    reach = below.shape[1]
    order = torch.arange(reach + 1, device=below.device)
    drafted = torch.nn.functional.pad(tree.tokens.gather(1, below), (0, 1))
    tokens = torch.where(order == verdict.length[:, None], verdict.next_token[:, None], drafted)
    packed = torch.cat([verdict.length[:, None], tokens, tree.ranks.gather(1, below)], dim=1)
    if laws is not None:
        packed = torch.cat([packed.double(), laws], dim=1)  # float64 holds every token id
    news = []
    for length, *row in packed.tolist():
        count = int(length) + 1
        new, ranks = row[:count], row[reach + 1 : reach + count]
        rest = row[2 * reach + 1 :]
        known = zip(rest[:count], rest[reach + 1 : reach + 1 + count], strict=True)
        news.append(_News(tuple(map(int, new)), tuple(map(int, ranks)), tuple(Law(*pair) for pair in known)))
    return news


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
