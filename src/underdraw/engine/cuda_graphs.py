"""CUDA graphs: a pass of many kernels becomes one launch.

The first pass of a bucket runs eagerly (which compiles its layer functions), the second is captured as a CUDA graph,
later ones are replayed. Passes share a graph if they have the same bucketed plan, the same number of nodes after
padding and read the same span of the KV caches. What differs between them, such as the depth of each tree and the
length of each image, is read from device tensors. Buffers and graphs are kept for the next images.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from underdraw.engine.compile import compiled_layer_functions
from underdraw.engine.step import AcceptedTokens, StepRunner, TokenStatsMode, grown_plans, unpack_from_host
from underdraw.errors import CapacityError, ConfigError, unknown
from underdraw.nn.attention import AttentionBackend
from underdraw.nn.layer_functions import EAGER, LayerFunctions
from underdraw.nn.numerics import Numerics, eager_backend, resolve_numerics
from underdraw.nn.target import DecoderSession
from underdraw.plan import TreePlan, bucket_size, covering_plan
from underdraw.protocols import CapturableDraft, Drafter, PassConfig, Prompt, Target, Verifier
from underdraw.sampling import NoiseStream, Sampler
from underdraw.tree import DraftTree, Proposal, TreeLimits

log = logging.getLogger(__name__)
Compile = Literal["auto", "on", "capture", "off"]
MAX_RUNNERS = 2  # sets of buffers that are kept for later images
_SMALL_CACHE, _SPAN_MULTIPLE = 1024, 256  # slots: caches up to the first are read as a whole, larger ones in multiples
_WHOLE_CACHE = 2**20  # slots, more than any cache has


class CapturedPass(Protocol):
    """A pass that was captured and has run once."""

    out: Tensor

    def replay(self) -> None: ...


CaptureFn = Callable[[Callable[[], Tensor]], CapturedPass]


class CudaGraphPass:
    """A pass captured as a CUDA graph. All graphs share one memory pool, since no two run at the same time."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
        pool, stream = _pool_owner(device).pool(), _capture_stream(device)
        capture = torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local")
        with _no_garbage_collection(), capture:
            self.out = work()
        self.graph.replay()  # a capture only records

    def replay(self) -> None:
        self.graph.replay()


class EagerPass:
    """A pass that runs eagerly instead of being replayed: the same code path on devices without CUDA graphs."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.out = work, work()

    def replay(self) -> None:
        self.out = self.work()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Freeing another graph during a capture would invalidate the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@functools.cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """The stream for captures on a device; torch's default one belongs to the first device that captured."""
    return torch.cuda.Stream(device)


@functools.cache
def _pool_owner(device: int) -> torch.cuda.CUDAGraph:
    """A trivial graph that lives forever, so that torch does not free the memory pool that all graphs share."""
    graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(1, device=f"cuda:{device}")
    with torch.cuda.graph(graph, stream=_capture_stream(device)):
        tensor.zero_()
    return graph


class GraphCache:
    """GraphRunners of one model, kept for later images with the same parts and settings.

    `capture` records a pass, `min_bucket` is the smallest number of nodes of a pass (plain decoding in the bucket of
    trees rounds as trees do), and `report` receives a line for every bucket that is compiled.
    """

    def __init__(
        self,
        *,
        capture: CaptureFn = CudaGraphPass,
        layer_functions: LayerFunctions = EAGER,
        attention_backend: AttentionBackend = "auto",
        min_bucket: int = 1,
        span_multiple: int | None = None,
        report: Callable[[str], None] = log.info,
    ) -> None:
        self.capture, self.layer_functions, self.attention_backend = capture, layer_functions, attention_backend
        self.min_bucket, self.span_multiple, self.report = min_bucket, span_multiple, report
        self.max_runners = MAX_RUNNERS
        self.runners: dict[Hashable, GraphRunner] = {}  # least recently used first
        self._reported_buckets: set[int] = set()
        self._warned_types: set[type] = set()

    def with_min_bucket(self, min_bucket: int) -> GraphCache:
        """An empty cache with the same settings for passes of at least `min_bucket` nodes."""
        return GraphCache(
            capture=self.capture,
            layer_functions=self.layer_functions,
            attention_backend=self.attention_backend,
            min_bucket=min_bucket,
            span_multiple=self.span_multiple,
            report=self.report,
        )

    @property
    def pass_counts(self) -> tuple[int, int]:
        """The number of different passes that have run, and how many of them are captured."""
        passes = [captured for runner in self.runners.values() for captured in runner.passes.values()]
        return len(passes), sum(captured is not None for captured in passes)

    def report_compile(self, bucket: int) -> None:
        """Report once that the passes of a bucket are compiled now."""
        if self.layer_functions.is_compiled and bucket not in self._reported_buckets:
            self._reported_buckets.add(bucket)
            self.report(f"compiling passes of {bucket} nodes")

    def open(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        prompts: Sequence[Prompt],
        sampler: Sampler,
        guidance: float,
        proposal: Proposal,
        token_stats: TokenStatsMode,
    ) -> StepRunner:
        """The runner of a decode: a kept one if its buffers fit, else a new one, eager if it cannot be captured."""
        settings = (sampler.temperature, sampler.top_k, sampler.top_p, guidance, proposal, token_stats)
        key = (target, drafter, verifier, sampler.layout, len(prompts), *settings)
        runner = self.runners.pop(key, None)
        if runner is not None and runner.restart(prompts, sampler):
            self.runners[key] = runner
            return runner
        while len(self.runners) >= self.max_runners:
            del self.runners[next(iter(self.runners))]
        try:
            session = target.open(prompts, sampler.layout, guidance=guidance)
        except CapacityError:
            self.runners.clear()  # free the buffers of earlier decodes and try again
            session = target.open(prompts, sampler.layout, guidance=guidance)
        draft = drafter.open(prompts, sampler.layout, session.prefill, guidance=guidance)
        if not isinstance(session, DecoderSession) or not isinstance(draft, CapturableDraft):
            self._warn_eager(drafter if isinstance(session, DecoderSession) else target)
            return StepRunner(session, draft, verifier, sampler, proposal, token_stats)
        self.runners[key] = GraphRunner(
            self, session, draft, verifier, sampler.copy(), proposal, token_stats, drafter.proposes != "tree"
        )
        return self.runners[key]

    def _warn_eager(self, part: Target | Drafter) -> None:
        """Say once per type why passes run without CUDA graphs."""
        if type(part) not in self._warned_types:
            self._warned_types.add(type(part))
            log.warning(
                "passes with %s run eagerly, without CUDA graphs, which makes them several times slower on a GPU: its "
                "session does not have the methods of a capturable session (prepare, sync and restart).",
                type(part).__name__,
            )


class GraphRunner(StepRunner):
    """Runs passes in fixed buffers: each different pass eagerly first, then captured, then replayed."""

    def __init__(
        self,
        graphs: GraphCache,
        session: DecoderSession,
        draft: CapturableDraft,
        verifier: Verifier,
        sampler: Sampler,
        proposal: Proposal,
        token_stats: TokenStatsMode,
        is_depth_free: bool,
    ) -> None:
        super().__init__(session, draft, verifier, sampler, proposal, token_stats)
        self.graphs, self.target, self.draft_session, self.is_depth_free = graphs, session, draft, is_depth_free
        self.noise_streams: tuple[NoiseStream, ...] = (
            ("target", "draft", "accept") if proposal == "sampled" else ("target", "accept")
        )
        sampler.precompute_noise(sampler.seeds, self.noise_streams)
        default_multiple = _SPAN_MULTIPLE if session.cache.capacity > _SMALL_CACHE else _WHOLE_CACHE
        self.span_multiple = graphs.span_multiple or default_multiple
        self.passes: dict[Hashable, CapturedPass | None] = {}  # None: has run eagerly once
        self._grown_tree: DraftTree | None = None  # of the last pass, if its size depends on `min_probability`
        device = self.steps.device
        self._limits = torch.zeros(4, len(sampler), dtype=torch.int64, device=device)
        self._host_limits = torch.zeros(4, len(sampler), dtype=torch.int64, pin_memory=device.type == "cuda")

    def restart(self, prompts: Sequence[Prompt], sampler: Sampler) -> bool:
        """Start new images in the same buffers; False if they do not fit."""
        if not self.target.restart(prompts) or not self.draft_session.restart(prompts, self.session.prefill):
            return False
        self.sampler.precompute_noise(sampler.seeds, self.noise_streams)
        return True

    def step(
        self, requested_plans: Sequence[TreePlan], root_steps: Sequence[int]
    ) -> tuple[list[TreePlan], list[AcceptedTokens]]:
        active = self.active_images(root_steps)
        requested_plans = [plan.truncate(self.session.max_depth) for plan in requested_plans]
        plans = self.truncate_plans(requested_plans, root_steps)
        has_min_probability = any(plan.min_probability for plan in plans)
        if self.proposal == "sampled" or has_min_probability:
            # The shape of a sampled tree is fixed before its tokens are drawn, so limits cannot cut it afterwards.
            plan = covering_plan([p for p, is_active in zip(plans, active, strict=True) if is_active])
        else:
            plan = covering_plan([p for p, is_active in zip(requested_plans, active, strict=True) if is_active])
            plan = plan.bucketed(is_depth_free=self.is_depth_free)
        bucket = bucket_size(max(plan.nodes, self.graphs.min_bucket))
        config = PassConfig(
            plan, bucket, self.proposal, self.span_multiple, self.graphs.layer_functions, self.graphs.attention_backend
        )
        limits = self._copy_limits(plans) if plan.depth else None
        session_keys = (self.target.prepare(config), self.draft_session.prepare(config))
        # With a min_probability the size of the tree depends on values on the device.
        can_capture = not has_min_probability and None not in session_keys
        packed = self._run(
            config, limits, (plan, bucket, self.sampler.graph_key, *session_keys) if can_capture else None
        )
        accepted = unpack_from_host(packed.tolist(), self.token_stats)
        if self._grown_tree is not None:
            plans = grown_plans(self._grown_tree, plans)
        counts = tuple(len(a.tokens) if is_active else 0 for a, is_active in zip(accepted, active, strict=True))
        self.target.sync(counts)
        self.draft_session.sync(counts)
        return plans, accepted

    def advance_roots(self, root: Tensor, counts: Tensor) -> None:
        self.root.copy_(root)
        self.steps.add_(counts)

    def _copy_limits(self, plans: Sequence[TreePlan]) -> TreeLimits:
        """The limits of each tree inside the covering plan, copied to the device without waiting for it."""
        self._host_limits.copy_(torch.tensor([[p.depth, p.width, p.branch, p.nodes] for p in plans]).T)
        self._limits.copy_(self._host_limits, non_blocking=True)
        return TreeLimits(*self._limits)

    def _run(self, config: PassConfig, limits: TreeLimits | None, key: Hashable | None) -> Tensor:
        """Run a pass eagerly, capture it or replay it; returns the packed result. Without a key it stays eager."""

        def work() -> Tensor:
            noise_window = self.sampler.noise_window(self.steps, config.plan.depth + 1)
            verified = self.draft_and_verify(config.plan, limits, noise_window, config.bucket_size)
            packed = self.pack_for_host(verified, config.plan.depth)
            self._grown_tree = verified.tree if config.plan.min_probability else None
            self.commit(verified)
            return packed

        if key is None:
            return work()
        if key not in self.passes:
            self.passes[key] = None
            self.graphs.report_compile(config.bucket_size)
            return work()
        captured = self.passes[key]
        if captured is None:
            with torch.cuda.device_of(self.steps):  # a capture belongs to the current device
                captured = self.passes[key] = self.graphs.capture(work)
        else:
            captured.replay()
        return captured.out


def make_graph_cache(device: torch.device, compile: Compile, numerics: Numerics = "row-invariant") -> GraphCache | None:
    """The graph cache of a device; None runs passes eagerly. "auto" captures on a GPU.

    Row-invariant passes consist of kernels of their own; those of `fastest` numerics are compiled if possible.
    """
    if not isinstance(compile, str) or compile not in get_args(Compile):
        raise unknown("compile", compile, get_args(Compile))
    if compile == "off" or (device.type != "cuda" and compile == "auto"):
        return None
    if device.type != "cuda":
        raise ConfigError(f"compile {compile!r} needs a CUDA device and the model is on {device}; use auto or off.")
    if resolve_numerics(numerics, device) == "row-invariant":
        functions, backend = eager_backend(numerics, device)
        return GraphCache(layer_functions=functions, attention_backend=backend)
    if compile == "capture":
        return GraphCache()
    if find_spec("triton") is not None:
        return GraphCache(layer_functions=compiled_layer_functions())
    if compile == "on":
        raise ConfigError("compile 'on' needs the package triton, which is not installed; use auto, capture or off.")
    return GraphCache()
