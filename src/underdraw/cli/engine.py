"""`underdraw bench engine`: how close passes come to what the memory allows, with random weights of true shapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from underdraw.cli import options
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from underdraw.bench.engine import Kind
    from underdraw.bench.replay import Trace

EXAMPLES = """
Examples:

underdraw bench engine --model random:anole-7b --out anole.json

underdraw bench engine --model random:anole-7b --replay ghost.trace.json --replay-drafter block --out anole.json
"""
PREFIX = "random:"
WHAT = "What is measured"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", rich_help_panel=WHAT,
        help="random:anole-7b, lumina-7b, llamagen-xl, janus-7b, emu3-8b or toy.",
    ),
]  # fmt: skip
Replay = Annotated[
    list[Path] | None,
    typer.Option(metavar="TRACE", rich_help_panel=WHAT, help="Force the accepted lengths of a trace; several times."),
]
ReplayDrafter = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND", rich_help_panel=WHAT, help="What drafts in replays: eagle, block (default) or jacobi."
    ),
]
Batch = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=WHAT, help="Pictures drawn together, 1 to 8.")]
StepRunner = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=WHAT, help="Timed passes of each size.")]
Attention = Annotated[
    Literal["auto", "sdpa", "matmul", "tree"],
    typer.Option(rich_help_panel=WHAT, help="How a GPU attends; auto tries all and goes on with the fastest."),
]  # fmt: skip
Tune = Annotated[
    bool, typer.Option("--tune", rich_help_panel=WHAT, help="Also try kernels for the matrix products; takes minutes.")
]
Baseline = Annotated[
    bool, typer.Option("--transformers/--no-transformers", rich_help_panel=WHAT, help="Time transformers as well.")
]
Out = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", rich_help_panel=options.OUTPUT, help="Write it as JSON.")
]


@app.command(epilog=EXAMPLES)
def engine(
    model: Model = "random:anole-7b",
    replay: Replay = None,
    replay_drafter: ReplayDrafter = None,
    batch: Batch = 1,
    passes: StepRunner = 40,
    attention: Attention = "auto",
    tune: Tune = False,
    baseline: Baseline = True,
    temperature: options.Temperature = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    compile: options.Compile = "auto",
    out: Out = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Time passes of every size beside the floor that the memory sets and beside transformers, without a checkpoint."""
    if not model.startswith(PREFIX):
        raise ConfigError(f"--model {model} has no published shape; use {PREFIX}anole-7b or another of --help.")
    if not 1 <= batch <= 8 or passes < 1:
        raise ConfigError(f"--batch {batch} must lie between 1 and 8, and --passes {passes} be at least 1.")
    if out is not None:
        check_file(out)
    traces = _traces(replay or [], replay_drafter or [])
    from rich.console import Console

    from underdraw.bench.engine import EngineBenchConfig, measure
    from underdraw.bench.results import write_json
    from underdraw.engine.cuda_graphs import make_graph_cache
    from underdraw.models.loading import resolve_placement
    from underdraw.nn.layer_functions import EAGER

    place = resolve_placement(device, dtype)
    graphs = make_graph_cache(place.device, compile)
    mode: Any = "off" if graphs is None else "capture" if graphs.layer_functions is EAGER else "on"
    if tune and mode != "on":
        raise ConfigError("--tune is about compiled passes and these are not compiled; leave it out, or --compile on.")
    settings = EngineBenchConfig(
        model.removeprefix(PREFIX), place, mode, batch, passes,
        temperature=1.0 if temperature is None else temperature, attention_backend=attention, tuned=tune,
    )  # fmt: skip
    console = Console(stderr=True, quiet=json or quiet)

    def keep(part: dict[str, Any]) -> None:
        if out is not None:
            write_json(out, part)

    record = measure(settings, traces, console.print, baseline=baseline, keep=keep)
    if not (json or quiet):
        show(record)
    plain = record["plain"]
    sentence = f"{model}: {plain['ms_per_token']:.2f} ms a token, {plain['over_floor']:.2f} times the floor"
    print_result(sentence, record, as_json=json, quiet=quiet)


def _traces(paths: Sequence[Path], kinds: Sequence[str]) -> list[tuple[Trace, Kind]]:
    from underdraw.bench.replay import Trace

    wrong = [kind for kind in kinds if kind not in ("eagle", "block", "jacobi")]
    if wrong:
        raise ConfigError(f"--replay-drafter {wrong[0]} is not known; use eagle, block or jacobi.")
    if len(kinds) > len(paths):
        raise ConfigError("--replay-drafter belongs to a --replay; give as many traces.")
    named: Any = [*kinds, *["block"] * (len(paths) - len(kinds))]
    return [(Trace.load(path), kind) for path, kind in zip(paths, named, strict=True)]


def show(record: dict[str, Any]) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    from underdraw.bench.performance import rows

    table = Table("what", "value")
    for name, value in rows(record):
        table.add_row(name, value)
    Console().print(table)
