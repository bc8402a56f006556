"""The interfaces between target, drafter, verifier and policy, and the records they exchange.

Shapes: B images, R rows (B, or 2 B with classifier-free guidance), N tree nodes, K image codes, V symbols that a step
chooses from (`Layout.vocab_size`), D features.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, overload, runtime_checkable

from torch import Tensor

from underdraw.history import History
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal, TreeLimits

if TYPE_CHECKING:
    from underdraw.nn.attention import AttentionBackend
    from underdraw.nn.layer_functions import LayerFunctions

Prefix = tuple[int, ...] | Tensor
"""The sequence before the image: token ids, or features (P, D) of a text encoder."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prefix of one image, and the prefix of its unconditional row under classifier-free guidance."""

    condition: Prefix
    unconditional: Prefix | None = None


Guidance = float | Sequence[float]
"""Scale of classifier-free guidance, of all images or of each; 1, which turns it off, for all of a batch or none."""


@dataclass(frozen=True, slots=True)
class EmptySlots(Sequence[Prompt]):
    """Prompts of a batch whose images come later: `slots` with room for `prompt_length` tokens each.

    Sessions opened with these run no prefill. Their slots are filled by `copy_slots`.
    """

    slots: int
    prompt_length: int

    def __len__(self) -> int:
        return self.slots

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return ([Prompt((), ())] * self.slots)[index]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """Result of a target forward pass over N tree nodes."""

    logits: Tensor  # (B, N, K) float32, guidance applied
    features: Tensor  # (R, N, D) last hidden states, read only by drafters


@dataclass(frozen=True, slots=True)
class PrefillOutput:
    """Result of the target's prefill."""

    logits: Tensor  # (B, 1, K) of the first token
    features: Tensor  # (R, P, D) last hidden states of the prefix, right-padded
    prefix: Tensor  # (R, P) token ids of the prefix, right-padded; -1 where it is features of a text encoder
    lengths: Tensor  # (R,) prefix length of each row
    host_lengths: tuple[int, ...]  # the same on the host


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Input of a drafter in one pass."""

    root: Tensor  # (B,) token ids
    steps: Tensor  # (B,) step of each root
    plan: TreePlan
    noise_window: NoiseWindow
    proposal: Proposal = "coupled"
    limits: TreeLimits | None = None


@dataclass(frozen=True, slots=True)
class VerifiedStep:
    """A verified tree: what target and drafter sessions need to commit the accepted tokens."""

    tree: DraftTree
    accepted_path: AcceptedPath
    output: TargetOutput
    noise_window: NoiseWindow
    counts: Tensor  # (B,) committed nodes, the root included; 0 for an image that is finished
    host_counts: tuple[int, ...]  # the same on the host


@dataclass(frozen=True, slots=True)
class PassConfig:
    """Everything that decides the tensor shapes and kernels of a captured pass, fixed before the pass runs."""

    plan: TreePlan
    bucket_size: int  # nodes that the tree is padded to
    proposal: Proposal
    span_multiple: int  # the number of KV cache slots that attention reads is rounded up to a multiple of this
    layer_functions: LayerFunctions
    attention_backend: AttentionBackend


class TreePolicy(Protocol):
    """Chooses the size of the next tree from what was accepted so far. A pure function."""

    def plan(self, history: History, step: int) -> TreePlan: ...


class Verifier(Protocol):
    """Chooses the accepted path of every tree."""

    proposals: ClassVar[tuple[Proposal, ...]]  # that it can verify, preferred first

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath: ...


class TargetSession(Protocol):
    """The target's state for one batch: KV cache and sequence lengths."""

    prefill: PrefillOutput
    max_depth: int  # of trees that it verifies

    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput: ...

    def commit(self, verified: VerifiedStep) -> None: ...


class Target(Protocol):
    """The large model: immutable weights, shared by all sessions."""

    def open(self, prompts: Sequence[Prompt], layout: Layout, *, guidance: Guidance) -> TargetSession: ...


class DrafterSession(Protocol):
    """A drafter's state for one batch."""

    def draft(self, request: DraftRequest) -> DraftTree: ...

    def commit(self, verified: VerifiedStep) -> None: ...


class Drafter(Protocol):
    """The small model, or anything else that can propose tokens: immutable weights, shared by all sessions."""

    @property
    def proposes(self) -> Literal["chain", "trunk", "tree"]:
        """What is drafted from a plan: a chain of its depth, a trunk of its depth with branches, or a tree of levels.

        Only the levels of a tree are drafted one after another; to the others depth costs nothing.
        """
        ...

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> DrafterSession: ...


@runtime_checkable
class SlotSession(Protocol):
    """A session for continuous batching: images enter and leave while others run.

    A session opened with `EmptySlots` is filled by copies of other sessions of the same target or drafter: new images
    from the session that prefilled them, and running ones from the batch that they outgrew.
    """

    def copy_slots(self, source: Any, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite the state of images `slots` by that of images `source_slots` of a session of the same type.

        Called between passes. Writes into the same tensors, which captured passes read.
        """
        ...


@runtime_checkable
class Capturable(Protocol):
    """A session whose passes can be captured as a CUDA graph and replayed.

    A replay repeats the device's work on the same tensors and none of the host's. So all state that a pass reads or
    writes must live in tensors that are never reallocated, and the host's part is split off into `prepare` and `sync`.
    """

    def prepare(self, config: PassConfig) -> Hashable | None:
        """Fix all shapes before a pass. Returns what they depend on besides `config`, or None to run this pass eagerly.

        Passes with equal `config` and equal return value replay one graph.
        """
        return ()

    def sync(self, counts: tuple[int, ...]) -> None:
        """Update the host's lengths after a pass; `counts` are the committed nodes of each image, root included."""
        return None


@runtime_checkable
class CapturableDraft(Capturable, DrafterSession, Protocol):
    """A drafter session whose passes can be captured.

    The engine checks for these methods, not for the base class; subclassing adds defaults for a session without state.
    """

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        """Start a new batch in the same tensors; False if its shapes do not fit them."""
        return True

    def commit(self, verified: VerifiedStep) -> None:
        return None


class ImageTokenizer(Protocol):
    """Decodes image codes to pixels, and encodes pixels."""

    @property
    def downsample(self) -> int: ...

    @property
    def codebook(self) -> Tensor: ...  # (K, D)

    def encode(self, pixels: Tensor) -> Tensor: ...

    def decode(self, codes: Tensor) -> Tensor: ...


@runtime_checkable
class PromptedImageTokenizer(ImageTokenizer, Protocol):
    """An image tokenizer whose decoder is a large model of its own, which also reads the prompt."""

    def check_available(self) -> None: ...  # raises an UnderdrawError if its decoder cannot run here

    def decode_prompted(self, codes: Tensor, prompt: str, seed: int) -> Tensor: ...
