"""Sessions that outlive a picture and whose passes can be captured and replayed.

Replaying repeats what the device did, on the same tensors, and nothing that the host did. So the state of such a
session lives in tensors that stay where they are, and the host's own part of a pass is split off: `fix` before the pass
settles all sizes, `note` after it says how far each image came. Knows nothing of how passes are captured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from underdraw.nn.attention import Kernel
from underdraw.nn.layer_functions import PLAIN, LayerFunctions
from underdraw.plan import TreePlan
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.tree import DraftTree, Proposal


@dataclass(frozen=True, slots=True)
class PassConfig:
    """What is settled about a pass before it runs: the tree that is grown and the number of nodes it is padded to."""

    plan: TreePlan
    size: int
    proposal: Proposal
    quantum: int = 256  # cache slots that a pass looks at are a multiple of this
    regions: LayerFunctions = PLAIN
    kernel: Kernel = "fused"


class Capturable(ABC):
    """A session of a target or a drafter."""

    @abstractmethod
    def prepare(self, config: PassConfig) -> Hashable | None:
        """Settle the sizes of the next pass; what they depend on besides it, None if it must not be captured."""

    @abstractmethod
    def sync(self, counts: tuple[int, ...]) -> None:
        """So many nodes of each image were committed, the root included."""


class CapturableDraft(Capturable):
    """A session of a drafter. One that keeps nothing between passes has only to draft."""

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        """Start with new prompts in the same tensors; False if they do not fit."""
        return True

    def prepare(self, config: PassConfig) -> Hashable | None:
        return ()

    def sync(self, counts: tuple[int, ...]) -> None:
        return None

    @abstractmethod
    def draft(self, request: DraftRequest) -> DraftTree: ...

    def commit(self, verified: VerifiedStep) -> None:
        return None
