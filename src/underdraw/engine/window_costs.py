"""What passes with Jacobi chains and trees of every size cost on this machine, and the size that pays for a batch.

One decode is run whose passes cycle through all sizes, several times. The cost of a size is its fastest pass and the
time that choosing a size takes. Passes of one size that differ much show that the machine was busy. Such costs are
measured again, at once and, if that does not help, by the next process.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from underdraw.history import History, StepResult
from underdraw.plan import TreePlan
from underdraw.policies.budget import PRIOR_DIFFICULTY, Budget, Costs, cheapest_size, format_costs
from underdraw.policies.fixed import Chain, NoTree
from underdraw.policies.trunk import Trunk
from underdraw.protocols import TreePolicy

CPU_SIZES, GPU_SIZES = (1, 2, 4, 8, 12, 18, 24, 32, 64), (1, 8, 16, 32, 64, 128)
GPU_BATCH_SIZES = (1, 2, 4, *GPU_SIZES[1:])  # for one image, passes of 2 and 4 nodes cost what those of 8 do
# Of the images in a running batch: of all kinds, and hard ones stay longest. Chains of 64 nodes that commit 8.4, 7.2,
# 6.0, 3.1 and 1.5 tokens per pass (docs/experiments/kinds.md) commit 3.6 on average over their passes.
BATCH_DIFFICULTY = 0.25
_MAX_BATCH_NODES = 2048  # of all images of a batch together: more never pay
TREE_SIZES = (16, 32, 64, 128)  # smaller trees accept less than chains
_ROUNDS, _WARMUP = 2, 1  # passes of each size; captured passes: prefill, eager run and capture come first
_CAPTURED_ROUNDS, _CAPTURED_WARMUP = 5, 3
_MAX_DECODES = 12  # pictures of few cells end before all sizes have had their turn
_SLOW_PASS = 0.3  # seconds: of models this slow only few sizes are measured, once
_SLOW_SIZES = (1, 12, 24)
BUSY = 1.25  # median over fastest pass of a size, above which the machine was busy
_ATTEMPTS = 2  # in one process
MAX_ATTEMPTS = 6  # in all processes: a machine may always be busy


@dataclass(frozen=True, slots=True)
class WindowCosts:
    """Milliseconds of a pass by nodes per image, for `batch` images at once, with a chain and with a tree."""

    chain: Costs
    tree: Costs = ()
    batch: int = 1
    spread: float = 1.0  # median over fastest pass, averaged over sizes
    attempts: int = 1  # measurements so far

    @property
    def is_busy(self) -> bool:
        """Whether the machine was busy during the measurement."""
        return self.spread > BUSY

    @property
    def is_final(self) -> bool:
        """Whether the costs need not be measured again."""
        return not self.is_busy or self.attempts >= MAX_ATTEMPTS

    def for_batch(self, batch: int) -> WindowCosts:
        """The costs of another batch size: by the nodes of all images together, extended in a straight line."""
        if batch == self.batch:
            return self
        scale = batch / self.batch
        chain, tree = (tuple((n, interpolate(costs, n * scale)) for n, _ in costs) for costs in (self.chain, self.tree))
        return replace(self, chain=chain, tree=tree, batch=batch)

    def policy(self, row: int = 32) -> TreePolicy:
        """The policy for this batch: of one image, sizes follow the picture; a batch has one size for all its images.

        A row of a picture has `row` tokens.
        All images of a batch are padded to the largest tree, so trees of different sizes would save nothing.
        """
        difficulty = PRIOR_DIFFICULTY if self.batch == 1 else BATCH_DIFFICULTY
        nodes, is_tree = cheapest_size(self.chain, self.tree, difficulty, row)
        if nodes == 1:
            return NoTree()
        if self.batch == 1:
            return Budget(format_costs(self.chain), format_costs(self.tree) if self.tree else None)
        return Trunk(nodes) if is_tree else Chain(nodes - 1)


def interpolate(costs: Costs, nodes: float) -> float:
    """Milliseconds of `nodes` nodes, linear between the measured sizes and beyond the last one."""
    sizes = [size for size, _ in costs]
    if len(costs) < 2:
        return costs[0][1] * max(nodes / sizes[0], 1.0)
    right = min(max(bisect.bisect_left(sizes, nodes), 1), len(costs) - 1)
    (low, low_ms), (high, high_ms) = costs[right - 1], costs[right]
    slope = max((high_ms - low_ms) / (high - low), 0.0)
    return round(max(low_ms + slope * (nodes - low), costs[0][1]), 4)


@dataclass(slots=True)
class _Sweep:
    """A policy whose plans take turns; results count if the tree was not cut short at the end of the picture."""

    plans: Sequence[TreePlan]
    warmup: int
    planner: TreePolicy | None = None  # whose time to choose a size is part of what a drafted pass costs
    next_index: int = 0
    planning: float = 0.0  # seconds, before the pass that runs
    requested: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)  # by index of the plan
    cut_short: Counter[int] = field(default_factory=Counter)  # by index of the plan

    def plan(self, history: History, step: int) -> TreePlan:
        self.requested, self.planning = self.next_index, 0.0
        plan = self.plans[self.requested]
        if self.planner is not None and plan.nodes > 1:
            started = time.perf_counter()
            self.planner.plan(history, step)
            self.planning = time.perf_counter() - started
        return plan

    def observe(self, result: StepResult) -> None:
        index = self.requested
        if result.plan.depth == self.plans[index].depth:
            self.seconds.setdefault(index, []).append(result.seconds + self.planning)
        else:
            self.cut_short[index] += 1
        self.next_index = (index + 1) % len(self.plans)

    def is_done(self, rounds: int) -> bool:
        """Whether every size has been timed often enough, or cut short as often as that shows that it never fits."""
        needed = self.warmup + rounds
        return all(len(self.seconds.get(i, ())) + self.cut_short[i] // 2 >= needed for i in range(len(self.plans)))


RunDecode = Callable[[TreePolicy], Iterator[StepResult]]


def captured_sizes(batch: int) -> tuple[int, ...]:
    """Nodes per image of the captured passes that are measured for a batch."""
    if batch == 1:
        return GPU_SIZES
    return tuple(size for size in GPU_BATCH_SIZES if size * batch <= _MAX_BATCH_NODES)


def measure_windows(run: RunDecode, *, has_trees: bool, batch: int, is_captured: bool) -> WindowCosts:
    """Time passes of every size; `run(policy)` decodes a batch and yields the results of its first image."""
    sizes = captured_sizes(batch) if is_captured else CPU_SIZES
    if not is_captured and _plain_seconds(run) > _SLOW_PASS:
        sizes = _SLOW_SIZES
    best: WindowCosts | None = None
    for _ in range(_ATTEMPTS):
        costs = _measure_once(run, sizes, has_trees, batch, is_captured)
        best = costs if best is None else fastest(best, costs)
        if not costs.is_busy or sizes is _SLOW_SIZES:
            break
    assert best is not None
    return best


def _plain_seconds(run: RunDecode) -> float:
    """Seconds of a plain pass."""
    seconds = []
    for result in run(NoTree()):
        seconds.append(result.seconds)
        if len(seconds) == 2:
            break
    return min(seconds, default=0.0)


def _measure_once(run: RunDecode, sizes: Sequence[int], has_trees: bool, batch: int, is_captured: bool) -> WindowCosts:
    tree_sizes = [size for size in TREE_SIZES if has_trees and size in sizes]
    plans = [TreePlan(size - 1, 1, 1, size) for size in sizes]
    plans += [TreePlan(3 * size // 8, 2, 8, size) for size in tree_sizes]
    warmup, rounds = (_CAPTURED_WARMUP, _CAPTURED_ROUNDS) if is_captured else (_WARMUP, _ROUNDS)
    if sizes is _SLOW_SIZES:
        warmup, rounds = 0, 1
    planner = Budget(tree="16:19/32:30/64:53") if batch == 1 else None
    sweep, started = _Sweep(plans, warmup, planner), time.perf_counter()
    for _ in range(_MAX_DECODES):
        for result in run(sweep):
            sweep.observe(result)
            if sweep.is_done(rounds):
                break
        if sweep.is_done(rounds) or time.perf_counter() - started > 60:
            break
    timed = {index: times[warmup:] or times for index, times in sweep.seconds.items()}
    costs = {index: round(1000 * min(times), 4) for index, times in timed.items()}
    spreads = [statistics.median(times) / max(min(times), 1e-9) for times in timed.values()]
    count = len(sizes)
    return WindowCosts(
        _monotonic([(sizes[i], costs[i]) for i in range(count) if i in costs]),
        _monotonic([(tree_sizes[i - count], costs[i]) for i in range(count, len(plans)) if i in costs]),
        batch,
        round(statistics.mean(spreads), 3) if spreads else 1.0,
    )


def _monotonic(costs: Sequence[tuple[int, float]]) -> Costs:
    """Costs that never fall with the number of nodes: a larger pass cannot be cheaper than a smaller one."""
    lowest, result = float("inf"), []
    for nodes, ms in reversed(costs):
        lowest = min(lowest, ms)
        result.append((nodes, lowest))
    return tuple(reversed(result))


def fastest(first: WindowCosts, second: WindowCosts) -> WindowCosts:
    """The smaller cost of every size; other work can only make a pass slower."""

    def merge(costs: Costs, other: Costs) -> Costs:
        both = dict(costs)
        for nodes, ms in other:
            both[nodes] = min(ms, both.get(nodes, ms))
        return _monotonic(sorted(both.items()))

    return WindowCosts(
        merge(first.chain, second.chain),
        merge(first.tree, second.tree),
        first.batch,
        min(first.spread, second.spread),
        first.attempts + second.attempts,
    )
