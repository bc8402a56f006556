"""Benchmarks: every method and plain autoregression draw the same pictures in turns, and each picture is one row.

Turns are short (one picture), so that a machine that slows down slows all methods down alike. Only the decoding loop is
on the clock: prompt, passes and drafting, without loading and without turning codes into pixels. What was measured is
summed elsewhere.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from underdraw.bench.cost_fit import kind, measured
from underdraw.bench.environment import about
from underdraw.bench.instrumentation import Clock, Timed
from underdraw.bench.methods import AR, PLAIN, Method, check_names
from underdraw.bench.results import Key, Store, picture_name
from underdraw.engine.decode import TokenStatsMode, resolve_proposal
from underdraw.engine.memory_stats import peak_bytes, reset_peak_bytes
from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.images import save_png
from underdraw.io import pack_grid, unpack_grid
from underdraw.pipeline import Pipeline
from underdraw.registry import drafters, parse
from underdraw.request import GenerationRequest

WARM = 6  # passes of every method before anything is measured
_ROUNDS = 8  # pictures of every method at most before that, where passes are captured
_TREES = (
    "confidence:depth=5,top_k=1,nodes=6", "confidence:depth=3,nodes=59", "confidence:depth=7,nodes=59",
    "confidence:depth=8,top_k=3,nodes=59", "confidence:depth=4,top_k=4,nodes=20",
)  # fmt: skip
_CHAINS = ("chain:depth=4", "chain:depth=24")
STUDIED = 4  # prompts whose laws are kept, by drawing them once more with plain autoregression
COLUMNS = ("accepted", "depth", "width", "rank", "pass_index")  # of a history, that cells.jsonl keeps
Noted = Callable[[Key], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    methods: tuple[Method, ...]  # besides plain autoregression
    temperatures: tuple[float, ...]
    prompts: Sequence[str]
    repeats: int = 1
    seed: int = 0
    preset: str | None = None

    def units(self) -> Iterator[tuple[Method, Key]]:
        """Pictures in the order of drawing: methods take turns, plain first, the others from a new start each time."""
        for repeat in range(self.repeats):
            for prompt in range(len(self.prompts)):
                for temperature in self.temperatures:
                    start = (prompt + repeat) % max(1, len(self.methods))
                    for method in (AR, *self.methods[start:], *self.methods[:start]):
                        yield method, Key(method.name, temperature, prompt, repeat)


@dataclass(frozen=True, slots=True)
class Drawn:
    """One picture, and what it took."""

    history: History
    seconds: float
    prompt_seconds: float  # before the first pass
    draft_seconds: float
    memory: int
    tree_passes: int  # passes with a tree; what follows is summed over them
    nodes: int
    levels: int
    expanded: int
    stalled_seconds: float


class Bench:
    """A loaded model, and the parts of every method of a plan, checked."""

    def __init__(self, pipe: Pipeline, plan: Plan, sampling: dict[str, Any]) -> None:
        self.plan, self.sampling, self.model = plan, sampling, pipe.model
        check_names((AR, *plan.methods))
        methods = (AR, *plan.methods)
        names = dict.fromkeys(method.drafter for method in methods)
        self.pipes = {name: _drafting(pipe, name) for name in names}
        self.verifiers = {method.verifier: self._verifier(method) for method in methods}
        self.timed = {
            name: Timed(own.drafter, Clock(own.device, captured=own.graphs is not None))
            for name, own in self.pipes.items()
        }  # fmt: skip
        for own in self.pipes.values():
            if own.graphs is not None:  # every method comes back to its own buffers and captured passes
                own.graphs.max_runners = 2 * len(methods) * len(plan.temperatures)
        for text in plan.prompts:
            pipe.model.check_prompt(text)
        for method in methods:
            for temperature in plan.temperatures:
                self._ready(method)
                self._job(method, Key(method.name, temperature, 0, 0))
                self._check(method)

    def _verifier(self, method: Method) -> Any:
        pipe = self.pipes[method.drafter]
        pipe.verifier = method.verifier
        return pipe.verifier

    def _ready(self, method: Method) -> Pipeline:
        """The pipeline of a method's drafter with the method's other parts in it."""
        pipe = self.pipes[method.drafter]
        pipe.tree, pipe.verifier, pipe.proposal = method.tree, self.verifiers[method.verifier], method.proposal
        return pipe

    def _check(self, method: Method) -> None:
        pipe = self.pipes[method.drafter]
        proposal: Any = None if method.proposal == "auto" else method.proposal
        try:
            resolve_proposal(pipe.verifier, proposal)
        except ConfigError as error:
            raise ConfigError(f"method {method.name!r}: {error}") from None

    def _job(self, method: Method, key: Key) -> GenerationRequest:
        arguments = {**self.sampling, "temperature": key.temperature, "seed": self.plan.seed + key.prompt}
        return self.pipes[method.drafter].request(self.plan.prompts[key.prompt], **arguments)

    def draw(self, method: Method, key: Key, token_stats: TokenStatsMode = "skip", passes: int | None = None) -> Drawn:
        """Draw a picture, or its first few passes."""
        pipe = self._ready(method)
        job, timed = self._job(method, key), self.timed[method.drafter]
        history, timed.clock.seconds = History(pipe.model.make_layout(job.size)), 0.0
        steps = pipe.stream(job, [history], token_stats, timed)
        reset_peak_bytes(pipe.device)
        plans, spent = [], []
        opened = 0.0
        began = time.perf_counter()
        for step in steps:
            opened = opened or time.perf_counter() - began - step.seconds
            spent.append(step.seconds)
            plans.append(step.plan)
            if history.passes == passes:
                break
        if pipe.device.type == "cuda":
            torch.cuda.synchronize(pipe.device)
        seconds = time.perf_counter() - began
        if (pipe.verifier.proposals[0] if method.proposal == "auto" else method.proposal) == "sampled":
            plans = [plan.with_fixed_shape() for plan in plans]  # as they are grown
        trees = [plan for plan in plans if plan.levels]
        return Drawn(
            history, seconds, opened, timed.clock.seconds, peak_bytes(pipe.device), len(trees),
            sum(plan.nodes for plan in trees),
            sum(plan.levels for plan in trees), sum(plan.expanded for plan in trees), stalled(spent),
        )  # fmt: skip

    def settings(self) -> dict[str, Any]:
        """What must not change between two parts of one run."""
        job = self._job(AR, Key(PLAIN, self.plan.temperatures[0], 0, 0))
        known = self.pipes[AR.drafter].settings(job)
        kept = ("guidance", "top_k", "top_p", "height", "width", "dtype")
        return {
            "preset": self.plan.preset, "model": self.model.name, "seed": self.plan.seed,
            "drafter": self.pipes["auto"].drafter_name if "auto" in self.pipes else None,
            "device": self.model.placement.device.type, **{key: known[key] for key in kept},
        }  # fmt: skip

    def costs(self) -> dict[str, Any]:
        """What passes cost here with each drafter and verifier, from whole pictures with other trees."""
        found, rows = {}, {}
        for name, (method, temperature) in self._kinds().items():
            trees = ("none",) if method is AR else _CHAINS if self._guesses(method) else _TREES
            own = [replace(method, tree=tree) for tree in trees]
            for one in own:
                self._warm(one, temperature)
            rows[name] = [_figures(self.draw(one, Key("", temperature, 0, 0))) for one in own]
            plain = [] if method is AR else rows[kind(AR.record(), temperature)]
            found[name] = measured([*rows[name], *plain])
        return found

    def _kinds(self) -> dict[str, tuple[Method, float]]:
        """A method and a temperature for each kind of pass, plain ones first."""
        found: dict[str, tuple[Method, float]] = {}
        for method in (AR, *self.plan.methods):
            for temperature in reversed(self.plan.temperatures):
                found.setdefault(kind(method.record(), temperature), (method, temperature))
        return found

    def _guesses(self, method: Method) -> bool:
        """True if the guesses of a method's drafter are all there at once, so that trees are chains."""
        return parse(self.pipes[method.drafter].drafter_name).name in drafters.names()

    def _warm(self, method: Method, temperature: float) -> None:
        """Draw a few passes, or, where passes are captured, pictures until nothing new is met or captured."""
        graphs = self.pipes[method.drafter].graphs
        if graphs is None:
            self.draw(method, Key(method.name, temperature, 0, 0), passes=WARM)
            return
        for count in range(_ROUNDS):
            before = graphs.pass_counts
            self.draw(method, Key(method.name, temperature, count % len(self.plan.prompts), 0))
            if graphs.pass_counts == before:
                break

    def run(self, store: Store, noted: Noted) -> int:
        """Draw every picture that the store does not hold yet; returns how many that were."""
        for key, row in store.rows.items():
            if key.prompt < len(self.plan.prompts) and row["text"] != self.plan.prompts[key.prompt]:
                raise ConfigError(
                    f"{store.folder} holds a run with other prompts (number {key.prompt + 1} was {row['text']!r}); "
                    "give a new folder, or --force to start again."
                )
        todo = [(method, key) for method, key in self.plan.units() if key not in store.rows]
        if not todo:
            return 0
        for method in dict.fromkeys(method for method, _ in todo):
            for temperature in self.plan.temperatures:
                self._warm(method, temperature)
        known = about(self.model.placement.device)
        costs = store.about.get("costs") or {}
        fresh = not set(self._kinds()) <= set(costs)
        store.begin({"machine": known, "costs": self.costs() if fresh else costs})
        for method, key in todo:
            drawn = self.draw(method, key)
            cells = self._cells(drawn, key) if key.repeat == 0 else None
            row = {**key._asdict(), "seed": self.plan.seed + key.prompt, "text": self.plan.prompts[key.prompt]}
            row.update(_figures(drawn), **self._agreement(drawn, key, store), settings=method.record(), machine=known)
            if key[0] == PLAIN and key[2:] == (0, 0):
                self._keep_picture(drawn, store.folder / picture_name(key.temperature))
            store.append(row, cells)
            noted(key)
        if fresh:  # a machine may have become slower or faster meanwhile
            store.begin({"costs": _mean(store.about["costs"], self.costs())})
        return len(todo)

    def _cells(self, drawn: Drawn, key: Key) -> dict[str, Any]:
        """What happened at every cell; of plain autoregression also the laws, from a second drawing off the clock."""
        history = drawn.history
        cells = {"codes": pack_grid(history.layout.grid(history.tokens))}
        cells.update({name: pack_grid(history.grid(name)) for name in COLUMNS})
        if key.method == PLAIN and key.prompt < STUDIED:
            kept = self.draw(AR, key, token_stats="keep").history
            cells["entropy"] = pack_grid(np.round(kept.grid("entropy") * 1000).astype(np.int32))
            cells["top1"] = pack_grid(np.round(kept.grid("top1") * 1000).astype(np.int32))
        return cells

    def _keep_picture(self, drawn: Drawn, path: Path) -> None:
        """The picture that figures lay their maps over."""
        save_png(self.pipes[AR.drafter].decode_images([drawn.history])[0], path)

    def _agreement(self, drawn: Drawn, key: Key, store: Store) -> dict[str, Any]:
        """Whether the picture is the one of plain autoregression with the same seed, and the share of equal codes."""
        codes = drawn.history.layout.grid(drawn.history.tokens)
        if key.method == PLAIN and key.repeat == 0:
            return {"equal_codes": 1.0, "equal_image": True}
        same = codes == self._plain_codes(key._replace(method=PLAIN, repeat=0), store)
        return {"equal_codes": round(float(same.mean()), 6), "equal_image": bool(same.all())}

    def _plain_codes(self, key: Key, store: Store) -> NDArray[Any]:
        """The codes of plain autoregression; drawn again, off the clock, if the run's cells were not kept."""
        if key in store.cells:
            return unpack_grid(store.cells[key]["codes"], str(store.folder))
        history = self.draw(AR, key).history
        return history.layout.grid(history.tokens)


def _drafting(pipe: Pipeline, name: str) -> Pipeline:
    """The pipeline with another drafter; "trained" is the model's own, where it has one."""
    if name == "auto" or (name == "trained" and not pipe.model.drafter_folders):
        return pipe
    return Pipeline(pipe.model, drafter=pipe.model.drafter_folders[0].name if name == "trained" else name)


def _mean(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Costs of each kind of pass, halfway between two measurements."""
    return {
        name: {part: round((value + after[name][part]) / 2, 4) for part, value in costs.items()}
        for name, costs in before.items()
    }


def stalled(spent: Sequence[float]) -> float:
    """Seconds in which the machine stood still: what passes took beyond three times the median and a second more."""
    usual = statistics.median(spent) if spent else 0.0
    longest = max(3 * usual, usual + 1)
    return sum(max(0.0, seconds - longest) for seconds in spent)


def _figures(drawn: Drawn) -> dict[str, Any]:
    history = drawn.history
    return {
        "seconds": round(drawn.seconds, 5), "prompt_seconds": round(drawn.prompt_seconds, 5),
        "draft_seconds": round(drawn.draft_seconds, 5), "stalled_seconds": round(drawn.stalled_seconds, 5),
        "memory": drawn.memory,
        "passes": history.passes, "tokens": int((history.pass_index >= 0).sum()),
        "tau": round(history.tokens_per_pass, 5), "mean_depth": round(history.mean_depth, 5),
        "mean_nodes": round(history.mean_nodes, 5), "tree_passes": drawn.tree_passes, "tree_nodes": drawn.nodes,
        "tree_levels": drawn.levels, "tree_expanded": drawn.expanded,
    }  # fmt: skip
