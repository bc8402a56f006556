"""`underdraw evaluate statistics`: entropy of a model and acceptance of its drafter."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from underdraw.cli import options
from underdraw.cli.options import measured_option
from underdraw.cli.progress import announce, image_counter

EXAMPLES = """
Examples:

underdraw evaluate statistics --prompts prompts.txt --out statistics.json

underdraw evaluate statistics --prompts prompts.txt --limit 8 --drafter drafter --out statistics.json
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Prompts = Annotated[str, measured_option(metavar="FILE", help="A text file with one prompt per line.")]
Limit = Annotated[int, measured_option(min=1, metavar="COUNT", help="Only the first COUNT prompts.")]
Temperatures = Annotated[
    list[float] | None, measured_option("--temperature", metavar="NUMBER", help="Can be repeated. Default: 1 and 0.")
]


@app.command(epilog=EXAMPLES)
@options.grouped
def statistics(
    prompts: Prompts,
    limit: Limit = 8,
    temperature: Temperatures = None,
    seed: options.PromptSeed = 0,
    drafter: options.Drafter = "auto",
    tree: options.Tree = "auto",
    *,
    model_options: options.ModelOptions,
    result: options.ResultOptions,
) -> None:
    """Measure a model's entropy, its drafter's acceptance by rank and depth, and how both correlate with neighbours."""
    temperatures = tuple(dict.fromkeys(temperature or (1.0, 0.0)))
    for number in temperatures:
        options.check_sampling_options(None, number, None, None, seed)
    result.check()
    from underdraw.prompts import load_prompts

    texts = load_prompts(prompts)[:limit]
    announce(f"underdraw evaluate statistics: loading {model_options.model}", silent=result.silent)
    from underdraw.bench.acceptance import measure
    from underdraw.bench.records import record_sections
    from underdraw.bench.report import to_markdown

    loading = {**asdict(model_options), "drafter": drafter, "tree": tree, "verifier": "exact"}
    pipe, _ = options.load_pipeline(**loading, silent=result.silent)
    for text in texts:
        pipe.model.check_prompt(text)
    with image_counter("measuring", len(texts) * len(temperatures), silent=result.silent) as bar:
        record = measure(pipe, texts, temperatures, seed=seed, on_image=lambda: bar.update())
    result.save(record)
    result.print(
        "\n\n".join([to_markdown(record_sections(record)), *([str(result.out)] if result.out else [])]), record
    )
