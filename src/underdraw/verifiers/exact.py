"""The exact verifier: accept the child with the token that the target samples itself, stop where there is none.

The target samples at a node what plain autoregressive decoding samples there with the same seed. So the output is
that of plain decoding, for every drafter and tree, greedy or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from underdraw.constants import arange_cached
from underdraw.sampling import NoiseWindow, argmax_first
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.tree_walk import TreeWalk, follow_choices


@dataclass(frozen=True, slots=True)
class Exact:
    """Accepts a draft token if and only if it equals the target's sample."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk", "sampled")

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        """logits (B, N, K). A CPU samples only at the nodes of the path, a device at all nodes in one go."""
        layout, reach = noise_window.sampler.layout, noise_window.steps.shape[1]
        if TreeWalk.uses_all_nodes(logits):
            if tree.size == 1:  # plain decoding: nothing to match
                token = layout.token_ids(argmax_first(noise_window.level_scores(logits, 1)))  # (B, 1)
                root = arange_cached(1, token.device).expand_as(token)
                return AcceptedPath(root, root[:, 0], token[:, 0], token)
            return match_all_nodes(tree, reach, layout.token_ids(noise_window.sample(logits, tree.depths + 1)))
        rows = torch.arange(logits.shape[0], device=logits.device)

        def sample_at(node: Tensor, depth: int) -> Tensor:
            scores = noise_window.level_scores(logits[rows, node, None], depth)  # (B, 1, V)
            return layout.token_ids(argmax_first(scores)[:, 0])

        return match_along_path(tree, reach, sample_at)


def match_along_path(tree: DraftTree, reach: int, sample_at: Callable[[Tensor, int], Tensor]) -> AcceptedPath:
    """Walk down while a child has the token that the target samples.

    `sample_at(node, depth)` samples a token of `depth` at nodes (B,): (B,); `reach` is the largest depth.
    """
    walk = TreeWalk(tree, tree.tokens)
    token = sample_at(walk.node, 1)
    for depth in range(1, reach):
        walk.step(token)
        if walk.has_ended():
            break
        token = torch.where(walk.is_walking, sample_at(walk.node, depth + 1), token)
    return AcceptedPath(*walk.path(), token)


def match_all_nodes(tree: DraftTree, reach: int, chosen: Tensor) -> AcceptedPath:
    """`match_along_path` from the tokens (B, N) that the target samples at all nodes."""
    path, length = follow_choices(tree, reach, tree.tokens, chosen)
    return AcceptedPath(path, length, chosen.gather(1, path.gather(1, length[:, None]))[:, 0], chosen)
