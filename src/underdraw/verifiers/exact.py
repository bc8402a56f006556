"""The exact verifier: walk from the root to the child that carries the target's own choice; stop at the first miss.

The target's choice at a node is what plain autoregression draws there with the same seed, so the output is that of
plain autoregression, for every drafter and tree, greedy and sampling alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from underdraw.sampling import Draws
from underdraw.tree import DraftTree, Proposal, Verdict


@dataclass(frozen=True, slots=True)
class Exact:
    """Accept iff equal."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk", "sampled")

    def verify(self, tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
        """logits (B, N, K) of every node."""
        columns = draws.choose(logits, tree.depths + 1)  # (B, N)
        return agree(tree, draws.sampler.layout.tokens(columns))


def agree(tree: DraftTree, choices: Tensor) -> Verdict:
    """The path of nodes whose tokens are the choices (B, N) made at their parents."""
    hit = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))
    hit &= tree.depths > 0
    hit[:, 0] = True
    on_path = ~(tree.ancestors & ~hit[:, None]).any(-1)  # (B, N): the node and all its ancestors were hit
    return verdict(tree, on_path, choices)


def verdict(tree: DraftTree, on_path: Tensor, choices: Tensor) -> Verdict:
    """The verdict for the nodes (B, N) of one path from the root, given what the target chose at each node."""
    batch, size = on_path.shape
    length = on_path.sum(-1) - 1
    index = torch.arange(size, device=on_path.device).expand(batch, size)
    # Nodes off the path write into a place that is cut off again.
    place = torch.where(on_path, tree.depths, size)
    path = torch.zeros(batch, size + 1, dtype=torch.int64, device=on_path.device).scatter_(1, place, index)
    last = path.gather(1, length[:, None])
    return Verdict(path[:, :size] * (index <= length[:, None]), length, choices.gather(1, last)[:, 0], choices)
