"""Recursive rejection sampling without replacement (EAGLE-1).

The output has the target's distribution, but a seed gives another image than plain decoding does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.rejection_sampling import exact_rule, rejection_walk


@dataclass(frozen=True, slots=True)
class Rejection:
    """For children that were sampled from q with noise that the target does not use."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("sampled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        if tree.q is None:
            raise ConfigError("rejection needs a tree drafted with the 'sampled' proposal; this one has no q.")
        return rejection_walk(tree, logits, noise_window, exact_rule)
