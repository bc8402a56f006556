"""Resolve the `auto` tree policy from what passes cost on this machine.

Jacobi drafters: `window_costs` measures passes of every size, and the policy `budget` chooses among them. Trained
drafters: the cost model is linear in the nodes and levels of a tree; captured passes come in few bucket sizes, so the
cost of each bucket is measured by itself. Measuring runs the decoding loop for a few passes at several tree sizes,
discards the tokens, and stores the costs in `costs.json` of the cache folder, once for a model, drafter, batch size and
machine, or again if the machine was busy.
"""

from __future__ import annotations

import logging
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from underdraw.drafters.forced import Forced
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.decode import collect_passes, decode
from underdraw.engine.window_costs import WindowCosts as WindowCosts
from underdraw.engine.window_costs import fastest, measure_windows
from underdraw.errors import ConfigError
from underdraw.history import History, StepResult
from underdraw.io import atomic_write_json, cache_dir, read_json_object
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.cost import Cost
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, Prompt, Target, TreePolicy
from underdraw.registry import policies
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact

log = logging.getLogger(__name__)
C = TypeVar("C")
AUTO = "auto"
MAX_BATCH = 4  # larger batches use the costs of this one, or of one of these, scaled for Jacobi drafters
_LARGE_BATCHES = (64, 16)
SLOWDOWN = 1.25  # the largest ratio of a pass with a tree to a plain pass
LEVEL_ACCEPTANCE = 0.7  # probability that a level's best node is accepted if the one above it was; see docs/lab.md
_SMALL, _DEEP, _WIDE = TreePlan(2, 1, 1, 3), TreePlan(8, 1, 1, 9), TreePlan(2, 6, 6, 27)
_WARMUP, _TIMED = 2, 5  # passes
_WARMUP_CAPTURED = 5  # until a pass is replayed: prefill, eager run, capture, and two more
_BUCKETS = (8, 16, 32, 64, 128)
_WIDTHS = (1, 4, 12)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Milliseconds of a plain pass, of a pass with a tree, and of each of the tree's nodes and levels."""

    plain: float
    base: float
    node: float
    level: float
    curve: tuple[tuple[int, float], ...] = ()  # (bucket size, milliseconds) of captured passes without drafting
    levels: tuple[tuple[int, float], ...] = ()  # (width, milliseconds) of drafting one level


@dataclass(frozen=True, slots=True)
class FixedPlan:
    """The same plan at every step."""

    tree: TreePlan

    def plan(self, history: History, step: int) -> TreePlan:
        return self.tree


@dataclass(frozen=True, slots=True)
class TimedDecode:
    """The decode whose passes are timed, and the key that its costs are stored under."""

    key: tuple[object, ...]
    target: Target
    drafter: Drafter
    prompts: Sequence[Prompt]
    sampler: Sampler
    guidance: float
    graphs: GraphCache | None = None

    def run(self, policy: TreePolicy) -> Iterator[StepResult]:
        """Decode with the drafter; the results of the first image."""
        parts = (self.target, self.drafter, policy, Exact(), self.prompts, self.sampler)
        steps = decode(*parts, guidance=self.guidance, graphs=self.graphs)
        return (step for step in steps if step.sequence == 0)

    def pass_ms(self, drafter: Drafter, policy: TreePolicy, graphs: GraphCache | None) -> float:
        """Median milliseconds of a pass, after warm-up."""
        warmup = _WARMUP if graphs is None else _WARMUP_CAPTURED
        steps = decode(
            self.target, drafter, policy, Exact(), self.prompts, self.sampler, guidance=self.guidance, graphs=graphs
        )
        seconds = [step.seconds for step in collect_passes(steps, warmup + _TIMED)]
        return 1000 * statistics.median(seconds[warmup:] or seconds)

    @property
    def name(self) -> str:
        """The key as text, with the machine and the library versions that costs depend on."""
        graphs = self.graphs
        mode = "eager" if graphs is None else "compiled" if graphs.layer_functions.is_compiled else "captured"
        parts = (*self.key, mode, device_name(), f"{torch.get_num_threads()} threads", f"torch {torch.__version__}")
        return " | ".join(map(str, parts))


def measured_batches(images: int, drafter: Drafter, *, is_captured: bool) -> tuple[int, ...]:
    """Batch sizes whose costs stand for those of `images` at once, the closest first; the others need less memory."""
    if drafter.proposes == "tree":
        return (min(images, MAX_BATCH),)
    if not is_captured:
        return (1,)  # passes of a batch take long on a CPU, and their cost is that of as many nodes in one image
    # The KV caches of many images take as long to read as the weights, and are read once however many nodes there are.
    return (*(size for size in _LARGE_BATCHES if size <= images), min(images, MAX_BATCH))


def build_tree(spec: str | TreePolicy) -> TreePolicy | None:
    """The policy that `spec` names; None is `auto`, which `resolve_tree` resolves for a request."""
    return None if isinstance(spec, str) and spec == AUTO else policies.build(spec)


def resolve_tree(
    policy: TreePolicy | None, drafter: Drafter, workload: Callable[[], TimedDecode], batch: int | None = None
) -> TreePolicy:
    """`policy`; if it is None (`auto`), the one that is fastest by measured costs for `batch` images at once.

    `batch` defaults to the workload's. Costs of Jacobi drafters are scaled to it, so windows shrink as batches grow.
    """
    if policy is not None:
        return policy
    work = workload()
    if drafter.proposes != "tree":
        costs = load_or_measure_windows(work)
        log.debug("costs of windows: %s", costs)
        return costs.for_batch(batch or len(work.prompts)).policy(work.sampler.layout.row_stride)
    linear = load_or_measure_costs(work)
    log.debug("costs of passes: %s", linear)
    if work.graphs is not None:
        return tree_within_budget(linear)
    return Cost(linear.plain, linear.base, linear.node, linear.level)


def load_or_measure_windows(workload: TimedDecode, file: Path | None = None) -> WindowCosts:
    """The costs of chains and trees by size, measured unless they are stored; those of a busy machine are replaced."""
    stored = read_windows(workload.name, file)
    return stored if stored is not None and stored.is_final else measure_windows_again(workload, file, stored)


def measure_windows_again(
    workload: TimedDecode, file: Path | None = None, stored: WindowCosts | None = None
) -> WindowCosts:
    """Measure the costs of chains and trees by size and store them, together with what is kept of `stored`."""
    costs = measure_windows(
        workload.run,
        has_trees=workload.drafter.proposes == "trunk",
        batch=len(workload.prompts),
        is_captured=workload.graphs is not None,
    )
    if stored is not None:
        costs = fastest(stored, costs)
    if not costs.is_final:
        log.info("the machine was busy while costs of passes were measured; the next process measures them again.")
    _store(workload.name, asdict(costs), file or costs_file(), logging.INFO)
    return costs


def read_windows(name: str, file: Path | None = None) -> WindowCosts | None:
    """The stored costs of Jacobi chains and trees of `TimedDecode.name`, if there are any."""

    def parse(row: dict[str, Any]) -> WindowCosts:
        chain, tree = (tuple((int(size), float(ms)) for size, ms in row[key]) for key in ("chain", "tree"))
        costs = WindowCosts(chain, tree, int(row["batch"]), float(row["spread"]), int(row["attempts"]))
        costs.policy()  # checks the values
        return costs

    return _read_entry(name, file or costs_file(), parse)


def tree_within_budget(costs: PassCosts) -> TreePolicy:
    """Adjacency trees of the largest bucket that hardly slows a pass down, as deep as levels are worth drafting.

    A level is worth its time if the share of a plain pass that it takes is less than its probability to be reached.
    """
    nodes = max((size for size, spent in costs.curve if spent <= SLOWDOWN * costs.plain and size >= 16), default=16)
    level = max((spent for _, spent in costs.levels), default=costs.level) / costs.plain
    usual = Adjacency()
    d_max = next((depth for depth in range(usual.d_max, 1, -1) if LEVEL_ACCEPTANCE**depth >= level), 1)
    return Adjacency(
        init="both", nodes=nodes, d_min=min(usual.d_min, d_max), depth=min(usual.depth, d_max), d_max=d_max
    )


def load_or_measure_costs(workload: TimedDecode, file: Path | None = None) -> PassCosts:
    """The stored costs of a workload, or else `measure_again`."""
    return read_costs(workload.name, file) or measure_again(workload, file)


def measure_again(workload: TimedDecode, file: Path | None = None) -> PassCosts:
    """Measure the costs of a decode and store them; logs the path of the file."""
    costs = measure(workload)
    _store(workload.name, asdict(costs), file or costs_file())
    return costs


def _store(name: str, entry: dict[str, Any], file: Path, level: int = logging.WARNING) -> None:
    """Add an entry to the file of costs; logs its path."""
    try:
        atomic_write_json(file, {**_read_stored(file), name: entry})
        log.log(level, "measured what passes cost on this machine and stored it in %s", file)
    except (OSError, ConfigError) as error:
        log.warning("measured what passes cost on this machine; %s cannot be written (%s)", file, error)


def measure(workload: TimedDecode) -> PassCosts:
    """Time a few passes of each tree size."""
    drafter, graphs, pass_ms = workload.drafter, workload.graphs, workload.pass_ms
    plain = pass_ms(Forced(), NoTree(), graphs)
    small, deep, wide = (pass_ms(drafter, FixedPlan(tree), graphs) for tree in (_SMALL, _DEEP, _WIDE))
    node = max((wide - small) / (_WIDE.nodes - _SMALL.nodes), 0.002 * plain)
    level = max((deep - small - node * (_DEEP.nodes - _SMALL.nodes)) / (_DEEP.depth - _SMALL.depth), 0.0)
    base = max(small - node * _SMALL.nodes - level * _SMALL.depth, 0.5 * plain)
    costs = PassCosts(round(plain, 3), round(base, 3), round(node, 3), round(level, 3))
    if graphs is None:
        return costs
    curve = [(1, plain), *((size, pass_ms(Forced(), NoTree(), graphs.with_min_bucket(size))) for size in _BUCKETS)]
    levels, padded = [], graphs.with_min_bucket(32)
    for width in _WIDTHS:
        # Both passes have the same bucket, so their difference is six more levels of drafting.
        low, high = (pass_ms(drafter, FixedPlan(TreePlan(depth, width, min(width, 4), 32)), padded) for depth in (2, 8))
        levels.append((width, max((high - low) / 6, 0.0)))
    return replace(costs, curve=_rounded(curve), levels=_rounded(levels))


def _rounded(pairs: Sequence[Sequence[float]]) -> tuple[tuple[int, float], ...]:
    return tuple((int(size), round(value, 3)) for size, value in pairs)


def costs_file() -> Path:
    return cache_dir() / "costs.json"


def read_costs(name: str, file: Path | None = None) -> PassCosts | None:
    """The stored costs of `TimedDecode.name`, if there are any."""

    def parse(row: dict[str, Any]) -> PassCosts:
        costs = PassCosts(**{**row, "curve": _rounded(row["curve"]), "levels": _rounded(row["levels"])})
        Cost(costs.plain, costs.base, costs.node, costs.level)  # checks the values
        if not all(0 <= spent < math.inf for _, spent in (*costs.curve, *costs.levels)):
            raise ValueError("a cost is negative or not finite")
        return costs

    return _read_entry(name, file or costs_file(), parse)


def _read_entry(name: str, file: Path, parse: Callable[[dict[str, Any]], C]) -> C | None:
    """An entry of the file of costs; None if it is missing or damaged."""
    row = _read_stored(file).get(name)
    try:
        return None if row is None else parse(row)
    except (ValueError, KeyError, TypeError, OverflowError, ConfigError) as error:
        log.warning("the costs of %s in %s are damaged (%s); measuring again", name, file, error)
        return None


def _read_stored(file: Path) -> dict[str, Any]:
    """All stored costs by name; a damaged file is set aside, so that measuring again replaces it."""
    if not file.exists():
        return {}
    try:
        return read_json_object(file, "measured costs")
    except ConfigError as error:
        aside = file.with_name(f"{file.name}.damaged")
        log.warning("%s It is kept as %s; measuring again.", error, aside)
        with suppress(OSError):
            file.replace(aside)
        return {}


def device_name() -> str:
    """The name of the GPU, or of the processor where there is none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else processor()


def processor() -> str:
    """The processor's name, or its architecture where the system has no name for it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
