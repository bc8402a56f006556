"""`underdraw bench agreement`: whether trees, batches and temperatures give the tokens of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from underdraw.cli import options
from underdraw.cli.options import measured_model_option, measured_option
from underdraw.cli.progress import stages
from underdraw.plan import MAX_NODES

EXAMPLES = """
Examples:

underdraw bench agreement --out agreement.json

underdraw bench agreement --model random:anole-7b --pictures 3 --tokens 64 --dtype bfloat16 --dtype float16

underdraw bench agreement --weights int8 --nodes 24 --batch 1
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Model = Annotated[
    str,
    measured_model_option(
        help="A model, or the random weights that `bench engine --help` lists, such as random:anole-7b.",
    ),
]
Nodes = Annotated[
    list[int] | None,
    measured_option(
        "--nodes",
        min=2,
        max=MAX_NODES,
        metavar="COUNT",
        help="Nodes of chains and trees; can be repeated. Default: 8, 24, 64 and 128.",
    ),
]
Batches = Annotated[
    list[int] | None,
    measured_option("--batch", min=1, metavar="COUNT", help="Pictures at once; can be repeated. Default: 1, 3 and 16."),
]
Temperatures = Annotated[
    list[float] | None,
    measured_option(
        "--temperature", min=0, metavar="NUMBER", help="A temperature; can be repeated. Default: 0, 0.5 and 1."
    ),
]
Dtypes = Annotated[
    list[str] | None,
    options.part_option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16; can be repeated."),
]
Pictures = Annotated[int, measured_option(min=1, metavar="COUNT", help="Pictures of every setting and temperature.")]
Tokens = Annotated[
    int | None, measured_option(min=1, metavar="COUNT", help="Only the first COUNT tokens of every picture.")
]


@dataclass(frozen=True)
class AgreementOptions:
    """What is compared."""

    model: Model = "tiny"
    nodes: Nodes = None
    batch: Batches = None
    temperature: Temperatures = None
    pictures: Pictures = 20
    tokens: Tokens = None
    device: options.Device = "auto"
    dtype: Dtypes = None

    def grid(self) -> tuple[Sequence[int], Sequence[int], Sequence[float]]:
        """Numbers of nodes, batch sizes and temperatures."""
        return self.nodes or (8, 24, 64, 128), self.batch or (1, 3, 16), self.temperature or (0.0, 0.5, 1.0)


@app.command(epilog=EXAMPLES)
@options.grouped
def agreement(comparison: AgreementOptions, pass_options: options.PassOptions, result: options.ResultOptions) -> None:
    """Compare chains and trees with plain decoding, token by token; quantised weights also with full ones."""
    for number in comparison.temperature or ():
        options.check_sampling_options(None, number, None, None, None)
    result.check()
    options.check_random_model(comparison.model)
    with stages(f"loading {comparison.model}", silent=result.silent) as set_stage:
        record = _measure(comparison, pass_options, result.save, set_stage)
    drawn, equal = (sum(row[key] for row in record["rows"]) for key in ("pictures", "pictures_equal"))
    result.print_tables(f"{record['model']}: {equal} of {drawn} pictures equal plain decoding", record)


def _measure(
    comparison: AgreementOptions,
    pass_options: options.PassOptions,
    save: Callable[[dict[str, Any]], None],
    set_stage: Callable[[str], None],
) -> dict[str, Any]:
    from underdraw.bench import agreement as bench
    from underdraw.bench.environment import describe_machine
    from underdraw.engine.cuda_graphs import make_graph_cache

    nodes, batches, temperatures = comparison.grid()
    model, pictures = comparison.model, comparison.pictures
    cells = list(bench.settings(nodes, batches))
    record: dict[str, Any] = {"kind": "matrix", "model": model, "tokens": comparison.tokens, "rows": []}
    for name in comparison.dtype or ["auto"]:
        placement = pass_options.placement(comparison.device, name)
        label = str(placement.dtype).removeprefix("torch.")
        graphs = make_graph_cache(placement.device, pass_options.compile, pass_options.numerics)
        set_stage(f"{model}, {label}")
        subject = bench.load_subject(model, placement, max(pictures, *batches))
        subject = replace(subject, target=replace(subject.target, numerics=pass_options.numerics))
        record.update(weights=placement.weights, numerics=pass_options.numerics, guidance=subject.guidance)
        record.update(machine=describe_machine(placement.device))

        def report(row: dict[str, Any], label: str = label) -> None:
            record["rows"].append({"dtype": label, **row})
            set_stage(
                f"{label}, T={row['temperature']:g}, {row['kind']} of {row['nodes']}, batch {row['batch']}: "
                f"{row['pictures_equal']} of {row['pictures']} equal"
            )
            save(record)

        bench.measure_matrix(subject, cells, temperatures, pictures, graphs, tokens=comparison.tokens, report=report)
        if placement.weights != "full":
            set_stage(f"{label}, {placement.weights} weights against full ones")
            full = bench.load_subject(model, replace(placement, weights="full"), pictures)
            quality = bench.measure_quality(full, subject, pictures, temperature=temperatures[-1])
            record.setdefault("quality", {})[label] = quality
    save(record)
    return record
