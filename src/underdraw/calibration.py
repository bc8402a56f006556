"""The chance that the target will choose a drafted child, told from the scores that the child was drafted with.

Under shared noise a child with a small q can be nearly certain, because the noise that made it a child will make the
target choose it, and a child with a large q can be hopeless. What tells them apart is how far a child's perturbed
score lies behind the best one, and its rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.constants import constant


@dataclass(frozen=True, slots=True)
class Calibration:
    """The chance of child r is proportional to exp(bias_r - gap_r * slope), that of no child at all to `miss`.

    gap_r is how far the child's perturbed score lies behind the best sibling's. If draft and target differed by
    independent Gumbel errors of scale 1 / slope on every logit this would be exact with zero biases; the biases (the
    last one for all further ranks) and `miss` are what fitting adds.
    """

    slope: float = 1.0
    biases: tuple[float, ...] = (0.0,)
    miss: float = 0.05

    def log_chance(self, scores: Tensor, *, forcing: bool = True) -> Tensor:
        """Best scores of a node in descending order (..., k) -> log chance of each; -inf stays -inf.

        Where the layout is `forcing` tokens, a node with one possible child is not a guess.
        """
        count, device = scores.shape[-1], scores.device
        biases = constant((self.biases + self.biases[-1:] * count)[:count], scores.dtype, device)
        weight = torch.add(biases, scores - scores[..., :1], alpha=self.slope)
        none = constant((math.log(self.miss) if self.miss > 0 else -math.inf,), scores.dtype, device)
        none = none.expand(*scores.shape[:-1], 1)
        if forcing and count > 1:
            none = none.masked_fill(scores[..., 1:2] == -torch.inf, -torch.inf)
        # It is never above 0: rounding does not put a child before its parent.
        return torch.cat([weight, none], dim=-1).log_softmax(-1)[..., :count]

    @classmethod
    def fit(cls, scores: Tensor, ranks: Tensor, steps: int = 200) -> Calibration:
        """The most likely calibration for nodes with best scores (M, k) whose target chose rank (M,); k for none."""
        count = scores.shape[1]
        gap = (scores[:, :1] - scores).clamp(max=50).double()
        values = torch.zeros(count + 1, dtype=torch.float64, requires_grad=True)  # log slope, biases 1.., log miss
        optimizer = torch.optim.LBFGS([values], max_iter=steps, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimizer.zero_grad()
            biases = torch.cat([values.new_zeros(1), values[1:count]])
            weight = torch.cat([biases - gap * values[0].exp(), values[count:].expand(len(gap), 1) - 3], dim=1)
            value = torch.nn.functional.cross_entropy(weight, ranks)
            value = value + 1e-4 * values.square().sum()  # keeps ranks that never occur finite
            value.backward()
            return value

        with torch.enable_grad():
            optimizer.step(loss)
        found = values.detach()
        biases = (0.0, *(round(v, 4) for v in found[1:count].tolist()))
        return cls(round(float(found[0].exp()), 4), biases, round(float((found[count] - 3).exp()), 6))
