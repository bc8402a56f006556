"""The exact verifier: walk from the root to the child that carries the target's own choice; stop at the first miss.

The target's choice at a node is what plain autoregression draws there with the same seed, so the output is that of
plain autoregression, for every drafter and tree, greedy and sampling alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from underdraw.sampling import Draws, first_best
from underdraw.tree import DraftTree, Proposal, Verdict
from underdraw.verifiers.trail import Trail, follow


@dataclass(frozen=True, slots=True)
class Exact:
    """Accept iff equal."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk", "sampled")

    def verify(self, tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
        """logits (B, N, K) of every node. A CPU looks at those on the path alone, a device at all of them at once."""
        layout = draws.sampler.layout
        if Trail.at_once(logits):
            return agree_at_once(tree, draws.steps.shape[1], layout.tokens(draws.choose(logits, tree.depths + 1)))
        rows = torch.arange(logits.shape[0], device=logits.device)

        def choose(node: Tensor, depth: int) -> Tensor:
            scores = draws.level_scores(logits[rows, node, None], depth)  # (B, 1, columns)
            return layout.tokens(first_best(scores)[:, 0])

        return agree(tree, draws.steps.shape[1], choose)


def agree(tree: DraftTree, reach: int, choose: Callable[[Tensor, int], Tensor]) -> Verdict:
    """Walk down while a child carries the target's choice.

    `choose` gives the token (B,) of depth `depth` that the target chooses at a node (B,); `reach` is the deepest.
    """
    trail = Trail(tree, tree.tokens)
    token = choose(trail.node, 1)
    for depth in range(1, reach):
        trail.step(token)
        if trail.ended():
            break
        token = torch.where(trail.walking, choose(trail.node, depth + 1), token)
    return Verdict(*trail.path(), token)


def agree_at_once(tree: DraftTree, reach: int, chosen: Tensor) -> Verdict:
    """`agree` with the target's choice at every node (B, N) known."""
    path, length = follow(tree, reach, tree.tokens, chosen)
    return Verdict(path, length, chosen.gather(1, path.gather(1, length[:, None]))[:, 0], chosen)
