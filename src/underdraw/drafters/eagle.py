"""EAGLE: one or more decoder layers over [token embedding; target feature] that draft features and tokens.

Optionally a head also reads the tokens above and above-right of the cell it predicts. They are sampled already and are
its most informative input.
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
from underdraw.nn.cached_decoder import CachedDecoder
from underdraw.nn.linear import Linear
from underdraw.nn.transformer import Arch, Transformer
from underdraw.plan import MAX_EXPANDED, MAX_NODES
from underdraw.protocols import Guidance, PrefillOutput, Prompt

_FREE_SLOTS = MAX_EXPANDED + MAX_NODES  # KV cache slots for drafted nodes, and for padding of the pending tokens
DrafterKind = Literal["eagle", "block"]
"""Kinds of trained drafters, as their files name them."""
ABOVE = ((-1, 0), (-1, 1))  # (rows, cols) to the cells above and above-right


class EagleNet(nn.Module):
    """Input projection and decoder. `above` adds the embeddings of the row above; `bias` is the projection's."""

    def __init__(self, arch: Arch, feature_dim: int, *, above: bool, bias: bool = True) -> None:
        super().__init__()
        self.body = Transformer(arch)
        inputs = arch.dim * (1 + (len(ABOVE) if above else 0)) + feature_dim
        self.fc = Linear(inputs, arch.dim, bias=bias)
        self.missing = nn.Parameter(torch.zeros(len(ABOVE), arch.dim)) if above else None

    def embed_inputs(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """tokens (R, N), features (R, N, D), above (R, N, 2) token ids, -1 where there is none -> (R, N, dim)."""
        embedded = None if above is None or self.missing is None else self.embed_above(above)
        return self.project_inputs(tokens, features, embedded)

    def project_inputs(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """`embed_inputs` with the row above embedded already, (R, N, 2 dim)."""
        parts = (self.body.embed(tokens), features) if above is None else (self.body.embed(tokens), features, above)
        return self.fc(torch.cat([part.to(features.dtype) for part in parts], dim=-1))

    def embed_above(self, above: Tensor) -> Tensor:
        """(R, N, 2) token ids, -1 where there is none -> (R, N, 2 dim)."""
        assert self.missing is not None
        return torch.where((above >= 0)[..., None], self.body.embed(above.clamp(min=0)), self.missing).flatten(-2)


class EagleSession(NetworkDraftSession):
    """Position i of the KV cache holds the target's feature of token i together with token i + 1."""

    def __init__(self, drafter: Eagle, layout: Layout, prefill: PrefillOutput, guidance: Guidance) -> None:
        net = drafter.net
        rows = prefill.lengths.shape[0]
        prefill = drafter.adapt_prefill(prefill)
        decoder = CachedDecoder(net.body, rows, max(prefill.host_lengths) + layout.stop - layout.start + _FREE_SLOTS)
        super().__init__(net.body, layout, guidance, drafter.calibration, decoder, torch.zeros_like(prefill.lengths))
        self.drafter, self.eagle = drafter, net
        self._reset_to_prompt(prefill)

    @torch.no_grad()
    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        prefill, layout = self.drafter.adapt_prefill(prefill), self.layout
        needed = max(prefill.host_lengths) + layout.stop - layout.start + _FREE_SLOTS
        if len(prefill.host_lengths) != len(self.cache.host_lengths) or needed > self.cache.capacity:
            return False
        self.decoder.reset()
        self._reset_to_prompt(prefill)
        return True

    def _reset_to_prompt(self, prefill: PrefillOutput) -> None:
        """Make the prompt pending, each token one position earlier than in the target."""
        image_offset, start = self.drafter.image_offset, self.layout.start
        if image_offset is None:
            self.offset.copy_(prefill.lengths - start - 1)
        else:
            self.offset.copy_(torch.full_like(prefill.lengths, image_offset - 1))
        tokens = torch.cat([prefill.prefix[:, 1:], prefill.prefix[:, :1]], dim=1).clamp(min=0)
        index = torch.arange(max(prefill.host_lengths), device=self.offset.device)
        steps = index + 1 - (prefill.lengths[:, None] - start)
        self.reset(PendingTokens(tokens, prefill.features, steps, prefill.lengths, prefill.host_lengths))

    def cos_sin(self, steps: Tensor) -> Tensor:
        cos_sin = super().cos_sin(steps)
        if max(self.cache.host_lengths) > 0:
            return cos_sin
        rope = self.net.arch.rope  # the prompt is pending; its tokens have no cells
        prompt = rope.cos_sin(rope.prompt_rotation(steps.shape[1], steps.device), cos_sin.dtype)
        return torch.where((steps >= 0)[..., None, None], cos_sin, prompt)

    def embed_inputs(self, tokens: Tensor, features: Tensor | None, position_inputs: Tensor | None) -> Tensor:
        assert features is not None
        return self.eagle.project_inputs(tokens, features, position_inputs)

    def position_inputs(self, steps: Tensor) -> Tensor | None:
        """Embeddings (R, N, 2 dim) of the tokens above and above-right of the cells after `steps` (R, N)."""
        if self.eagle.missing is None:
            return None
        return self.eagle.embed_above(above_tokens(self.committed, self.layout, steps + 1, self.roots, self.copies))


@dataclass(frozen=True, slots=True)
class Eagle:
    """A trained head, the calibration of its scores, and the position of step 0 if it is not the prefix length."""

    proposes: ClassVar[Literal["tree"]] = "tree"
    kind: ClassVar[DrafterKind] = "eagle"
    session_type: ClassVar[type[EagleSession]] = EagleSession

    net: EagleNet
    calibration: Calibration | None = Calibration()
    image_offset: int | None = None

    def adapt_prefill(self, prefill: PrefillOutput) -> PrefillOutput:
        """The target's prefill in the form that this head was trained on."""
        return prefill

    @torch.no_grad()
    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> EagleSession:
        return self.session_type(self, layout, prefill, guidance)


def above_tokens(committed: Tensor, layout: Layout, steps: Tensor, roots: Tensor, copies: int) -> Tensor:
    """Committed tokens above and above-right of the cells at `steps` (R, N): (R, N, 2), -1 where there is none.

    `roots` are (B,), or (B, N) with one for each cell. A neighbour after the root belongs to the tree and counts as
    missing.
    """
    table = _steps_above(layout, committed.device)
    above = table[steps.clamp(0, len(table) - 1)]  # (R, N, 2)
    last = (roots[:, None] if roots.ndim == 1 else roots).repeat(copies, 1)[..., None]
    tokens = committed.repeat(copies, 1).gather(1, above.clamp(0, committed.shape[1] - 1).flatten(1))
    return torch.where((above >= 0) & (above <= last), tokens.view_as(above), -1)


@functools.cache  # kept forever, since CUDA graphs read it
def _steps_above(layout: Layout, device: torch.device) -> Tensor:
    """The steps of the cells above and above-right of every step's cell: (steps, 2), -1 where there is none."""
    with torch.inference_mode(False):
        steps = torch.arange(layout.steps, device=device)
        neighbours = [layout.neighbour(steps, rows, cols) for rows, cols in ABOVE]
        return torch.stack(
            [torch.where(is_inside & (steps > layout.start), step, -1) for step, is_inside in neighbours], dim=-1
        )
