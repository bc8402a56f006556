"""A decoder as the target of speculative decoding: prefill, guidance, passes over draft trees and commits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underdraw.errors import CapacityError, ConfigError
from underdraw.layout import Layout
from underdraw.nn import memory
from underdraw.nn.cached_decoder import CachedDecoder
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.numerics import Numerics, resolve_numerics
from underdraw.nn.rope import RopeTable
from underdraw.nn.transformer import Transformer
from underdraw.plan import MAX_DEPTH, MAX_GPU_DEPTH, MAX_NODES
from underdraw.protocols import (
    Capturable,
    EmptySlots,
    Guidance,
    PassConfig,
    PrefillOutput,
    Prefix,
    Prompt,
    TargetOutput,
    VerifiedStep,
)
from underdraw.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DecoderTarget:
    """A decoder and how its family uses it."""

    net: Transformer
    projection: nn.Module | None = None  # from a text encoder's features to prompt embeddings
    image_offset: int | None = None  # sequence position of the image's step 0; None: right behind the prompt
    max_positions: int | None = None  # the longest sequence that the model was trained for
    numerics: Numerics = "row-invariant"

    def open(self, prompts: Sequence[Prompt], layout: Layout, *, guidance: Guidance) -> DecoderSession:
        return DecoderSession(self, prompts, layout, guidance)


def apply_guidance(logits: Tensor, guidance: float | Tensor) -> Tensor:
    """Classifier-free guidance u + s (c - u) of rows [conditional, unconditional]: (2 B, ...) -> (B, ...)."""
    if not isinstance(guidance, Tensor) and guidance == 1:
        return logits
    cond, uncond = logits.chunk(2, dim=0)
    return torch.lerp(uncond, cond, guidance.to(logits.dtype) if isinstance(guidance, Tensor) else guidance)


def guidance_copies(guidance: Guidance) -> int:
    """Rows of an image: 2 with guidance."""
    scales = {guidance} if not isinstance(guidance, Sequence) else set(guidance)
    if 1 in scales and len(scales) > 1:
        raise ConfigError("images with and without guidance have different numbers of rows; use two batches.")
    return 1 if scales == {1} else 2


def guidance_scales(guidance: Guidance, images: int, device: torch.device) -> float | Tensor:
    """The scales of all images as a tensor (B, 1, 1), or 1 if there is no guidance."""
    if guidance_copies(guidance) == 1:
        return 1.0
    scales = list(guidance) if isinstance(guidance, Sequence) else [guidance] * images
    return torch.tensor(scales, dtype=torch.float32, device=device)[:, None, None]


def guidance_rows(prompts: Sequence[Prompt], is_guided: bool) -> list[Prefix]:
    """The prompts of all rows: the conditional ones, then, with guidance, the unconditional ones."""
    rows = [prompt.condition for prompt in prompts]
    if not is_guided:
        return rows
    for prompt in prompts:
        if prompt.unconditional is None:
            raise ConfigError(
                "guidance other than 1 needs an unconditional prompt, which this model does not have; use guidance 1."
            )
        rows.append(prompt.unconditional)
    return rows


def _check_head(net: Transformer, layout: Layout) -> None:
    """The LM head's outputs must be the layout's codes."""
    outputs = net.head.weight.shape[0]
    if outputs != len(layout.codes):
        raise ConfigError(
            f"the head has {outputs} outputs but the layout {len(layout.codes)} codes; cut the head to the codes."
        )
    token_ids = net.arch.outputs
    if token_ids is not None and token_ids != layout.codes:
        raise ConfigError(f"the head gives {token_ids} and the layout has {layout.codes}; use the model's own layout.")


class GuidedRows:
    """The rows of B images in a KV cache: conditional ones and, with guidance, unconditional ones behind them."""

    copies: int  # rows of an image
    guidance: float | Tensor  # (B, 1, 1), or 1
    cache: KVCache
    rope_table: RopeTable

    def rows_of(self, slots: Sequence[int]) -> list[int]:
        """The rows of some images, the conditional ones first."""
        batch = len(self.cache.host_lengths) // self.copies
        return [slot + copy * batch for copy in range(self.copies) for slot in slots]

    def copy_rows(
        self, source: GuidedRows, source_slots: Sequence[int], slots: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Overwrite cache, positions and guidance of images `slots`; returns the rows of both."""
        source_rows, rows = source.rows_of(source_slots), self.rows_of(slots)
        self.cache.copy_rows(source.cache, source_rows, rows)
        self.rope_table.copy_rows(source.rope_table, source_rows, rows)
        if isinstance(self.guidance, Tensor) and isinstance(source.guidance, Tensor):
            self.guidance[list(slots)] = source.guidance[list(source_slots)]
        return source_rows, rows


class DecoderSession(GuidedRows, Capturable):
    """Decodes B images in R = B rows, or 2 B with guidance.

    `tree_slots` are cache slots kept free for a tree; a `prefill_only` session has none for the image either, and is
    for `copy_slots`.
    """

    @torch.no_grad()
    def __init__(
        self,
        target: DecoderTarget,
        prompts: Sequence[Prompt],
        layout: Layout,
        guidance: Guidance,
        tree_slots: int = MAX_NODES,
        *,
        prefill_only: bool = False,
    ) -> None:
        if not prompts:
            raise ConfigError("no prompts were given; a batch needs at least one.")
        self.target, self.layout, self.tree_slots = target, layout, tree_slots
        weight = target.net.embedding.weight
        self.copies = guidance_copies(guidance)
        self.guidance = guidance_scales(guidance, len(prompts), weight.device)  # (B, 1, 1), or 1
        _check_head(target.net, layout)
        rows = self._rows(prompts)
        capacity = max(self.lengths) if prefill_only else self._positions + tree_slots
        memory.check_fits(target.net.arch, len(prompts), self.copies, capacity, max(self.lengths), weight)
        self.decoder = CachedDecoder(target.net, len(self.lengths), capacity, target.numerics)
        self.cache = self.decoder.cache
        is_limited = weight.is_cuda and resolve_numerics(target.numerics, weight.device) == "row-invariant"
        self.max_depth = MAX_GPU_DEPTH if is_limited else MAX_DEPTH
        self.offset = torch.zeros_like(self.cache.length)  # (R,) sequence position of step 0
        self.rope_table = RopeTable(target.net.arch.rope, layout, self.offset, weight.dtype)
        self.prefill = self._start(rows)

    def _empty_prefill(self) -> PrefillOutput:
        """Zeros in the shapes of prompts as long as fit."""
        net, rows, length = self.target.net, len(self.lengths), self.lengths[0]
        weight = net.embedding.weight
        self.rope_table.update()
        return PrefillOutput(
            logits=torch.zeros(rows // self.copies, 1, len(self.layout.codes), device=weight.device),
            features=weight.new_zeros(1, 1, net.arch.dim).expand(rows, length, -1),
            prefix=torch.zeros(rows, length, dtype=torch.int64, device=weight.device),
            lengths=torch.tensor(self.lengths, device=weight.device),
            host_lengths=tuple(self.lengths),
        )

    @torch.no_grad()
    def copy_slots(self, source: DecoderSession, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        self.copy_rows(source, source_slots, slots)

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Remove the tokens of images that ended, so that attention reads them no more."""
        self.cache.clear_rows(self.rows_of(slots))

    @torch.no_grad()
    def restart(self, prompts: Sequence[Prompt]) -> bool:
        """Start with new prompts in the same tensors, which CUDA graphs hold on to; False if they do not fit."""
        rows = self._rows(prompts)
        if len(rows) != len(self.cache.host_lengths) or self._positions + self.tree_slots > self.cache.capacity:
            return False
        self.decoder.reset()
        self.prefill = self._start(rows)
        return True

    @property
    def _positions(self) -> int:
        """Sequence positions of the longest prompt and its image."""
        return max(self.lengths) + self.layout.stop - self.layout.start

    def _rows(self, prompts: Sequence[Prompt]) -> list[Prefix]:
        """The checked prompts of all rows; sets `lengths` to theirs, the prologue included."""
        target, layout = self.target, self.layout
        if isinstance(prompts, EmptySlots):
            self.lengths = [prompts.prompt_length] * (len(prompts) * self.copies)
            return []
        rows = guidance_rows(prompts, self.copies == 2)
        vocab = target.net.arch.vocab
        for row in rows:
            invalid = [] if isinstance(row, Tensor) else [token for token in row if not 0 <= token < vocab]
            if invalid:
                raise ConfigError(
                    f"prompt tokens {invalid} lie outside the {vocab} of the model; use the model's own tokenizer."
                )
        self.lengths = [_prompt_length(row) + len(layout.prologue) for row in rows]
        if min(self.lengths) < 1:
            raise ConfigError("an empty prompt has nothing to start from; pass at least one token or feature.")
        if target.max_positions is not None and self._positions > target.max_positions:
            raise CapacityError(
                f"prompt and image need {self._positions} positions and the model has {target.max_positions}; "
                "shorten the prompt."
            )
        return rows

    def _start(self, rows: list[Prefix]) -> PrefillOutput:
        """Set the image's positions and prefill; without rows the slots stay empty."""
        if not rows:
            return self._empty_prefill()
        fixed = self.target.image_offset
        offsets = [length - self.layout.start if fixed is None else fixed for length in self.lengths]
        self.offset.copy_(torch.tensor(offsets))
        self.rope_table.update()
        return self._prefill(rows, self.offset.device)

    def _prefill(self, rows: list[Prefix], device: torch.device) -> PrefillOutput:
        """Run the prompts and the image's prologue through the decoder, padded on the right."""
        net, longest = self.target.net, max(self.lengths)
        tokens = torch.full((len(rows), longest), -1, dtype=torch.int64)
        x = torch.zeros(len(rows), longest, net.arch.dim, device=device, dtype=net.embedding.weight.dtype)
        for index, row in enumerate(rows):
            ids = self.layout.prologue if isinstance(row, Tensor) else (*row, *self.layout.prologue)
            start = self.lengths[index] - len(ids)
            if isinstance(row, Tensor):
                x[index, :start] = self._project(row.to(x))
            if ids:
                tokens[index, start : start + len(ids)] = torch.tensor(ids)
        tokens = tokens.to(device)
        x = torch.where((tokens >= 0)[..., None], net.embed(tokens.clamp(min=0)), x)
        cos_sin = self._prompt_cos_sin(longest, device)
        lengths = torch.tensor(self.lengths, device=device)
        features = self.decoder.append(x, cos_sin, lengths, self.lengths)
        last = features[torch.arange(len(rows), device=device), lengths - 1]
        logits = apply_guidance(self.decoder.logits(last[:, None]), self.guidance)
        return PrefillOutput(logits, features, tokens, lengths, tuple(self.lengths))

    def _prompt_cos_sin(self, longest: int, device: torch.device) -> Tensor:
        """cos_sin (R, P, 2, D) of the prefill; the prologue's tokens are image tokens already."""
        rope, layout = self.target.net.arch.rope, self.layout
        rotation = rope.prompt_rotation(longest, device)
        cos_sin = rope.cos_sin(rotation, self.rope_table.dtype).expand(len(self.lengths), -1, -1, -1)
        if layout.start == 0:
            return cos_sin
        image_starts = torch.tensor(self.lengths, device=device)[:, None] - layout.start
        steps = torch.arange(longest, device=device) - image_starts
        return torch.where((steps >= 0)[..., None, None], self.rope_table(steps), cos_sin)

    def _project(self, features: Tensor) -> Tensor:
        if self.target.projection is None:
            raise ConfigError("this model takes prompt tokens, not text features.")
        return self.target.projection(features)

    @torch.no_grad()
    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput:
        """One pass over the nodes of B trees whose roots are at `steps` (B,)."""
        net = self.target.net
        depths = tree.depths.clamp(min=0)  # (B, N)
        x, cos_sin = net.embed(self._for_rows(tree.tokens)), self.rope_table(steps[:, None] + depths)
        features = self.decoder.append_nodes(x, cos_sin, depths, tree.ancestors)
        logits = self.decoder.logits(features)
        return TargetOutput(apply_guidance(logits, self.guidance), features)

    def prepare(self, config: PassConfig) -> Hashable | None:
        self.decoder.layer_functions, self.decoder.attention_backend = config.layer_functions, config.attention_backend
        return self.decoder.fix_span(config.bucket_size, config.span_multiple)

    def sync(self, counts: tuple[int, ...]) -> None:
        self.cache.sync_lengths(counts * self.copies)

    def commit(self, verified: VerifiedStep) -> None:
        path, counts = map(self._for_rows, (verified.accepted_path.path, verified.counts))
        self.cache.compact(path, counts, verified.host_counts * self.copies)

    def _for_rows(self, images: Tensor) -> Tensor:
        """Repeat a tensor of all images (B, ...) for all rows (R, ...)."""
        return images if self.copies == 1 else torch.cat([images] * self.copies)


def _prompt_length(row: Prefix) -> int:
    return row.shape[0] if isinstance(row, Tensor) else len(row)
