"""Ways down B trees at once: level by level, or from what is wanted at every node.

A node wants one of its children at most, by something that its children differ in: their tokens or their ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from underdraw.tree import DraftTree

Judge = Callable[[Tensor | None], tuple[Tensor, Tensor]]
"""Nodes (B, W), all N of them if None -> the rank of the child that each wants (B, W), and what is left (B, W, ...)."""


class TreeWalk:
    """Where each of B walks stands, and how it came there. Children differ in `own` (B, N)."""

    @staticmethod
    def at_once(on: Tensor) -> bool:
        """True where all nodes are looked at together: a device has time for them, and asking it would mean waiting."""
        return on.device.type != "cpu"

    def __init__(self, tree: DraftTree, own: Tensor) -> None:
        self.node = torch.zeros_like(own[:, 0])  # (B,)
        self.walking = torch.ones_like(self.node, dtype=torch.bool)  # (B,)
        self._path, self._went = [self.node], [self.walking]
        self._own, self._index = own, torch.arange(tree.size, device=own.device)
        self._parents = torch.where(tree.depths > 0, tree.parents, -1)

    def step(self, wanted: Tensor) -> None:
        """Go on to the children whose own is what is wanted (B,); walks that find none have ended."""
        hit = (self._parents == self.node[:, None]) & (self._own == wanted[:, None])
        child = (hit * self._index).amax(1)  # 0, the root, is nobody's child
        self.walking = self.walking & (child > 0)
        self.node = torch.where(self.walking, child, self.node)
        self._path.append(self.node)
        self._went.append(self.walking)

    def ended(self) -> bool:
        """True if no walk goes on."""
        return not bool(self.walking.any())

    def path(self) -> tuple[Tensor, Tensor]:
        """The nodes from the root down (B, D) and how many of them lie below it (B,)."""
        went = torch.stack(self._went, dim=1)  # (B, D)
        return torch.stack(self._path, dim=1) * went, went.sum(1) - 1


def follow(tree: DraftTree, reach: int, own: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The paths (B, reach) and lengths (B,) of trails, given what is wanted at every node (B, N).

    A node is kept if it and all above it are wanted.
    """
    wrong = (own != wanted.gather(1, tree.parents.clamp(min=0))) | (tree.depths < 0)  # (B, N) but for the root
    kept = ~(tree.ancestors[..., 1:] & wrong[:, None, 1:]).any(-1)  # (B, N) at most one of each depth
    index, level = (torch.arange(count, device=own.device) for count in (tree.size, reach))
    path = ((kept[:, None] & (tree.depths[:, None] == level[:, None])) * index).amax(-1)
    return path, kept.sum(1) - 1


def descend(tree: DraftTree, reach: int, judge: Judge) -> tuple[Tensor, Tensor, Tensor]:
    """Go down as far as children are wanted: paths (B, D), lengths (B,) and what is left at their ends (B, ...)."""
    if TreeWalk.at_once(tree.tokens):
        rank, left = judge(None)
        path, length = follow(tree, reach, tree.ranks, rank)
        return path, length, at(left, path.gather(1, length[:, None]))[:, 0]
    trail = TreeWalk(tree, tree.ranks)
    rank, left = judge(trail.node[:, None])
    for _ in range(1, reach):
        trail.step(rank[:, 0])
        if trail.ended():
            break
        rank, left = judge(trail.node[:, None])
    return *trail.path(), left[:, 0]


def at(values: Tensor, nodes: Tensor | None) -> Tensor:
    """Values (B, N) or (B, N, C) at nodes (B, W), or all of them."""
    if nodes is None:
        return values
    return values.gather(1, nodes if values.dim() == 2 else nodes[..., None].expand(-1, -1, values.shape[2]))
