"""Overhead of the decode loop: everything but the forward passes of target and drafter.

    python benchmarks/overhead.py            # 64 nodes, 8,192 codes, one CPU core
    python benchmarks/overhead.py --json

Target and drafter are lookup tables of logits, so what remains is the loop: tree policy, noise, tree growth,
verification, compaction of a real KV cache, and the history. Times are CPU time of the thread, which other programs do
not change; all are medians, the loop's over the passes of one image of 1,024 tokens.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.engine.decode import decode
from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Arch
from underdraw.plan import MAX_DEPTH, TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.budget import Budget
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, TargetOutput, VerifiedStep
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree, Frontier, grow_tree
from underdraw.verifiers.exact import Exact


@dataclass(frozen=True)
class FixedSize:
    """The same plan for every pass, so that every pass costs the same."""

    nodes: int
    depth: int
    width: int

    def plan(self, history: History, step: int) -> TreePlan:
        return TreePlan(self.depth, self.width, self.width, self.nodes)


class LookupModels:
    """Target and drafter in one: logits from a table, no computation."""

    proposes: ClassVar[Literal["tree"]] = "tree"

    def __init__(self, codes: int, nodes: int, rows: int = 1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.target_logits = torch.randn(rows, nodes, codes, generator=generator) * 2
        # A plausible drafter: the target's logits plus some error.
        self.draft_logits = self.target_logits + torch.randn(rows, nodes, codes, generator=generator) * 0.7
        self.features = torch.zeros(rows, nodes, 8)

    def open(self, prompts: Sequence[Prompt], layout: Layout, *unused: PrefillOutput, guidance: float) -> LookupSession:
        return LookupSession(self)


class LookupSession:
    max_depth = MAX_DEPTH

    def __init__(self, models: LookupModels) -> None:
        self.models = models
        logits = models.target_logits[:, :1]
        ones = torch.ones(logits.shape[0], dtype=torch.int64)
        self.prefill = PrefillOutput(logits, models.features[:, :1], ones[:, None], ones, (1,) * len(ones))

    def forward(self, tree: DraftTree, steps: Tensor) -> TargetOutput:
        return TargetOutput(self.models.target_logits[:, : tree.size], self.models.features[:, : tree.size])

    def draft(self, request: DraftRequest) -> DraftTree:
        def expand(frontier: Frontier) -> Tensor:
            return self.models.draft_logits[:, : frontier.tokens.shape[1]]

        return grow_tree(expand, request.root, request.plan, request.noise_window, calibration=Calibration())

    def commit(self, verified: VerifiedStep) -> None:
        pass


def median_ms(action: Callable[[], object], repeats: int) -> float:
    action()  # warm-up
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        action()
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e3


def jacobi_tree_ms(sampler: Sampler, models: LookupModels, nodes: int, repeats: int) -> dict[str, float]:
    """Milliseconds per pass that a Jacobi tree costs besides its verification: growing it, and keeping candidates."""
    session, steps, root = LookupSession(models), torch.tensor([100]), torch.tensor([3])
    draft = JacobiTree().open([Prompt((0,))], sampler.layout, session.prefill, guidance=1.0)
    plan = TreePlan(5 * nodes // 8, 2, 8, nodes)
    request = DraftRequest(root, steps, plan, sampler.noise_window(steps, plan.depth + 1))

    def commit() -> None:
        tree = draft.draft(request)
        output = session.forward(tree, steps)
        accepted_path = Exact().verify(tree, output.logits, request.noise_window)
        draft.commit(VerifiedStep(tree, accepted_path, output, request.noise_window, accepted_path.length + 1, ()))

    commit()  # from here on there are candidates to branch to
    grow = median_ms(lambda: draft.draft(request), repeats)
    tree = draft.draft(request)
    output = session.forward(tree, steps)
    verify = median_ms(lambda: Exact().verify(tree, output.logits, request.noise_window), repeats)
    return {"Jacobi tree: grow": grow, "Jacobi tree: commit": median_ms(commit, repeats) - grow - verify}


def budget_plan_ms(layout: Layout, accepted: int = 4) -> float:
    """Milliseconds in which `auto` chooses a size, the median over the passes of an image."""
    history, policy, step, times = History(layout), Budget(tree="16:19/32:30/64:53"), layout.start, []
    history.record_first(0)
    while step + accepted + 1 < layout.stop:
        start = time.thread_time()
        plan = policy.plan(history, step)
        times.append(time.thread_time() - start)
        tokens = tuple(range(accepted + 1))
        history.record(StepResult(0, 0, step, accepted, plan, tokens, (0,) * accepted, 0.0))
        step += accepted + 1
    return statistics.median(times) * 1e3


def measure(nodes: int, codes: int, depth: int, width: int, repeats: int) -> dict[str, float]:
    """Milliseconds per pass of each part and of the whole loop."""
    layout = Layout(32, 32, range(codes))
    sampler, models = Sampler(layout, [1]), LookupModels(codes, nodes)
    session, steps, root = LookupSession(models), torch.tensor([100]), torch.tensor([3])
    plan = TreePlan(depth, width, width, nodes)
    noise_window = sampler.noise_window(steps, depth + 1)
    request = DraftRequest(root, steps, plan, noise_window)
    tree = session.draft(request)
    output = session.forward(tree, steps)
    accepted_path = Exact().verify(tree, output.logits, noise_window)
    history, adjacency = History(layout), Adjacency()
    cache = KVCache(Arch(512, 10, 8, 1408, 16, Rope.one_axis(64), outputs=range(16)), 2, 1280, torch.zeros(1))
    path = accepted_path.path[:, : int(accepted_path.length) + 1].repeat(2, 1)
    counts = (accepted_path.length + 1).repeat(2)

    def commit() -> None:
        cache.compact(path, counts * 0, (0, 0))

    parts = {
        "plan (adjacency)": median_ms(lambda: adjacency.plan(history, 100), repeats),
        "plan (budget)": min(budget_plan_ms(layout) for _ in range(5)),
        "noise": median_ms(lambda: sampler.noise_window(steps, depth + 1), repeats),
        "grow": median_ms(lambda: session.draft(request), repeats),
        "verify": median_ms(lambda: Exact().verify(tree, output.logits, noise_window), repeats),
        "commit": median_ms(commit, repeats),
        **jacobi_tree_ms(sampler, models, nodes, repeats),
    }
    policy = FixedSize(nodes, depth, width)
    history = History(layout)
    times, start = [], time.thread_time()
    for _ in decode(models, models, policy, Exact(), [Prompt((0,))], sampler, histories=[history]):
        times.append(time.thread_time() - start)
        start = time.thread_time()
    loop = statistics.median(times) * 1e3 + parts["commit"]
    return {**parts, "loop": loop, "tokens per pass": history.tokens_per_pass}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--codes", type=int, default=8192)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        result = measure(options.nodes, options.codes, options.depth, options.width, options.repeats)
    if options.json:
        print(json.dumps({"milliseconds": result, "options": vars(options), "torch": torch.__version__}))
        return
    print(
        f"{options.nodes} nodes, {options.codes} codes, depth {options.depth}, width {options.width}, batch 1, float32"
    )
    print(f"torch {torch.__version__}, {options.threads} thread(s), {platform.machine()}")
    for name, value in result.items():
        print(f"{name:20} {value:7.3f}" + (" ms" if name != "tokens per pass" else ""))


if __name__ == "__main__":
    main()
