"""The device's part of a decode: from the plans of one pass to the small tensor that the host has to read.

Nothing here asks the device for a value but `advance`, once. So the same functions run as they are, or are captured and
replayed. Knows no policy and no record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.history import Law
from underdraw.plan import TreePlan
from underdraw.protocols import DrafterSession, Outcome, Output, Request, TargetSession, Verifier
from underdraw.sampling import Draws, Sampler
from underdraw.tree import DraftTree, Limits, Proposal, Verdict, envelope

Laws = Literal["skip", "keep"]
"""Whether entropy and top-1 chance of the target's law at every cell are noted."""
REST = TreePlan(0, 1, 1, 1)  # of an image that is finished


@dataclass(frozen=True, slots=True)
class News:
    """What the host learns of one image's pass."""

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    laws: tuple[Law, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A tree, what the target said of it and how far they agree."""

    tree: DraftTree
    output: Output
    verdict: Verdict
    draws: Draws
    packed: Tensor  # (B, ...) what the host reads


class Passes:
    """B images in the making."""

    def __init__(
        self, session: TargetSession, draft: DrafterSession, verifier: Verifier, sampler: Sampler, proposal: Proposal,
        laws: Laws,
    ) -> None:  # fmt: skip
        self.session, self.draft, self.verifier, self.sampler = session, draft, verifier, sampler
        self.proposal, self.laws = proposal, laws
        self.steps = torch.zeros_like(sampler.seeds)  # (B,) step of each root
        self.root = torch.zeros_like(sampler.seeds)  # (B,) token ids
        self.draws: Draws | None = None  # of the pass before
        self.moved: int | None = None  # how far all roots have come since, if it is the same for all

    def begin(self) -> Tensor:
        """Draw the first tokens from what the prompts said; what the host reads of it (B, 1 or 3)."""
        logits = self.session.first.logits
        self.steps.fill_(self.sampler.layout.start)
        draws = self.sampler.draws(self.steps - 1, 1)
        columns = draws.choose(logits, torch.ones_like(draws.steps))
        self.root.copy_(self.sampler.layout.tokens(columns)[:, 0])
        self.draws, self.moved = draws, 1
        if self.laws == "skip":
            return self.root[:, None]
        return torch.cat([self.root[:, None].double(), laws_of(logits, torch.zeros_like(columns), draws)], dim=1)

    def advance(self, wanted: Sequence[TreePlan], places: Sequence[int]) -> tuple[list[TreePlan], list[News]]:
        """Make one pass. `wanted` are the policy's plans, `places` the steps of the roots; finished images rest.

        Returns the plans of the trees that were grown, and what came of them.
        """
        plans = self.cut(wanted, places)
        live = [place < self.sampler.layout.stop - 1 for place in places]
        plan = envelope([p for p, alive in zip(plans, live, strict=True) if alive])
        limits = None if all(p == plan for p in plans) else Limits.of(plans, self.steps.device)
        self.draws = self.sampler.draws(self.steps, plan.depth + 1, self.draws, self.moved)
        judged = self.judge(plan, limits, self.draws)
        if plan.floor:
            plans = grown(judged.tree, plans)
        news = unpacked(judged.packed.tolist(), self.laws)
        counts = tuple(len(new.tokens) if alive else 0 for new, alive in zip(news, live, strict=True))
        self.settle(replace(judged, verdict=judged.verdict.narrow(max(counts) - 1)), counts)
        self.moved = counts[0] if len(set(counts)) == 1 else None
        return plans, news

    def cut(self, wanted: Sequence[TreePlan], places: Sequence[int]) -> list[TreePlan]:
        """Plans that do not reach past the last cell."""
        stop = self.sampler.layout.stop
        return [
            plan.cut(stop - 2 - place) if place < stop - 1 else REST
            for plan, place in zip(wanted, places, strict=True)
        ]  # fmt: skip

    def judge(self, plan: TreePlan, limits: Limits | None, draws: Draws, size: int = 1) -> Judged:
        """Draft trees of at least `size` nodes, padding included, and check them in one target pass."""
        request = Request(self.root, self.steps, plan, draws, self.proposal, limits)
        tree = self.draft.draft(request).padded(size)
        output = self.session.run(tree, self.steps)
        verdict = self.verifier.verify(tree, output.logits, draws)
        laws = laws_of(output.logits, verdict.path, draws) if self.laws == "keep" else None
        return Judged(tree, output, verdict, draws, packed(tree, verdict, plan.depth, laws))

    def settle(self, judged: Judged, known: tuple[int, ...]) -> None:
        """Keep what was agreed on. `known` is how much that is, as far as the host knows yet."""
        verdict = judged.verdict
        going = self.steps < self.sampler.layout.stop - 1
        counts = (verdict.length + 1) * going
        outcome = Outcome(judged.tree, verdict, judged.output, judged.draws, counts, known)
        self.session.commit(outcome)
        self.draft.commit(outcome)
        self.move(verdict.next_token, counts)

    def move(self, root: Tensor, counts: Tensor) -> None:
        """The roots of the next trees."""
        self.root, self.steps = root, self.steps + counts


def laws_of(logits: Tensor, path: Tensor, draws: Draws) -> Tensor:
    """Entropies, then top-1 chances, of the laws at the nodes of a path: (B, N, K), (B, D) -> (B, 2 D) float64."""
    index = path[:, : draws.steps.shape[1]]
    nodes = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    depths = torch.arange(1, index.shape[1] + 1, device=path.device).expand_as(index)
    chances = draws.scaled(nodes, depths).double().softmax(-1)
    return torch.cat([torch.special.entr(chances).sum(-1), chances.amax(-1)], dim=1)


def packed(tree: DraftTree, verdict: Verdict, depth: int, laws: Tensor | None) -> Tensor:
    """How far each image came, its new tokens, their ranks and, if given, their laws: one row an image."""
    below = verdict.path[:, 1 : depth + 1]
    order = torch.arange(below.shape[1] + 1, device=below.device)
    drafted = functional.pad(tree.tokens.gather(1, below), (0, 1))
    tokens = torch.where(order == verdict.length[:, None], verdict.next_token[:, None], drafted)
    row = torch.cat([verdict.length[:, None], tokens, tree.ranks.gather(1, below)], dim=1)
    return row if laws is None else torch.cat([row.double(), laws], dim=1)  # float64 holds every token id


def unpacked(rows: list[list[float]], laws: Laws) -> list[News]:
    """`packed` on the host."""
    news = []
    for length, *row in rows:
        count = int(length) + 1
        reach = (len(row) - 1) // 2 if laws == "skip" else (len(row) - 3) // 4
        new, ranks = row[:count], row[reach + 1 : reach + count]
        rest = row[2 * reach + 1 :]
        known = zip(rest[:count], rest[reach + 1 : reach + 1 + count], strict=True)
        news.append(News(tuple(map(int, new)), tuple(map(int, ranks)), tuple(Law(*pair) for pair in known)))
    return news


def grown(tree: DraftTree, plans: list[TreePlan]) -> list[TreePlan]:
    """The plans with the sizes that trees with a floor have really come to, for the record."""
    depths, nodes = tree.depths.amax(1).tolist(), (tree.depths >= 0).sum(1).tolist()
    return [
        replace(plan, depth=depth, nodes=count) if plan.floor else plan
        for plan, depth, count in zip(plans, depths, nodes, strict=True)
    ]
