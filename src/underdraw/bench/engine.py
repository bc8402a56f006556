"""How close the engine comes to what the memory allows, with random weights of a published shape.

Everything is measured in one run: the bandwidth of a large copy, the time that reading the weights once would take (the
floor), a plain token, a pass of every size, a level of a drafter, and the same shape in transformers. Times of passes
are the loop's own: the host's clock, from one plan to the next, with the copy to the host in them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from underdraw.bench.environment import about
from underdraw.bench.replay import Replan, Replay, Trace
from underdraw.drafters.block import BlockDrafter
from underdraw.drafters.eagle import Eagle
from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.trained import build_net
from underdraw.engine.autotune import FixedPlan
from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import CudaGraphPass, EagerPass, GraphCache, GraphRunner
from underdraw.engine.decode import collect_passes, decode
from underdraw.engine.memory_stats import peak_bytes
from underdraw.history import StepResult
from underdraw.models.family import Placement
from underdraw.models.random_weights import ModelShape, model_shape, random_target, randomise
from underdraw.nn.attention import AttentionBackend
from underdraw.nn.layer_functions import EAGER, LayerFunctions
from underdraw.nn.row_invariant import pack_weights
from underdraw.nn.target import DecoderTarget
from underdraw.plan import TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, TreePolicy, Verifier
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact

SIZES = (1, 8, 16, 32, 64, 128)
CONTEXT = 540  # tokens between prompt and passes that are timed by size: as in the middle of a picture
WARM = 6  # passes until the pass of a kind is replayed: prompt, first, captured, and some to settle
KERNELS = 16  # of a pass that are named
FORCED = "accepted lengths were forced from a trace; no picture was drawn with these weights"
Kind = Literal["eagle", "block", "jacobi"]


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """What is measured, and how long."""

    model: str
    placement: Placement
    compile: Literal["on", "capture", "off"]  # compiled and captured, captured, neither
    batch: int = 1
    passes: int = 40  # timed passes of each size
    pictures: int = 3  # timed plain ones
    temperature: float = 1.0
    sizes: tuple[int, ...] = SIZES
    drafters: tuple[Kind, ...] = ("eagle", "block")  # whose levels are timed
    attention_backend: AttentionBackend = "auto"  # the fastest of them
    tuned: bool = False  # whether matrix products are tuned while compiling


@dataclass
class EngineBench:
    """A random model and its captured passes."""

    settings: EngineBenchConfig
    tell: Callable[[str], None]
    shape: ModelShape = field(init=False)
    target: DecoderTarget = field(init=False)
    graphs: GraphCache = field(init=False)

    def __post_init__(self) -> None:
        given = self.settings
        self.shape = model_shape(given.model)
        self.target = random_target(self.shape.arch, given.placement)
        record = CudaGraphPass if self.device.type == "cuda" and given.compile != "off" else EagerPass
        layer_functions = compiled_layer_functions(tuned=given.tuned) if given.compile == "on" else EAGER
        self.graphs = GraphCache(capture=record, layer_functions=layer_functions, report=self.tell)
        self.settle(given.attention_backend)

    def settle(self, backend: AttentionBackend) -> None:
        """Go on with one way to attend."""
        if backend != "auto":
            self.graphs = self.variant(self.graphs.layer_functions, backend)

    def variant(self, layer_functions: LayerFunctions, backend: AttentionBackend, smallest: int = 1) -> GraphCache:
        """Passes in another way."""
        return GraphCache(
            capture=self.graphs.capture,
            layer_functions=layer_functions,
            attention_backend=backend,
            min_bucket=smallest,
            report=self.tell,
        )

    def variants(self) -> dict[str, Any]:
        """A pass over one node and over 64 in every way there is; what a way runs into takes the place of its times."""
        backends: tuple[AttentionBackend, ...] = ("sdpa", "matmul", "tree")
        name = "captured" if self.graphs.capture is CudaGraphPass else "as it is"
        ways: dict[str, tuple[LayerFunctions, AttentionBackend]] = {
            f"{name}, {backend}": (EAGER, backend) for backend in backends
        }
        if self.graphs.layer_functions is not EAGER:
            ways = {f"compiled, {backend}": (self.graphs.layer_functions, backend) for backend in backends}
            ways = {"captured, sdpa": (EAGER, "sdpa"), **ways}
        found: dict[str, Any] = {}
        for name, (layer_functions, backend) in ways.items():
            self.tell(f"passes, {name}")
            try:
                sizes = {size: self.variant(layer_functions, backend, size) for size in (1, 64)}
                found[name] = {str(n): self.pass_ms(Forced(), NoTree(), graphs) for n, graphs in sizes.items()}
            except Exception as error:  # one way that fails says nothing about the others
                found[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        return found

    @property
    def device(self) -> torch.device:
        return self.settings.placement.device

    def draw(
        self,
        drafter: Drafter,
        policy: TreePolicy,
        *,
        graphs: GraphCache | None = None,
        verifier: Verifier | None = None,
        passes: int | None = None,
    ) -> list[StepResult]:
        """The passes of a picture, or the first few after a long prompt; steps of the first image alone."""
        given, own = self.settings, self.shape
        sampler = Sampler(
            own.layout, range(given.batch), temperature=given.temperature, top_k=own.top_k, device=self.device
        )  # fmt: skip
        steps = decode(
            self.target, drafter, policy, verifier or Exact(),
            own.prompts(given.batch, 0 if passes is None else CONTEXT), sampler,
            guidance=own.guidance, graphs=graphs or self.graphs,
        )  # fmt: skip
        return collect_passes(steps, passes)

    def pass_ms(self, drafter: Drafter, policy: TreePolicy, graphs: GraphCache | None = None) -> float:
        """Milliseconds of a pass of one kind: the median of some."""
        steps = self.draw(drafter, policy, graphs=graphs, passes=WARM + self.settings.passes)
        return 1000 * statistics.median(step.seconds for step in steps[WARM:])

    def drafter(self, kind: Kind) -> Drafter:
        """A drafter of the usual size beside the target, with random weights."""
        if kind == "jacobi":
            return Jacobi()
        arch = self.shape.arch
        sizes = {"layers": 1 if kind == "eagle" else 2, "ffn": arch.ffn, "above": True, "slots": 16, "markov_dim": 512}
        with torch.device("cpu"):
            net = build_net(self.target, kind, sizes)
        embedding, head = net.body.embedding, net.body.head
        net.body.embedding, net.body.head = torch.nn.Identity(), torch.nn.Identity()  # type: ignore[assignment]
        net = net.to(self.device, self.settings.placement.dtype).eval().requires_grad_(False)
        randomise(net)
        pack_weights(net)
        net.body.embedding, net.body.head = embedding, head
        return (BlockDrafter if kind == "block" else Eagle)(net)  # type: ignore[arg-type]

    def plain(self) -> dict[str, Any]:
        """A token of plain decoding over whole pictures, with all passes captured; and what the host adds to it."""
        self.tell("whole pictures, plain")
        began = time.perf_counter()
        self.draw(Forced(), NoTree())
        first = time.perf_counter() - began
        pictures = [self.draw(Forced(), NoTree()) for _ in range(self.settings.pictures)]
        spent = [1000 * sum(s.seconds for s in steps) / sum(len(s.tokens) for s in steps) for steps in pictures]
        median = 1000 * statistics.median(step.seconds for steps in pictures for step in steps)
        return {
            "ms_per_token": statistics.median(spent), "ms_per_token_each": spent, "median_pass_ms": median,
            **self._host_share(),
            "first_picture_seconds": first,
        }  # fmt: skip

    def _runs(self, graphs: GraphCache) -> list[Callable[[], None]]:
        """The captured passes of the last picture, to be replayed when nothing depends on them any more."""
        passes = list(graphs.runners.values())[-1]
        assert isinstance(passes, GraphRunner)
        return [run.replay for run in passes.passes.values() if isinstance(run, CudaGraphPass)]

    def _host_share(self) -> dict[str, float | None]:
        """What the host adds to passes after a long prompt: beside them the same ones by the device's own clock."""
        whole = self.pass_ms(Forced(), NoTree())
        runs = self._runs(self.graphs)
        if not runs:
            return {"device_pass_ms": None, "host_share": None}
        device = device_ms(runs[-1], repeats=5, together=8)  # without a gap; each adds a token, as those before did
        return {"device_pass_ms": device, "host_share": max(0.0, 1 - device / whole)}

    def profile(self, size: int) -> list[dict[str, Any]]:
        """Where the device's time goes in a captured pass over so many nodes: kernels by name, the longest first."""
        self.tell(f"kernels of a pass over {size} nodes")
        graphs = self.graphs.with_min_bucket(size)
        self.draw(Forced(), NoTree(), graphs=graphs, passes=WARM)
        runs = self._runs(graphs)
        if not runs:
            return []
        from torch.profiler import ProfilerActivity, profile

        runs[-1]()
        torch.cuda.synchronize()
        repeats = 4
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(repeats):
                runs[-1]()
            torch.cuda.synchronize()
        found = [
            {"kernel": one.key[:120], "count": one.count / repeats, "ms": one.device_time_total / repeats / 1000}
            for one in seen.key_averages()
            if one.device_time_total > 0
        ]
        return sorted(found, key=lambda one: -float(one["ms"]))[:KERNELS]

    def verify(self) -> dict[str, float]:
        """A pass over so many nodes, without drafting."""
        found = {}
        for size in self.settings.sizes:
            self.tell(f"a pass over {size} nodes")
            found[str(size)] = self.pass_ms(Forced(), NoTree(), self.graphs.with_min_bucket(size))
        return found

    def levels(self) -> dict[str, Any]:
        """What one more level of a drafter costs, by how many nodes it expands: differences of passes of one size."""
        found: dict[str, Any] = {}
        for kind in self.settings.drafters:
            drafter, graphs = self.drafter(kind), self.graphs.with_min_bucket(32)
            found[kind] = {}
            for width in (1, 8, 16):
                self.tell(f"levels of {width} nodes, {kind}")
                low, high = (
                    self.pass_ms(drafter, FixedPlan(TreePlan(depth, width, min(width, 4), 32)), graphs)
                    for depth in (2, 8)
                )
                found[kind][str(width)] = (high - low) / 6
        return found

    def replay(self, trace: Trace, kind: Kind) -> dict[str, Any]:
        """A whole picture with the accepted lengths of a trace."""
        self.tell(f"a whole picture, replayed, {kind}")
        drafter, verifier = self.drafter(kind), Replay(trace, self.device)
        seconds, steps = [], []
        for _ in range(3):
            verifier.rewind()
            steps = self.draw(drafter, Replan(trace), verifier=verifier)
            seconds.append(sum(step.seconds for step in steps))
        tokens = sum(len(step.tokens) for step in steps)
        passes = list(self.graphs.runners.values())[-1]
        return {
            "drafter": kind, "ms_per_token": 1000 * min(seconds[1:]) / tokens, "tokens_per_pass": tokens / len(steps),
            "first_picture_seconds": seconds[0], "kinds": len(passes.passes), "trace": trace.about, "note": FORCED,
        }  # fmt: skip


def device_ms(work: Callable[[], Any], repeats: int = 20, together: int = 1) -> float:
    """The median by the device's clock, or the host's where there is no device; `together` times without a wait."""
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(together):
                work()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / together)
        else:
            start = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    size = 2**32 if device.type == "cuda" else 2**26
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / (device_ms(lambda: target.copy_(source)) / 1000)


def weight_bytes(target: DecoderTarget) -> int:
    """What a pass has to read: everything but the embedding, of which it looks up a few rows."""
    parameters = [(name, value) for name, value in target.net.named_parameters() if "embedding" not in name]
    return sum(value.numel() * value.element_size() for _, value in parameters)


def layouts(target: DecoderTarget, rows: int) -> dict[str, float]:
    """One matrix of the model times a few rows, stored either way: microseconds."""
    weight = target.net.blocks[0].gate_up.weight  # type: ignore[union-attr]
    assert isinstance(weight, Tensor)
    x = torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    either = {"output_major": weight.contiguous(), "input_major": weight.t().contiguous().t()}
    return {name: 1000 * device_ms(lambda w=own: torch.nn.functional.linear(x, w)) for name, own in either.items()}  # type: ignore[misc]


def fastest(variants: dict[str, Any]) -> AttentionBackend:
    """The way to attend of the fastest variant, by one node and 64 together."""
    worked = {name: sum(times.values()) for name, times in variants.items() if "error" not in times}
    best = min(worked, key=lambda name: float(worked[name]), default="sdpa")
    backends: tuple[AttentionBackend, ...] = ("matmul", "tree")
    return next((backend for backend in backends if best.endswith(backend)), "sdpa")


def nothing(_: dict[str, Any]) -> None:
    """Keeps no parts."""


@torch.inference_mode()
def measure(
    settings: EngineBenchConfig, traces: Sequence[tuple[Trace, Kind]], tell: Callable[[str], None], *, baseline: bool,
    keep: Callable[[dict[str, Any]], None] = nothing,
) -> dict[str, Any]:  # fmt: skip
    """Everything there is to know, as a record; `keep` is given what is known so far after every part."""
    device = settings.placement.device
    speed = bandwidth(device)
    bench = EngineBench(settings, tell)
    read = weight_bytes(bench.target)
    record: dict[str, Any] = {
        "model": f"random:{settings.model}", "machine": about(device), "batch": settings.batch,
        "guidance": bench.shape.guidance, "temperature": settings.temperature, "top_k": bench.shape.top_k,
        "dtype": str(settings.placement.dtype).removeprefix("torch."), "compiled": settings.compile,
        "attention": settings.attention_backend, "tuned": settings.tuned,
        "tokens": bench.shape.layout.stop - bench.shape.layout.start,
        "bytes_a_pass": read, "bandwidth_bytes_per_second": speed, "floor_ms": 1000 * read / speed,
        "layouts_us": layouts(bench.target, 2 * settings.batch), "verify_ms": {}, "level_ms": {},
        "replays": [], "profiles": {},
    }  # fmt: skip
    if device.type == "cuda" and settings.attention_backend == "auto":
        record["variants_ms"] = bench.variants()
        keep(record)
        bench.settle(fastest(record["variants_ms"]))
        record["attention"] = bench.graphs.attention_backend
    plain = bench.plain()
    record["plain"] = {**plain, "over_floor": plain["ms_per_token"] / record["floor_ms"]}
    keep(record)
    for trace, kind in traces:
        found = bench.replay(trace, kind)
        record["replays"].append({**found, "over_plain": plain["ms_per_token"] / found["ms_per_token"]})
        keep(record)
    record["verify_ms"] = bench.verify()
    record["context"] = CONTEXT
    keep(record)
    record["level_ms"] = bench.levels()
    if device.type == "cuda":
        record["peak_bytes"] = peak_bytes(device)
    keep(record)
    if baseline:
        from underdraw.bench.transformers_baseline import transformers_ms

        tell("transformers, as it is")
        record["transformers"] = transformers_ms(settings.model, bench.shape, settings.placement, settings.batch)
        keep(record)
    # Last of all, since kernels take longer to begin in a process that has been profiled.
    record["profiles"] = {str(size): bench.profile(size) for size in (1, 64)}
    keep(record)
    return record
