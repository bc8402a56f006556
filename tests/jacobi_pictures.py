"""Jacobi decoding of synthetic pictures in numpy, to try out policies by counting passes, without a model or a clock.

A token is the best of: a random function of four earlier tokens, a preference for the codes above and to the left, and
noise. How strongly it depends on the four tokens is the picture's difficulty: the function's values change completely
if one of them does. With the settings of `KINDS`, chains of 2 to 64 nodes accept about as many tokens as on pictures of
the embedded model at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.protocols import TreePolicy

SIZE, CODES = 24, 96
TAP_WEIGHTS = np.array([2.0, 1.0, 0.7, 0.7]) / 2.45  # left, above, two to the left, a random earlier one
Grid = NDArray[np.float64]
ROWS, COLUMNS = np.mgrid[:SIZE, :SIZE]
KINDS = {  # difficulty and repeats inside a disc, and outside of it
    "plain": (1.0, 2.0, 0.0, 9.0),
    "gradient": (1.0, 2.0, 0.4, 4.0),
    "portrait": (1.4, 2.0, 0.6, 4.0),
    "scene": (1.2, 2.0, 2.6, 3.0),
    "photo": (25.0, 0.0, 25.0, 0.0),
}


@dataclass(frozen=True)
class Picture:
    """Everything that decides the tokens of a picture."""

    difficulty: Grid  # (cells,)
    repeats: Grid  # (cells,) added to the scores of the codes above and to the left
    scores: Grid  # (cells, codes) bias and noise
    effects: Grid  # (4, codes, codes) of the four earlier tokens on the scores
    distance: NDArray[np.int64]  # (cells,) to the random earlier token

    @classmethod
    def make(cls, difficulty: Grid, repeats: Grid, seed: int) -> Picture:
        rng, cells = np.random.default_rng(seed), SIZE * SIZE
        scores = rng.gumbel(size=(cells, CODES)) + rng.normal(size=(cells, CODES))
        effects = rng.normal(size=(4, CODES, CODES))
        return cls(difficulty.ravel(), repeats.ravel(), scores, effects, rng.integers(3, 3 * SIZE, size=cells))

    @classmethod
    def of_kind(cls, kind: str, seed: int) -> Picture:
        """A disc in front of a background."""
        radius = np.random.default_rng(seed + 99).integers(6, 9)
        is_inside = radius**2 > (ROWS - 12) ** 2 + (COLUMNS - 12) ** 2
        inside, inside_repeats, outside, outside_repeats = KINDS[kind]
        return cls.make(
            np.where(is_inside, inside, outside), np.where(is_inside, inside_repeats, outside_repeats), seed
        )

    def choose(self, cells: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """The tokens of some cells, given those before them."""
        taps = [np.where(cells >= d, tokens[np.maximum(cells - d, 0)], 0) for d in (1, SIZE, 2, self.distance[cells])]
        effects = sum(w * e[tap] for w, e, tap in zip(TAP_WEIGHTS, self.effects, taps, strict=True))
        scores = self.scores[cells] + self.difficulty[cells, None] * effects
        rows = np.arange(len(cells))
        for tap in taps[:2]:
            scores[rows, tap] += self.repeats[cells]
        return np.asarray(scores.argmax(1))


def decode(picture: Picture, policy: TreePolicy) -> tuple[History, list[int]]:
    """Draw a picture with chains of the policy's size; its history and the nodes of every pass."""
    cells, history = SIZE * SIZE, History(Layout(SIZE, SIZE, range(CODES)))
    tokens, guesses = np.full(cells, -1), np.full(cells, -1)
    tokens[0] = picture.choose(np.array([0]), tokens)[0]
    history.record_first(int(tokens[0]))
    step, nodes = 0, []
    while step < cells - 1:
        plan = policy.plan(history, step)
        plan = plan.truncate(min(plan.depth, cells - 2 - step))
        ahead = np.arange(step + 1, step + 2 + plan.depth)
        drafted = tokens.copy()
        for cell in ahead[:-1]:  # fresh guesses copy the token above, as `drafters.jacobi` does
            above = drafted[cell - SIZE] if cell >= SIZE else tokens[step]
            drafted[cell] = guesses[cell] if guesses[cell] >= 0 else above
        chosen = picture.choose(ahead, drafted)
        wrong = np.flatnonzero(drafted[ahead[:-1]] != chosen[:-1])
        accepted = int(wrong[0]) if len(wrong) else plan.depth
        guesses[ahead] = chosen
        new = chosen[: accepted + 1]
        tokens[ahead[: accepted + 1]] = new
        history.record(StepResult(0, 0, step, accepted, plan, tuple(new.tolist()), (0,) * accepted, 0.0))
        nodes.append(plan.nodes)
        step += accepted + 1
    return history, nodes


def total_ms(nodes: Sequence[int], costs: Sequence[tuple[int, float]]) -> float:
    """Milliseconds of passes with so many nodes."""
    sizes, milliseconds = zip(*costs, strict=True)
    return float(np.interp(nodes, sizes, milliseconds).sum())
