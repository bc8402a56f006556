"""`underdraw evaluate statistics`: entropy and acceptance of a model and its drafter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from underdraw.cli import options
from underdraw.cli.outputs import check_file
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw evaluate statistics --prompts prompts.txt --out statistics.json

underdraw evaluate statistics --prompts prompts.txt --limit 8 --drafter drafter --out statistics.json
"""
WHAT = "What is measured"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Prompts = Annotated[str, typer.Option(metavar="FILE", rich_help_panel=WHAT, help="A text file with one prompt a line.")]
Limit = Annotated[int, typer.Option(metavar="COUNT", rich_help_panel=WHAT, help="Only the first COUNT prompts.")]
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature", metavar="NUMBER", rich_help_panel=WHAT, help="Several times for several. Without it, 1 and 0."
    ),
]
Seed = Annotated[int, typer.Option(metavar="NUMBER", rich_help_panel=WHAT, help="Prompt i is drawn with seed + i.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="JSON", rich_help_panel=options.OUTPUT, help="Where the result goes.")
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
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Entropy of a model's law, acceptance of its drafter by rank and depth, and how both follow the neighbours."""
    if limit < 1:
        raise ConfigError(f"--limit {limit} leaves nothing to measure; use at least 1.")
    check_file(out)
    from underdraw.prompts import load_prompts

    texts = load_prompts(prompts)[:limit]
    from tqdm import tqdm

    from underdraw.bench.acceptance import measure
    from underdraw.bench.records import head, table
    from underdraw.bench.results import write_json

    pipe, _ = options.load_pipeline(model, drafter, tree, "exact", device, dtype, silent=json or quiet)
    for text in texts:
        pipe.model.check_prompt(text)
    asked = tuple(temperature or (1.0, 0.0))
    hidden = json or quiet or not sys.stderr.isatty()
    with tqdm(total=len(texts) * len(asked), unit="image", file=sys.stderr, disable=hidden, leave=False) as bar:

        def noted(count: int) -> None:
            bar.update(count)

        found = measure(pipe, texts, asked, seed=seed, noted=noted)
    write_json(out, found)
    print_result(f"{head(found)}\n\n{table(found)}\n\n{out}", found, as_json=json, quiet=quiet)
