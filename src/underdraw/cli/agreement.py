"""`underdraw bench agreement`: whether trees, batches and temperatures give the tokens of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from underdraw.cli import options
from underdraw.cli.measuring import stages
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw bench agreement --out agreement.json

underdraw bench agreement --model random:anole-7b --pictures 3 --tokens 64 --dtype bfloat16 --dtype float16

underdraw bench agreement --weights int8 --nodes 24 --batch 1
"""
MEASURED = "Measurement"
NODES, BATCHES, TEMPERATURES = (8, 24, 64, 128), (1, 3, 16), (0.0, 0.5, 1.0)
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        rich_help_panel=MEASURED,
        help="A model, or the random weights that `bench engine --help` lists, such as random:anole-7b.",
    ),
]
Nodes = Annotated[
    list[int] | None,
    typer.Option(
        "--nodes",
        metavar="COUNT",
        rich_help_panel=MEASURED,
        help="Nodes of chains and trees; can be repeated. Default: 8, 24, 64 and 128.",
    ),
]
Batches = Annotated[
    list[int] | None,
    typer.Option(
        "--batch",
        metavar="COUNT",
        rich_help_panel=MEASURED,
        help="Pictures at once; can be repeated. Default: 1, 3 and 16.",
    ),
]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature",
        metavar="NUMBER",
        rich_help_panel=MEASURED,
        help="A temperature; can be repeated. Default: 0, 0.5 and 1.",
    ),
]
Dtypes = Annotated[
    list[str] | None,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        rich_help_panel=options.PARTS,
        help="auto, float32, bfloat16 or float16; can be repeated.",
    ),
]
Pictures = Annotated[
    int, typer.Option(metavar="COUNT", rich_help_panel=MEASURED, help="Pictures of every setting and temperature.")
]
Tokens = Annotated[
    int | None,
    typer.Option(metavar="COUNT", rich_help_panel=MEASURED, help="Only the first COUNT tokens of every picture."),
]


@app.command(epilog=EXAMPLES)
def agreement(
    model: Model = "tiny",
    nodes: Nodes = None,
    batch: Batches = None,
    temperature: Temperatures = None,
    pictures: Pictures = 20,
    tokens: Tokens = None,
    device: options.Device = "auto",
    dtype: Dtypes = None,
    compile: options.Compile = "auto",
    numerics: options.Numerics = "row-invariant",
    weights: options.Weights = "full",
    out: options.ResultFile = None,
    force: options.ForceFile = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compare chains and trees with plain decoding, token by token; quantised weights also with full ones."""
    counts = {"--nodes": nodes or NODES, "--batch": batch or BATCHES}
    for name, values in {**counts, "--pictures": [pictures], "--tokens": [tokens or 1]}.items():
        if any(not (2 if name == "--nodes" else 1) <= value <= 10**6 for value in values):
            raise ConfigError(f"{name} {min(values)} leaves nothing to compare; use at least 1, for --nodes 2.")
    if max(counts["--nodes"]) > 128:
        raise ConfigError(f"--nodes {max(counts['--nodes'])} is more than a tree can have; use at most 128.")
    if out is not None:
        check_file(out, force=force)
    grid = {**counts, "temperatures": temperature or TEMPERATURES, "pictures": pictures, "tokens": tokens}
    with stages(f"loading {model}", silent=json or quiet) as set_stage:
        record = _measure(model, grid, dtype or ["auto"], (device, compile, numerics, weights), out, set_stage)
    _print(record, json=json, quiet=quiet)


def _measure(
    model: str, grid: dict[str, Any], dtypes: list[str], parts: tuple[Any, ...], out: Path | None, set_stage: Any
) -> dict[str, Any]:
    from dataclasses import replace

    from underdraw.bench import agreement as bench
    from underdraw.bench.environment import describe_machine
    from underdraw.engine.cuda_graphs import make_graph_cache
    from underdraw.io import atomic_write_json
    from underdraw.models.loading import resolve_placement

    device, compile, numerics, weights = parts
    cells = list(bench.settings(grid["--nodes"], grid["--batch"]))
    record: dict[str, Any] = {
        "kind": "matrix",
        "model": model,
        "weights": weights,
        "tokens": grid["tokens"],
        "rows": [],
    }
    for name in dtypes:
        placement = resolve_placement(device, name)
        placed = replace(placement, weights="full" if weights == "auto" else weights)
        label = str(placement.dtype).removeprefix("torch.")
        set_stage(f"{model}, {label}")
        subject = bench.load_subject(model, placed, max(grid["pictures"], *grid["--batch"]))
        subject = replace(subject, target=replace(subject.target, numerics=numerics))
        record.update(
            {"machine": describe_machine(placement.device), "guidance": subject.guidance, "numerics": numerics}
        )

        def report(row: dict[str, Any], label: str = label) -> None:
            record["rows"].append({"dtype": label, **row})
            set_stage(
                f"{label}, T={row['temperature']:g}, {row['kind']} of {row['nodes']}, batch {row['batch']}: "
                f"{row['pictures_equal']} of {row['pictures']} equal"
            )
            if out is not None:
                atomic_write_json(out, record)

        graphs = make_graph_cache(placement.device, compile, numerics)
        bench.measure_matrix(
            subject, cells, grid["temperatures"], grid["pictures"], graphs, tokens=grid["tokens"], report=report
        )
        if placed.weights != "full":
            set_stage(f"{label}, {placed.weights} weights against full ones")
            full = bench.load_subject(model, placement, grid["pictures"])
            quality = bench.measure_quality(full, subject, grid["pictures"], temperature=grid["temperatures"][-1])
            record.setdefault("quality", {})[label] = quality
    if out is not None:
        atomic_write_json(out, record)
    return record


def _print(record: dict[str, Any], *, json: bool, quiet: bool) -> None:
    from underdraw.bench.records import record_sections
    from underdraw.bench.report import print_table

    if not (json or quiet):
        for section in record_sections(record):
            if section.table is not None:
                print_table(section.table)
    drawn, equal = (sum(row[key] for row in record["rows"]) for key in ("pictures", "pictures_equal"))
    print_result(
        f"{record['model']}: {equal} of {drawn} pictures equal plain decoding", record, as_json=json, quiet=quiet
    )
