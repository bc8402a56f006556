"""Recursive rejection sampling without replacement (EAGLE-1): the output has the target's law, not its noise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.rejection_sampling import walk


@dataclass(frozen=True, slots=True)
class Rejection:
    """For children that were drawn from q, by noise that the target does not share."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("sampled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        if tree.q is None:
            raise ConfigError("rejection needs a tree drawn with the 'sampled' proposal; this one carries no q.")
        return walk(tree, logits, noise_window, lambda law, x: law)
