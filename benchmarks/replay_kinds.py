"""Speed at the size of a 7B model on five kinds of pictures, with the accepted lengths of the embedded model.

    python benchmarks/replay_kinds.py costs costs.json
    python benchmarks/replay_kinds.py record benchmarks/traces/kinds.npz --costs costs.json --device cuda --batch 40
    python benchmarks/replay_kinds.py replay benchmarks/traces/kinds.npz --costs costs.json \\
        --out benchmarks/results/replay/kinds.json
    python benchmarks/replay_kinds.py compare benchmarks/traces/kinds.npz --costs costs.json

`costs` times passes of the large model with nothing drafted, with Jacobi chains and with Jacobi trees. `record` draws
all prompts of prompts_kinds.json with the embedded model and keeps plan and accepted length of every pass; with those
costs also for the setting `auto`, as it would be for the large model. `replay` runs the same passes with random weights
of a published shape and forces those lengths: all work of a pass is done, no picture is drawn. It times every picture,
and plain decoding in the same context. `compare` only adds up the costs of the recorded passes, to estimate speed on a
machine that is not at hand. How fast a real model of that size is depends on how well its tokens can be guessed, which
this does not measure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jacobi_trees import PROMPTS, decode

from underdraw import Pipeline
from underdraw.bench.engine import FORCED, WARMUP_PASSES, EngineBench, EngineBenchConfig
from underdraw.bench.environment import describe_machine
from underdraw.bench.kinds import replay_sections
from underdraw.bench.replay import ReplayPolicy, ReplayVerifier, Trace, load_traces, save_traces
from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.engine.autotune import FixedPlan
from underdraw.history import History
from underdraw.io import atomic_write_json, read_json_object
from underdraw.models.loading import resolve_placement
from underdraw.plan import MAX_GPU_DEPTH, TreePlan, bucket_size, chain_plan
from underdraw.policies.budget import Budget, format_costs
from underdraw.policies.fixed import NoTree
from underdraw.protocols import TreePolicy

SIZES = (1, 8, 16, 32, 64, 128)  # of passes that are timed
SETTINGS: dict[str, str | TreePolicy] = {
    "chain 64": "chain:depth=63",
    **{f"tree {nodes}": f"trunk:nodes={nodes}" for nodes in (16, 32, 64, 128)},
}


def trace_of(history: History, about: dict[str, Any]) -> Trace:
    """The passes of a picture, from what its history holds of every cell."""
    drawn = history.pass_index >= 0
    _, first = np.unique(history.pass_index[drawn], return_index=True)
    columns = zip(
        *(getattr(history, name)[drawn][first].tolist() for name in ("accepted", "depth", "nodes")), strict=True
    )
    accepted, plans = [], []
    for length, depth, nodes in columns:
        branch = 1 if nodes <= depth + 1 else 8
        accepted.append(length)
        plans.append(TreePlan(depth, 2 if branch > 1 else 1, branch, nodes))
    return Trace(tuple(plans), tuple(accepted), about)


def open_bench(options: argparse.Namespace) -> EngineBench:
    """Random weights of the model, and its captured passes."""
    placement, started = resolve_placement(options.device, "auto"), time.perf_counter()
    is_cuda = placement.device.type == "cuda"
    config = EngineBenchConfig(options.model, placement, "capture" if is_cuda else "off", passes=40 if is_cuda else 4)
    return EngineBench(config, lambda stage: print(f"{time.perf_counter() - started:6.1f} s: {stage}", flush=True))


def measure_costs(options: argparse.Namespace) -> None:
    """Time passes of every size: with nothing drafted, with a Jacobi chain, with a Jacobi tree."""
    bench, drafter = open_bench(options), JacobiTree()
    result: dict[str, Any] = {"model": f"random:{options.model}", "machine": describe_machine(bench.device)}
    result |= {"forced": [], "chain": [], "tree": []}
    for size in options.sizes:
        plans = {"chain": chain_plan(size - 1)} if 1 < size <= MAX_GPU_DEPTH + 1 else {}
        if size >= 16:
            plans["tree"] = TreePlan(min(5 * size // 8, MAX_GPU_DEPTH), 2, 8, size)
        result["forced"].append([size, round(bench.pass_ms(Forced(), NoTree(), bench.graphs.with_min_bucket(size)), 4)])
        for name, plan in plans.items():
            result[name].append([size, round(bench.pass_ms(drafter, FixedPlan(plan)), 4)])
        atomic_write_json(options.out, result)
        print({name: result[name][-1] for name in ("forced", *plans)}, flush=True)


def settings_of(options: argparse.Namespace) -> dict[str, str | TreePolicy]:
    """The trees to record, with `auto` if the costs of the large model's passes are there."""
    settings = dict(SETTINGS)
    if options.costs is not None:
        costs = read_json_object(options.costs, "costs of passes")
        plain, *_ = costs["forced"]
        chain, tree = (format_costs(tuple(map(tuple, pairs))) for pairs in ([plain, *costs["chain"]], costs["tree"]))
        settings["auto"] = Budget(chain, tree)
    return {name: tree for name, tree in settings.items() if not options.setting or name in options.setting}


def record(options: argparse.Namespace) -> None:
    """Draw the prompts of every kind with every setting and write the traces."""
    groups = {kind: texts[: options.per_kind] for kind, texts in json.loads(PROMPTS.read_text()).items()}
    prompts, kinds = [t for texts in groups.values() for t in texts], [k for k, texts in groups.items() for _ in texts]
    pipe = Pipeline.from_pretrained(options.model, device=options.device, drafter="jacobi-tree", tree="none")
    traces = load_traces(options.traces) if options.add else []
    for name, tree in settings_of(options).items():
        pipe.tree = tree
        histories = decode(pipe, prompts, options.temperature, options.batch)
        for seed, (history, prompt, kind) in enumerate(zip(histories, prompts, kinds, strict=True)):
            about = {"setting": name, "kind": kind, "prompt": prompt, "seed": seed, "temperature": options.temperature}
            traces.append(trace_of(history, about))
        shown = [trace.tokens_per_pass for trace in traces[-len(prompts) :]]
        print(f"{name}: {1 / np.mean(1 / np.array(shown)):.2f} tokens per pass", flush=True)
        options.traces.parent.mkdir(parents=True, exist_ok=True)
        save_traces(options.traces, traces)
    print(f"{len(traces)} traces in {options.traces}, {options.traces.stat().st_size} bytes")


def replay(options: argparse.Namespace) -> None:
    """Time the passes of every trace at the size of another model."""
    traces, bench, started = load_traces(options.traces), open_bench(options), time.perf_counter()
    costs = read_json_object(options.costs, "costs of passes") if options.costs is not None else None
    by_costs = speed_by_costs(traces, costs) if costs is not None else None
    traces = [trace for trace in traces if not options.setting or trace.about["setting"] in options.setting]
    placement = bench.config.placement
    plain = bench.pass_ms(Forced(), NoTree())
    result = {
        "kind": "replay",
        "model": f"random:{options.model}",
        "machine": describe_machine(placement.device),
        "dtype": str(placement.dtype).removeprefix("torch."),
        "temperature": traces[0].about["temperature"],
        "note": FORCED,
        "plain_ms": round(plain, 4),
        "costs": costs,
        "by_costs": by_costs,
        "rows": [],
    }
    for row in replay_rows(bench, traces, options.limit):
        result["rows"].append({**row, "over_plain": round(plain / row["ms_per_token"], 4)})
        if options.out is not None:
            atomic_write_json(options.out, result)
        if time.perf_counter() - started > options.seconds:
            print(f"stopped after {options.seconds} s")
            break
    for section in replay_sections(result):
        assert section.table is not None
        print(section.text, *(" | ".join(row) for row in section.table.rows), sep="\n")


def speed_by_costs(traces: Sequence[Trace], costs: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Speed over plain decoding by setting and kind, total times of all recorded pictures by the costs of passes."""
    plain = costs["forced"][0][1]
    curves = {False: [costs["forced"][0], *costs["chain"]], True: costs["tree"]}
    times: dict[str, dict[str, list[float]]] = {}
    for trace in traces:
        sizes = [(plan.nodes > plan.depth + 1, bucket_size(plan.nodes)) for plan in trace.plans]
        spent = sum(float(np.interp(nodes, *zip(*curves[is_tree], strict=True))) for is_tree, nodes in sizes)
        for kind in (trace.about["kind"], "all"):
            by_kind = times.setdefault(trace.about["setting"], {}).setdefault(kind, [])
            by_kind.append(spent / (sum(trace.accepted) + len(trace.accepted)))
    return {
        setting: {kind: round(plain / float(np.mean(values)), 4) for kind, values in by_kind.items()}
        for setting, by_kind in times.items()
    }


def compare(options: argparse.Namespace) -> None:
    """Print the speed of every recorded setting over plain decoding, by the costs of passes."""
    by_setting = speed_by_costs(load_traces(options.traces), read_json_object(options.costs, "costs of passes"))
    for setting, by_kind in by_setting.items():
        print(f"{setting}: " + ", ".join(f"{kind} {speed:.2f}" for kind, speed in by_kind.items()))


def replay_rows(bench: EngineBench, traces: Sequence[Trace], limit: int | None) -> Iterator[dict[str, Any]]:
    """One row per trace, kinds and settings in turns, so that a run that is cut short has all of them."""
    names = [(trace.about["setting"], trace.about["kind"]) for trace in traces]
    order = sorted(range(len(traces)), key=lambda index: (names[:index].count(names[index]), index))
    drafter = JacobiTree()
    verifiers: dict[str, ReplayVerifier] = {}
    for index in order[:limit]:
        trace, setting = traces[index], traces[index].about["setting"]
        if setting not in verifiers:
            verifiers[setting] = ReplayVerifier(trace, bench.device)
            for _ in range(2):  # captures the passes of this setting
                run_trace(bench, drafter, verifiers[setting], trace)
        seconds, tokens = run_trace(bench, drafter, verifiers[setting], trace)
        yield {
            **{key: trace.about[key] for key in ("setting", "kind", "prompt", "seed")},
            "ms_per_token": round(1000 * seconds / tokens, 5),
            "tokens_per_pass": round(trace.tokens_per_pass, 4),
        }


def run_trace(bench: EngineBench, drafter: JacobiTree, verifier: ReplayVerifier, trace: Trace) -> tuple[float, int]:
    """Seconds and tokens of the passes of a trace; a pass that is captured now counts as the median one."""
    verifier.load(trace)
    steps = bench.run_decode(drafter, ReplayPolicy(trace), verifier=verifier, max_passes=len(trace.plans))
    seconds = np.array([step.seconds for step in steps])
    limit = 3 * np.median(seconds)  # captures take longer than any pass
    seconds[:WARMUP_PASSES] = np.minimum(seconds[:WARMUP_PASSES], np.median(seconds))
    seconds[seconds > limit] = np.median(seconds)
    return float(seconds.sum()), sum(len(step.tokens) for step in steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("costs", "record", "replay", "compare"):
        command = commands.add_parser(name)
        if name != "compare":
            command.add_argument("--device", default="auto")
            command.add_argument("--model", default="tiny" if name == "record" else "anole-7b")
        if name == "costs":
            command.add_argument("out", type=Path, metavar="JSON")
            command.add_argument("--sizes", type=int, nargs="+", default=SIZES)
            continue
        command.add_argument("traces", type=Path, metavar="NPZ")
        command.add_argument(
            "--costs", type=Path, metavar="JSON", help="what `costs` wrote", required=name == "compare"
        )
        if name == "compare":
            continue
        command.add_argument("--setting", action="append", choices=[*SETTINGS, "auto"], help="only this one; repeat")
        if name == "record":
            command.add_argument("--add", action="store_true", help="keep the traces that the file has")
            command.add_argument("--batch", type=int, default=1)
            command.add_argument("--per-kind", type=int, default=8, help="prompts of each kind")
            command.add_argument("--temperature", type=float, default=1.0)
        else:
            command.add_argument("--out", type=Path, metavar="JSON")
            command.add_argument("--limit", type=int, metavar="N", help="only N traces")
            command.add_argument("--seconds", type=float, default=600, help="stop after this time")
    options = parser.parse_args()
    commands_by_name = {"costs": measure_costs, "record": record, "replay": replay, "compare": compare}
    commands_by_name[options.command](options)


if __name__ == "__main__":
    main()
