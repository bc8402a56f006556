"""Acceptance probabilities of drafted children, estimated from their scores.

With shared Gumbel noise the drafter's probability q says little: a child with a small q can be nearly certain, because
the noise that lifted it into the tree lifts it in the target too. What predicts acceptance is how far a child's
perturbed score lies behind the best one, and its rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.constants import constant
from underdraw.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Calibration:
    """P(child of rank r is accepted) is proportional to exp(bias_r - slope * gap_r), P(no child is) to `miss`.

    gap_r is the distance of the child's perturbed score to the best sibling's. If the logits of draft and target
    differed by independent Gumbel errors of scale 1 / slope, this would be exact with zero biases; the biases (the last
    one holds for all further ranks) and `miss` are fitted on top.
    """

    slope: float = 1.0
    biases: tuple[float, ...] = (0.0,)
    miss: float = 0.05

    def __post_init__(self) -> None:
        values = (self.slope, *self.biases, self.miss)
        if not self.biases or not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
            raise ConfigError(f"{self} has values that are not finite numbers; fit it again.")
        if self.slope < 0 or self.miss < 0:
            raise ConfigError(f"{self} has a negative slope or miss; fit it again.")

    def log_acceptance_probability(self, scores: Tensor, *, has_forced_tokens: bool = True) -> Tensor:
        """(..., k) scores of a node's best children, descending -> (..., k); a score of -inf stays -inf.

        In a layout with forced tokens, a node with only one possible child has it accepted for certain.
        """
        count, device = scores.shape[-1], scores.device
        biases = constant((self.biases + self.biases[-1:] * count)[:count], scores.dtype, device)
        weights = torch.add(biases, scores - scores[..., :1], alpha=self.slope)
        miss = constant((math.log(self.miss) if self.miss > 0 else -math.inf,), scores.dtype, device)
        miss = miss.expand(*scores.shape[:-1], 1)
        if has_forced_tokens and count > 1:
            miss = miss.masked_fill(scores[..., 1:2] == -torch.inf, -torch.inf)
        # log_softmax is never above 0, so rounding cannot rank a child before its parent.
        return torch.cat([weights, miss], dim=-1).log_softmax(-1)[..., :count]

    @classmethod
    def fit(cls, scores: Tensor, ranks: Tensor, steps: int = 200) -> Calibration:
        """Maximum likelihood fit to M nodes: their best scores (M, k), and the accepted rank (M,), k for none."""
        count = scores.shape[1]
        gaps = (scores[:, :1] - scores).clamp(max=50).double()
        # log slope; biases of ranks 1, 2, ...; log miss + 3, so that the start is near a usual value
        params = torch.zeros(count + 1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([params], max_iter=steps, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            biases = torch.cat([params.new_zeros(1), params[1:count]])
            weights = torch.cat([biases - gaps * params[0].exp(), params[count:].expand(len(gaps), 1) - 3], dim=1)
            value = torch.nn.functional.cross_entropy(weights, ranks)
            value = value + 1e-4 * params.square().sum()  # keeps the biases of ranks that never occur finite
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        fitted = params.detach()
        biases = (0.0, *(round(v, 4) for v in fitted[1:count].tolist()))
        return cls(round(float(fitted[0].exp()), 4), biases, round(float((fitted[count] - 3).exp()), 6))
