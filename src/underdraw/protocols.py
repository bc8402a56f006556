"""What the parts of a decode must look like to each other. Nothing else.

Shapes: B images, R rows (B, or 2 B with guidance), N tree nodes, K codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from underdraw.history import History
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal, TreeLimits

Prefix = tuple[int, ...] | Tensor
"""What stands before the image: token ids, or features (P, D) of a text encoder."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The condition of one image, and what stands in its place in the unconditional row."""

    condition: Prefix
    unconditional: Prefix | None = None


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """What one target pass says of N nodes."""

    logits: Tensor  # (B, N, K) float32, guidance applied
    features: Tensor  # (R, N, D) what the head read; opaque to everything but drafters


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """What the prompts said: the choice of the first token, and the features of every prompt token."""

    logits: Tensor  # (B, 1, K)
    features: Tensor  # (R, P, D), right-padded
    prefix: Tensor  # (R, P) token ids behind those features, right-padded; -1 where the prefix was not tokens
    lengths: Tensor  # (R,) of each row
    host_lengths: tuple[int, ...]  # the same on the host


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is asked for in one step."""

    root: Tensor  # (B,) token ids
    steps: Tensor  # (B,) step of each root
    plan: TreePlan
    noise_window: NoiseWindow
    proposal: Proposal = "coupled"
    limits: TreeLimits | None = None


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """What came of the tree: everything a session needs to go on."""

    tree: DraftTree
    accepted_path: AcceptedPath
    output: TargetOutput
    noise_window: NoiseWindow
    counts: Tensor  # (B,) committed nodes, the root included; 0 for an image that is finished
    host_counts: tuple[int, ...]  # the same on the host


class TreePolicy(Protocol):
    """How large a tree, from what was accepted so far. A pure function."""

    def plan(self, history: History, step: int) -> TreePlan: ...


class Verifier(Protocol):
    """Which path of a tree the target agrees with."""

    proposals: ClassVar[tuple[Proposal, ...]]  # legal ones, preferred first

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath: ...


class TargetSession(Protocol):
    """One batch in the making: cache and lengths."""

    prefill: PrefillOutput

    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput: ...

    def commit(self, verified: VerifiedStep) -> None: ...


class Target(Protocol):
    """The large model: weights, shared and immutable."""

    def open(self, prompts: Sequence[Prompt], layout: Layout, *, guidance: float) -> TargetSession: ...


class DrafterSession(Protocol):
    def draft(self, request: DraftRequest) -> DraftTree: ...

    def commit(self, verified: VerifiedStep) -> None: ...


class Drafter(Protocol):
    """The small model, or whatever else can guess: weights, shared and immutable."""

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> DrafterSession: ...


class ImageTokenizer(Protocol):
    """Codes to pixels and back."""

    @property
    def downsample(self) -> int: ...

    @property
    def codebook(self) -> Tensor: ...  # (K, D)

    def encode(self, pixels: Tensor) -> Tensor: ...

    def decode(self, codes: Tensor) -> Tensor: ...
