"""Speed of the engine against the memory bandwidth bound, with random weights of a published model shape.

One run measures: the bandwidth of a large copy, the time that reading all weights once takes at that bandwidth (the
bound, `floor_ms`), plain decoding, a pass of every size, a level of each drafter, and the same shape in transformers.
Times of passes are those of the decode loop: wall time from one plan to the next, with the copy to the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from underdraw.bench.environment import describe_machine
from underdraw.bench.instrumentation import copy_bandwidth, device_ms
from underdraw.bench.replay import ReplayPolicy, ReplayVerifier, Trace
from underdraw.calibration import Calibration
from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.trained import build_net, make_drafter
from underdraw.engine.autotune import FixedPlan
from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.cuda_graphs import CudaGraphPass, EagerPass, GraphCache, GraphRunner
from underdraw.engine.decode import collect_passes, decode
from underdraw.engine.memory_stats import peak_bytes
from underdraw.history import StepResult
from underdraw.models.config import Placement
from underdraw.models.random_weights import ModelShape, model_shape, random_target, randomise
from underdraw.nn.attention import AttentionBackend
from underdraw.nn.layer_functions import EAGER, LayerFunctions
from underdraw.nn.linear import pack_weights
from underdraw.nn.numerics import Numerics, eager_backend, resolve_numerics
from underdraw.nn.target import DecoderTarget
from underdraw.plan import TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, TreePolicy, Verifier
from underdraw.sampling import Sampler
from underdraw.verifiers.exact import Exact

SIZES = (1, 2, 8, 16, 32, 64, 128)
CONTEXT = 540  # tokens between the prompt and the passes timed by size: the middle of a picture
WARMUP_PASSES = 6  # prefill, first eager pass, capture, and some replays
KERNELS = 16  # longest kernels of a pass that are listed
FORCED = "accepted lengths were forced from a trace; no picture was drawn with these weights"
DrafterKind = Literal["eagle", "block", "jacobi"]
SetStage = Callable[[str], None]
Save = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class EngineBenchConfig:
    """What to measure, and how often."""

    model: str
    placement: Placement
    compile: Literal["on", "capture", "off"]  # compiled and captured, only captured, eager
    batch: int = 1
    passes: int = 40  # timed passes of each size
    pictures: int = 3  # timed plain pictures
    temperature: float = 1.0
    sizes: tuple[int, ...] = SIZES
    drafters: tuple[DrafterKind, ...] = ("eagle", "block")  # drafters whose levels are timed
    attention_backend: AttentionBackend = "auto"  # auto: the fastest one
    tuned: bool = False  # autotune GEMMs during compilation
    numerics: Numerics = "row-invariant"


@dataclass
class EngineBench:
    """A target with random weights and its captured passes."""

    config: EngineBenchConfig
    set_stage: SetStage
    shape: ModelShape = field(init=False)
    target: DecoderTarget = field(init=False)
    graphs: GraphCache = field(init=False)

    def __post_init__(self) -> None:
        config = self.config
        self.shape = model_shape(config.model)
        self.target = replace(random_target(self.shape.arch, config.placement), numerics=config.numerics)
        capture = CudaGraphPass if self.device.type == "cuda" and config.compile != "off" else EagerPass
        functions, backend = eager_backend(config.numerics, self.device)
        if functions is EAGER:
            functions = compiled_layer_functions(tuned=config.tuned) if config.compile == "on" else EAGER
            backend = config.attention_backend
        self.graphs = GraphCache(
            capture=capture, layer_functions=functions, attention_backend=backend, report=self.set_stage
        )

    @property
    def device(self) -> torch.device:
        return self.config.placement.device

    def use_attention(self, backend: AttentionBackend) -> None:
        """Run all following passes with one attention backend."""
        if backend != "auto":
            self.graphs = self._variant(self.graphs.layer_functions, backend)

    def _variant(self, functions: LayerFunctions, backend: AttentionBackend, min_bucket: int = 1) -> GraphCache:
        """Passes with other layer functions and another attention backend."""
        return GraphCache(
            capture=self.graphs.capture,
            layer_functions=functions,
            attention_backend=backend,
            min_bucket=min_bucket,
            report=self.set_stage,
        )

    def time_variants(self) -> dict[str, Any]:
        """Milliseconds of a pass over 1 and over 64 nodes with every attention backend, or the error it raised."""
        backends: tuple[AttentionBackend, ...] = ("sdpa", "matmul", "tree")
        functions = self.graphs.layer_functions
        prefix = "captured" if self.graphs.capture is CudaGraphPass else "eager"
        if functions is not EAGER:
            prefix = "compiled"
        variants = {f"{prefix}, {backend}": (functions, backend) for backend in backends}
        if functions is not EAGER:
            variants = {"captured, sdpa": (EAGER, backends[0]), **variants}
        times: dict[str, Any] = {}
        for name, (layer_functions, backend) in variants.items():
            self.set_stage(f"pass, {name}")
            try:
                sizes = {size: self._variant(layer_functions, backend, size) for size in (1, 64)}
                times[name] = {str(size): self.pass_ms(Forced(), NoTree(), graphs) for size, graphs in sizes.items()}
            except Exception as error:  # a variant that fails must not stop the others
                times[name] = {"error": f"{type(error).__name__}: {error}"[:500]}
        return times

    def run_decode(
        self,
        drafter: Drafter,
        policy: TreePolicy,
        *,
        graphs: GraphCache | None = None,
        verifier: Verifier | None = None,
        max_passes: int | None = None,
    ) -> list[StepResult]:
        """Steps of the first image of a batch: of a whole picture, or the first ones after a long prompt."""
        config, shape = self.config, self.shape
        sampler = Sampler(
            shape.layout,
            range(config.batch),
            temperature=config.temperature,
            top_k=shape.top_k,
            top_p=shape.top_p,
            device=self.device,
        )
        prompts = shape.prompts(config.batch, 0 if max_passes is None else CONTEXT)
        steps = decode(
            self.target,
            drafter,
            policy,
            verifier or Exact(),
            prompts,
            sampler,
            guidance=shape.guidance,
            graphs=graphs or self.graphs,
        )
        return collect_passes(steps, max_passes)

    def pass_ms(self, drafter: Drafter, policy: TreePolicy, graphs: GraphCache | None = None) -> float:
        """Median milliseconds of a pass."""
        steps = self.run_decode(drafter, policy, graphs=graphs, max_passes=WARMUP_PASSES + self.config.passes)
        return 1000 * statistics.median(step.seconds for step in steps[WARMUP_PASSES:])

    def make_drafter(self, kind: DrafterKind) -> Drafter:
        """A drafter of the usual size for the target, with random weights."""
        if kind == "jacobi":
            return Jacobi()
        arch = self.shape.arch
        sizes = {"layers": 1 if kind == "eagle" else 2, "ffn": arch.ffn, "above": True, "slots": 16, "markov_dim": 512}
        with torch.device("cpu"):
            net = build_net(self.target, kind, sizes)
        # Embedding and head are the target's: they are on the device already and keep their weights.
        embedding, head = net.body.embedding, net.body.head
        net.body.embedding, net.body.head = torch.nn.Identity(), torch.nn.Identity()  # type: ignore[assignment]
        net = net.to(self.device, self.config.placement.dtype).eval().requires_grad_(False)
        randomise(net)
        pack_weights(net)
        net.body.embedding, net.body.head = embedding, head
        return make_drafter(net, self.target, Calibration())

    def time_plain(self) -> dict[str, Any]:
        """Milliseconds per token of plain decoding over whole pictures, and the host's share of a pass."""
        self.set_stage("plain decoding, whole pictures")
        start = time.perf_counter()
        self.run_decode(Forced(), NoTree())
        first = time.perf_counter() - start
        pictures = [self.run_decode(Forced(), NoTree()) for _ in range(self.config.pictures)]
        per_token = [1000 * sum(s.seconds for s in steps) / sum(len(s.tokens) for s in steps) for steps in pictures]
        median = 1000 * statistics.median(step.seconds for steps in pictures for step in steps)
        return {
            "ms_per_token": statistics.median(per_token),
            "ms_per_token_each": per_token,
            "median_pass_ms": median,
            **self._host_share(),
            "first_picture_seconds": first,
        }

    def _replays(self, graphs: GraphCache) -> list[Callable[[], None]]:
        """Replay functions of the CUDA graphs of the last picture; their results are not used any more."""
        passes = list(graphs.runners.values())[-1]
        assert isinstance(passes, GraphRunner)
        return [run.replay for run in passes.passes.values() if isinstance(run, CudaGraphPass)]

    def _host_share(self) -> dict[str, float | None]:
        """The host's share of a pass: wall time against the time of back-to-back replays on the device."""
        wall = self.pass_ms(Forced(), NoTree())
        replays = self._replays(self.graphs)
        if not replays:
            return {"device_pass_ms": None, "host_share": None}
        device = device_ms(replays[-1], repeats=5, batch=8)  # each replay appends a token, as in decoding
        return {"device_pass_ms": device, "host_share": max(0.0, 1 - device / wall)}

    def profile(self, size: int) -> list[dict[str, Any]]:
        """The longest kernels of a captured pass over `size` nodes, then all others together."""
        self.set_stage(f"kernels of a pass over {size} nodes")
        graphs = self.graphs.with_min_bucket(size)
        self.run_decode(Forced(), NoTree(), graphs=graphs, max_passes=WARMUP_PASSES)
        replays = self._replays(graphs)
        if not replays:
            return []
        from torch.profiler import ProfilerActivity, profile

        replays[-1]()
        torch.cuda.synchronize()
        repeats = 4
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(repeats):
                replays[-1]()
            torch.cuda.synchronize()
        kernels = [
            {"kernel": event.key[:120], "count": event.count / repeats, "ms": event.device_time_total / repeats / 1000}
            for event in profiler.key_averages()
            if event.device_time_total > 0
        ]
        kernels.sort(key=lambda kernel: -float(kernel["ms"]))
        rest = kernels[KERNELS:]
        others = {key: sum(kernel[key] for kernel in rest) for key in ("count", "ms")}
        return [*kernels[:KERNELS], {"kernel": f"{len(rest)} other kernels", **others}] if rest else kernels

    def time_sizes(self) -> dict[str, float]:
        """Milliseconds of a pass over each number of nodes, without drafting."""
        times = {}
        for size in self.config.sizes:
            self.set_stage(f"pass over {size} nodes")
            times[str(size)] = self.pass_ms(Forced(), NoTree(), self.graphs.with_min_bucket(size))
        return times

    def time_levels(self) -> dict[str, Any]:
        """Milliseconds of one more draft level by its number of nodes: the difference of passes of the same size."""
        times: dict[str, Any] = {}
        for kind in self.config.drafters:
            drafter, graphs = self.make_drafter(kind), self.graphs.with_min_bucket(32)
            times[kind] = {}
            for width in (1, 8, 16):
                self.set_stage(f"draft levels of {width} nodes, drafter {kind}")
                shallow, deep = (
                    self.pass_ms(drafter, FixedPlan(TreePlan(depth, width, min(width, 4), 32)), graphs)
                    for depth in (2, 8)
                )
                times[kind][str(width)] = (deep - shallow) / 6
        return times

    def time_replay(self, trace: Trace, kind: DrafterKind) -> dict[str, Any]:
        """Milliseconds per token of a whole picture with the accepted lengths of a trace."""
        self.set_stage(f"replayed picture, drafter {kind}")
        drafter, verifier = self.make_drafter(kind), ReplayVerifier(trace, self.device)
        seconds, steps = [], []
        for _ in range(3):
            verifier.rewind()
            steps = self.run_decode(drafter, ReplayPolicy(trace), verifier=verifier)
            seconds.append(sum(step.seconds for step in steps))
        tokens = sum(len(step.tokens) for step in steps)
        passes = list(self.graphs.runners.values())[-1]
        return {
            "drafter": kind,
            "ms_per_token": 1000 * min(seconds[1:]) / tokens,
            "tokens_per_pass": tokens / len(steps),
            "first_picture_seconds": seconds[0],
            "kinds": len(passes.passes),
            "trace": trace.about,
            "note": FORCED,
        }


def weight_bytes(target: DecoderTarget) -> int:
    """Bytes that every pass reads: all weights but the embedding, of which it reads a few rows."""
    parameters = [(name, value) for name, value in target.net.named_parameters() if "embedding" not in name]
    return sum(value.numel() * value.element_size() for _, value in parameters)


def time_weight_layouts(target: DecoderTarget, rows: int) -> dict[str, float]:
    """Microseconds of one GEMM of the model with its weight stored output-major and input-major."""
    weight = target.net.blocks[0].gate_up.weight  # type: ignore[union-attr]
    if not isinstance(weight, Tensor):  # quantised
        return {}
    x = torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)
    layouts = {"output_major": weight.contiguous(), "input_major": weight.t().contiguous().t()}
    times = {}
    for name, matrix in layouts.items():
        times[name] = 1000 * device_ms(lambda w=matrix: torch.nn.functional.linear(x, w))  # type: ignore[misc]
    return times


def fastest_attention(variants: dict[str, Any]) -> AttentionBackend:
    """The attention backend of the fastest variant, by the sum of passes over 1 and 64 nodes."""
    totals = {name: sum(times.values()) for name, times in variants.items() if "error" not in times}
    best = min(totals, key=lambda name: float(totals[name]), default="sdpa")
    backends: tuple[AttentionBackend, ...] = ("matmul", "tree")
    return next((backend for backend in backends if best.endswith(backend)), "sdpa")


@torch.inference_mode()
def measure(
    config: EngineBenchConfig,
    traces: Sequence[tuple[Trace, DrafterKind]],
    set_stage: SetStage,
    *,
    baseline: bool,
    save: Save = lambda record: None,
) -> dict[str, Any]:
    """Measure everything; `save` receives the record after every part, so that a stopped run keeps what it has."""
    device = config.placement.device
    set_stage("copy bandwidth")
    bandwidth = copy_bandwidth(device)
    set_stage(f"random weights of {config.model}")
    bench = EngineBench(config, set_stage)
    record = _start_record(bench, bandwidth)
    if device.type == "cuda" and bench.graphs.attention_backend == "auto":
        record["variants_ms"] = bench.time_variants()
        save(record)
        bench.use_attention(fastest_attention(record["variants_ms"]))
        record["attention"] = bench.graphs.attention_backend
    plain = bench.time_plain()
    record["plain"] = {**plain, "over_floor": plain["ms_per_token"] / record["floor_ms"]}
    save(record)
    for trace, kind in traces:
        replay = bench.time_replay(trace, kind)
        record["replays"].append({**replay, "over_plain": plain["ms_per_token"] / replay["ms_per_token"]})
        save(record)
    record["verify_ms"] = bench.time_sizes()
    record["context"] = CONTEXT
    save(record)
    record["level_ms"] = bench.time_levels()
    if device.type == "cuda":
        record["peak_bytes"] = peak_bytes(device)
    save(record)
    if baseline:
        from underdraw.bench.transformers_baseline import time_transformers

        set_stage("transformers")
        record["transformers"] = time_transformers(config.model, bench.shape, config.placement, config.batch)
        save(record)
    # Last, since kernel launches are slower in a process that was profiled.
    record["profiles"] = {str(size): bench.profile(size) for size in (1, 64)}
    save(record)
    return record


def _start_record(bench: EngineBench, bandwidth: float) -> dict[str, Any]:
    """Settings, and what is measured without a decode."""
    config, shape, size = bench.config, bench.shape, weight_bytes(bench.target)
    return {
        "kind": "engine",
        "model": f"random:{config.model}",
        "machine": describe_machine(bench.device),
        "batch": config.batch,
        "guidance": shape.guidance,
        "temperature": config.temperature,
        "top_k": shape.top_k,
        "top_p": shape.top_p,
        "dtype": str(config.placement.dtype).removeprefix("torch."),
        "compiled": config.compile,
        "numerics": resolve_numerics(config.numerics, bench.device),
        "weights": config.placement.weights,
        "attention": bench.graphs.attention_backend,
        "tuned": config.tuned,
        "tokens": shape.layout.stop - shape.layout.start,
        "bytes_a_pass": size,
        "bandwidth_bytes_per_second": bandwidth,
        "floor_ms": 1000 * size / bandwidth,
        "layouts_us": time_weight_layouts(bench.target, 2 * config.batch),
        "verify_ms": {},
        "level_ms": {},
        "replays": [],
        "profiles": {},
    }
