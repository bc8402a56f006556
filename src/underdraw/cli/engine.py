"""`underdraw bench engine`: time of passes against the memory bandwidth bound, with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from underdraw.cli import options
from underdraw.cli.options import measured_model_option, measured_option
from underdraw.cli.progress import stages
from underdraw.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underdraw.bench.engine import DrafterKind
    from underdraw.bench.replay import Trace

EXAMPLES = """
Examples:

underdraw bench engine --model random:anole-7b --out anole.json

underdraw bench engine --model random:anole-7b --replay ghost.trace.json --replay-drafter block --out anole.json
"""
PREFIX = "random:"
MAX_PASSES = 10**5
DRAFTER_KINDS = ("eagle", "block", "jacobi")
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

_RANDOM_MODELS = f"{', '.join(options.RANDOM_MODELS[:-1])} or {options.RANDOM_MODELS[-1]}"
Model = Annotated[str, measured_model_option(help=f"{PREFIX}{_RANDOM_MODELS}.")]
Replay = Annotated[
    list[Path] | None,
    measured_option(metavar="TRACE", help="Replay the accepted lengths of a trace; can be repeated."),
]
ReplayDrafter = Annotated[
    list[str] | None,
    measured_option(metavar="KIND", help="The drafter of a replay: eagle, block (default) or jacobi; can be repeated."),
]
Batch = Annotated[int, measured_option(min=1, max=8, metavar="COUNT", help="Batch size, 1 to 8.")]
Passes = Annotated[int, measured_option(min=1, max=MAX_PASSES, metavar="COUNT", help="Timed passes of each size.")]
Attention = Annotated[
    Literal["auto", "sdpa", "matmul", "tree"],
    measured_option(help="Attention backend on a GPU; auto measures all of them and uses the fastest."),
]
Tune = Annotated[bool, measured_option("--tune", help="Autotune the GEMMs during compilation; takes minutes.")]
Baseline = Annotated[bool, measured_option("--transformers/--no-transformers", help="Also time transformers.")]


@dataclass(frozen=True)
class TimingOptions:
    """What is timed."""

    model: Model = "random:anole-7b"
    replay: Replay = None
    replay_drafter: ReplayDrafter = None
    batch: Batch = 1
    passes: Passes = 40
    attention: Attention = "auto"
    tune: Tune = False
    baseline: Baseline = True
    temperature: options.Temperature = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"


@app.command(epilog=EXAMPLES)
@options.grouped
def engine(timing: TimingOptions, pass_options: options.PassOptions, result: options.ResultOptions) -> None:
    """Time passes of every size against the memory bandwidth bound and transformers, without a checkpoint."""
    model = timing.model
    if not model.startswith(PREFIX):
        raise ConfigError(f"--model {model} has no published shape; use {PREFIX}anole-7b or another one of --help.")
    options.check_sampling_options(None, timing.temperature, None, None, None)
    result.check()
    options.check_random_model(model)
    traces = _load_traces(timing.replay or [], timing.replay_drafter or [])
    with stages(f"loading {model}", silent=result.silent) as set_stage:
        from underdraw.bench.engine import EngineBenchConfig, measure
        from underdraw.engine.cuda_graphs import make_graph_cache

        placement = pass_options.placement(timing.device, timing.dtype)
        if placement.weights != "full" and pass_options.numerics == "fastest":
            raise ConfigError(
                f"--weights {pass_options.weights} runs with row-invariant numerics; leave out --numerics fastest."
            )
        graphs = make_graph_cache(placement.device, pass_options.compile, pass_options.numerics)
        mode: Any = "off" if graphs is None else "on" if graphs.layer_functions.is_compiled else "capture"
        if timing.tune and mode != "on":
            raise ConfigError("--tune needs compiled passes on a GPU; leave it out, or add --numerics fastest.")
        config = EngineBenchConfig(
            model.removeprefix(PREFIX),
            placement,
            mode,
            timing.batch,
            timing.passes,
            temperature=1.0 if timing.temperature is None else timing.temperature,
            attention_backend=timing.attention,
            tuned=timing.tune,
            numerics=pass_options.numerics,
        )
        record = measure(config, traces, set_stage, baseline=timing.baseline, save=result.save)
    plain = record["plain"]
    line = f"{model}: {plain['ms_per_token']:.2f} ms per token, {plain['over_floor']:.2f} times the bandwidth bound"
    result.print_tables(line, record)


def _load_traces(paths: Sequence[Path], kinds: Sequence[str]) -> list[tuple[Trace, DrafterKind]]:
    from underdraw.bench.replay import Trace

    unknown = [kind for kind in kinds if kind not in DRAFTER_KINDS]
    if unknown:
        raise ConfigError(f"--replay-drafter {unknown[0]} is unknown; use {', '.join(DRAFTER_KINDS)}.")
    if len(kinds) > len(paths):
        raise ConfigError("there are more --replay-drafter than --replay options; give one trace per drafter.")
    drafters: Any = [*kinds, *["block"] * (len(paths) - len(kinds))]
    return [(Trace.load(path), kind) for path, kind in zip(paths, drafters, strict=True)]
