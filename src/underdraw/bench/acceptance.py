"""Statistics of a model and its drafter: entropy, acceptance by rank and depth, and their correlation in the image.

Measured on generated images (their histories) and by probing the drafter on the same images (`probe_draft`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from underdraw.bench.draft_probe import can_probe, probe_draft
from underdraw.bench.environment import describe_machine
from underdraw.bench.sections import portable_settings
from underdraw.history import History
from underdraw.pipeline import Pipeline

PROBED_DEPTH = 6  # draft levels that are probed
BEST = (1, 2, 4, 8)  # numbers of children that the target's token may be among
NEIGHBOURS = {"left": (0, -1), "above": (-1, 0), "above-right": (-1, 1)}  # (rows, columns)


def measure(
    pipe: Pipeline,
    prompts: Sequence[str],
    temperatures: Sequence[float],
    *,
    seed: int = 0,
    on_image: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """All statistics as a record, of distributions that no filter cuts; `on_image` is called after every image."""
    unfiltered: dict[str, Any] = {"top_k": 0, "top_p": 1.0}
    request = pipe.request(prompts[0], seed=seed, **unfiltered)
    is_probed = can_probe(pipe.drafter, pipe, request)
    entries = []
    for temperature in temperatures:
        histories, ranks, noiseless_ranks = [], [], []
        for index, text in enumerate(prompts):
            sampling: dict[str, Any] = {"seed": seed + index, "temperature": temperature, **unfiltered}
            output = pipe(text, **sampling, token_stats="keep", output_type="codes")
            histories.append(output.history)
            if is_probed:
                probe = probe_draft(pipe, pipe.request(text, **sampling), output.history, PROBED_DEPTH)
                ranks.append(probe.ranks)
                noiseless_ranks.append(probe.noiseless_ranks)
            on_image()
        entry = {"temperature": temperature, **history_statistics(histories)}
        if is_probed:
            entry["accepted"] = acceptance_by_depth(np.stack(ranks))
            entry["accepted_by_q"] = acceptance_by_depth(np.stack(noiseless_ranks))
            entry["first_child"] = first_child_correlation(histories, ranks)
        entries.append(entry)
    settings = portable_settings(pipe.settings(request))
    return {
        "kind": "statistics",
        "model": pipe.model.name,
        "settings": {key: value for key, value in settings.items() if key != "temperature"},
        "prompts": len(prompts),
        "seed": seed,
        "loss": None,  # needs training data; a recipe can add it
        "entries": entries,
        "machine": describe_machine(pipe.device),
    }


def history_statistics(histories: Sequence[History]) -> dict[str, Any]:
    """Entropy and top-1 probability of the target, accepted tokens per pass, and their correlation with neighbours."""
    passes = sum(history.passes for history in histories)
    entropy = np.concatenate([history.grid("entropy").ravel() for history in histories])
    top1 = np.concatenate([history.grid("top1").ravel() for history in histories])
    entropy, top1 = entropy[np.isfinite(entropy)], top1[np.isfinite(top1)]
    lengths = np.concatenate([accepted_lengths(history) for history in histories])
    return {
        "entropy": _rounded(entropy.mean()),
        "top1": _rounded(top1.mean()),
        "certain": _rounded((top1 > 0.99).mean()),
        "tokens_per_pass": _rounded(sum(int((h.pass_index >= 0).sum()) for h in histories) / passes),
        "lengths": np.bincount(lengths).tolist(),
        "length_correlation": {name: length_correlation(histories, *offset) for name, offset in NEIGHBOURS.items()},
    }


def accepted_lengths(history: History) -> NDArray[np.int64]:
    """Accepted tokens of every pass."""
    decoded = history.pass_index >= 0
    first_steps = np.unique(history.pass_index[decoded], return_index=True)[1]
    return history.accepted[decoded][first_steps].astype(np.int64)


def length_correlation(histories: Sequence[History], rows: int, cols: int) -> float | None:
    """Correlation of a pass's accepted length with that of the pass which decoded a neighbour of its first cell."""
    pairs = []
    for history in histories:
        layout, pass_index = history.layout, history.pass_index
        for first in np.flatnonzero((pass_index >= 0) & (pass_index != np.roll(pass_index, 1))).tolist():
            if layout.cell(first) is None:
                continue
            step, is_inside = layout.neighbour(first, rows, cols)
            neighbour = history.tree_at(step) if is_inside else None
            if neighbour is not None:
                pairs.append((int(history.accepted[first]), neighbour.accepted))
    return correlation(np.array(pairs).reshape(-1, 2))


def first_child_correlation(
    histories: Sequence[History], ranks: Sequence[NDArray[np.int64]]
) -> dict[str, float | None]:
    """Correlation of "the drafter's best child is the target's token" between a cell and its neighbours."""
    grids = []
    for history, probed in zip(histories, ranks, strict=True):
        layout = history.layout
        is_hit = np.full(layout.steps, np.nan)  # by the step of the child, one after the root's
        roots = np.flatnonzero(probed[:, 0] >= 0)
        is_hit[roots + 1] = probed[roots, 0] == 0
        raster = is_hit[layout.grid_start : layout.grid_start + layout.row_stride * layout.height]
        grids.append(raster.reshape(layout.height, layout.row_stride)[:, : layout.width])
    stack = np.stack(grids)
    return {name: _shifted_correlation(stack, *offset) for name, offset in NEIGHBOURS.items()}


def _shifted_correlation(grids: NDArray[np.float64], rows: int, cols: int) -> float | None:
    """Correlation of grids (P, H, W) with themselves, shifted by an offset of NEIGHBOURS."""
    height, width = grids.shape[1:]
    cells = grids[:, -rows:, max(0, -cols) : width - max(0, cols)]
    neighbours = grids[:, : height + rows, max(0, cols) : width - max(0, -cols)]
    pairs = np.stack([cells.ravel(), neighbours.ravel()], axis=1)
    return correlation(pairs[np.isfinite(pairs).all(1)])


def correlation(pairs: NDArray[Any]) -> float | None:
    """Pearson correlation of pairs (N, 2); None where one side is constant."""
    if len(pairs) < 2 or (pairs.std(0) == 0).any():
        return None
    return _rounded(np.corrcoef(pairs.T)[0, 1])


def acceptance_by_depth(ranks: NDArray[np.int64]) -> list[list[float]]:
    """Ranks (P, steps, depth) -> for each depth the share of target tokens among the best 1, 2, 4 and 8 children."""
    levels = [ranks[..., level][ranks[..., level] >= 0] for level in range(ranks.shape[-1])]
    return [[_rounded((level < best).mean()) for best in BEST] for level in levels if len(level)]


def _rounded(value: Any) -> float:
    return round(float(value), 4)
