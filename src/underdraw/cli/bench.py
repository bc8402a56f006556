"""`underdraw bench`: how fast methods are beside plain autoregression. Reads the options; evaluation/ does the work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from underdraw.bench.methods import Preset, grid
from underdraw.bench.presets import PRESETS, preset
from underdraw.cli import options
from underdraw.cli.outputs import check_folder
from underdraw.cli.progress import print_result
from underdraw.errors import ConfigError, UnderdrawError

if TYPE_CHECKING:
    from underdraw.bench.runner import Plan
    from underdraw.pipeline import Pipeline

EXAMPLES = """
Examples:

underdraw bench --preset paper-main --prompts benchmarks/prompts128.txt --out benchmarks/results/paper-main/cpu

underdraw bench --prompts prompts.txt --tree adjacency --tree confidence:depth=5 --temperature 1 --out run

underdraw bench --preset paper-main --prompts parti --data data --overlong skip --limit 8 --repeats 3 --out parti
"""
WHAT = "What is measured"
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Many = list[str] | None

Named = Annotated[
    str | None,
    typer.Option(
        "--preset", metavar="NAME", rich_help_panel=WHAT,
        help=f"An experiment with its methods and temperatures: {', '.join(PRESETS)}.",
    ),
]  # fmt: skip
Prompts = Annotated[
    str,
    typer.Option(
        metavar="FILE|parti|coco", rich_help_panel=WHAT,
        help="A text file with one prompt a line, a TSV of PartiPrompts, a captions JSON of COCO, or parti or coco.",
    ),
]  # fmt: skip
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", envvar="UNDERDRAW_DATA", rich_help_panel=WHAT, help="Where the files of parti and coco lie."
    ),
]  # fmt: skip
Limit = Annotated[
    int | None,
    typer.Option(
        metavar="COUNT",
        rich_help_panel=WHAT,
        help="Only the first COUNT prompts. Without it, as many as the preset says, or all.",
    ),
]
Overlong = Annotated[
    Literal["refuse", "skip"],
    typer.Option(rich_help_panel=WHAT, help="What to do with prompts that the model cannot read."),
]
Repeats = Annotated[
    int, typer.Option(metavar="COUNT", rich_help_panel=WHAT, help="How often every picture is drawn, for the times.")
]
Trees = Annotated[
    Many, typer.Option("--tree", metavar="POLICY", rich_help_panel=WHAT, help="A policy; may be given several times.")
]
Verifiers = Annotated[
    Many, typer.Option("--verifier", metavar="VERIFIER", rich_help_panel=WHAT, help="The same for verifiers.")
]
Drafters = Annotated[
    Many,
    typer.Option(
        "--drafter", metavar="DRAFTER", rich_help_panel=WHAT, help="The same for drafters; for a preset, one."
    ),
]
Proposals = Annotated[
    Many,
    typer.Option(
        "--proposal", metavar="PROPOSAL", rich_help_panel=WHAT,
        help="The same for proposals: auto, coupled, topk or sampled.",
    ),
]  # fmt: skip
Temperatures = Annotated[
    list[float] | None,
    typer.Option(
        "--temperature", metavar="NUMBER", rich_help_panel=WHAT,
        help="The same for temperatures. Without it, those of the preset, or 1.",
    ),
]  # fmt: skip
Seed = Annotated[int, typer.Option(metavar="NUMBER", rich_help_panel=WHAT, help="Prompt i is drawn with seed + i.")]
Out = Annotated[
    Path,
    typer.Option(
        "--out", "-o", metavar="FOLDER", rich_help_panel=options.OUTPUT,
        help="Where rows and summary go. Run the command again to go on after a stop.",
    ),
]  # fmt: skip
Force = Annotated[
    bool, typer.Option("--force", "-f", rich_help_panel=options.OUTPUT, help="Forget the run that is in the folder.")
]


@app.command(epilog=EXAMPLES)
def bench(
    prompts: Prompts,
    out: Out,
    named: Named = None,
    data: Data = None,
    limit: Limit = None,
    overlong: Overlong = "refuse",
    repeats: Repeats = 1,
    tree: Trees = None,
    verifier: Verifiers = None,
    drafter: Drafters = None,
    proposal: Proposals = None,
    temperature: Temperatures = None,
    seed: Seed = 0,
    guidance: options.Guidance = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    model: options.Model = "tiny",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    force: Force = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure methods beside plain autoregression: speed, tokens a pass, memory, agreement. Resumable."""
    wanted = _wanted(named, tree, verifier, drafter, proposal)
    for name, value in (("--limit", limit), ("--repeats", repeats)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} leaves nothing to measure; use at least 1.")
    if not 0 <= seed < 2**61:
        raise ConfigError(f"--seed {seed} is not allowed; use a whole number from 0 to 2**61 - 1.")
    check_folder(out)
    from underdraw.prompts import load_prompts

    texts = load_prompts(prompts, data)
    own = drafter[0] if named is not None and drafter else "auto"
    pipe, _ = options.load_pipeline(model, own, "auto", "exact", device, dtype, silent=json or quiet)
    from underdraw.bench.runner import Plan
    from underdraw.pipeline import Pipeline

    if named is not None and wanted.drafter == "trained" and own == "auto":
        if not pipe.model.drafter_folders:
            raise ConfigError(
                f"{pipe.model.name} has no drafter of its own, which {named} is about; name one with --drafter FOLDER, "
                "or --drafter neighbour, which needs no weights."
            )
        pipe = Pipeline(pipe.model, drafter=pipe.model.drafter_folders[0].name)  # even if auto is another one

    texts = _readable(pipe, texts, overlong, limit or wanted.prompts)
    plan = Plan(wanted.methods, tuple(temperature or wanted.temperatures), texts, repeats, seed, wanted.name or None)
    sampling = {"guidance_scale": guidance, "top_k": top_k, "top_p": top_p}
    _run(pipe, plan, sampling, out, force=force, json=json, quiet=quiet)


def _wanted(named: str | None, tree: Many, verifier: Many, drafter: Many, proposal: Many) -> Preset:
    """The preset, or the grid that the options span."""
    if named is None:
        methods = grid(tree or ["auto"], verifier or ["exact"], drafter or ["auto"], proposal or ["auto"])
        return Preset("", "", methods, (1.0,))
    given = [f"--{name}" for name, value in (("tree", tree), ("verifier", verifier), ("proposal", proposal)) if value]
    if given:
        raise ConfigError(f"a preset has methods of its own; leave out {given[0]}, or --preset.")
    if len(drafter or []) > 1:
        raise ConfigError("a preset takes one --drafter, in the place of the model's own; leave out the others.")
    return preset(named)


def _readable(pipe: Pipeline, texts: list[str], overlong: str, limit: int | None) -> list[str]:
    """The prompts that are drawn: the first `limit` of those that the model can read, or of all."""
    kept: list[str] = []
    for number, text in enumerate(texts, start=1):
        if len(kept) == limit:
            break
        try:
            pipe.model.check_prompt(text)
            kept.append(text)
        except UnderdrawError as error:
            if overlong == "refuse":
                raise ConfigError(f"prompt {number}: {error} Or leave such prompts out: --overlong skip.") from None
    if not kept:
        raise ConfigError(f"{pipe.model.name} can read none of the {len(texts)} prompts; shorten them.")
    return kept


def _run(
    pipe: Pipeline, plan: Plan, sampling: dict[str, Any], out: Path, *, force: bool, json: bool, quiet: bool
) -> None:
    import sys

    from tqdm import tqdm

    from underdraw.bench.methods import AR
    from underdraw.bench.results import Key, Store
    from underdraw.bench.runner import Bench
    from underdraw.bench.summary import write_summary
    from underdraw.bench.tables import show

    made = Bench(pipe, plan, sampling)
    store = Store(out)
    store.open(made.settings(), {method.name: method.record() for method in (AR, *plan.methods)}, anew=force)
    units = [key for _, key in plan.units()]
    hidden = json or quiet or not sys.stderr.isatty()
    with tqdm(total=len(units), unit="image", file=sys.stderr, disable=hidden, leave=False) as bar:
        bar.update(sum(key in store.rows for key in units))

        def noted(key: Key) -> None:
            bar.set_postfix_str(f"{key.method}, T={key.temperature:g}", refresh=False)
            bar.update()

        try:
            drawn = made.run(store, noted)
        except KeyboardInterrupt:
            measured = sum(key in store.rows for key in units)
            print(f"{measured} of {len(units)} pictures are measured; the same command goes on.", file=sys.stderr)
            raise
    summary = write_summary(store)
    record = {"out": str(out), "rows": len(store.rows), "drawn": drawn, "entries": summary["entries"]}
    if not (json or quiet):
        show(summary)
    print_result(
        f"{out}: {len(store.rows)} rows ({drawn} new); see it with: underdraw plot {out}",
        record,
        as_json=json,
        quiet=quiet,
    )
