"""A target and a drafter that look up their logits in tables.

Fast for thousands of images, and the distribution of whole images can be enumerated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from underdraw.engine.decode import decode
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.plan import MAX_DEPTH
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, TargetOutput, VerifiedStep
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree, Frontier, grow_tree


def random_tables(layout: Layout, seed: int, spread: float = 1.2, error: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits (steps, V, K) of a target and of an inaccurate drafter, by step and by the previous token."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.steps, layout.vocab_size, len(layout.codes))
    target = torch.randn(shape, generator=generator) * spread
    return target, target + torch.randn(shape, generator=generator) * error


def look_up_logits(table: Tensor, layout: Layout, tokens: Tensor, steps: Tensor) -> Tensor:
    """Logits (B, N, K) of the tokens that follow `tokens` (B, N) at `steps` (B, N)."""
    return table[(steps + 1).clamp(0, table.shape[0] - 1), layout.vocab_indices(tokens)]


@dataclass(frozen=True)
class TableTarget:
    table: Tensor

    def open(self, prompts: Sequence[Prompt], layout: Layout, *, guidance: float) -> TableTargetSession:
        return TableTargetSession(self.table, layout, len(prompts))


class TableTargetSession:
    max_depth = MAX_DEPTH

    def __init__(self, table: Tensor, layout: Layout, batch: int) -> None:
        self.table, self.layout = table, layout
        logits = table[layout.start, 0].expand(batch, 1, -1)
        ones = torch.ones(batch, dtype=torch.int64)
        self.prefill = PrefillOutput(logits, torch.zeros(batch, 1, 1), -ones[:, None], ones, (1,) * batch)

    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput:
        logits = look_up_logits(self.table, self.layout, tree.tokens, steps[:, None] + tree.depths)
        return TargetOutput(logits, torch.zeros(*tree.tokens.shape, 1))

    def commit(self, verified: VerifiedStep) -> None:
        pass


@dataclass(frozen=True)
class TableDrafter:
    """`drafted` collects every (request, tree) for tests to inspect."""

    proposes: ClassVar[str] = "tree"

    table: Tensor
    drafted: list[tuple[DraftRequest, DraftTree]] = field(default_factory=list)

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> TableDrafterSession:
        return TableDrafterSession(self, layout)


@dataclass(frozen=True)
class TableDrafterSession:
    drafter: TableDrafter
    layout: Layout

    def draft(self, request: DraftRequest) -> DraftTree:
        def expand(frontier: Frontier) -> Tensor:
            steps = (request.steps + frontier.depth)[:, None].expand(frontier.tokens.shape)
            return look_up_logits(self.drafter.table, self.layout, frontier.tokens, steps)

        tree = grow_tree(
            expand, request.root, request.plan, request.noise_window, proposal=request.proposal, limits=request.limits
        )
        self.drafter.drafted.append((request, tree))
        return tree

    def commit(self, verified: VerifiedStep) -> None:
        pass


def decode_tokens(
    target: object,
    drafter: object,
    policy: object,
    verifier: object,
    layout: Layout,
    seeds: Sequence[int],
    *,
    proposal: str | None = None,
    **settings: Any,
) -> tuple[np.ndarray, list[History]]:
    """Tokens (B, steps) and histories of one decode."""
    histories = [History(layout) for _ in seeds]
    sampler = Sampler(layout, seeds, **settings)
    prompts = [Prompt((0,))] * len(seeds)
    models: Any = (target, drafter, policy, verifier)
    for _ in decode(*models, prompts, sampler, proposal=proposal, histories=histories):  # type: ignore[arg-type]
        pass
    return np.stack([history.tokens for history in histories]), histories


def reference_probs(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """Probabilities (K,) after temperature, then top-k with ties, then top-p, in plain Python."""
    values = logits.double().tolist()
    weights = [math.exp((value - max(values)) / temperature) for value in values]
    if 0 < top_k < len(values):
        kth = sorted(values)[-top_k]
        weights = [w if value >= kth else 0.0 for w, value in zip(weights, values, strict=True)]
    probs = [w / sum(weights) for w in weights]
    kept, cumulative = np.zeros(len(probs)), 0.0
    for code in sorted(range(len(probs)), key=lambda c: -probs[c]):
        if cumulative < top_p:
            kept[code] = probs[code]
        cumulative += probs[code]
    return kept / kept.sum()


def joint_probs(table: Tensor, layout: Layout, **settings: Any) -> np.ndarray:
    """The probability of every possible image, by enumeration: an array with one axis per cell."""
    codes = len(layout.codes)
    probs = np.array([[reference_probs(row, **settings) for row in step] for step in table])  # (steps, V, K)
    steps = [layout.step(row, col) for row in range(layout.height) for col in range(layout.width)]
    joint = np.zeros((codes,) * layout.cells)
    for image in itertools.product(range(codes), repeat=layout.cells):
        probability = 1.0
        for index, (step, code) in enumerate(zip(steps, image, strict=True)):
            previous = 0 if index == 0 else codes if steps[index - 1] != step - 1 else image[index - 1]
            probability *= probs[step, previous, code]
        joint[image] = probability
    return joint
