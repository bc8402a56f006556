"""Acceptance probabilities of candidate tokens, corrected while decoding by which candidates the target chose.

The prior depends on the depth in the tree, on the gaps (how far the score of each candidate is behind the best one), on
for how many passes the first candidate of the step has stayed the same, and on whether that of the step before has just
changed: then the candidates were computed in a wrong context. It was fitted to the embedded model at temperatures 0.5
and 1. Other models differ, so that observed choices correct it: the probability of a rank is multiplied by observed /
expected, counted by the number of passes.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from underdraw.constants import arange_cached

MAX_RANKS = 8
# Log weights. Rank 0: 0. Rank r: RANK[r] + STAYS[passes] + CHANGED - GAP_SLOPE[depth] * log(1 + 4 * gap). None of the
# candidates: NONE[depth] + NONE_STAYS[passes] + NONE_CHANGED.
_RANK = (0.0, -0.15, -0.52, -0.82, -1.19, -1.25, -1.44, -1.85)
_GAP_SLOPE = (0.74, 0.79, 1.01, 1.2)  # depths 1, 2, 3, and all deeper ones
_NONE = (-2.71, -2.74, -3.59, -4.18)
_STAYS = (0.12, 0.0, -0.78, -1.24, -1.64, -2.09)  # 0: never verified, 1: has just changed, ..., 5 or more passes
_NONE_STAYS = (0.33, 0.0, -1.37, -2.16, -2.47, -3.55)
_CHANGED, _NONE_CHANGED = 1.27, 2.62  # if the first candidate of the step before has just changed
_PRIOR_COUNT = 8.0  # observations that the prior is worth, per bucket and rank


@functools.cache  # unbounded: CUDA graphs keep reading these tensors
def _depth_tables(depth: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Weights (D + 1, k + 1) and negative slopes (D + 1, 1) of depths 0 to D; the root, of depth 0, is certain."""
    rows = [[0.0] + [-math.inf] * ranks]
    for d in range(depth):
        rows.append([*_RANK[:ranks], _NONE[min(d, len(_NONE) - 1)]])
    slopes = [-1.0] + [-_GAP_SLOPE[min(d, len(_GAP_SLOPE) - 1)] for d in range(depth)]
    return torch.tensor(rows, device=device), torch.tensor(slopes, device=device)[:, None]


@functools.cache
def _stability_table(ranks: int, device: torch.device) -> Tensor:
    """Weights (2 * buckets, k + 1) by bucket and by whether the step before has just changed."""
    rows = [
        [0.0] + [rank + changed * _CHANGED] * (ranks - 1) + [none + changed * _NONE_CHANGED]
        for rank, none in zip(_STAYS, _NONE_STAYS, strict=True)
        for changed in (0, 1)
    ]
    return torch.tensor(rows, device=device)


class OnlineCalibration:
    """Counts of which rank the target chose, shared by a batch, in a tensor that is never reallocated."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        self.ranks = ranks
        # Observed and expected choices by bucket: (buckets, 2, ranks + 1); the last column is "none of the candidates".
        self.counts = torch.zeros(len(_STAYS), 2, ranks + 1, device=device)

    def restart(self) -> None:
        """Forget what was observed."""
        self.counts.zero_()

    def merge(self, other: OnlineCalibration) -> None:
        """Take over what another calibration has observed where that is more: counts of earlier images of a batch."""
        self.counts.copy_(torch.maximum(self.counts, other.counts))

    def buckets(self, stays: Tensor) -> Tensor:
        """The buckets of candidates by the number of passes for which the first one has stayed; 0 if never verified."""
        return stays.clamp(max=len(_STAYS) - 1)

    def prior(self, gaps: Tensor, buckets: Tensor, is_forced: Tensor | None = None) -> Tensor:
        """Prior log weights (B, D + 1, k + 1) of the candidates of depths 0 to D, the last for none of them.

        `gaps` (B, D + 1, k + 1) are 0 for the best candidate and for "none", and inf where there is no candidate. At
        steps that are `is_forced` (B, D + 1) the first candidate is certain.
        """
        weights, slopes = _depth_tables(gaps.shape[1] - 1, self.ranks, gaps.device)
        has_changed = (buckets == 1).roll(1, dims=1)  # of the step before; the root has none, but is certain
        stability = _stability_table(self.ranks, gaps.device)[torch.add(has_changed, buckets, alpha=2)]
        prior = torch.addcmul(weights + stability, slopes, torch.log1p(4 * gaps))
        if is_forced is not None:
            prior[..., 1:].masked_fill_(is_forced[..., None], -torch.inf)
        return prior

    def log_probs(self, prior: Tensor, buckets: Tensor) -> Tensor:
        """Log acceptance probabilities by `prior` and what was observed: (B, D + 1, k + 1)."""
        observed, expected = (self.counts + _PRIOR_COUNT).unbind(1)
        return (prior + (observed / expected).log()[buckets]).log_softmax(-1)

    def observe(self, prior: Tensor, buckets: Tensor, is_chosen: Tensor, is_observed: Tensor) -> None:
        """Count choices: `is_chosen` (B, D, k) marks at most one candidate, `is_observed` (B, D) the depths that count.

        One matrix product instead of atomic additions, so that runs are reproducible.
        """
        outcome = torch.cat([is_chosen, ~is_chosen.any(-1, keepdim=True)], dim=-1)
        rows = torch.cat([outcome, prior.softmax(-1)], dim=-1).flatten(0, 1)  # (B * D, 2 * (k + 1))
        order = arange_cached(self.counts.shape[0], buckets.device)
        is_member = (buckets.flatten() == order[:, None]) & is_observed.flatten()  # (buckets, B * D)
        self.counts.flatten(1).addmm_(is_member.float(), rows)
