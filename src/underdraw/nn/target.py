"""A decoder as a target: prompts to cache rows, guidance, tree passes and commits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underdraw.errors import CapacityError, ConfigError
from underdraw.layout import Layout
from underdraw.nn import memory
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.rope import RopeTable
from underdraw.nn.transformer import Transformer
from underdraw.plan import MAX_NODES
from underdraw.protocols import Capturable, PassConfig, PrefillOutput, Prefix, Prompt, TargetOutput, VerifiedStep
from underdraw.tree import DraftTree


@dataclass(frozen=True, slots=True)
class DecoderTarget:
    """Weights and what the family says about them.

    `projection` turns a text encoder's features into prefix embeddings. `image_offset` is the sequence place of the
    image's step 0, where that is fixed; otherwise it follows the prompt. `positions` is how many places there are.
    """

    net: Transformer
    projection: nn.Module | None = None
    image_offset: int | None = None
    positions: int | None = None

    def open(self, prompts: Sequence[Prompt], layout: Layout, *, guidance: float) -> DecoderSession:
        return DecoderSession(self, prompts, layout, guidance)


def apply_guidance(logits: Tensor, guidance: float | Tensor) -> Tensor:
    """u + s (c - u) of conditional rows and, behind them, unconditional ones: (2 B, ...) -> (B, ...)."""
    if not isinstance(guidance, Tensor) and guidance == 1:
        return logits
    cond, uncond = logits.chunk(2, dim=0)
    return torch.lerp(uncond, cond, guidance)


def guidance_rows(prompts: Sequence[Prompt], guidance: float) -> list[Prefix]:
    """The prefixes of all rows: conditional ones, then, with guidance, unconditional ones."""
    rows = [prompt.condition for prompt in prompts]
    if guidance == 1:
        return rows
    for prompt in prompts:
        if prompt.unconditional is None:
            raise ConfigError(f"guidance {guidance} needs an unconditional prompt; give one or use guidance 1.")
        rows.append(prompt.unconditional)
    return rows


class DecoderSession(Capturable):
    """B images in the making; R = B rows, or 2 B with guidance. `room` is what the cache keeps free for a tree."""

    @torch.no_grad()
    def __init__(
        self, target: DecoderTarget, prompts: Sequence[Prompt], layout: Layout, guidance: float, room: int = MAX_NODES
    ) -> None:
        if not prompts:
            raise ConfigError("no prompts were given; a batch needs at least one.")
        self.target, self.layout, self.guidance, self.room = target, layout, guidance, room
        self.copies = 1 if guidance == 1 else 2
        outputs = target.net.head.weight.shape[0]
        if outputs != len(layout.codes):
            raise ConfigError(
                f"the head has {outputs} outputs but the layout {len(layout.codes)} codes; cut the head to the codes."
            )
        own = target.net.arch.outputs
        if own is not None and own != layout.codes:
            raise ConfigError(f"the head gives {own} and the layout has {layout.codes}; use the model's own layout.")
        rows = self._rows(prompts)
        weight, longest = target.net.head.weight, max(self.lengths)
        memory.check(target.net.arch, len(prompts), self.copies, self._needed + room, longest, weight)
        self.cache = KVCache(target.net, len(rows), self._needed + room)
        self.offset = torch.zeros_like(self.cache.length)  # (R,) sequence place of step 0
        self.raster = RopeTable(target.net.arch.rope, layout, self.offset, weight.dtype)
        self.prefill = self._begin(rows)

    @torch.no_grad()
    def restart(self, prompts: Sequence[Prompt]) -> bool:
        """Start with new prompts in the same tensors; False if they do not fit."""
        rows = self._rows(prompts)
        if len(rows) != len(self.cache.host_lengths) or self._needed + self.room > self.cache.capacity:
            return False
        self.cache.reset()
        self.prefill = self._begin(rows)
        return True

    @property
    def _needed(self) -> int:
        """Places of the longest prompt and its image."""
        return max(self.lengths) + self.layout.stop - self.layout.start

    def _rows(self, prompts: Sequence[Prompt]) -> list[Prefix]:
        """The prefixes of all rows, checked, and their lengths."""
        target, layout = self.target, self.layout
        rows = guidance_rows(prompts, self.guidance)
        vocab = target.net.arch.vocab
        for row in rows:
            wrong = [] if isinstance(row, Tensor) else [token for token in row if not 0 <= token < vocab]
            if wrong:
                raise ConfigError(f"prompt tokens {wrong} lie outside the {vocab} of the model; use its tokenizer.")
        self.lengths = [_length(row) + len(layout.prologue) for row in rows]
        if min(self.lengths) < 1:
            raise ConfigError("an empty prompt gives nothing to start from; give at least one token or feature.")
        if target.positions is not None and self._needed > target.positions:
            raise CapacityError(
                f"prompt and image need {self._needed} positions and the model has {target.positions}; shorten the "
                "prompt."
            )
        return rows

    def _begin(self, rows: list[Prefix]) -> PrefillOutput:
        place = self.target.image_offset
        start = [n - self.layout.start if place is None else place for n in self.lengths]
        self.offset.copy_(torch.tensor(start))
        self.raster.fill()
        return self._prefill(rows, self.offset.device)

    def _prefill(self, rows: list[Prefix], device: torch.device) -> PrefillOutput:
        net, longest = self.target.net, max(self.lengths)
        tokens = torch.full((len(rows), longest), -1, dtype=torch.int64)
        x = torch.zeros(len(rows), longest, net.arch.dim, device=device, dtype=net.head.weight.dtype)
        for index, row in enumerate(rows):
            ids = self.layout.prologue if isinstance(row, Tensor) else (*row, *self.layout.prologue)
            start = self.lengths[index] - len(ids)
            if isinstance(row, Tensor):
                x[index, :start] = self._project(row.to(x))
            if ids:
                tokens[index, start : start + len(ids)] = torch.tensor(ids)
        tokens = tokens.to(device)
        x = torch.where((tokens >= 0)[..., None], net.embed(tokens.clamp(min=0)), x)
        cos_sin = self._prompt_factors(longest, device)
        lengths = torch.tensor(self.lengths, device=device)
        features = self.cache.append(x, cos_sin, lengths, self.lengths)
        last = features[torch.arange(len(rows), device=device), lengths - 1]
        logits = apply_guidance(net.logits(last[:, None]), self.guidance)
        return PrefillOutput(logits, features, tokens, lengths, tuple(self.lengths))

    def _prompt_factors(self, longest: int, device: torch.device) -> Tensor:
        """Factors of the prompt places (R, P, 2, width); the prologue's tokens are image tokens already."""
        rope, layout = self.target.net.arch.rope, self.layout
        cos_sin = rope.cos_sin(rope.prompt(longest, device), self.raster.dtype).expand(len(self.lengths), -1, -1, -1)
        if layout.start == 0:
            return cos_sin
        step = torch.arange(longest, device=device) - (
            torch.tensor(self.lengths, device=device)[:, None] - layout.start
        )
        image = self.raster(step)
        return torch.where((step >= 0)[..., None, None], image, cos_sin)

    def _project(self, features: Tensor) -> Tensor:
        if self.target.projection is None:
            raise ConfigError("this model takes prompt tokens, not text features.")
        return self.target.projection(features)

    @torch.no_grad()
    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput:
        """One pass over the nodes of B trees whose roots stand at `steps` (B,)."""
        net = self.target.net
        depths = tree.depths.clamp(min=0)  # (B, N)
        x, cos_sin = net.embed(self._copied(tree.tokens)), self.raster(steps[:, None] + depths)
        features = self.cache.append_nodes(x, cos_sin, depths, tree.ancestors)
        logits = self.cache.regions.suited(net.arch, features).logits(net, features)
        return TargetOutput(apply_guidance(logits, self.guidance), features)

    def prepare(self, config: PassConfig) -> Hashable | None:
        self.cache.regions, self.cache.kernel = config.layer_functions, config.kernel
        return self.cache.fix_span(config.bucket_size, config.span_multiple)

    def sync(self, counts: tuple[int, ...]) -> None:
        self.cache.sync_lengths(counts * self.copies)

    def commit(self, verified: VerifiedStep) -> None:
        path, counts = map(self._copied, (verified.accepted_path.path, verified.counts))
        self.cache.compact(path, counts, verified.host_counts * self.copies)

    def _copied(self, images: Tensor) -> Tensor:
        """Something of all images (B, ...), for all rows (R, ...)."""
        return images if self.copies == 1 else torch.cat([images] * self.copies)


def _length(row: Prefix) -> int:
    return row.shape[0] if isinstance(row, Tensor) else len(row)
