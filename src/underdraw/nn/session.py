"""A decoder as a target: prompts to cache rows, guidance, tree passes and commits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from underdraw.errors import CapacityError, ConfigError
from underdraw.layout import Layout
from underdraw.nn import memory
from underdraw.nn.lasting import Frame, Lasting
from underdraw.nn.rope import Raster
from underdraw.nn.stream import Stream
from underdraw.nn.transformer import Transformer
from underdraw.plan import MAX_NODES
from underdraw.protocols import Opening, Outcome, Output, Prefix, Prompt
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


def guided(logits: Tensor, guidance: float | Tensor) -> Tensor:
    """u + s (c - u) of conditional rows and, behind them, unconditional ones: (2 B, ...) -> (B, ...)."""
    if not isinstance(guidance, Tensor) and guidance == 1:
        return logits
    cond, uncond = logits.chunk(2, dim=0)
    return torch.lerp(uncond, cond, guidance)


def rows_of(prompts: Sequence[Prompt], guidance: float) -> list[Prefix]:
    """The prefixes of all rows: conditional ones, then, with guidance, unconditional ones."""
    rows = [prompt.condition for prompt in prompts]
    if guidance == 1:
        return rows
    for prompt in prompts:
        if prompt.unconditional is None:
            raise ConfigError(f"guidance {guidance} needs an unconditional prompt; give one or use guidance 1.")
        rows.append(prompt.unconditional)
    return rows


class DecoderSession(Lasting):
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
        self.stream = Stream(target.net, len(rows), self._needed + room)
        self.offset = torch.zeros_like(self.stream.length)  # (R,) sequence place of step 0
        self.raster = Raster(target.net.arch.rope, layout, self.offset, weight.dtype)
        self.first = self._begin(rows)

    @torch.no_grad()
    def again(self, prompts: Sequence[Prompt]) -> bool:
        """Start with new prompts in the same tensors; False if they do not fit."""
        rows = self._rows(prompts)
        if len(rows) != len(self.stream.known) or self._needed + self.room > self.stream.capacity:
            return False
        self.stream.reset()
        self.first = self._begin(rows)
        return True

    @property
    def _needed(self) -> int:
        """Places of the longest prompt and its image."""
        return max(self.lengths) + self.layout.stop - self.layout.start

    def _rows(self, prompts: Sequence[Prompt]) -> list[Prefix]:
        """The prefixes of all rows, checked, and their lengths."""
        target, layout = self.target, self.layout
        rows = rows_of(prompts, self.guidance)
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

    def _begin(self, rows: list[Prefix]) -> Opening:
        place = self.target.image_offset
        start = [n - self.layout.start if place is None else place for n in self.lengths]
        self.offset.copy_(torch.tensor(start))
        self.raster.fill()
        return self._prefill(rows, self.offset.device)

    def _prefill(self, rows: list[Prefix], device: torch.device) -> Opening:
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
        factors = self._prompt_factors(longest, device)
        lengths = torch.tensor(self.lengths, device=device)
        features = self.stream.extend(x, factors, lengths, self.lengths)
        last = features[torch.arange(len(rows), device=device), lengths - 1]
        logits = guided(net.logits(last[:, None]), self.guidance)
        return Opening(logits, features, tokens, lengths, tuple(self.lengths))

    def _prompt_factors(self, longest: int, device: torch.device) -> Tensor:
        """Factors of the prompt places (R, P, 2, width); the prologue's tokens are image tokens already."""
        rope, layout = self.target.net.arch.rope, self.layout
        factors = rope.factors(rope.prompt(longest, device), self.raster.dtype).expand(len(self.lengths), -1, -1, -1)
        if layout.start == 0:
            return factors
        step = torch.arange(longest, device=device) - (
            torch.tensor(self.lengths, device=device)[:, None] - layout.start
        )
        image = self.raster(step)
        return torch.where((step >= 0)[..., None, None], image, factors)

    def _project(self, features: Tensor) -> Tensor:
        if self.target.projection is None:
            raise ConfigError("this model takes prompt tokens, not text features.")
        return self.target.projection(features)

    @torch.no_grad()
    def run(self, tree: DraftTree, steps: Tensor) -> Output:
        """One pass over the nodes of B trees whose roots stand at `steps` (B,)."""
        net = self.target.net
        depths = tree.depths.clamp(min=0)  # (B, N)
        x, factors = net.embed(self._copied(tree.tokens)), self.raster(steps[:, None] + depths)
        features = self.stream.branch(x, factors, depths, tree.ancestors)
        logits = self.stream.regions.suited(net.arch, features).logits(net, features)
        return Output(guided(logits, self.guidance), features)

    def fix(self, frame: Frame) -> Hashable | None:
        self.stream.regions, self.stream.kernel = frame.regions, frame.kernel
        return self.stream.fix(frame.size, frame.quantum)

    def note(self, known: tuple[int, ...]) -> None:
        self.stream.note(known * self.copies)

    def commit(self, outcome: Outcome) -> None:
        path, counts = map(self._copied, (outcome.verdict.path, outcome.counts))
        self.stream.keep(path, counts, outcome.known * self.copies)

    def _copied(self, images: Tensor) -> Tensor:
        """Something of all images (B, ...), for all rows (R, ...)."""
        return images if self.copies == 1 else torch.cat([images] * self.copies)


def _length(row: Prefix) -> int:
    return row.shape[0] if isinstance(row, Tensor) else len(row)
