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

from underdraw.history import TokenStats
from underdraw.plan import TreePlan
from underdraw.protocols import DrafterSession, DraftRequest, TargetOutput, TargetSession, VerifiedStep, Verifier
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal, TreeLimits, covering_plan

TokenStatsMode = Literal["skip", "keep"]
"""Whether entropy and top-1 chance of the target's law at every cell are noted."""
REST = TreePlan(0, 1, 1, 1)  # of an image that is finished


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """What the host learns of one image's pass."""

    tokens: tuple[int, ...]
    ranks: tuple[int, ...]
    token_stats: tuple[TokenStats, ...]


@dataclass(frozen=True, slots=True)
class Judged:
    """A tree, what the target said of it and how far they agree."""

    tree: DraftTree
    output: TargetOutput
    accepted_path: AcceptedPath
    noise_window: NoiseWindow
    packed: Tensor  # (B, ...) what the host reads


class StepRunner:
    """B images in the making."""

    def __init__(
        self, session: TargetSession, draft: DrafterSession, verifier: Verifier, sampler: Sampler, proposal: Proposal,
        token_stats: TokenStatsMode,
    ) -> None:  # fmt: skip
        self.session, self.draft, self.verifier, self.sampler = session, draft, verifier, sampler
        self.proposal, self.token_stats = proposal, token_stats
        self.steps = torch.zeros_like(sampler.seeds)  # (B,) step of each root
        self.root = torch.zeros_like(sampler.seeds)  # (B,) token ids
        self.noise_window: NoiseWindow | None = None  # of the pass before
        self.moved: int | None = None  # how far all roots have come since, if it is the same for all

    def sample_first(self) -> Tensor:
        """Draw the first tokens from what the prompts said; what the host reads of it (B, 1 or 3)."""
        logits = self.session.prefill.logits
        self.steps.fill_(self.sampler.layout.start)
        noise_window = self.sampler.noise_window(self.steps - 1, 1)
        columns = noise_window.choose(logits, torch.ones_like(noise_window.steps))
        self.root.copy_(self.sampler.layout.token_ids(columns)[:, 0])
        self.noise_window, self.moved = noise_window, 1
        if self.token_stats == "skip":
            return self.root[:, None]
        return torch.cat(
            [self.root[:, None].double(), token_stats_of(logits, torch.zeros_like(columns), noise_window)], dim=1
        )

    def step(self, wanted: Sequence[TreePlan], places: Sequence[int]) -> tuple[list[TreePlan], list[AcceptedTokens]]:
        """Make one pass. `wanted` are the policy's plans, `places` the steps of the roots; finished images rest.

        Returns the plans of the trees that were grown_plans, and what came of them.
        """
        plans = self.truncate_plans(wanted, places)
        live = [place < self.sampler.layout.stop - 1 for place in places]
        plan = covering_plan([p for p, alive in zip(plans, live, strict=True) if alive])
        limits = None if all(p == plan for p in plans) else TreeLimits.of(plans, self.steps.device)
        self.noise_window = self.sampler.noise_window(self.steps, plan.depth + 1, self.noise_window, self.moved)
        judged = self.draft_and_verify(plan, limits, self.noise_window)
        if plan.min_probability:
            plans = grown_plans(judged.tree, plans)
        news = unpack_from_host(judged.packed.tolist(), self.token_stats)
        counts = tuple(len(new.tokens) if alive else 0 for new, alive in zip(news, live, strict=True))
        self.commit(replace(judged, accepted_path=judged.accepted_path.narrow(max(counts) - 1)), counts)
        self.moved = counts[0] if len(set(counts)) == 1 else None
        return plans, news

    def truncate_plans(self, wanted: Sequence[TreePlan], places: Sequence[int]) -> list[TreePlan]:
        """Plans that do not reach past the last cell."""
        stop = self.sampler.layout.stop
        return [
            plan.truncate(stop - 2 - place) if place < stop - 1 else REST
            for plan, place in zip(wanted, places, strict=True)
        ]  # fmt: skip

    def draft_and_verify(
        self, plan: TreePlan, limits: TreeLimits | None, noise_window: NoiseWindow, size: int = 1
    ) -> Judged:
        """Draft trees of at least `size` nodes, padding included, and check them in one target pass."""
        request = DraftRequest(self.root, self.steps, plan, noise_window, self.proposal, limits)
        tree = self.draft.draft(request).padded(size)
        output = self.session.forward(tree, self.steps)
        accepted_path = self.verifier.verify(tree, output.logits, noise_window)
        token_stats = (
            token_stats_of(output.logits, accepted_path.path, noise_window) if self.token_stats == "keep" else None
        )
        return Judged(
            tree, output, accepted_path, noise_window, pack_for_host(tree, accepted_path, plan.depth, token_stats)
        )

    def commit(self, judged: Judged, host_counts: tuple[int, ...]) -> None:
        """Keep what was agreed on. `known` is how much that is, as far as the host knows yet."""
        accepted_path = judged.accepted_path
        going = self.steps < self.sampler.layout.stop - 1
        counts = (accepted_path.length + 1) * going
        verified = VerifiedStep(judged.tree, accepted_path, judged.output, judged.noise_window, counts, host_counts)
        self.session.commit(verified)
        self.draft.commit(verified)
        self.advance_roots(accepted_path.next_token, counts)

    def advance_roots(self, root: Tensor, counts: Tensor) -> None:
        """The roots of the next trees."""
        self.root, self.steps = root, self.steps + counts


def token_stats_of(logits: Tensor, path: Tensor, noise_window: NoiseWindow) -> Tensor:
    """Entropies, then top-1 chances, of the laws at the nodes of a path: (B, N, K), (B, D) -> (B, 2 D) float64."""
    index = path[:, : noise_window.steps.shape[1]]
    nodes = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    depths = torch.arange(1, index.shape[1] + 1, device=path.device).expand_as(index)
    chances = noise_window.scaled(nodes, depths).double().softmax(-1)
    return torch.cat([torch.special.entr(chances).sum(-1), chances.amax(-1)], dim=1)


def pack_for_host(tree: DraftTree, accepted_path: AcceptedPath, depth: int, token_stats: Tensor | None) -> Tensor:
    """How far each image came, its new tokens, their ranks and, if given, their laws: one row an image."""
    below = accepted_path.path[:, 1 : depth + 1]
    order = torch.arange(below.shape[1] + 1, device=below.device)
    drafted = functional.pad(tree.tokens.gather(1, below), (0, 1))
    tokens = torch.where(order == accepted_path.length[:, None], accepted_path.next_token[:, None], drafted)
    row = torch.cat([accepted_path.length[:, None], tokens, tree.ranks.gather(1, below)], dim=1)
    return row if token_stats is None else torch.cat([row.double(), token_stats], dim=1)  # float64 holds every token id


def unpack_from_host(rows: list[list[float]], token_stats: TokenStatsMode) -> list[AcceptedTokens]:
    """`packed` on the host."""
    news = []
    for length, *row in rows:
        count = int(length) + 1
        reach = (len(row) - 1) // 2 if token_stats == "skip" else (len(row) - 3) // 4
        new, ranks = row[:count], row[reach + 1 : reach + count]
        rest = row[2 * reach + 1 :]
        known = zip(rest[:count], rest[reach + 1 : reach + 1 + count], strict=True)
        news.append(
            AcceptedTokens(tuple(map(int, new)), tuple(map(int, ranks)), tuple(TokenStats(*pair) for pair in known))
        )
    return news


def grown_plans(tree: DraftTree, plans: list[TreePlan]) -> list[TreePlan]:
    """The plans with the sizes that trees with a min_probability have really come to, for the record."""
    depths, nodes = tree.depths.amax(1).tolist(), (tree.depths >= 0).sum(1).tolist()
    return [
        replace(plan, depth=depth, nodes=count) if plan.min_probability else plan
        for plan, depth, count in zip(plans, depths, nodes, strict=True)
    ]
