"""StepRunner: one pass on the device, from the tree plans of B images to the small tensor that the host reads.

The host reads that tensor once per pass and waits for the device nowhere else. So the same code runs eagerly, or is
captured as a CUDA graph and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.constants import arange_cached
from underdraw.history import TokenStats
from underdraw.plan import TreePlan, covering_plan
from underdraw.protocols import DrafterSession, DraftRequest, SlotSession, TargetSession, VerifiedStep, Verifier
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import DraftTree, Proposal, TreeLimits

TokenStatsMode = Literal["skip", "keep"]
"""Whether entropy and top-1 probability of the target's distribution are recorded for every token."""
IDLE_PLAN = TreePlan(0, 1, 1, 1)  # of an image that is finished


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """What one pass added to one image, on the host."""

    tokens: tuple[int, ...]  # accepted tokens, then the target's next token
    ranks: tuple[int, ...]  # of each accepted token among its siblings
    token_stats: tuple[TokenStats, ...]  # of `tokens`, if they are recorded


class StepRunner:
    """Runs the passes of B images eagerly."""

    def __init__(
        self,
        session: TargetSession,
        draft: DrafterSession,
        verifier: Verifier,
        sampler: Sampler,
        proposal: Proposal,
        token_stats: TokenStatsMode,
    ) -> None:
        self.session, self.draft, self.verifier, self.sampler = session, draft, verifier, sampler
        self.proposal, self.token_stats = proposal, token_stats
        self.steps = torch.zeros_like(sampler.seeds)  # (B,) step of each root
        self.root = torch.zeros_like(sampler.seeds)  # (B,) token id of each root
        self._noise_window: NoiseWindow | None = None  # of the previous pass
        self._advance: int | None = None  # steps from the previous roots to these, if it is the same for all images

    def sample_first(self) -> Tensor:
        """Sample the first tokens from the prefill's logits: (B, 1) token ids, with token stats (B, 3)."""
        logits = self.session.prefill.logits
        self.steps.fill_(self.sampler.layout.start)
        noise_window = self.sampler.noise_window(self.steps - 1, 1)
        chosen = noise_window.sample(logits, torch.ones_like(noise_window.steps))
        self.root.copy_(self.sampler.layout.token_ids(chosen)[:, 0])
        self._noise_window, self._advance = noise_window, 1
        if self.token_stats == "skip":
            return self.root[:, None]
        stats = compute_token_stats(logits, torch.zeros_like(chosen), noise_window)
        return torch.cat([self.root[:, None].double(), stats], dim=1)

    def copy_slots(self, source: StepRunner, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite images `slots` by images `source_slots` of another runner of the same parts, between passes."""
        for mine, theirs in (
            (self.session, source.session),
            (self.draft, source.draft),
            (self.sampler, source.sampler),
        ):
            assert isinstance(mine, SlotSession)
            mine.copy_slots(theirs, source_slots, slots)
        self.root[list(slots)] = source.root[list(source_slots)]
        self.steps[list(slots)] = source.steps[list(source_slots)]
        self._noise_window = None

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Make images idle: they have no tokens left to sample. Their trees still need a valid root."""
        stops = self.sampler.layout.host_stops(len(self.steps))
        self.steps[list(slots)] = torch.tensor([stops[slot] - 1 for slot in slots], device=self.steps.device)
        self.root[list(slots)] = self.sampler.layout.codes.start

    def step(
        self, requested_plans: Sequence[TreePlan], root_steps: Sequence[int]
    ) -> tuple[list[TreePlan], list[AcceptedTokens]]:
        """Run one pass; `root_steps` are the steps of the roots on the host.

        Returns the plans of the trees that were grown, and what was accepted of them.
        """
        plans = self.truncate_plans(requested_plans, root_steps)
        active = self.active_images(root_steps)
        plan = covering_plan([p for p, is_active in zip(plans, active, strict=True) if is_active])
        limits = None if all(p == plan for p in plans) else TreeLimits.from_plans(plans, self.steps.device)
        noise_window = self.sampler.noise_window(self.steps, plan.depth + 1, self._noise_window, self._advance)
        verified = self.draft_and_verify(plan, limits, noise_window)
        if plan.min_probability:
            plans = grown_plans(verified.tree, plans)
        accepted = unpack_from_host(self.pack_for_host(verified, plan.depth).tolist(), self.token_stats)
        counts = tuple(len(a.tokens) if is_active else 0 for a, is_active in zip(accepted, active, strict=True))
        path = verified.accepted_path.narrow(max(counts) - 1)
        self.commit(replace(verified, accepted_path=path, host_counts=counts))
        self._noise_window, self._advance = noise_window, counts[0] if len(set(counts)) == 1 else None
        return plans, accepted

    def active_images(self, root_steps: Sequence[int]) -> list[bool]:
        """Which images have tokens left to sample."""
        stops = self.sampler.layout.host_stops(len(root_steps))
        return [step < stop - 1 for step, stop in zip(root_steps, stops, strict=True)]

    def truncate_plans(self, requested_plans: Sequence[TreePlan], root_steps: Sequence[int]) -> list[TreePlan]:
        """Plans that do not reach past the last cell of the image, or deeper than the target verifies."""
        stops, max_depth = self.sampler.layout.host_stops(len(root_steps)), self.session.max_depth
        return [
            plan.truncate(min(stop - 2 - step, max_depth)) if step < stop - 1 else IDLE_PLAN
            for plan, step, stop in zip(requested_plans, root_steps, stops, strict=True)
        ]

    def draft_and_verify(
        self, plan: TreePlan, limits: TreeLimits | None, noise_window: NoiseWindow, bucket_size: int = 1
    ) -> VerifiedStep:
        """Draft trees, pad them to `bucket_size` nodes, and verify them in one target forward.

        `host_counts` of the result is empty: the host has not read how many tokens were accepted.
        """
        request = DraftRequest(self.root, self.steps, plan, noise_window, self.proposal, limits)
        tree = self.draft.draft(request).padded(bucket_size)
        output = self.session.forward(tree, self.steps)
        accepted_path = self.verifier.verify(tree, output.logits, noise_window)
        is_active = self.steps < self.sampler.layout.stops - 1
        counts = (accepted_path.length + 1) * is_active
        return VerifiedStep(tree, accepted_path, output, noise_window, counts, ())

    def commit(self, verified: VerifiedStep) -> None:
        """Append the accepted tokens to both KV caches and move the roots behind them."""
        self.session.commit(verified)
        self.draft.commit(verified)
        self.advance_roots(verified.accepted_path.next_token, verified.counts)

    def advance_roots(self, root: Tensor, counts: Tensor) -> None:
        """Set the roots of the next trees."""
        self.root, self.steps = root, self.steps + counts

    def pack_for_host(self, verified: VerifiedStep, depth: int) -> Tensor:
        """Number of accepted tokens, new tokens (depth + 1), ranks (depth) and token stats, one row per image."""
        tree, accepted_path = verified.tree, verified.accepted_path
        length, next_token = accepted_path.length[:, None], accepted_path.next_token[:, None]
        if depth == 0:
            row = torch.cat([length, next_token], dim=1)
        else:
            below_root = accepted_path.path[:, 1 : depth + 1]
            index = arange_cached(below_root.shape[1] + 1, below_root.device)
            drafted = functional.pad(tree.tokens.gather(1, below_root), (0, 1))
            tokens = torch.where(index == length, next_token, drafted)
            row = torch.cat([length, tokens, tree.ranks.gather(1, below_root)], dim=1)
        if self.token_stats == "skip":
            return row
        stats = compute_token_stats(verified.output.logits, accepted_path.path, verified.noise_window)
        return torch.cat([row.double(), stats], dim=1)  # float64 represents every token id


def compute_token_stats(logits: Tensor, path: Tensor, noise_window: NoiseWindow) -> Tensor:
    """Entropies, then top-1 probabilities, at the nodes of a path: (B, N, K), (B, D) -> (B, 2 D) float64."""
    index = path[:, : noise_window.steps.shape[1]]
    nodes = logits.gather(1, index[..., None].expand(-1, -1, logits.shape[-1]))
    depths = torch.arange(1, index.shape[1] + 1, device=path.device).expand_as(index)
    probs = noise_window.filtered_logits(nodes, depths).double().softmax(-1)
    return torch.cat([torch.special.entr(probs).sum(-1), probs.amax(-1)], dim=1)


def unpack_from_host(rows: list[list[float]], token_stats: TokenStatsMode) -> list[AcceptedTokens]:
    """What `StepRunner.pack_for_host` packed, as records."""
    if token_stats == "skip":  # length, depth + 1 tokens and depth ranks: whole numbers
        first_rank = len(rows[0]) // 2 + 1
        return [
            AcceptedTokens(tuple(row[1 : length + 2]), tuple(row[first_rank : first_rank + length]), ())
            for row in cast("list[list[int]]", rows)
            for length in row[:1]
        ]
    accepted = []
    for length, *row in rows:
        count = int(length) + 1
        depth = (len(row) - 3) // 4
        tokens, ranks, stats = row[:count], row[depth + 1 : depth + count], row[2 * depth + 1 :]
        pairs = zip(stats[:count], stats[depth + 1 : depth + 1 + count], strict=True)
        accepted.append(
            AcceptedTokens(tuple(map(int, tokens)), tuple(map(int, ranks)), tuple(TokenStats(*pair) for pair in pairs))
        )
    return accepted


def grown_plans(tree: DraftTree, plans: list[TreePlan]) -> list[TreePlan]:
    """The plans with the sizes that trees with a `min_probability` have grown to; the host waits for the device."""
    depths, nodes = tree.depths.amax(1).tolist(), (tree.depths >= 0).sum(1).tolist()
    return [
        replace(plan, depth=depth, nodes=count) if plan.min_probability else plan
        for plan, depth, count in zip(plans, depths, nodes, strict=True)
    ]
