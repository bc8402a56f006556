"""What passes cost on this machine: a straight line in nodes and levels, measured once and remembered on disk.

Where passes are captured they come in few sizes, and the cost of each size is measured on its own: the `curve`.

Measuring runs the loop itself for a few passes at several tree sizes; the pictures are thrown away.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from underdraw.drafters.forced import Forced
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.decode import decode
from underdraw.history import History
from underdraw.io import cache_dir
from underdraw.nn.layer_functions import PLAIN
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, Prompt, Target, TreePolicy
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact

log = logging.getLogger(__name__)
_SMALL, _DEEP, _WIDE = TreePlan(2, 1, 1, 3), TreePlan(8, 1, 1, 9), TreePlan(2, 6, 6, 27)
_WARM, _TIMED = 2, 5
_CAPTURED = 5  # passes until the pass of one kind is replayed: prompt, first, captured, and two to settle
_SIZES = (8, 16, 32, 64, 128)
_WIDTHS = (1, 4, 12)
WORTH = 1.25  # a tree may make a pass so many times as long as a plain one
REACHED = 0.7  # chance that a level's best node is accepted if the one above it was: see the statistics of docs/lab.md


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Milliseconds: a plain pass, one with a tree, and what each node and level add to it."""

    plain: float
    base: float
    node: float
    level: float
    curve: tuple[tuple[int, float], ...] = ()  # (nodes, milliseconds) of captured passes, drafting left out
    levels: tuple[tuple[int, float], ...] = ()  # (nodes that it expands, milliseconds) of one level of drafting


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """One plan for every step."""

    tree: TreePlan

    def plan(self, history: History, step: int) -> TreePlan:
        return self.tree


def measure(
    target: Target, drafter: Drafter, forced: Drafter, prompts: Sequence[Prompt], sampler: Sampler, guidance: float,
    graphs: GraphCache | None = None,
) -> PassCosts:  # fmt: skip
    """Time a few passes of each size; the median of each is what counts."""

    def time(own: Drafter, policy: TreePolicy, graphs: GraphCache | None = graphs) -> float:
        seconds = []
        warm = _WARM if graphs is None else _CAPTURED
        for step in decode(target, own, policy, Exact(), prompts, sampler, guidance=guidance, graphs=graphs):
            if step.sequence == 0:
                seconds.append(step.seconds)
            if len(seconds) == warm + _TIMED:
                break
        return 1000 * statistics.median(seconds[warm:] or seconds)

    plain = time(forced, NoTree())
    small, deep, wide = (time(drafter, FixedPlan(tree)) for tree in (_SMALL, _DEEP, _WIDE))
    node = max((wide - small) / (_WIDE.nodes - _SMALL.nodes), 0.002 * plain)
    level = max((deep - small - node * (_DEEP.nodes - _SMALL.nodes)) / (_DEEP.depth - _SMALL.depth), 0.0)
    base = max(small - node * _SMALL.nodes - level * _SMALL.depth, 0.5 * plain)
    line = PassCosts(round(plain, 3), round(base, 3), round(node, 3), round(level, 3))
    if graphs is None:
        return line
    curve = [(1, plain), *((size, time(forced, NoTree(), graphs.padded(size))) for size in _SIZES)]
    levels, same = [], graphs.padded(32)
    for width in _WIDTHS:
        low, high = (time(drafter, FixedPlan(TreePlan(depth, width, min(width, 4), 32)), same) for depth in (2, 8))
        levels.append((width, max((high - low) / 6, 0.0)))
    return replace(line, curve=_rounded(curve), levels=_rounded(levels))


def _rounded(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    return tuple((size, round(value, 3)) for size, value in pairs)


def load_or_measure_costs(
    key: Sequence[object], target: Target, drafter: Drafter, prompts: Sequence[Prompt], sampler: Sampler,
    guidance: float, graphs: GraphCache | None = None,
) -> PassCosts:  # fmt: skip
    """What was measured before for this model and machine, or else is measured now and remembered."""
    how = "as it is" if graphs is None else "captured" if graphs.regions is PLAIN else "compiled"
    key = (*key, how)
    costs = remembered(key)
    if costs is None:
        costs = measure(target, drafter, Forced(), prompts, sampler, guidance, graphs)
        remember(key, costs)
    return costs


def tree_within_budget(costs: PassCosts) -> TreePolicy:
    """Adjacent trees of the largest size that hardly lengthens a pass, as deep as levels are worth drafting.

    A level is worth its time if the share of a plain pass that it takes is less than its chance to be reached.
    """
    nodes = max((size for size, spent in costs.curve if spent <= WORTH * costs.plain and size >= 16), default=16)
    level = max((spent for _, spent in costs.levels), default=costs.level) / costs.plain
    usual = Adjacency()
    deepest = next((depth for depth in range(usual.d_max, 1, -1) if REACHED**depth >= level), 1)
    least, first = min(usual.d_min, deepest), min(usual.depth, deepest)
    return Adjacency(init="both", nodes=nodes, d_min=least, depth=first, d_max=deepest)


def remembered(key: Sequence[object], folder: Path | None = None) -> PassCosts | None:
    """What was measured before for this model and machine, if anything was."""
    try:
        known = json.loads(_file(folder).read_text(encoding="utf-8"))
        found = known[_name(key)]
        lists = {name: _rounded([tuple(pair) for pair in found.get(name, ())]) for name in ("curve", "levels")}
        return PassCosts(**{**found, **lists})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember(key: Sequence[object], costs: PassCosts, folder: Path | None = None) -> None:
    """Keep a measurement; a folder that cannot be written to is no reason to stop."""
    file = _file(folder)
    try:
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        known[_name(key)] = asdict(costs)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        part.replace(file)
    except (OSError, ValueError) as error:
        log.info("the measured costs could not be kept in %s (%s)", file, error)


def _file(folder: Path | None) -> Path:
    return (folder or cache_dir()) / "costs.json"


def _name(key: Sequence[object]) -> str:
    return " | ".join(map(str, (*key, machine(), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}")))


def machine() -> str:
    """The device's name, as far as it is known."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """The processor's name, where the system says it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
