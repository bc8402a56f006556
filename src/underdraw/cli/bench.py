"""`underdraw bench`: options of the benchmark against plain autoregression; underdraw.bench does the work."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underdraw.bench.presets import PRESETS, Preset, find_preset, method_grid
from underdraw.cli import options
from underdraw.cli.options import OutputOptions, measured_option, output_option
from underdraw.cli.outputs import check_folder
from underdraw.cli.progress import image_counter
from underdraw.errors import ConfigError, UnderdrawError
from underdraw.extras import require_package
from underdraw.io import FolderLock
from underdraw.ranges import MAX_IMAGES, check_seed

if TYPE_CHECKING:
    from underdraw.bench.runner import BenchPlan
    from underdraw.pipeline import Pipeline

EXAMPLES = """
Examples:

underdraw bench --preset paper-main --prompts benchmarks/prompts128.txt --out benchmarks/results/paper-main/cpu

underdraw bench --preset kinds --prompts benchmarks/prompts_kinds.json --limit 10 --out kinds

underdraw bench --prompts prompts.txt --tree adjacency --tree confidence:depth=5 --temperature 1 --out run

underdraw bench --preset paper-main --prompts parti --data data --overlong skip --limit 8 --repeats 3 --out parti
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Many = list[str] | None

PresetName = Annotated[
    str | None,
    measured_option(
        "--preset",
        metavar="NAME",
        help=f"An experiment with its methods and temperatures: {', '.join(PRESETS)}.",
    ),
]
Prompts = Annotated[
    str,
    measured_option(
        metavar="FILE|parti|coco",
        help="A text file with one prompt per line, a JSON object of lists of prompts by kind, a TSV of PartiPrompts, "
        "a captions JSON of COCO, or parti or coco.",
    ),
]
Limit = Annotated[
    int | None,
    measured_option(
        min=1,
        max=MAX_IMAGES,
        metavar="COUNT",
        help="Only the first COUNT prompts. Default: as many as the preset says, or all.",
    ),
]
Repeats = Annotated[
    int,
    measured_option(min=1, max=MAX_IMAGES, metavar="COUNT", help="How often every image is generated, for the times."),
]
Trees = Annotated[Many, measured_option("--tree", metavar="POLICY", help="A tree policy; can be repeated.")]
Verifiers = Annotated[Many, measured_option("--verifier", metavar="VERIFIER", help="A verifier; can be repeated.")]
Drafters = Annotated[
    Many, measured_option("--drafter", metavar="DRAFTER", help="A drafter; can be repeated without a preset.")
]
Proposals = Annotated[
    Many,
    measured_option(
        "--proposal", metavar="PROPOSAL", help="A proposal: auto, coupled, topk or sampled; can be repeated."
    ),
]
Temperatures = Annotated[
    list[float] | None,
    measured_option(
        "--temperature",
        metavar="NUMBER",
        help="A temperature; can be repeated. Default: those of the preset, or 1.",
    ),
]
TopP = Annotated[
    float,
    measured_option("--top-p", metavar="SHARE", help="Draw from the most likely codes that make up SHARE; 1 is all."),
]
Out = Annotated[
    Path,
    output_option(
        "--out", "-o", metavar="FOLDER", help="Folder of the results. After a stop, the same command resumes."
    ),
]
Force = Annotated[bool, output_option("--force", "-f", help="Discard the run in the folder.")]


@app.command(epilog=EXAMPLES)
@options.grouped
def bench(
    prompts: Prompts,
    out: Out,
    preset: PresetName = None,
    data: options.Data = None,
    limit: Limit = None,
    overlong: options.Overlong = "refuse",
    repeats: Repeats = 1,
    tree: Trees = None,
    verifier: Verifiers = None,
    drafter: Drafters = None,
    proposal: Proposals = None,
    temperature: Temperatures = None,
    seed: options.PromptSeed = 0,
    guidance: options.Guidance = None,
    top_k: options.TopK = None,
    top_p: TopP = 1.0,
    force: Force = False,
    *,
    model_options: options.ModelOptions,
    output: options.OutputOptions,
) -> None:
    """Compare methods with plain autoregression: speed, tokens per pass, memory, identical images. Resumable."""
    experiment = _choose_methods(preset, tree, verifier, drafter, proposal)
    for number in temperature or (1.0,):
        options.check_sampling_options(guidance, number, top_k, top_p, seed)
    check_folder(out)
    for package in ("pandas", "scipy"):  # for the summary; better missed now than after hours of measuring
        require_package(package, "bench", "underdraw bench")
    texts, kinds = _load_prompts(prompts, data)
    _check_methods(experiment)
    default_drafter = drafter[0] if preset is not None and drafter else "auto"
    loading = {**asdict(model_options), "drafter": default_drafter, "verifier": "exact"}
    pipe, _ = options.load_pipeline(**loading, size=(None, None), silent=output.silent)
    from underdraw.bench.runner import BenchPlan
    from underdraw.pipeline import Pipeline

    if preset is not None and experiment.drafter == "trained" and default_drafter == "auto":
        if not pipe.model.drafter_folders:
            raise ConfigError(
                f"{pipe.model.name} comes without a drafter, which {preset} needs; name one with --drafter FOLDER, "
                "or use --drafter neighbour, which has no weights."
            )
        pipe = Pipeline(pipe.model, drafter=pipe.model.drafter_folders[0].name)  # even if auto is another one

    texts = _select_prompts(pipe, texts, overlong, limit or experiment.prompts)
    temperatures = tuple(dict.fromkeys(temperature or experiment.temperatures))
    if len(texts) * repeats * len(temperatures) * (1 + len(experiment.methods)) > MAX_IMAGES:
        raise ConfigError(f"--repeats {repeats} asks for more than {MAX_IMAGES} images; use less.")
    check_seed(seed, len(texts))
    preset_name, has_costs = experiment.name or None, experiment.has_cost_model
    plan = BenchPlan(experiment.methods, temperatures, texts, repeats, seed, preset_name, kinds, has_costs)
    sampling = {"guidance_scale": guidance, "top_k": top_k, "top_p": top_p}
    with FolderLock(out, "a benchmark"):
        _run(pipe, plan, sampling, out, output, force=force)


def _choose_methods(preset: str | None, tree: Many, verifier: Many, drafter: Many, proposal: Many) -> Preset:
    """The preset, or an unnamed one with every combination of the options."""
    if preset is None:
        parts = (tree or ["auto"], verifier or ["exact"], drafter or ["auto"], proposal or ["auto"])
        methods = method_grid(*parts)
        return Preset("", "", methods, (1.0,))
    conflicts = [
        f"--{name}" for name, value in (("tree", tree), ("verifier", verifier), ("proposal", proposal)) if value
    ]
    if conflicts:
        raise ConfigError(f"--preset already defines the methods; leave out {conflicts[0]}, or --preset.")
    if len(drafter or []) > 1:
        raise ConfigError("--preset takes one --drafter, which replaces the model's; leave out the others.")
    return find_preset(preset)


def _check_methods(experiment: Preset) -> None:
    """Raise for names of parts that do not exist, before the model is loaded."""
    from underdraw.parts import check_parts

    for method in experiment.methods:
        drafter = "auto" if method.drafter == "trained" else method.drafter
        check_parts(drafter=drafter, tree=method.tree, verifier=method.verifier, proposal=method.proposal)


def _load_prompts(source: str, data: Path | None) -> tuple[list[str], dict[str, str]]:
    """The prompts, and their kinds of images if the file is `{kind: [prompt, ...]}`."""
    from underdraw.prompts import load_prompt_kinds, load_prompts

    return load_prompts(source, data), load_prompt_kinds(source)


def _select_prompts(pipe: Pipeline, texts: list[str], overlong: str, limit: int | None) -> list[str]:
    """The first `limit` prompts that fit the model's text context."""
    selected: list[str] = []
    for number, text in enumerate(texts, start=1):
        if len(selected) == limit:
            break
        try:
            pipe.model.check_prompt(text)
            selected.append(text)
        except UnderdrawError as error:
            if overlong == "refuse":
                raise ConfigError(f"prompt {number}: {error} Or leave such prompts out: --overlong skip.") from None
    if not selected:
        raise ConfigError(f"none of the {len(texts)} prompts fits {pipe.model.name}; shorten them.")
    return selected


def _run(
    pipe: Pipeline, plan: BenchPlan, sampling: dict[str, Any], out: Path, output: OutputOptions, *, force: bool
) -> None:
    from underdraw.bench.presets import AR
    from underdraw.bench.report import print_table
    from underdraw.bench.results import ImageKey, ResultFolder
    from underdraw.bench.runner import Bench
    from underdraw.bench.sections import main_table
    from underdraw.bench.summary import write_summary

    runner, folder = Bench(pipe, plan, sampling), ResultFolder(out)
    methods = {method.name: method.to_dict() for method in (AR, *plan.methods)}
    folder.open(runner.settings(), methods, overwrite=force)
    keys = [key for _, key in plan.images()]
    with image_counter("measuring", len(keys), silent=output.silent) as bar:
        bar.update(sum(key in folder.rows for key in keys))

        def advance(key: ImageKey) -> None:
            bar.set_postfix_str(f"{key.method}, T={key.temperature:g}", refresh=False)
            bar.update()

        try:
            drawn = runner.run(folder, advance)
        except KeyboardInterrupt:
            measured = sum(key in folder.rows for key in keys)
            print(f"{measured} of {len(keys)} images are measured; the same command resumes.", file=sys.stderr)
            raise
    summary = write_summary(folder)
    record = {"out": str(out), "rows": len(folder.rows), "drawn": drawn, "entries": summary["entries"]}
    if not output.silent:
        print_table(main_table(summary))
    line = f"{out}: {len(folder.rows)} rows ({drawn} new); figures and a report: underdraw plot {out}"
    output.print(line, record)
