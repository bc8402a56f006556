"""A walk down B trees at once, one level a step, each as far as its nodes are accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from underdraw.tree import DraftTree, Verdict


class Trail:
    """Where each of B walks stands, and how it came there."""

    def __init__(self, tree: DraftTree) -> None:
        self.node = torch.zeros_like(tree.tokens[:, 0])  # (B,)
        self.walking = torch.ones_like(self.node, dtype=torch.bool)  # (B,)
        self._path, self._went = [self.node], [self.walking]

    def step(self, child: Tensor, accepted: Tensor) -> None:
        """Go on to the children (B,) that were accepted (B,); the other walks have ended."""
        self.walking = self.walking & accepted
        self.node = torch.where(self.walking, child, self.node)
        self._path.append(self.node)
        self._went.append(self.walking)

    def ended(self) -> bool:
        """True if no walk goes on. A device is not asked, since the answer would have to be waited for."""
        return self.node.device.type == "cpu" and not bool(self.walking.any())

    def verdict(self, token: Tensor) -> Verdict:
        """The verdict, given the target's own tokens (B,) where the walks ended."""
        went = torch.stack(self._went, dim=1)  # (B, D)
        return Verdict(torch.stack(self._path, dim=1) * went, went.sum(1) - 1, token)
