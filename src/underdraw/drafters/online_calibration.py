"""Acceptance probabilities of candidate tokens, corrected while decoding by which candidates the target chose.

The prior depends on the depth in the tree and on the gaps: how far the score of each candidate is behind the best one.
It was fitted to the embedded model at temperatures 0.5 and 1 (docs/experiments.md). Other models differ, so the
observed choices correct it: the probability of a rank is multiplied by observed / expected, counted by the first gap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from underdraw.constants import arange_cached, constant

MAX_RANKS = 8
# Log weight of rank r at depth d: RANK_BIAS[r] - GAP_SLOPE[d] * log(1 + 4 * gap). Of "none of the candidates": NONE[d].
_RANK_BIAS = (0.0, -0.47, -0.95, -1.17, -1.59, -1.83, -1.87, -2.08)
_GAP_SLOPE = (0.49, 0.7, 0.92, 1.19)  # depths 1, 2, 3, and all deeper ones
_NONE = (-1.0, -2.28, -3.07, -3.61)
_GAP_EDGES = (0.25, 0.75, 1.5, 3.0, 6.0, 1e20)  # the last bucket: there is one candidate only
_PRIOR_COUNT = 8.0  # observations that the prior is worth, per bucket and rank


class OnlineCalibration:
    """Counts of which rank the target chose, shared by a batch, in a tensor that is never reallocated."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        # Observed and expected choices by bucket: (buckets, 2, ranks + 1); the last column is "none of the candidates".
        self.counts = torch.zeros(len(_GAP_EDGES) + 1, 2, ranks + 1, device=device)

    def restart(self) -> None:
        """Forget what was observed."""
        self.counts.zero_()

    def gap_buckets(self, gaps: Tensor) -> Tensor:
        """The bucket (B, D) of candidates by the gap from the best to the second: gaps (B, D, k)."""
        if self.ranks == 1:
            return torch.zeros(gaps.shape[:2], dtype=torch.int64, device=gaps.device)
        return torch.bucketize(gaps[..., 1].contiguous(), constant(_GAP_EDGES, torch.float32, gaps.device))

    def prior(self, gaps: Tensor, is_forced: Tensor | None) -> Tensor:
        """Prior log acceptance probabilities (B, D, k + 1) of candidates of depths 1 to D; the last for none of them.

        `gaps` (B, D, k) are 0 for the best candidate and inf where there is none; at steps that are `is_forced` (B, D)
        the first candidate is certain.
        """
        depth, device = gaps.shape[1], gaps.device
        slope, none = (
            constant((table + table[-1:] * depth)[:depth], torch.float32, device)[:, None]
            for table in (_GAP_SLOPE, _NONE)
        )
        bias = constant(_RANK_BIAS[: self.ranks], torch.float32, device)
        weights = bias - slope * torch.log1p(4 * gaps)
        none = none.expand(*gaps.shape[:2], 1)
        if is_forced is not None:
            none = none.masked_fill(is_forced[..., None], -torch.inf)
        return torch.cat([weights, none], dim=-1).log_softmax(-1)

    def correct(self, prior: Tensor, buckets: Tensor) -> Tensor:
        """Log acceptance probabilities by `prior` and what was observed: (B, D, k + 1), (B, D) -> (B, D, k + 1)."""
        observed, expected = (self.counts + _PRIOR_COUNT).unbind(1)
        return (prior + (observed / expected).log()[buckets]).log_softmax(-1)

    def observe(self, prior: Tensor, buckets: Tensor, is_chosen: Tensor, is_observed: Tensor) -> None:
        """Count choices: `is_chosen` (B, D, k) marks at most one candidate, `is_observed` (B, D) the depths that count.

        One matrix product instead of atomic additions, so that runs are reproducible.
        """
        outcome = torch.cat([is_chosen, ~is_chosen.any(-1, keepdim=True)], dim=-1).float()
        rows = torch.cat([outcome, prior.exp()], dim=-1).flatten(0, 1)  # (B * D, 2 * (k + 1))
        order = arange_cached(self.counts.shape[0], buckets.device)
        member = (buckets.flatten() == order[:, None]) & is_observed.flatten()  # (buckets, B * D)
        self.counts.flatten(1).addmm_(member.float(), rows)
