"""Acceptance probabilities of candidate tokens, corrected while decoding by which candidates the target chose.

The prior depends on the depth in the tree and on the gaps: how far the score of each candidate is behind the best one.
It was fitted to the embedded model at temperatures 0.5 and 1. Other models differ, so the observed choices correct it:
the probability of a rank is multiplied by observed / expected, counted by the gap from the first candidate to the next.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from underdraw.constants import arange_cached, constant

MAX_RANKS = 8
# Log weight of rank r at depth d: RANK_BIAS[r] - GAP_SLOPE[d] * log(1 + 4 * gap). Of "none of the candidates": NONE[d].
_RANK_BIAS = (0.0, -0.47, -0.95, -1.17, -1.59, -1.83, -1.87, -2.08)
_GAP_SLOPE = (0.49, 0.7, 0.92, 1.19)  # depths 1, 2, 3, and all deeper ones
_NONE = (-1.0, -2.28, -3.07, -3.61)
_GAP_EDGES = (0.25, 0.75, 1.5, 3.0, 6.0, 1e20)  # of the buckets; in the last one there is no second candidate
_PRIOR_COUNT = 8.0  # observations that the prior is worth, per bucket and rank


@functools.cache  # unbounded: CUDA graphs keep reading these tensors
def _prior_tables(depth: int, ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Biases (D + 1, k + 1) and negative slopes (D + 1, 1) of depths 0 to D; the root, of depth 0, is certain."""
    rows = [[0.0] + [-math.inf] * ranks]
    for d in range(depth):
        rows.append([*_RANK_BIAS[:ranks], _NONE[min(d, len(_NONE) - 1)]])
    slopes = [-1.0] + [-_GAP_SLOPE[min(d, len(_GAP_SLOPE) - 1)] for d in range(depth)]
    return torch.tensor(rows, device=device), torch.tensor(slopes, device=device)[:, None]


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
        """The bucket (B, D + 1) of candidates by the gap from the best to the second: gaps (B, D + 1, k + 1)."""
        return torch.bucketize(gaps[..., 1].contiguous(), constant(_GAP_EDGES, torch.float32, gaps.device))

    def prior(self, gaps: Tensor, is_forced: Tensor | None = None) -> Tensor:
        """Prior log weights (B, D + 1, k + 1) of the candidates of depths 0 to D, the last for none of them.

        `gaps` (B, D + 1, k + 1) are 0 for the best candidate and for "none", and inf where there is no candidate. At
        steps that are `is_forced` (B, D + 1) the first candidate is certain.
        """
        bias, slope = _prior_tables(gaps.shape[1] - 1, self.ranks, gaps.device)
        prior = torch.addcmul(bias, slope, torch.log1p(4 * gaps))
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
