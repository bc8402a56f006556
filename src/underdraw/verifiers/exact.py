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
from underdraw.verifiers.trail import Trail


@dataclass(frozen=True, slots=True)
class Exact:
    """Accept iff equal."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk", "sampled")

    def verify(self, tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
        """logits (B, N, K) of every node. A CPU looks at those on the path alone, a device at all of them at once."""
        layout = draws.sampler.layout
        if logits.device.type != "cpu":
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
    trail = Trail(tree)
    index = torch.arange(tree.size, device=tree.tokens.device)
    parents = torch.where(tree.depths > 0, tree.parents, -1)
    token = choose(trail.node, 1)
    for depth in range(1, reach):
        hit = (parents == trail.node[:, None]) & (tree.tokens == token[:, None])
        child = (hit * index).amax(1)  # 0, the root, is nobody's child
        trail.step(child, child > 0)
        if trail.ended():
            break
        token = torch.where(trail.walking, choose(trail.node, depth + 1), token)
    return trail.verdict(token)


def agree_at_once(tree: DraftTree, reach: int, chosen: Tensor) -> Verdict:
    """`agree` with the target's choice at every node (B, N) known: a node is kept if it and all above it are chosen."""
    wanted = chosen.gather(1, tree.parents.clamp(min=0))
    wrong = ((tree.tokens != wanted) & (tree.depths != 0)) | (tree.depths < 0)  # (B, N)
    kept = ~(tree.ancestors & wrong[:, None]).any(-1)  # (B, N) at most one of each depth
    index, level = (torch.arange(count, device=chosen.device) for count in (tree.size, reach))
    path = ((kept[:, None] & (tree.depths[:, None] == level[:, None])) * index).amax(-1)  # (B, reach)
    length = kept.sum(1) - 1
    return Verdict(path, length, chosen.gather(1, path.gather(1, length[:, None]))[:, 0])
