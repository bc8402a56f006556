"""The benchmark loop: every method and plain autoregression draw the same images in turns, one row per image.

A turn is one image, so that a machine that slows down slows all methods down alike. Only the decode loop is timed:
prefill, passes and drafting, without loading the model and without decoding codes into pixels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from underdraw.bench.cost_model import fit_costs, pass_type
from underdraw.bench.environment import describe_machine
from underdraw.bench.instrumentation import SpanTimer, TimedDrafter
from underdraw.bench.presets import AR, PLAIN, Method, check_method_names
from underdraw.bench.results import ImageKey, ResultFolder, plain_image_name
from underdraw.engine.decode import TokenStatsMode, resolve_proposal
from underdraw.engine.memory_stats import peak_bytes, reset_peak_bytes
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.images import save_png
from underdraw.io import pack_grid, unpack_grid
from underdraw.pipeline import Pipeline
from underdraw.request import GenerationRequest

WARMUP_PASSES = 6  # of every method before anything is timed
MAX_WARMUP_IMAGES = 8  # with CUDA graphs: images until no new pass is captured, at most
STUDIED_PROMPTS = 4  # prompts of which entropy and top-1 probability are kept, from a second, untimed image
CELL_COLUMNS = ("accepted", "depth", "width", "rank", "pass_index")  # history columns in cells.jsonl
# Trees and chains that the cost model is measured with: of other shapes than those of the methods.
COST_TREES = (
    "confidence:depth=5,top_k=1,nodes=6",
    "confidence:depth=3,nodes=59",
    "confidence:depth=7,nodes=59",
    "confidence:depth=8,top_k=3,nodes=59",
    "confidence:depth=4,top_k=4,nodes=20",
)
COST_CHAINS = ("chain:depth=4", "chain:depth=24")
_TRUNK = "trunk:init=fixed"
COST_TRUNKS = ("chain:depth=24", f"{_TRUNK},nodes=32", f"{_TRUNK},nodes=64,base=20", f"{_TRUNK},nodes=64,base=52")
OnImage = Callable[[ImageKey], None]


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure."""

    methods: tuple[Method, ...]  # plain autoregression is added to them
    temperatures: tuple[float, ...]
    prompts: Sequence[str]
    repeats: int = 1
    seed: int = 0
    preset: str | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)  # kind of image by prompt, where prompts have one
    has_cost_model: bool = True

    def images(self) -> Iterator[tuple[Method, ImageKey]]:
        """All images in drawing order: plain first, then the methods, rotated so that each one comes early."""
        for repeat in range(self.repeats):
            for prompt in range(len(self.prompts)):
                for temperature in self.temperatures:
                    start = (prompt + repeat) % max(1, len(self.methods))
                    for method in (AR, *self.methods[start:], *self.methods[:start]):
                        yield method, ImageKey(method.name, temperature, prompt, repeat)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One image, its times and its memory. Tree counts are sums over the passes that had a tree."""

    history: History
    seconds: float
    prefill_seconds: float
    draft_seconds: float
    stalled_seconds: float
    peak_memory: int  # bytes
    tree_passes: int
    tree_nodes: int
    tree_levels: int
    tree_expanded: int

    @property
    def active_seconds(self) -> float:
        """Seconds without those in which the machine stalled."""
        return self.seconds - self.stalled_seconds

    def columns(self) -> dict[str, Any]:
        """The measured columns of a row."""
        history = self.history
        return {
            "seconds": round(self.seconds, 5),
            "prompt_seconds": round(self.prefill_seconds, 5),
            "draft_seconds": round(self.draft_seconds, 5),
            "stalled_seconds": round(self.stalled_seconds, 5),
            "memory": self.peak_memory,
            "passes": history.passes,
            "tokens": int((history.pass_index >= 0).sum()),
            "tau": round(history.tokens_per_pass, 5),
            "mean_depth": round(history.mean_depth, 5),
            "mean_nodes": round(history.mean_nodes, 5),
            "tree_passes": self.tree_passes,
            "tree_nodes": self.tree_nodes,
            "tree_levels": self.tree_levels,
            "tree_expanded": self.tree_expanded,
        }

    def codes(self) -> NDArray[Any]:
        """Codes (height, width) of the image."""
        return self.history.layout.grid(self.history.tokens)


class Bench:
    """A loaded model and the validated parts of every method of a plan."""

    def __init__(self, pipe: Pipeline, plan: BenchPlan, sampling: dict[str, Any]) -> None:
        self.plan, self.sampling, self.model = plan, sampling, pipe.model
        methods = (AR, *plan.methods)
        check_method_names(methods)
        self.pipes = {name: _with_drafter(pipe, name) for name in dict.fromkeys(m.drafter for m in methods)}
        self.verifiers = {method.verifier: self._build_verifier(method) for method in methods}
        self.timed_drafters = {
            name: TimedDrafter(pipe.drafter, SpanTimer(pipe.device, captured=pipe.graphs is not None))
            for name, pipe in self.pipes.items()
        }
        for pipe in self.pipes.values():
            if pipe.graphs is not None:  # room for the buffers and CUDA graphs of every method
                pipe.graphs.max_runners = 2 * len(methods) * len(plan.temperatures)
        for text in plan.prompts:
            pipe.model.check_prompt(text)
        for method in methods:
            for temperature in plan.temperatures:
                self._configure(method)
                self._request(method, ImageKey(method.name, temperature, 0, 0))  # validates the sampling settings
                self._check_proposal(method)

    def _build_verifier(self, method: Method) -> Any:
        pipe = self.pipes[method.drafter]
        pipe.verifier = method.verifier
        return pipe.verifier

    def _configure(self, method: Method) -> Pipeline:
        """The pipeline with the method's drafter, set to the method's tree, verifier and proposal."""
        pipe = self.pipes[method.drafter]
        pipe.tree, pipe.verifier, pipe.proposal = method.tree, self.verifiers[method.verifier], method.proposal
        return pipe

    def _check_proposal(self, method: Method) -> None:
        proposal: Any = None if method.proposal == "auto" else method.proposal
        try:
            resolve_proposal(self.verifiers[method.verifier], proposal)
        except ConfigError as error:
            raise ConfigError(f"method {method.name!r}: {error}") from None

    def _request(self, method: Method, key: ImageKey) -> GenerationRequest:
        arguments = {**self.sampling, "temperature": key.temperature, "seed": self.plan.seed + key.prompt}
        return self.pipes[method.drafter].request(self.plan.prompts[key.prompt], **arguments)

    def draw(
        self, method: Method, key: ImageKey, token_stats: TokenStatsMode = "skip", max_passes: int | None = None
    ) -> Measurement:
        """Draw an image, or its first `max_passes` passes, and measure it."""
        pipe = self._configure(method)
        request, drafter = self._request(method, key), self.timed_drafters[method.drafter]
        history, drafter.timer.seconds = History(pipe.model.make_layout(request.size)), 0.0
        steps = pipe.stream(request, [history], token_stats, drafter)
        reset_peak_bytes(pipe.device)
        plans, pass_seconds = [], []
        prefill = 0.0
        start = time.perf_counter()
        for step in steps:
            prefill = prefill or time.perf_counter() - start - step.seconds
            pass_seconds.append(step.seconds)
            plans.append(step.plan)
            if history.passes == max_passes:
                break
        if pipe.device.type == "cuda":
            torch.cuda.synchronize(pipe.device)
        seconds = time.perf_counter() - start
        if (pipe.verifier.proposals[0] if method.proposal == "auto" else method.proposal) == "sampled":
            plans = [plan.with_fixed_shape() for plan in plans]  # sampled trees are grown to a fixed shape
        trees = [plan for plan in plans if plan.levels]
        return Measurement(
            history,
            seconds,
            prefill,
            drafter.timer.seconds,
            stalled_seconds(pass_seconds),
            peak_bytes(pipe.device),
            tree_passes=len(trees),
            tree_nodes=sum(plan.nodes for plan in trees),
            tree_levels=sum(plan.levels for plan in trees),
            tree_expanded=sum(plan.expanded for plan in trees),
        )

    def settings(self) -> dict[str, Any]:
        """The settings that must not change when a run is resumed."""
        request = self._request(AR, ImageKey(PLAIN, self.plan.temperatures[0], 0, 0))
        settings = self.pipes[AR.drafter].settings(request)
        sampling = ("guidance", "top_k", "top_p", "height", "width", "dtype")
        return {
            "preset": self.plan.preset,
            "model": self.model.name,
            "seed": self.plan.seed,
            "drafter": self.pipes["auto"].drafter_name if "auto" in self.pipes else None,
            "device": self.model.placement.device.type,
            **{key: settings[key] for key in sampling},
        }

    def drafter_names(self) -> dict[str, str]:
        """What "auto" and "trained" stand for in this run."""
        return {name: pipe.drafter_name for name, pipe in self.pipes.items()}

    def measure_costs(self) -> dict[str, Any]:
        """The cost model of every type of pass, fitted to whole images with trees of other shapes."""
        costs, rows = {}, {}
        for name, (method, temperature) in self._pass_types().items():
            proposes = self.pipes[method.drafter].drafter.proposes
            trees = {"chain": COST_CHAINS, "trunk": COST_TRUNKS, "tree": COST_TREES}[proposes]
            variants = [replace(method, tree=tree) for tree in (("none",) if method is AR else trees)]
            for variant in variants:
                self._warm_up(variant, temperature)
            rows[name] = [self.draw(variant, ImageKey("", temperature, 0, 0)).columns() for variant in variants]
            plain = [] if method is AR else rows[pass_type(AR.to_dict(), temperature)]
            costs[name] = fit_costs([*rows[name], *plain])
        return costs

    def _pass_types(self) -> dict[str, tuple[Method, float]]:
        """A method and a temperature for each type of pass, plain first."""
        types: dict[str, tuple[Method, float]] = {}
        for method in (AR, *self.plan.methods):
            for temperature in reversed(self.plan.temperatures):
                types.setdefault(pass_type(method.to_dict(), temperature), (method, temperature))
        return types

    def _warm_up(self, method: Method, temperature: float) -> None:
        """Draw a few passes, or, with CUDA graphs, images until every pass that occurs is captured."""
        graphs = self.pipes[method.drafter].graphs
        if graphs is None:
            self.draw(method, ImageKey(method.name, temperature, 0, 0), max_passes=WARMUP_PASSES)
            return
        for count in range(MAX_WARMUP_IMAGES):
            before = graphs.pass_counts
            self.draw(method, ImageKey(method.name, temperature, count % len(self.plan.prompts), 0))
            if graphs.pass_counts == before:
                break

    def run(self, folder: ResultFolder, on_image: OnImage) -> int:
        """Draw every image that has no row yet; returns their number."""
        self._check_prompts(folder)
        missing = [(method, key) for method, key in self.plan.images() if key not in folder.rows]
        if not missing:
            return 0
        for method in dict.fromkeys(method for method, _ in missing):
            for temperature in self.plan.temperatures:
                self._warm_up(method, temperature)
        machine = describe_machine(self.model.placement.device)
        costs = folder.info.get("costs") or {}
        needs_costs = self.plan.has_cost_model and not set(self._pass_types()) <= set(costs)
        facts = {"machine": machine, "drafters": self.drafter_names()}
        folder.start({**facts, "costs": self.measure_costs() if needs_costs else costs})
        plain_seconds: dict[ImageKey, float] = {}  # of the plain images that this call has drawn
        for method, key in missing:
            plain = key._replace(method=PLAIN)
            if method is not AR and plain not in plain_seconds:  # its row is of an earlier call
                plain_seconds[plain] = self.draw(AR, plain).active_seconds
            measurement = self.draw(method, key)
            plain_seconds.setdefault(key, measurement.active_seconds)
            cells = self._cells(measurement, key) if key.repeat == 0 else None
            row = {**key._asdict(), "seed": self.plan.seed + key.prompt, "text": self.plan.prompts[key.prompt]}
            row.update(measurement.columns(), **self._agreement(measurement, key, folder))
            row.update(plain_seconds=round(plain_seconds[plain], 5), settings=method.to_dict(), machine=machine)
            if self.plan.kinds:
                row["kind"] = self.plan.kinds[self.plan.prompts[key.prompt]]
            if key.method == PLAIN and (key.prompt, key.repeat) == (0, 0):
                self._save_image(measurement, folder.path / plain_image_name(key.temperature))
            folder.append(row, cells)
            on_image(key)
        if needs_costs:  # the mean of before and after, since the machine's speed may have changed during the run
            folder.start({"costs": _mean_costs(folder.info["costs"], self.measure_costs())})
        return len(missing)

    def _check_prompts(self, folder: ResultFolder) -> None:
        for key, row in folder.rows.items():
            if key.prompt < len(self.plan.prompts) and row["text"] != self.plan.prompts[key.prompt]:
                raise ConfigError(
                    f"{folder.path} holds a run with other prompts (number {key.prompt + 1} was {row['text']!r}); "
                    "choose a new folder, or use --force to start again."
                )

    def _cells(self, measurement: Measurement, key: ImageKey) -> dict[str, Any]:
        """Per-cell values; for plain autoregression also entropy and top-1 probability, from an untimed image."""
        cells = {"codes": pack_grid(measurement.codes())}
        cells.update({name: pack_grid(measurement.history.grid(name)) for name in CELL_COLUMNS})
        if key.method == PLAIN and key.prompt < STUDIED_PROMPTS:
            history = self.draw(AR, key, token_stats="keep").history
            for name in ("entropy", "top1"):  # as integers: thousandths
                cells[name] = pack_grid(np.round(history.grid(name) * 1000).astype(np.int32))
        return cells

    def _save_image(self, measurement: Measurement, path: Path) -> None:
        save_png(self.pipes[AR.drafter].decode_images([measurement.history])[0], path)

    def _agreement(self, measurement: Measurement, key: ImageKey, folder: ResultFolder) -> dict[str, Any]:
        """Share of codes that are equal to those of plain autoregression with the same seed, and whether all are."""
        if key.method == PLAIN and key.repeat == 0:
            return {"equal_codes": 1.0, "equal_image": True}
        equal = measurement.codes() == self._plain_codes(key._replace(method=PLAIN, repeat=0), folder)
        return {"equal_codes": round(float(equal.mean()), 6), "equal_image": bool(equal.all())}

    def _plain_codes(self, key: ImageKey, folder: ResultFolder) -> NDArray[Any]:
        """Codes of plain autoregression; drawn again, untimed, if cells.jsonl was deleted."""
        if key in folder.cells:
            return unpack_grid(folder.cells[key]["codes"], str(folder.path))
        return self.draw(AR, key).codes()


def _with_drafter(pipe: Pipeline, name: str) -> Pipeline:
    """The pipeline with another drafter; "trained" is the one that comes with the model, if there is one."""
    if name == "auto" or (name == "trained" and not pipe.model.drafter_folders):
        return pipe
    return Pipeline(pipe.model, drafter=pipe.model.drafter_folders[0].name if name == "trained" else name)


def _mean_costs(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    return {
        name: {part: round((value + after[name][part]) / 2, 4) for part, value in costs.items()}
        for name, costs in before.items()
    }


def stalled_seconds(pass_seconds: Sequence[float]) -> float:
    """Time in which the machine stalled: what passes took beyond 3 x the median and at least 1 s above it."""
    median = statistics.median(pass_seconds) if pass_seconds else 0.0
    limit = max(3 * median, median + 1)
    return sum(max(0.0, seconds - limit) for seconds in pass_seconds)
