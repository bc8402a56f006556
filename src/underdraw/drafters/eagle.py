"""The EAGLE head: one or more decoder layers over [token embedding; target feature], drafting features and tokens.

Optionally it also reads the tokens above and above-right of the cell that it predicts: they are drawn already, and no
other input tells it more. Everything else that differs between published heads is a field of the architecture.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from underdraw.calibration import Calibration
from underdraw.drafters.network import NetworkDraftSession, PendingTokens
from underdraw.layout import Layout
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.row_invariant import Linear
from underdraw.nn.transformer import Arch, Transformer
from underdraw.plan import MAX_EXPANDED, MAX_NODES
from underdraw.protocols import PrefillOutput, Prompt

_ROOM = MAX_EXPANDED + MAX_NODES  # cache slots for nodes, and for pending tokens that turn out to be none
ABOVE = ((-1, 0), (-1, 1))  # cells that lie above and above-right


class EagleNet(nn.Module):
    """Input projection and decoder. `above` says whether the row above is read; `bias` is the projection's."""

    def __init__(self, arch: Arch, feature_dim: int, *, above: bool, bias: bool = True) -> None:
        super().__init__()
        self.body = Transformer(arch)
        inputs = arch.dim * (1 + (len(ABOVE) if above else 0)) + feature_dim
        self.fc = Linear(inputs, arch.dim, bias=bias)
        self.missing = nn.Parameter(torch.zeros(len(ABOVE), arch.dim)) if above else None

    def inputs(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """tokens (R, N), features (R, N, D), above (R, N, 2) token ids, -1 where there is none -> (R, N, dim)."""
        return self.join(tokens, features, None if above is None or self.missing is None else self.embed_above(above))

    def join(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """`inputs` with what was above embedded already, (R, N, 2 dim)."""
        parts = (self.body.embed(tokens), features) if above is None else (self.body.embed(tokens), features, above)
        return self.fc(torch.cat([part.to(features.dtype) for part in parts], dim=-1))

    def embed_above(self, above: Tensor) -> Tensor:
        """(R, N, 2) token ids -> (R, N, 2 dim)."""
        assert self.missing is not None
        return torch.where((above >= 0)[..., None], self.body.embed(above.clamp(min=0)), self.missing).flatten(-2)


@dataclass(frozen=True, slots=True)
class Eagle:
    """A trained head with the calibration of its scores."""

    proposes: ClassVar[Literal["tree"]] = "tree"

    net: EagleNet
    calibration: Calibration | None = Calibration()
    image_offset: int | None = None

    def adapt_prefill(self, prefill: PrefillOutput) -> PrefillOutput:
        """What the prompts said, as this head has learnt to read it."""
        return prefill

    @torch.no_grad()
    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> EagleSession:
        return EagleSession(self, layout, prefill, guidance)


class EagleSession(NetworkDraftSession):
    """Follows the target's features; place i holds the feature of token i and token i + 1."""

    def __init__(self, drafter: Eagle, layout: Layout, prefill: PrefillOutput, guidance: float) -> None:
        net = drafter.net
        rows = prefill.lengths.shape[0]
        prefill = drafter.adapt_prefill(prefill)
        cache = KVCache(net.body, rows, max(prefill.host_lengths) + layout.stop - layout.start + _ROOM)
        super().__init__(net.body, layout, guidance, drafter.calibration, cache, torch.zeros_like(prefill.lengths))
        self.drafter, self.eagle = drafter, net
        self._prompt(prefill)

    @torch.no_grad()
    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        prefill, layout = self.drafter.adapt_prefill(prefill), self.layout
        needed = max(prefill.host_lengths) + layout.stop - layout.start + _ROOM
        if len(prefill.host_lengths) != len(self.cache.host_lengths) or needed > self.cache.capacity:
            return False
        self.cache.reset()
        self._prompt(prefill)
        return True

    def _prompt(self, prefill: PrefillOutput) -> None:
        """Start with the prompt pending, one place earlier than its tokens have in the target."""
        place, start = self.drafter.image_offset, self.layout.start
        self.offset.copy_(prefill.lengths - start - 1 if place is None else torch.full_like(prefill.lengths, place - 1))
        tokens = torch.cat([prefill.prefix[:, 1:], prefill.prefix[:, :1]], dim=1).clamp(min=0)
        index = torch.arange(max(prefill.host_lengths), device=self.offset.device)
        steps = index + 1 - (prefill.lengths[:, None] - start)
        self.begin(PendingTokens(tokens, prefill.features, steps, prefill.lengths, prefill.host_lengths))

    def cos_sin(self, steps: Tensor) -> Tensor:
        cos_sin = super().cos_sin(steps)
        if max(self.cache.host_lengths) > 0:
            return cos_sin
        rope = self.net.arch.rope  # the prompt has no steps of its own
        prompt = rope.cos_sin(rope.prompt(steps.shape[1], steps.device), cos_sin.dtype)
        return torch.where((steps >= 0)[..., None, None], cos_sin, prompt)

    def inputs(self, tokens: Tensor, features: Tensor | None, beside: Tensor | None) -> Tensor:
        assert features is not None
        return self.eagle.join(tokens, features, beside)

    def beside(self, steps: Tensor) -> Tensor | None:
        return None if self.eagle.missing is None else self.eagle.embed_above(self.above(steps))

    def above(self, steps: Tensor) -> Tensor:
        """Tokens above and above-right of the cells after `steps` (R, N), -1 where none is known: (R, N, 2)."""
        return above_tokens(self.committed, self.layout, steps + 1, self.roots, self.copies)


def above_tokens(committed: Tensor, layout: Layout, steps: Tensor, roots: Tensor, copies: int) -> Tensor:
    """Committed tokens above and above-right of the cells at `steps` (R, N): (R, N, 2), -1 where there is none.

    A neighbour after the root, (B,) or one for each cell (B, N), is part of the tree and not of the picture, and counts
    as unknown.
    """
    places = _places_above(layout, committed.device)
    place = places[steps.clamp(0, len(places) - 1)]  # (R, N, 2)
    last = (roots[:, None] if roots.ndim == 1 else roots).repeat(copies, 1)[..., None]
    found = committed.repeat(copies, 1).gather(1, place.clamp(0, committed.shape[1] - 1).flatten(1))
    return torch.where((place >= 0) & (place <= last), found.view_as(place), -1)


@functools.cache  # never forgotten, since captured passes read it
def _places_above(layout: Layout, device: torch.device) -> Tensor:
    """The steps of the cells above and above-right of every step's, -1 where there is none: (steps, 2)."""
    with torch.inference_mode(False):
        steps = torch.arange(layout.steps, device=device)
        found = [layout.neighbour(steps, rows, cols) for rows, cols in ABOVE]
        return torch.stack([torch.where(inside & (steps > layout.start), at, -1) for at, inside in found], dim=-1)
