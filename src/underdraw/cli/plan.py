"""`underdraw plan`: how long and how expensive a million images are, before any GPU is rented."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underdraw.cli import options
from underdraw.errors import ConfigError

if TYPE_CHECKING:
    from underdraw.bench.capacity import Capacity

EXAMPLES = """
Examples:

underdraw plan --model random:anole-7b --pictures 1e6 --gpus 8

underdraw plan --model random:anole-7b --pictures 1e6 --gpus 8 --tokens-per-pass 3.2 --price 2.50

underdraw plan --model random:anole-7b --costs mine.json --json
"""
MODELLED_BATCH = 4  # larger ones take clearly longer than a pass over as many nodes of one image
BATCH_NOTE = (
    "too optimistic for so many images at once, each of which has a KV cache to read: with images of 192 tokens "
    "measured plain passes took 1.2 times as long with 8 at once, 1.4 times with 16 and 2.4 times with 64"
)
TOKENS_PER_PASS = (1.0, 2.0, 3.0, 4.0)  # shown unless one is given; 1 is plain decoding
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Model = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A model whose costs were measured, e.g. random:anole-7b.")
]
Pictures = Annotated[float, typer.Option(metavar="COUNT", help="How many images to draw, e.g. 1e6.")]
Gpus = Annotated[int, typer.Option(min=1, metavar="COUNT", help="How many GPUs draw, each with the whole model.")]
TokensPerPass = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", help="As `underdraw generate` prints it for your model. Default: several."),
]
Nodes = Annotated[int, typer.Option(min=1, metavar="COUNT", help="Nodes of a draft tree; plain decoding has none.")]
Batch = Annotated[int, typer.Option(min=1, metavar="COUNT", help="How many images a GPU draws together.")]
Price = Annotated[
    float | None, typer.Option(metavar="NUMBER", help="Price of a GPU for an hour; then costs are shown, too.")
]
CostsFile = Annotated[
    Path | None,
    typer.Option("--costs", metavar="JSON", help="Times that benchmarks/scale.py measured. Default: those of an H200."),
]


@app.command(epilog=EXAMPLES)
@options.grouped
def plan(
    model: Model = "random:anole-7b",
    pictures: Pictures = 1e6,
    gpus: Gpus = 1,
    tokens_per_pass: TokensPerPass = None,
    nodes: Nodes = 64,
    batch: Batch = 1,
    price: Price = None,
    costs: CostsFile = None,
    *,
    output: options.OutputOptions,
) -> None:
    """Estimate images per hour and the cost of a million, from measured times of passes and tokens per pass."""
    if not pictures >= 1:  # also refuses nan
        raise ConfigError(f"--pictures {pictures:g} is not allowed; use at least 1.")
    if tokens_per_pass is not None and not 1 <= tokens_per_pass <= nodes + 1:
        raise ConfigError(f"--tokens-per-pass {tokens_per_pass:g} is not allowed; use a number from 1 to {nodes + 1}.")
    if price is not None and not price >= 0:
        raise ConfigError(f"--price {price:g} is not allowed; use 0 or more.")
    from underdraw.bench.capacity import CapacityPlan, estimate, read_costs

    try:
        measured = read_costs(model, costs)
    except ConfigError as error:
        if costs is not None:
            raise
        raise ConfigError(f"{error} For another model, measure it with benchmarks/scale.py: --costs FILE.") from None
    rows = []
    for rate in TOKENS_PER_PASS if tokens_per_pass is None else (tokens_per_pass,):
        work = CapacityPlan(pictures, gpus, rate, nodes=1 if rate == 1 else nodes, batch=batch)
        rows.append(estimate(measured, work))
    record: dict[str, Any] = {
        "model": model, "device": measured.device, "pictures": pictures, "gpus": gpus, "nodes": nodes, "batch": batch,
        "unmeasured": list(measured.unmeasured),
        "rows": [{**asdict(row), **_cost(row, price)} for row in rows],
    }  # fmt: skip
    output.print("\n".join(_lines(record)), record)


def _cost(row: Capacity, price: float | None) -> dict[str, float]:
    return {} if price is None else {"cost_per_million": round(row.gpu_hours_per_million * price, 2)}


def _lines(record: dict[str, Any]) -> list[str]:
    """The estimate for people."""
    lines = [
        f"{record['model']} on {record['gpus']} x {record['device']}, {record['batch']} at once, trees of "
        f"{record['nodes']} nodes; an estimate from measured times:"
    ]
    for row in record["rows"]:
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in row["shares"].items())
        cost = f", {row['cost_per_million']:,.0f} per million" if "cost_per_million" in row else ""
        lines.append(
            f"  {row['tokens_per_pass']:g} tokens per pass: {row['images_per_hour']:,.0f} images per hour, "
            f"{record['pictures']:,.0f} in {row['hours']:,.1f} hours; {row['gpu_hours_per_million']:,.0f} GPU hours"
            f"{cost or ' per million'}; {shares}; writes {row['bytes_per_second'] / 1e6:.1f} MB/s"
        )
    if record["batch"] > MODELLED_BATCH:
        lines.append(f"  {BATCH_NOTE}")
    if record["unmeasured"]:
        lines.append(f"  without {', '.join(record['unmeasured'])}, whose times were not measured")
    return lines
