"""A target and a drafter that look their logits up in tables: fast for thousands of images, and easy to enumerate."""

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
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, TargetOutput, VerifiedStep
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree, Frontier, grow_tree


def tables(layout: Layout, seed: int, spread: float = 1.2, error: float = 1.0) -> tuple[Tensor, Tensor]:
    """Logits (steps, columns, codes) of a target and of a drafter that errs: by step, then by the token before it."""
    generator = torch.Generator().manual_seed(seed)
    shape = (layout.steps, layout.vocab_size, len(layout.codes))
    target = torch.randn(shape, generator=generator) * spread
    return target, target + torch.randn(shape, generator=generator) * error


def look_up(table: Tensor, layout: Layout, tokens: Tensor, steps: Tensor) -> Tensor:
    """Logits (B, N, codes) of what follows tokens (B, N) that stand at steps (B, N)."""
    return table[(steps + 1).clamp(0, table.shape[0] - 1), layout.vocab_indices(tokens)]


@dataclass(frozen=True)
class TableTarget:
    table: Tensor

    def open(self, prompts: Sequence[Prompt], layout: Layout, *, guidance: float) -> TableTargetSession:
        return TableTargetSession(self.table, layout, len(prompts))


class TableTargetSession:
    def __init__(self, table: Tensor, layout: Layout, batch: int) -> None:
        self.table, self.layout = table, layout
        logits = table[layout.start, 0].expand(batch, 1, -1)
        ones = torch.ones(batch, dtype=torch.int64)
        self.prefill = PrefillOutput(logits, torch.zeros(batch, 1, 1), -ones[:, None], ones, (1,) * batch)

    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput:
        logits = look_up(self.table, self.layout, tree.tokens, steps[:, None] + tree.depths)
        return TargetOutput(logits, torch.zeros(*tree.tokens.shape, 1))

    def commit(self, verified: VerifiedStep) -> None:
        pass


@dataclass(frozen=True)
class TableDrafter:
    """`seen` keeps every (request, tree) for tests to look at."""

    proposes: ClassVar[str] = "tree"

    table: Tensor
    seen: list[tuple[DraftRequest, DraftTree]] = field(default_factory=list)

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> TableDrafterSession:
        return TableDrafterSession(self, layout)


@dataclass(frozen=True)
class TableDrafterSession:
    drafter: TableDrafter
    layout: Layout

    def draft(self, request: DraftRequest) -> DraftTree:
        def expand(level: Frontier) -> Tensor:
            steps = (request.steps + level.depth)[:, None].expand(level.tokens.shape)
            return look_up(self.drafter.table, self.layout, level.tokens, steps)

        tree = grow_tree(
            expand, request.root, request.plan, request.noise_window, proposal=request.proposal, limits=request.limits
        )
        self.drafter.seen.append((request, tree))
        return tree

    def commit(self, verified: VerifiedStep) -> None:
        pass


def draw(
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
    for _ in decode(
        target, drafter, policy, verifier, prompts, sampler, proposal=proposal, histories=histories  # type: ignore[arg-type]
    ):  # fmt: skip
        pass
    return np.stack([history.tokens for history in histories]), histories


def law(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """What plain autoregression draws from, (K,): temperature, then top-k with ties, then top-p, in plain Python."""
    values = logits.double().tolist()
    weights = [math.exp((value - max(values)) / temperature) for value in values]
    if 0 < top_k < len(values):
        kth = sorted(values)[-top_k]
        weights = [w if value >= kth else 0.0 for w, value in zip(weights, values, strict=True)]
    chances = [w / sum(weights) for w in weights]
    kept, before = np.zeros(len(chances)), 0.0
    for code in sorted(range(len(chances)), key=lambda c: -chances[c]):
        if before < top_p:
            kept[code] = chances[code]
        before += chances[code]
    return kept / kept.sum()


def joint(table: Tensor, layout: Layout, **settings: Any) -> np.ndarray:
    """The chance of every image of a table, by enumeration: an array with one axis per cell."""
    codes = len(layout.codes)
    token_stats = np.array([[law(row, **settings) for row in step] for step in table])  # (steps, columns, K)
    cells = [layout.step(row, col) for row in range(layout.height) for col in range(layout.width)]
    chances = np.zeros((codes,) * layout.cells)
    for image in itertools.product(range(codes), repeat=layout.cells):
        chance = 1.0
        for index, (step, code) in enumerate(zip(cells, image, strict=True)):
            before = 0 if index == 0 else codes if cells[index - 1] != step - 1 else image[index - 1]
            chance *= token_stats[step, before, code]
        chances[image] = chance
    return chances
