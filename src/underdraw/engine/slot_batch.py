"""SlotBatch: images that run together, each entering and leaving at its own time.

Images of one batch are of one model, and either all or none of them use guidance and noise; prompts, seeds, all other
settings and, if the drafter can mix them, sizes are their own. New images are prefilled in a session of their own and
copied into free slots. The number of slots follows the number of images in few sizes: a larger or smaller batch is a
copy of the running images.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from underdraw.engine.cuda_graphs import GraphCache, GraphRunner
from underdraw.engine.decode import run_pass, sample_first_tokens
from underdraw.engine.restart import replay
from underdraw.engine.slot_layout import SlotLayout, layout_kind
from underdraw.engine.slot_sampler import SamplingParams, SlotSampler
from underdraw.engine.step import IDLE_PLAN, StepRunner, TokenStatsMode
from underdraw.errors import CapacityError
from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.nn.target import DecoderSession, DecoderTarget
from underdraw.protocols import CapturableDraft, Drafter, EmptySlots, Prompt, SlotSession, TreePolicy, Verifier
from underdraw.sampling import NoiseStream
from underdraw.tree import Proposal

log = logging.getLogger(__name__)
_PROMPT_MULTIPLE = 128  # KV caches have room for prompts of a multiple of this
_STUCK = 4  # passes after a restart; another crash by then is no accident
_SHRINK_AFTER = 4  # passes with so few images that a smaller batch would hold them


@dataclass(frozen=True, slots=True)
class BatchParts:
    """What all batches of a scheduler share."""

    target: DecoderTarget
    drafter: Drafter
    verifier: Verifier
    proposal: Proposal
    token_stats: TokenStatsMode
    graphs: GraphCache | None
    resolve_policy: Callable[[int], TreePolicy]  # the tree policy for so many images at once

    def key(self, layout: Layout, *, is_guided: bool, is_greedy: bool) -> BatchKey:
        """The batch of an image. Under the `sampled` proposal, noise depends on the size of the buffers."""
        can_mix = getattr(self.drafter, "mixes_sizes", False) and self.proposal != "sampled"
        return BatchKey(layout_kind(layout) if can_mix else layout, is_guided, is_greedy)


@dataclass(frozen=True, slots=True)
class BatchKey:
    """What the images of one batch have in common."""

    kind: Hashable  # of their layouts
    is_guided: bool
    is_greedy: bool


@dataclass(slots=True, eq=False)
class BatchImage:
    """An image of a batch."""

    prompt: Prompt
    params: SamplingParams
    guidance: float
    history: History
    index: int = 0  # `sequence` of its results
    root_step: int = 0  # step of the last token, where the next tree starts
    restarted_at: int | None = None  # number of its passes when it was restarted last

    @property
    def is_stuck(self) -> bool:
        """Whether it was restarted only a few passes ago."""
        return self.restarted_at is not None and self.history.passes - self.restarted_at < _STUCK


@dataclass(frozen=True, slots=True)
class Room:
    """What the buffers of a batch have room for."""

    prompt_length: int = 0  # of the longest prompt, rounded up
    layouts: tuple[Layout, ...] = ()  # the longest and the widest image may be different ones

    def extended(self, prompt_length: int, layout: Layout) -> Room:
        """Room for images with such prompts and of this size as well; the same where they fit already."""
        rounded = -(-prompt_length // _PROMPT_MULTIPLE) * _PROMPT_MULTIPLE
        fits = layout in self.layouts or (
            len(self.layouts) > 1
            and layout.steps <= self.largest.steps
            and layout.max_stride <= max(other.max_stride for other in self.layouts)
        )
        return Room(max(rounded, self.prompt_length), self.layouts if fits else (*self.layouts, layout))

    @property
    def largest(self) -> Layout:
        """The layout with the most tokens."""
        return max(self.layouts, key=lambda layout: layout.steps)

    def slot_layout(self, slots: int, device: torch.device) -> Layout:
        """The layout of the images in so many slots."""
        return self.layouts[0] if len(self.layouts) == 1 else SlotLayout.covering(self.layouts, slots, device)


def bucket_slots(images: int, max_slots: int, *, is_captured: bool) -> int:
    """The number of slots for so many images: a power of 2, or 1.5 times one where passes are not captured."""
    power = 1 << (images - 1).bit_length()
    size = power * 3 // 4 if not is_captured and power >= 4 and power * 3 // 4 >= images else power
    return min(size, max_slots)


class SlotBatch:
    """The running images of one key. `max_slots` is lowered when there is no memory for more."""

    def __init__(
        self, parts: BatchParts, key: BatchKey, max_slots: int, free_idle_batches: Callable[[], None] = lambda: None
    ) -> None:
        self.parts, self.key, self.max_slots, self._free_idle_batches = parts, key, max_slots, free_idle_batches
        self.slots: list[BatchImage | None] = []
        self._room = Room()
        self._runner: StepRunner | None = None
        self._policy: TreePolicy | None = None
        self._captured: dict[int, GraphRunner] = {}  # by number of slots, kept for later images
        self._can_copy = True  # whether the drafter's sessions can copy images
        self._passes_with_room = 0

    @property
    def prompt_length(self) -> int:
        """Tokens of the longest prompt that fits."""
        return self._room.prompt_length

    @property
    def running(self) -> int:
        return len(self.slots) - self.slots.count(None)

    @property
    def free(self) -> int:
        return max(self.max_slots - self.running, 0)

    @torch.inference_mode()
    def admit(self, images: Sequence[BatchImage]) -> int:
        """Prefill images of one size and give them slots; returns how many got one, the first of them.

        After an error the running images are as they were.
        """
        runner = self._prefill(images) if self._can_copy else None
        if runner is None or not isinstance(runner.draft, SlotSession):
            return self._run_alone(images[0])
        if not self._make_room(self.running + len(images), runner):
            return 0
        self._sample_first(runner, images)
        self._enter(runner, images)
        return len(images)

    @torch.inference_mode()
    def restart(self, image: BatchImage) -> StepResult:
        """Bring back an image whose batch crashed: replay its tokens alone, run a pass, and give it a slot if it can.

        An exception is this image's.
        """
        policy, history = self._policy or self.parts.resolve_policy(1), image.history
        runner = self._prefill([image], prefill_only=False)
        root_steps = [replay(runner, history, policy, is_chain=self.parts.drafter.proposes == "chain")]
        plan = policy.plan(history, root_steps[0])
        ((_, result),) = run_pass(runner, [plan], [history], root_steps, [image.index])
        image.root_step = root_steps[0]
        if not isinstance(runner.draft, SlotSession):
            self._hold_alone(runner, policy, image)
        elif not history.done and self._make_room(self.running + 1, runner):
            self._enter(runner, [image])
        return result

    def _enter(self, runner: StepRunner, images: Sequence[BatchImage]) -> None:
        """Copy all images of a runner into free slots."""
        slots = [slot for slot, image in enumerate(self.slots) if image is None][: len(images)]
        assert self._runner is not None
        self._runner.copy_slots(runner, range(len(images)), slots)
        for slot, image in zip(slots, images, strict=True):
            self.slots[slot] = image

    @torch.inference_mode()
    def step(self) -> tuple[list[tuple[BatchImage, StepResult]], list[tuple[BatchImage, Exception]]]:
        """Run one pass; returns its results, and the images that a policy failed for. Both lose their slots at the end.

        An exception concerns all images.
        """
        self._shrink()
        assert self._runner is not None and self._policy is not None
        plans, failures = [IDLE_PLAN] * len(self.slots), []
        for slot, image in enumerate(self.slots):
            if image is not None:
                try:
                    plans[slot] = self._policy.plan(image.history, image.root_step)
                except Exception as error:
                    failures.append((image, error))
        self.remove([image for image, _ in failures])
        stops = self._runner.sampler.layout.host_stops(len(self.slots))
        root_steps = [
            stop - 1 if image is None else image.root_step for image, stop in zip(self.slots, stops, strict=True)
        ]
        histories = [None if image is None else image.history for image in self.slots]
        if not self.running:
            return [], failures
        sequences = [0 if image is None else image.index for image in self.slots]
        results = []
        for slot, result in run_pass(self._runner, plans, histories, root_steps, sequences):
            image = self.slots[slot]
            assert image is not None
            image.root_step = root_steps[slot]
            results.append((image, result))
        self.remove([image for image, _ in results if image.history.done])
        return results, failures

    @torch.inference_mode()
    def remove(self, images: Sequence[BatchImage]) -> None:
        """Free the slots of images."""
        slots = [slot for slot, image in enumerate(self.slots) if image in images]
        for slot in slots:
            self.slots[slot] = None
        if self._runner is not None:
            self._clear(self._runner, slots)

    def _clear(self, runner: StepRunner, slots: Sequence[int]) -> None:
        if not slots:
            return
        runner.clear_slots(slots)
        assert isinstance(runner.session, DecoderSession) and isinstance(runner.sampler, SlotSampler)
        runner.session.clear_slots(slots)
        runner.sampler.clear_slots(slots)

    def _prefill(self, images: Sequence[BatchImage], *, prefill_only: bool = True) -> StepRunner:
        """A runner of some new images; with `prefill_only` it has no room for their tokens."""
        parts, layout = self.parts, images[0].history.layout
        prompts, guidance = [image.prompt for image in images], [image.guidance for image in images]
        session = DecoderSession(parts.target, prompts, layout, guidance, prefill_only=prefill_only)
        draft = parts.drafter.open(prompts, layout, session.prefill, guidance=guidance)
        sampler = SlotSampler(layout, [image.params for image in images], session.prefill.logits.device)
        return StepRunner(session, draft, parts.verifier, sampler, parts.proposal, parts.token_stats)

    def _sample_first(self, runner: StepRunner, images: Sequence[BatchImage]) -> None:
        sample_first_tokens(runner, [image.history for image in images], [image.params.seed for image in images])
        for image in images:
            image.root_step = image.history.layout.start

    def _run_alone(self, image: BatchImage) -> int:
        """Draw one image at a time, in the session that prefilled it."""
        if self._can_copy:
            log.warning(
                "the drafter %s draws one image at a time: its sessions have no copy_slots(), which images that run "
                "together but start at different times need.",
                type(self.parts.drafter).__name__,
            )
        runner = self._prefill([image], prefill_only=False)
        self._sample_first(runner, [image])
        self._hold_alone(runner, self.parts.resolve_policy(1), image)
        return 1

    def _hold_alone(self, runner: StepRunner, policy: TreePolicy, image: BatchImage) -> None:
        self._can_copy, self.max_slots = False, 1
        self._runner, self._policy, self.slots = runner, policy, [None if image.history.done else image]

    def _make_room(self, images: int, newcomers: StepRunner) -> bool:
        """Switch to a batch that holds so many images, some of them new ones; False if there is no memory."""
        room = self._room.extended(max(newcomers.session.prefill.host_lengths), newcomers.sampler.layout)
        if images <= len(self.slots) and room == self._room:
            return True
        size = max(self._bucket(images), len(self.slots))
        try:
            self._switch(size, room)
        except (CapacityError, torch.OutOfMemoryError):
            if size == 1:
                raise
            self.max_slots = max(-(-size // 2), self.running)
            log.warning("there is no memory for %d images at once; drawing %d at once.", size, self.max_slots)
            return False
        return True

    def _shrink(self) -> None:
        """Switch to a smaller batch if that has been large enough for some passes."""
        size = self._bucket(max(self.running, 1))
        self._passes_with_room = self._passes_with_room + 1 if size < len(self.slots) else 0
        if self._passes_with_room > _SHRINK_AFTER and self._can_copy:
            try:
                self._switch(size, self._room)
            except (CapacityError, torch.OutOfMemoryError):
                self._passes_with_room = 0  # there is no memory for a copy: go on in this batch

    def _bucket(self, images: int) -> int:
        return bucket_slots(images, self.max_slots, is_captured=self.parts.graphs is not None)

    def _switch(self, size: int, room: Room) -> None:
        """Copy the running images into the first slots of a batch of another size."""
        if room != self._room:
            self._captured.clear()  # their buffers are too small
        runner = self._captured.get(size) or self._open_or_evict(size, room)
        active = [slot for slot, image in enumerate(self.slots) if image is not None]
        if active:
            assert self._runner is not None
            runner.copy_slots(self._runner, active, range(len(active)))
        self._clear(runner, range(len(active), size))
        self.slots = [self.slots[slot] for slot in active] + [None] * (size - len(active))
        self._runner, self._policy = runner, self.parts.resolve_policy(size)
        self._room, self._passes_with_room = room, 0
        if isinstance(runner, GraphRunner):
            self._captured[size] = runner

    def _open_or_evict(self, size: int, room: Room) -> StepRunner:
        """A new runner; if there is no memory for it, those that are not running are freed first."""
        try:
            return self._open(size, room)
        except (CapacityError, torch.OutOfMemoryError):
            self.free_memory()
            self._free_idle_batches()
            if self.parts.graphs is not None:
                self.parts.graphs.runners.clear()
            return self._open(size, room)

    def free_memory(self) -> None:
        """Free the buffers and captured passes that the running images do not use."""
        self._captured.clear()
        if not self.running:
            self._runner, self.slots, self._room = None, [], Room()

    def _open(self, size: int, room: Room) -> StepRunner:
        """A runner of empty slots, captured where possible."""
        parts, key = self.parts, self.key
        prompts, guidance = EmptySlots(size, room.prompt_length), 0.0 if key.is_guided else 1.0
        session = DecoderSession(parts.target, prompts, room.largest, guidance)
        layout = room.slot_layout(size, session.prefill.logits.device)
        draft = parts.drafter.open(prompts, layout, session.prefill, guidance=guidance)
        params = [SamplingParams(temperature=0.0 if key.is_greedy else 1.0)] * size
        sampler = SlotSampler(layout, params, session.prefill.logits.device)
        rest = (parts.verifier, sampler, parts.proposal, parts.token_stats)
        if parts.graphs is None or not isinstance(draft, CapturableDraft):
            streams: tuple[NoiseStream, ...] = ("target", "draft") if parts.proposal == "sampled" else ("target",)
            sampler.precompute_noise(sampler.seeds, streams)
            return StepRunner(session, draft, *rest)
        return GraphRunner(parts.graphs, session, draft, *rest, parts.drafter.proposes != "tree")
