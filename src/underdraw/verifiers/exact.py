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

from underdraw.sampling import NoiseWindow, argmax_first
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.tree_walk import TreeWalk, follow


@dataclass(frozen=True, slots=True)
class Exact:
    """Accept iff equal."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk", "sampled")

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        """logits (B, N, K) of every node. A CPU looks at those on the path alone, a device at all of them at once."""
        layout = noise_window.sampler.layout
        if TreeWalk.at_once(logits):
            return agree_at_once(
                tree, noise_window.steps.shape[1], layout.token_ids(noise_window.choose(logits, tree.depths + 1))
            )
        rows = torch.arange(logits.shape[0], device=logits.device)

        def choose(node: Tensor, depth: int) -> Tensor:
            scores = noise_window.level_scores(logits[rows, node, None], depth)  # (B, 1, columns)
            return layout.token_ids(argmax_first(scores)[:, 0])

        return agree(tree, noise_window.steps.shape[1], choose)


def agree(tree: DraftTree, reach: int, choose: Callable[[Tensor, int], Tensor]) -> AcceptedPath:
    """Walk down while a child carries the target's choice.

    `choose` gives the token (B,) of depth `depth` that the target chooses at a node (B,); `reach` is the deepest.
    """
    trail = TreeWalk(tree, tree.tokens)
    token = choose(trail.node, 1)
    for depth in range(1, reach):
        trail.step(token)
        if trail.ended():
            break
        token = torch.where(trail.walking, choose(trail.node, depth + 1), token)
    return AcceptedPath(*trail.path(), token)


def agree_at_once(tree: DraftTree, reach: int, chosen: Tensor) -> AcceptedPath:
    """`agree` with the target's choice at every node (B, N) known."""
    path, length = follow(tree, reach, tree.tokens, chosen)
    return AcceptedPath(path, length, chosen.gather(1, path.gather(1, length[:, None]))[:, 0], chosen)
