"""`underdraw bench engine`: time of passes against the memory bandwidth bound, with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from underdraw.cli import options
from underdraw.cli.measuring import stages
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import print_result
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
MEASURED = "Measurement"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        rich_help_panel=MEASURED,
        help="random:anole-7b, lumina-7b, lumina-2-7b, llamagen-xl, janus-1b, janus-7b, emu3-8b, glm-image-9b, "
        "simplear-0.5b, simplear-1.5b or toy.",
    ),
]
Replay = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="TRACE", rich_help_panel=MEASURED, help="Replay the accepted lengths of a trace; can be repeated."
    ),
]
ReplayDrafter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND",
        rich_help_panel=MEASURED,
        help="The drafter of a replay: eagle, block (default) or jacobi; can be repeated.",
    ),
]
Batch = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=MEASURED, help="Batch size, 1 to 8.")]
Passes = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=MEASURED, help="Timed passes of each size.")]
Attention = Annotated[
    Literal["auto", "sdpa", "matmul", "tree"],
    typer.Option(
        rich_help_panel=MEASURED, help="Attention backend on a GPU; auto measures all of them and uses the fastest."
    ),
]
Tune = Annotated[
    bool, typer.Option("--tune", rich_help_panel=MEASURED, help="Autotune the GEMMs during compilation; takes minutes.")
]
Baseline = Annotated[
    bool, typer.Option("--transformers/--no-transformers", rich_help_panel=MEASURED, help="Also time transformers.")
]


@app.command(epilog=EXAMPLES)
def engine(
    model: Model = "random:anole-7b",
    replay: Replay = None,
    replay_drafter: ReplayDrafter = None,
    batch: Batch = 1,
    passes: Passes = 40,
    attention: Attention = "auto",
    tune: Tune = False,
    baseline: Baseline = True,
    temperature: options.Temperature = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    compile: options.Compile = "auto",
    numerics: options.Numerics = "row-invariant",
    weights: options.Weights = "full",
    out: options.ResultFile = None,
    force: options.ForceFile = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time passes of every size against the memory bandwidth bound and transformers, without a checkpoint."""
    if not model.startswith(PREFIX):
        raise ConfigError(f"--model {model} has no published shape; use {PREFIX}anole-7b or another one of --help.")
    if not 1 <= batch <= 8 or not 1 <= passes <= MAX_PASSES:
        raise ConfigError(f"--batch {batch} must be from 1 to 8, and --passes {passes} from 1 to {MAX_PASSES}.")

    options.check_sampling_options(None, temperature, None, None, None)
    if out is not None:
        check_file(out, force=force)
    traces = _load_traces(replay or [], replay_drafter or [])
    with stages(f"loading {model}", silent=json or quiet) as set_stage:
        from dataclasses import replace

        from underdraw.bench.engine import EngineBenchConfig, measure
        from underdraw.engine.cuda_graphs import make_graph_cache
        from underdraw.io import atomic_write_json
        from underdraw.models.loading import resolve_placement

        placement = resolve_placement(device, dtype)
        placement = replace(placement, weights="full" if weights == "auto" else weights)
        if placement.weights != "full" and numerics == "fastest":
            raise ConfigError(f"--weights {weights} runs with row-invariant numerics; leave out --numerics fastest.")
        graphs = make_graph_cache(placement.device, compile, numerics)
        mode: Any = "off" if graphs is None else "on" if graphs.layer_functions.is_compiled else "capture"
        if tune and mode != "on":
            raise ConfigError("--tune needs compiled passes on a GPU; leave it out, or add --numerics fastest.")
        config = EngineBenchConfig(
            model.removeprefix(PREFIX),
            placement,
            mode,
            batch,
            passes,
            temperature=1.0 if temperature is None else temperature,
            attention_backend=attention,
            tuned=tune,
            numerics=numerics,
        )

        def save(partial: dict[str, Any]) -> None:
            if out is not None:
                atomic_write_json(out, partial)

        record = measure(config, traces, set_stage, baseline=baseline, save=save)
    _print(model, record, json=json, quiet=quiet)


def _load_traces(paths: Sequence[Path], kinds: Sequence[str]) -> list[tuple[Trace, DrafterKind]]:
    from underdraw.bench.replay import Trace

    unknown = [kind for kind in kinds if kind not in DRAFTER_KINDS]
    if unknown:
        raise ConfigError(f"--replay-drafter {unknown[0]} is unknown; use {', '.join(DRAFTER_KINDS)}.")
    if len(kinds) > len(paths):
        raise ConfigError("there are more --replay-drafter than --replay options; give one trace per drafter.")
    drafters: Any = [*kinds, *["block"] * (len(paths) - len(kinds))]
    return [(Trace.load(path), kind) for path, kind in zip(paths, drafters, strict=True)]


def _print(model: str, record: dict[str, Any], *, json: bool, quiet: bool) -> None:
    from underdraw.bench.records import record_sections
    from underdraw.bench.report import print_table

    if not (json or quiet):
        for section in record_sections(record):
            if section.table is not None:
                print_table(section.table)
    plain = record["plain"]
    line = f"{model}: {plain['ms_per_token']:.2f} ms per token, {plain['over_floor']:.2f} times the bandwidth bound"
    print_result(line, record, as_json=json, quiet=quiet)
