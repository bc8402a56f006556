"""The statistics of a model and its drafter: entropy, acceptance by rank and depth, and how they vary in space.

All of it comes from pictures that the pipeline draws (their histories), and from asking the drafter about the same
pictures (`probe`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.bench.draft_probe import can_probe, probe
from underdraw.bench.environment import about
from underdraw.bench.records import told
from underdraw.history import History
from underdraw.pipeline import Pipeline

DEPTH = 6  # levels that a drafter is asked about
BEST = (1, 2, 4, 8)  # children that the true token may be among
NEIGHBOURS = {"left": (0, -1), "above": (-1, 0), "above-right": (-1, 1)}
Noted = Callable[[int], None]


def measure(
    pipe: Pipeline,
    prompts: Sequence[str],
    temperatures: Sequence[float],
    *,
    seed: int = 0,
    noted: Noted = lambda drawn: None,
) -> dict[str, Any]:
    """Everything, as a record; `noted` hears of every picture."""
    job = pipe.request(prompts[0], seed=seed)
    deep = can_probe(pipe.drafter, pipe, job)
    entries = []
    for temperature in temperatures:
        histories, ranks, plain = [], [], []
        for place, text in enumerate(prompts):
            out = pipe(text, seed=seed + place, temperature=temperature, token_stats="keep", output_type="codes")
            histories.append(out.history)
            if deep:
                asked = probe(pipe, pipe.request(text, seed=seed + place, temperature=temperature), out.history, DEPTH)
                ranks.append(asked.ranks)
                plain.append(asked.plain)
            noted(1)
        entry = {"temperature": temperature, **drawn(histories)}
        if deep:
            entry["accepted"] = by_depth(np.stack(ranks))
            entry["accepted_by_q"] = by_depth(np.stack(plain))
            entry["first_child"] = first_child(histories, ranks)
        entries.append(entry)
    settings = {key: value for key, value in told(pipe.settings(job)).items() if key != "temperature"}
    return {
        "kind": "statistics", "model": pipe.model.name, "settings": settings, "prompts": len(prompts), "seed": seed,
        "loss": None,  # needs training data; a recipe may fill it in
        "entries": entries, "machine": about(pipe.device),
    }  # fmt: skip


def drawn(histories: Sequence[History]) -> dict[str, Any]:
    """What histories say: the target's law at every cell, accepted lengths, and those of neighbouring passes."""
    passes = sum(history.passes for history in histories)
    entropy = np.concatenate([history.grid("entropy").ravel() for history in histories])
    top1 = np.concatenate([history.grid("top1").ravel() for history in histories])
    lengths = np.concatenate([accepted(history) for history in histories])
    return {
        "entropy": _rounded(entropy[np.isfinite(entropy)].mean()), "top1": _rounded(top1[np.isfinite(top1)].mean()),
        "certain": _rounded((top1[np.isfinite(top1)] > 0.99).mean()),
        "tokens_per_pass": _rounded(sum(int((h.pass_index >= 0).sum()) for h in histories) / passes),
        "lengths": np.bincount(lengths).tolist(),
        "length_correlation": {name: between_passes(histories, *step) for name, step in NEIGHBOURS.items()},
    }  # fmt: skip


def accepted(history: History) -> NDArray[np.int64]:
    """Drafted tokens that each pass accepted."""
    tree = history.pass_index[history.pass_index >= 0]
    return history.accepted[history.pass_index >= 0][np.unique(tree, return_index=True)[1]].astype(np.int64)


def between_passes(histories: Sequence[History], rows: int, cols: int) -> float | None:
    """Correlation of the length that a pass accepts with that of the pass that drew a neighbour of its first cell."""
    pairs = []
    for history in histories:
        layout, tree = history.layout, history.pass_index
        for first in np.flatnonzero((tree >= 0) & (tree != np.roll(tree, 1))).tolist():
            if layout.cell(first) is None:
                continue
            step, inside = layout.neighbour(first, rows, cols)
            other = history.tree_at(step) if inside else None
            if other is not None:
                pairs.append((int(history.accepted[first]), other.accepted))
    return correlation(np.array(pairs).reshape(-1, 2))


def first_child(histories: Sequence[History], ranks: Sequence[NDArray[np.int64]]) -> dict[str, float | None]:
    """Correlation of "the best child is the true token" between a cell and its neighbours."""
    maps = []
    for history, found in zip(histories, ranks, strict=True):
        layout = history.layout
        hit = np.full(layout.steps, np.nan)  # of the step that a root's first child fills
        asked = np.flatnonzero(found[:, 0] >= 0)
        hit[asked + 1] = found[asked, 0] == 0
        raster = hit[layout.start : layout.start + layout.row_stride * layout.height]
        maps.append(raster.reshape(layout.height, layout.row_stride)[:, : layout.width])
    stack = np.stack(maps)
    return {name: _shifted(stack, *step) for name, step in NEIGHBOURS.items()}


def _shifted(maps: NDArray[np.float64], rows: int, cols: int) -> float | None:
    """Correlation of maps (P, H, W) with themselves, `rows` down and `cols` right."""
    height, width = maps.shape[1:]
    own = maps[:, -rows:, max(0, -cols) : width - max(0, cols)]
    other = maps[:, : height + rows, max(0, cols) : width - max(0, -cols)]
    pairs = np.stack([own.ravel(), other.ravel()], axis=1)
    return correlation(pairs[np.isfinite(pairs).all(1)])


def correlation(pairs: NDArray[Any]) -> float | None:
    """Pearson's, of pairs (N, 2); None where one side does not vary."""
    if len(pairs) < 2 or (pairs.std(0) == 0).any():
        return None
    return _rounded(np.corrcoef(pairs.T)[0, 1])


def by_depth(ranks: NDArray[np.int64]) -> list[list[float]]:
    """Ranks (P, steps, depth) -> for each depth the share of true tokens among the best 1, 2, 4 and 8."""
    levels = [ranks[..., level][ranks[..., level] >= 0] for level in range(ranks.shape[-1])]
    return [[_rounded((level < best).mean()) for best in BEST] for level in levels if len(level)]


def _rounded(value: Any) -> float:
    return round(float(value), 4)
