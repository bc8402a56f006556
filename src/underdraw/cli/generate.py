"""`underdraw generate`: words to pictures. Reads the options, checks them, then loads the model and draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from underdraw.cli import options
from underdraw.cli.task import Parts, Sampling, Task
from underdraw.errors import ConfigError

EXAMPLES = """
Examples:

underdraw generate "a red fox on a blue background" -o fox.png --seed 7

underdraw generate "a red fox on a blue background" -o fox.png --compare --compare-image both.png --heatmap heat.png

underdraw generate "a house" --n 4 -o houses/

underdraw generate --prompts prompts.txt -o pictures/ --batch 4 --json

underdraw generate "a tree" --tree adjacency:init=both,nodes=24 --temperature 0 -o tree.png
"""
PROMPTS = "What to draw"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="What to draw, in a few words.")]
Prompts = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|parti|coco", rich_help_panel=PROMPTS,
        help="Many prompts: a text file with one a line, a TSV of PartiPrompts, a captions JSON of COCO, or the "
        "published sets by name. The pictures go into the folder --out; run the command again to go on after a stop.",
    ),
]  # fmt: skip
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", envvar="UNDERDRAW_DATA", rich_help_panel=PROMPTS,
        help="Where the files of parti and coco lie.",
    ),
]  # fmt: skip
Limit = Annotated[int | None, typer.Option(metavar="COUNT", rich_help_panel=PROMPTS, help="Only the first COUNT.")]
Number = Annotated[int, typer.Option("--n", "-n", metavar="COUNT", rich_help_panel=PROMPTS, help="Images per prompt.")]
Overlong = Annotated[
    Literal["refuse", "skip"],
    typer.Option(rich_help_panel=PROMPTS, help="What to do with prompts of a file that the model cannot read."),
]
Negative = Annotated[
    str | None, typer.Option(metavar="TEXT", rich_help_panel=PROMPTS, help="What guidance leads away from.")
]
Height = Annotated[int | None, typer.Option(metavar="PIXELS", rich_help_panel=PROMPTS, help="A size of the model's.")]
Width = Annotated[int | None, typer.Option(metavar="PIXELS", rich_help_panel=PROMPTS, help="A size of the model's.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "-o", metavar="PATH", rich_help_panel=options.OUTPUT,
        help="A PNG file; a folder with --prompts or several images. Without it, a name made of prompt and seed.",
    ),
]  # fmt: skip
Force = Annotated[
    bool,
    typer.Option("--force", "-f", rich_help_panel=options.OUTPUT, help="Replace what is there; start a folder again."),
]
Batch = Annotated[
    int, typer.Option(metavar="COUNT", rich_help_panel=options.OUTPUT, help="Pictures of a folder drawn together.")
]
Heatmap = Annotated[
    Path | None,
    typer.Option(
        metavar="PNG", rich_help_panel=options.OUTPUT,
        help="Also write what happened at every cell: codes kept, depth of the tree, entropy, top-1 probability.",
    ),
]  # fmt: skip
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="JSON", rich_help_panel=options.OUTPUT,
        help="Also write the trees and what was accepted of them, for: underdraw bench engine --replay.",
    ),
]  # fmt: skip
Sheet = Annotated[
    Path | None,
    typer.Option(
        metavar="JPG|PNG", rich_help_panel=options.OUTPUT,
        help="Also write small copies of all pictures of the folder on one sheet, with their prompts.",
    ),
]  # fmt: skip
Compare = Annotated[
    bool,
    typer.Option(
        "--compare", rich_help_panel=options.OUTPUT,
        help="Draw the same seed without speculation too: whether the pixels are identical, and the ratio of times.",
    ),
]  # fmt: skip
CompareImage = Annotated[
    Path | None,
    typer.Option(
        metavar="PNG", rich_help_panel=options.OUTPUT,
        help="Also write both pictures side by side with their times; implies --compare.",
    ),
]  # fmt: skip


@app.command(epilog=EXAMPLES)
def generate(
    prompt: Prompt = None,
    prompts: Prompts = None,
    data: Data = None,
    limit: Limit = None,
    n: Number = 1,
    overlong: Overlong = "refuse",
    negative: Negative = None,
    height: Height = None,
    width: Width = None,
    seed: options.Seed = None,
    guidance: options.Guidance = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    model: options.Model = "tiny",
    tree: options.Tree = "auto",
    verifier: options.Verifier = "auto",
    drafter: options.Drafter = "auto",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    compile: options.Compile = "auto",
    out: Out = None,
    force: Force = False,
    batch: Batch = 1,
    compare: Compare = False,
    compare_image: CompareImage = None,
    heatmap: Heatmap = None,
    trace: Trace = None,
    sheet: Sheet = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Draw a picture from words, or many into a folder. The same seed gives the same picture, however it is drafted."""
    task = Task(
        prompts=texts(prompt, prompts, data, limit), listed=prompts is not None, n=n, seed=seed, out=out,
        heatmap=heatmap, trace=trace, compare=compare or compare_image is not None, compare_image=compare_image,
        batch=batch, overlong=overlong, force=force, json=json, quiet=quiet, sheet=sheet,
    )  # fmt: skip
    task.check()
    sampling = Sampling(guidance, temperature, top_k, top_p, negative, height, width)
    parts = Parts(
        model=model, drafter=drafter, tree=tree, verifier=verifier, device=device, dtype=dtype, compile=compile
    )
    pipe, seconds = parts.timed(quiet=task.silent)
    if task.many:
        from underdraw.cli.many import draw_many

        draw_many(pipe, task, sampling)
    else:
        from underdraw.cli.single import draw_one

        draw_one(pipe, task, sampling, seconds)


def texts(prompt: str | None, source: str | None, data: Path | None, limit: int | None) -> list[str]:
    """The prompts of the command line: one, or those of a file."""
    if (prompt is None) == (source is None):
        raise ConfigError("give either a prompt or --prompts FILE; see underdraw generate --help.")
    if limit is not None and source is None:
        raise ConfigError("--limit counts prompts of a file; use it with --prompts.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} leaves no prompts; use at least 1.")
    if source is None:
        return [prompt or ""]
    from underdraw.prompts import load_prompts

    return load_prompts(source, data)[:limit]
