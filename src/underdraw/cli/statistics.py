"""`underdraw evaluate statistics`: entropy of a model and acceptance of its drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from underdraw.cli import options
from underdraw.cli.measuring import announce, image_counter
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw evaluate statistics --prompts prompts.txt --out statistics.json

underdraw evaluate statistics --prompts prompts.txt --limit 8 --drafter drafter --out statistics.json
"""
MEASURED = "Measurement"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Prompts = Annotated[
    str, typer.Option(metavar="FILE", rich_help_panel=MEASURED, help="A text file with one prompt per line.")
]
Limit = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=MEASURED, help="Only the first COUNT prompts.")]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature", metavar="NUMBER", rich_help_panel=MEASURED, help="Can be repeated. Default: 1 and 0."
    ),
]
Seed = Annotated[int, typer.Option(metavar="NUMBER", rich_help_panel=MEASURED, help="Prompt i has seed + i.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="JSON", rich_help_panel=options.OUTPUT, help="The result file.")
]


@app.command(epilog=EXAMPLES)
def statistics(
    prompts: Prompts,
    out: Out,
    limit: Limit = 8,
    temperature: Temperatures = None,
    seed: Seed = 0,
    model: options.Model = "tiny",
    drafter: options.Drafter = "auto",
    tree: options.Tree = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force: options.ForceFile = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a model's entropy, its drafter's acceptance by rank and depth, and how both correlate with neighbours."""
    if limit < 1:
        raise ConfigError(f"--limit {limit} leaves nothing to measure; use at least 1.")
    for number in temperature or (1.0,):
        options.check_sampling_options(None, number, None, None, seed)
    check_file(out, force=force)
    from underdraw.prompts import load_prompts

    texts = load_prompts(prompts)[:limit]
    announce(f"underdraw evaluate statistics: loading {model}", silent=json or quiet)
    from underdraw.bench.acceptance import measure
    from underdraw.bench.records import record_sections
    from underdraw.bench.report import to_markdown
    from underdraw.io import atomic_write_json

    pipe, _ = options.load_pipeline(model, drafter, tree, "exact", device, dtype, silent=json or quiet)
    for text in texts:
        pipe.model.check_prompt(text)
    temperatures = tuple(dict.fromkeys(temperature or (1.0, 0.0)))
    with image_counter("measuring", len(texts) * len(temperatures), silent=json or quiet) as bar:
        record = measure(pipe, texts, temperatures, seed=seed, on_picture=lambda: bar.update())
    atomic_write_json(out, record)
    print_result(f"{to_markdown(record_sections(record))}\n\n{out}", record, as_json=json, quiet=quiet)
