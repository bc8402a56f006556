"""Finding the accepted paths of B trees at once: level by level on a CPU, from the choices of all nodes on a device.

Every node accepts at most one of its children. A label identifies a child among its siblings: its token
or its rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from underdraw.constants import arange_cached
from underdraw.tree import DraftTree

ChooseChildFn = Callable[[Tensor | None], tuple[Tensor, Tensor]]
"""Nodes (B, W), or None for all N -> rank of the accepted child (B, W), and residual probs or logits (B, W, ...)."""


class TreeWalk:
    """B walks from the roots down, one level per `step`."""

    @staticmethod
    def uses_all_nodes(values: Tensor) -> bool:
        """Whether to evaluate all nodes in one go: on a device that is cheap, and reading back each level is not."""
        return values.device.type != "cpu"

    def __init__(self, tree: DraftTree, labels: Tensor) -> None:
        self.node = torch.zeros_like(labels[:, 0])  # (B,) the deepest accepted node so far
        self.is_walking = torch.ones_like(self.node, dtype=torch.bool)  # (B,)
        self._nodes, self._was_walking = [self.node], [self.is_walking]  # per level
        self._labels, self._index = labels, torch.arange(tree.size, device=labels.device)
        self._parents = torch.where(tree.depths > 0, tree.parents, -1)

    def step(self, chosen: Tensor) -> None:
        """Go to the children labelled `chosen` (B,); a walk without such a child ends."""
        is_match = (self._parents == self.node[:, None]) & (self._labels == chosen[:, None])
        child = (is_match * self._index).amax(1)  # 0 without a match: the root is never a child
        self.is_walking = self.is_walking & (child > 0)
        self.node = torch.where(self.is_walking, child, self.node)
        self._nodes.append(self.node)
        self._was_walking.append(self.is_walking)

    def has_ended(self) -> bool:
        """Whether all walks have ended."""
        return not bool(self.is_walking.any())

    def path(self) -> tuple[Tensor, Tensor]:
        """The nodes from the root down (B, D), and how many of them are below the root (B,)."""
        was_walking = torch.stack(self._was_walking, dim=1)  # (B, D)
        return torch.stack(self._nodes, dim=1) * was_walking, was_walking.sum(1) - 1


def follow_choices(tree: DraftTree, reach: int, labels: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Paths (B, reach) and lengths (B,) of the accepted nodes, from the label that every node chose (B, N).

    A node is accepted if it and all its ancestors are chosen by their parents.
    """
    is_rejected = (labels != chosen.gather(1, tree.parents.clamp(min=0))) | (tree.depths < 0)  # (B, N), root unused
    is_accepted = ~(tree.ancestors[..., 1:] & is_rejected[:, None, 1:]).any(-1)  # (B, N), at most one per depth
    index, level = (arange_cached(count, labels.device) for count in (tree.size, reach))
    path = ((is_accepted[:, None] & (tree.depths[:, None] == level[:, None])) * index).amax(-1)
    return path, is_accepted.sum(1) - 1


def walk_tree(tree: DraftTree, reach: int, choose_child: ChooseChildFn) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted paths (B, D), their lengths (B,), and the residuals at their last nodes (B, ...)."""
    if TreeWalk.uses_all_nodes(tree.tokens):
        rank, residual = choose_child(None)
        path, length = follow_choices(tree, reach, tree.ranks, rank)
        return path, length, gather_nodes(residual, path.gather(1, length[:, None]))[:, 0]
    walk = TreeWalk(tree, tree.ranks)
    rank, residual = choose_child(walk.node[:, None])
    for _ in range(1, reach):
        walk.step(rank[:, 0])
        if walk.has_ended():
            break
        rank, residual = choose_child(walk.node[:, None])
    return *walk.path(), residual[:, 0]


def gather_nodes(values: Tensor, nodes: Tensor | None) -> Tensor:
    """Values (B, N) or (B, N, C) at nodes (B, W); all of them for None."""
    if nodes is None:
        return values
    return values.gather(1, nodes if values.dim() == 2 else nodes[..., None].expand(-1, -1, values.shape[2]))
