"""Passes that are captured once and replayed: on a GPU a step is then one launch instead of thousands.

A pass of one kind runs as it is when it is first met (this is when regions are compiled), is captured when it is met
again, and is replayed from then on. Its kind is the plan, rounded up to one of few, the number of nodes that it is
padded to, and the cache slots that it looks at; what differs inside a kind (how deep a tree may go, how far each image
is) lies on the device. Buffers and captured passes are kept between pictures. Nothing about decoding is written here.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from underdraw.engine.step import AcceptedTokens, StepRunner, TokenStatsMode, grown_plans, unpack_from_host
from underdraw.errors import CapacityError, ConfigError, unknown
from underdraw.nn.attention import Kernel, triton_available
from underdraw.nn.layer_functions import PLAIN, LayerFunctions, joined
from underdraw.nn.row_invariant import chunk, fewest, multiple
from underdraw.nn.target import DecoderSession
from underdraw.nn.transformer import DecoderLayer
from underdraw.plan import TreePlan, bucket_size
from underdraw.protocols import CapturableDraft, Drafter, PassConfig, Prompt, Target, Verifier
from underdraw.sampling import NoiseStream, Sampler
from underdraw.tree import DraftTree, Proposal, TreeLimits, covering_plan

log = logging.getLogger(__name__)
Compile = Literal["auto", "on", "capture", "off"]
KEPT = 2  # sets of buffers that are kept for the next picture, where nobody asks for more
_WHOLE = 2**20  # slots, more than any cache has
_SMALL, _SPAN = 1024, 256  # slots of a cache that is always looked at as a whole; what larger ones are looked at in
_COMPILED = 64  # shapes of one region before torch gives up compiling


class CapturedPass(Protocol):
    """Work that was captured, and done once."""

    out: Tensor

    def replay(self) -> None: ...


CaptureFn = Callable[[Callable[[], Tensor]], CapturedPass]


class CudaGraphPass:
    """One captured pass on a CUDA device. All share one pool of memory, since no two are ever in flight."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.graph, device = torch.cuda.CUDAGraph(), torch.cuda.current_device()
        pool, stream = _anchor(device).pool(), _stream(device)
        with _uncollected(), torch.cuda.graph(self.graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.out = work()
        self.graph.replay()  # capturing has recorded the work and done none of it

    def replay(self) -> None:
        self.graph.replay()


class EagerPass:
    """Work that is done again instead of being replayed: the same passes where nothing can be captured."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work, self.out = work, work()

    def replay(self) -> None:
        self.out = self.work()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: an old graph that is freed inside a capture spoils it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@functools.cache
def _stream(device: int) -> torch.cuda.Stream:
    """Where captures of a device happen: torch's own stream for them belongs to the first device that captured."""
    return torch.cuda.Stream(device)


@functools.cache
def _anchor(device: int) -> torch.cuda.CUDAGraph:
    """A graph of next to nothing whose pool all others share: torch gives up a pool that no graph uses any more."""
    anchor, something = torch.cuda.CUDAGraph(), torch.zeros(1, device=f"cuda:{device}")
    with torch.cuda.graph(anchor, stream=_stream(device)):
        something.zero_()
    return anchor


@functools.cache
def compiled_regions(backend: str = "inductor", *, tuned: bool = False) -> LayerFunctions:
    """What lies between attentions, compiled for any number of nodes; all layers share it. Few nodes have kernels.

    torch caches them on disk. `tuned` also tries kernels for the matrix products, which takes minutes.
    """
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _COMPILED)
    for found_out in (chunk, fewest, multiple):  # not where they are written: that would take a second of every start
        torch.compiler.assume_constant_result(found_out)
    mode = "max-autotune-no-cudagraphs" if tuned else None

    def compiled(region: Any) -> Any:
        return torch.compile(region, fullgraph=True, backend=backend, mode=mode)

    leave, seen = map(compiled, (PLAIN.leave, PLAIN.seen))
    if backend != "inductor" or not triton_available(torch.device("cuda")):
        return LayerFunctions(compiled(PLAIN.enter), compiled(PLAIN.between), leave, seen)
    from underdraw.kernels import fused_layer as slim

    return replace(
        slim.placing(compiled(DecoderLayer.heads), compiled(joined)), leave=leave, seen=seen, few=slim.REGIONS
    )


class GraphCache:
    """Captured passes of one model and what they need, kept between pictures.

    `smallest` is the least number of nodes of a pass: plain decoding through the shapes of trees rounds as trees do.
    """

    def __init__(
        self,
        *,
        record: CaptureFn = CudaGraphPass,
        regions: LayerFunctions = PLAIN,
        kernel: Kernel = "auto",
        smallest: int = 1,
        quantum: int | None = None,
        tell: Callable[[str], None] = log.info,
    ) -> None:
        self.record, self.regions, self.kernel, self.smallest = record, regions, kernel, smallest
        self.quantum, self.tell = quantum, tell
        self.most = KEPT
        self.kept: dict[Hashable, GraphRunner] = {}
        self.told: set[int] = set()  # sizes that were announced

    def padded(self, smallest: int) -> GraphCache:
        """The same for passes of at least so many nodes."""
        return GraphCache(
            record=self.record, regions=self.regions, kernel=self.kernel, smallest=smallest, quantum=self.quantum,
            tell=self.tell,
        )  # fmt: skip

    @property
    def kinds(self) -> tuple[int, int]:
        """How many kinds of passes were met by what is kept, and how many of them are captured."""
        runs = [run for passes in self.kept.values() for run in passes.runs.values()]
        return len(runs), sum(run is not None for run in runs)

    def announce(self, size: int) -> None:
        """Say that a size of passes is compiled, once."""
        if self.regions is not PLAIN and size not in self.told:
            self.told.add(size)
            self.tell(f"compiling passes of {size} nodes")

    def open(
        self, target: Target, drafter: Drafter, verifier: Verifier, prompts: Sequence[Prompt], sampler: Sampler,
        guidance: float, proposal: Proposal, token_stats: TokenStatsMode,
    ) -> StepRunner:  # fmt: skip
        """The passes of a decode, captured if both sessions allow it, in the buffers of an earlier one if they fit."""
        settings = (sampler.temperature, sampler.top_k, sampler.top_p, guidance, proposal, token_stats)
        key = (target, drafter, verifier, sampler.layout, len(prompts), *settings)
        old = self.kept.pop(key, None)
        if old is not None and old.restart(prompts, sampler):
            self.kept[key] = old
            return old
        while len(self.kept) >= self.most:
            del self.kept[next(iter(self.kept))]  # the one that was not used for the longest time
        try:
            session = target.open(prompts, sampler.layout, guidance=guidance)
        except CapacityError:
            self.kept.clear()  # what was kept for later takes room that is needed now
            session = target.open(prompts, sampler.layout, guidance=guidance)
        draft = drafter.open(prompts, sampler.layout, session.prefill, guidance=guidance)
        if not isinstance(session, DecoderSession) or not isinstance(draft, CapturableDraft):
            return StepRunner(session, draft, verifier, sampler, proposal, token_stats)
        self.kept[key] = GraphRunner(self, session, draft, verifier, sampler.copy(), proposal, token_stats)
        return self.kept[key]


class GraphRunner(StepRunner):
    """Passes over buffers that stay, each kind captured when it is met for the second time."""

    def __init__(
        self, graphs: GraphCache, session: DecoderSession, draft: CapturableDraft, verifier: Verifier, sampler: Sampler,
        proposal: Proposal, token_stats: TokenStatsMode,
    ) -> None:  # fmt: skip
        super().__init__(session, draft, verifier, sampler, proposal, token_stats)
        self.graphs, self.target, self.draft_session = graphs, session, draft
        self.streams: tuple[NoiseStream, ...] = (
            ("target", "draft", "accept") if proposal == "sampled" else ("target", "accept")
        )
        sampler.precompute_noise(sampler.seeds, self.streams)
        self.quantum = graphs.quantum or (_SPAN if session.cache.capacity > _SMALL else _WHOLE)
        self.runs: dict[Hashable, CapturedPass | None] = {}  # None: met once
        self.tree: DraftTree | None = None  # of the last pass, if its size was found out on the way
        device = self.steps.device
        self.limits = torch.zeros(4, len(sampler), dtype=torch.int64, device=device)
        self.host_limits = torch.zeros(4, len(sampler), dtype=torch.int64, pin_memory=device.type == "cuda")

    def restart(self, prompts: Sequence[Prompt], sampler: Sampler) -> bool:
        """Start with new prompts and seeds in the same buffers; False if they do not fit."""
        if not self.target.restart(prompts) or not self.draft_session.restart(prompts, self.session.prefill):
            return False
        self.sampler.precompute_noise(sampler.seeds, self.streams)
        return True

    def step(self, wanted: Sequence[TreePlan], places: Sequence[int]) -> tuple[list[TreePlan], list[AcceptedTokens]]:
        stop = self.sampler.layout.stop
        live = [place < stop - 1 for place in places]
        plans = self.truncate_plans(wanted, places)
        min_probability = any(plan.min_probability for plan in plans)
        if (
            self.proposal == "sampled" or min_probability
        ):  # a shape is settled before it is drawn, so it cannot be cut later
            plan = covering_plan([p for p, alive in zip(plans, live, strict=True) if alive])
        else:
            plan = covering_plan([p for p, alive in zip(wanted, live, strict=True) if alive]).bucketed()
        size = bucket_size(max(plan.nodes, self.graphs.smallest))
        own = self.graphs
        config = PassConfig(plan, size, self.proposal, self.quantum, own.regions, own.kernel)
        limits = self._limited(plans) if plan.depth else None
        kind = (self.target.prepare(config), self.draft_session.prepare(config))
        free = (
            min_probability or None in kind
        )  # with a min_probability, the size of a tree depends on what the device finds
        news = unpack_from_host(
            self._run(config, limits, None if free else (plan, size, *kind)).tolist(), self.token_stats
        )
        if self.tree is not None:
            plans = grown_plans(self.tree, plans)
        counts = tuple(len(new.tokens) if alive else 0 for new, alive in zip(news, live, strict=True))
        self.target.sync(counts)
        self.draft_session.sync(counts)
        return plans, news

    def advance_roots(self, root: Tensor, counts: Tensor) -> None:
        self.root.copy_(root)
        self.steps.add_(counts)

    def _limited(self, plans: Sequence[TreePlan]) -> TreeLimits:
        """What each tree may use of the plan they share, copied to the device without waiting for it."""
        self.host_limits.copy_(torch.tensor([[p.depth, p.width, p.branch, p.nodes] for p in plans]).T)
        self.limits.copy_(self.host_limits, non_blocking=True)
        return TreeLimits(*self.limits)

    def _run(self, config: PassConfig, limits: TreeLimits | None, kind: Hashable | None) -> Tensor:
        """Make a pass: as it is, captured, or replayed."""

        def work() -> Tensor:
            noise_window = self.sampler.noise_window(self.steps, config.plan.depth + 1)
            judged = self.draft_and_verify(config.plan, limits, noise_window, config.bucket_size)
            self.tree = judged.tree if config.plan.min_probability else None
            self.commit(judged, ())
            return judged.packed

        if kind is None:
            return work()
        if kind not in self.runs:
            self.runs[kind] = None
            self.graphs.announce(config.bucket_size)
            return work()
        run = self.runs[kind]
        if run is None:
            with torch.cuda.device_of(self.steps):  # a capture belongs to the current device
                run = self.runs[kind] = self.graphs.record(work)
        else:
            run.replay()
        return run.out


def make_graph_cache(device: torch.device, compile: Compile) -> GraphCache | None:
    """How passes run on a device; None is as they are. "auto" captures on a GPU, and compiles where it can."""
    if compile not in get_args(Compile):
        raise unknown("compile", compile, get_args(Compile))
    if compile == "off" or (device.type != "cuda" and compile == "auto"):
        return None
    if device.type != "cuda":
        raise ConfigError(f"compile {compile!r} needs a CUDA device and the model is on {device}; use auto or off.")
    if compile == "capture":
        return GraphCache()
    if find_spec("triton") is not None:
        return GraphCache(regions=compiled_regions())
    if compile == "on":
        raise ConfigError("compile 'on' needs the package triton, which is not installed; use auto, capture or off.")
    return GraphCache()
