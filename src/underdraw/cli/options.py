"""Options that several commands share, in groups, and the pipeline that they describe.

A group is a dataclass whose fields are options. A command takes groups as parameters; `grouped` shows typer their
fields. An option whose metavar is its own name in capitals spells that name out: typer 0.27 would take the one for the
other.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from underdraw.cli.outputs import check_file
from underdraw.cli.progress import print_result
from underdraw.errors import unknown
from underdraw.models.progress_bars import hidden_progress_bars
from underdraw.ranges import check_guidance, check_sampling, check_seed
from underdraw.registry import policies

if TYPE_CHECKING:
    from underdraw.models.family import Placement
    from underdraw.pipeline import Pipeline

PROMPTS, PARTS, SAMPLING, OUTPUT = "Prompts", "Model and drafting", "Sampling", "Output"
MEASURED = "Measurement"
RANDOM_MODELS = (
    *("anole-7b", "lumina-7b", "lumina-2-7b", "llamagen-xl", "janus-1b", "janus-7b"),
    *("emu3-8b", "glm-image-9b", "simplear-0.5b", "simplear-1.5b", "toy"),
)  # the keys of `models.random_weights.SHAPES`, which is slow to import
prompts_option = partial(typer.Option, rich_help_panel=PROMPTS)
part_option = partial(typer.Option, rich_help_panel=PARTS)
sampling_option = partial(typer.Option, rich_help_panel=SAMPLING)
output_option = partial(typer.Option, rich_help_panel=OUTPUT)
measured_option = partial(typer.Option, rich_help_panel=MEASURED)
measured_model_option = partial(measured_option, "--model", "-m", metavar="MODEL")

Model = Annotated[
    str,
    part_option(
        "--model",
        "-m",
        metavar="MODEL",
        help="tiny (comes with the package), a folder or file of weights, or OWNER/NAME on the Hugging Face hub.",
    ),
]
Drafter = Annotated[
    str,
    part_option(
        "--drafter",
        metavar="DRAFTER",
        help="What drafts tokens: auto (what the model was saved with, else its own, else jacobi-tree), "
        "jacobi-tree, jacobi, neighbour, a drafter's folder, or OWNER/NAME on the Hugging Face hub.",
    ),
]
Tree = Annotated[
    str,
    part_option(
        metavar="POLICY",
        help=f"The draft tree: auto, {', '.join(policies.names())}, with options behind a colon, e.g. "
        "adjacency:init=both,nodes=24. With none there is no speculation.",
    ),
]
Verifier = Annotated[
    str,
    part_option(
        "--verifier",
        metavar="VERIFIER",
        help="Which drafted tokens are accepted: auto (what the model was saved with, or exact), exact (the same image "
        "as plain sampling), rejection (another image from the same distribution) or lantern (relaxed: another image).",
    ),
]
Device = Annotated[str, part_option("--device", metavar="DEVICE", help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[
    str,
    part_option(metavar="TYPE", help="auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16."),
]
Numerics = Annotated[
    Literal["row-invariant", "fastest"],
    part_option(
        help="On a GPU: row-invariant gives the same image for the same seed with every tree and batch; fastest may "
        "round differently in other trees and batches.",
    ),
]
Weights = Annotated[
    Literal["auto", "full", "int8", "fp8", "int4"],
    part_option(
        help="Quantise the decoder's matrices on load: int8 or fp8 (half of the memory), int4 (a quarter), or full. "
        "auto is what the model was saved with, else full. The image is another one than that of full weights.",
    ),
]
Compile = Annotated[
    Literal["auto", "on", "capture", "off"],
    part_option(
        help="How passes run on a GPU: replayed as CUDA graphs (capture), with --numerics fastest compiled before that "
        "(on), or eagerly (off). auto is on.",
    ),
]
Guidance = Annotated[
    float | None,
    sampling_option(
        "--guidance",
        metavar="NUMBER",
        help="How strictly to follow the prompt; 1 turns guidance off. Without it, the model's default.",
    ),
]
Temperature = Annotated[
    float | None, sampling_option(metavar="NUMBER", help="0 is greedy. Without it, the model's default.")
]
TopK = Annotated[
    int | None,
    sampling_option(
        "--top-k",
        metavar="COUNT",
        help="Draw from the COUNT most likely codes; 0 is off. Without it, the model's default.",
    ),
]
TopP = Annotated[
    float | None,
    sampling_option(
        "--top-p",
        metavar="SHARE",
        help="Draw from the most likely codes that make up SHARE; 1 is off. Without it, the model's default.",
    ),
]
Seed = Annotated[
    int | None,
    sampling_option(
        metavar="NUMBER",
        help="Seed of the first image; image i has seed + i. Images of prompts with an id have seeds that follow "
        "from it and this one. Without it, a random one, which is printed.",
    ),
]
PromptSeed = Annotated[int, measured_option(metavar="NUMBER", help="Prompt i has seed + i.")]
Json = Annotated[bool, output_option("--json", help="Print one JSON object as the last line and no progress.")]
Quiet = Annotated[bool, output_option("--quiet", "-q", help="Print nothing but errors (and --json).")]
Data = Annotated[
    Path | None,
    prompts_option(metavar="FOLDER", envvar="UNDERDRAW_DATA", help="The folder with the files of parti and coco."),
]
Overlong = Annotated[
    Literal["refuse", "skip"], prompts_option(help="What to do with prompts that are too long for the model.")
]


@dataclass(frozen=True)
class ModelOptions:
    """A model and where it runs."""

    model: Model = "tiny"
    device: Device = "auto"
    dtype: Dtype = "auto"


@dataclass(frozen=True)
class PassOptions:
    """How passes run, and on which weights."""

    compile: Compile = "auto"
    numerics: Numerics = "row-invariant"
    weights: Weights = "auto"

    def placement(self, device: str, dtype: str) -> Placement:
        """Device, dtype and weight format of a model that was not saved with any."""
        from underdraw.models.loading import resolve_placement

        weights = "full" if self.weights == "auto" else self.weights
        return dataclasses.replace(resolve_placement(device, dtype), weights=weights)


@dataclass(frozen=True)
class PipelineOptions(PassOptions, ModelOptions):
    """All that `Pipeline.from_pretrained` takes on the command line."""

    drafter: Drafter = "auto"
    tree: Tree = "auto"
    verifier: Verifier = "auto"


@dataclass(frozen=True)
class OutputOptions:
    """What a command prints."""

    json: Json = False
    quiet: Quiet = False

    @property
    def silent(self) -> bool:
        """Whether to show no progress."""
        return self.json or self.quiet

    def print(self, line: str, record: dict[str, Any]) -> None:
        """Print the last line of a command: its record as JSON, or the line for people."""
        print_result(line, record, as_json=self.json, quiet=self.quiet)


@dataclass(frozen=True)
class ResultOptions(OutputOptions):
    """The file that a measurement is written to, and what it prints."""

    out: Annotated[Path | None, output_option("--out", "-o", metavar="FILE", help="The result file (JSON).")] = None
    force: Annotated[bool, output_option("--force", "-f", help="Replace the result file if it exists.")] = False

    def check(self) -> None:
        """Raise if the file exists, or could not be written."""
        if self.out is not None:
            check_file(self.out, force=self.force)

    def save(self, record: dict[str, Any]) -> None:
        """Write the file; may be called again with more results."""
        from underdraw.io import atomic_write_json

        if self.out is not None:
            atomic_write_json(self.out, record)

    def print_tables(self, line: str, record: dict[str, Any]) -> None:
        """Print the tables of a record, and then its last line."""
        from underdraw.bench.records import record_sections
        from underdraw.bench.report import print_table

        for section in record_sections(record) if not self.silent else ():
            if section.table is not None:
                print_table(section.table)
        self.print(line, record)


def values_of(group: type[Any], options: Any) -> dict[str, Any]:
    """The options of a group by name, of an object that has them among others."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(group)}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose parameters that are groups of options are replaced by the options themselves.

    `OutputOptions` among them hold for libraries and log lines too.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        annotations = get_type_hints(groups[name], include_extras=True)
        for field in dataclasses.fields(groups[name]):
            default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
            kind, annotation = parameter.KEYWORD_ONLY, annotations[field.name]
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=annotation))

    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        output = next((value for value in values.values() if isinstance(value, OutputOptions)), OutputOptions())
        if output.quiet:
            logging.getLogger("underdraw").setLevel(logging.ERROR)  # until `main` returns
        with hidden_progress_bars(output.silent):
            command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def check_sampling_options(
    guidance: float | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> None:
    """Raise for sampling options that no model takes, before one is loaded."""
    check_seed(0 if seed is None else seed)
    check_guidance(1.0 if guidance is None else guidance)
    check_sampling(
        0.0 if temperature is None else temperature, 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
    )


def check_random_model(model: str) -> None:
    """Refuse unknown random weights before anything is loaded."""
    name = model.removeprefix("random:")
    if name != model and name not in RANDOM_MODELS:
        raise unknown("random model", name, RANDOM_MODELS)


@contextmanager
def stopped_by_downloads(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` when a download is announced: a spinner would hide the hub's progress bars."""
    log = logging.getLogger("underdraw.models.hub")

    def stop_before(_: logging.LogRecord) -> bool:
        stop()
        return True

    log.addFilter(stop_before)
    try:
        yield
    finally:
        log.removeFilter(stop_before)


def load_pipeline(
    *, silent: bool, size: tuple[int | None, int | None] | None = None, **loading: Any
) -> tuple[Pipeline, float]:
    """Load a pipeline with the arguments of `from_pretrained`; returns it with the seconds that took.

    A model that cannot draw pictures of a `size` (height, width) is refused before it is downloaded. torch is imported
    here, which is not counted.
    """
    from rich.console import Console

    console = Console(stderr=True, quiet=silent)
    with console.status(f"loading {loading['model']}") as spinner, stopped_by_downloads(spinner.stop):
        from underdraw.models.loading import CheckImages
        from underdraw.pipeline import Pipeline

        if size is not None:
            loading["check"] = CheckImages(*size)
        start = time.perf_counter()
        with hidden_progress_bars(silent):
            pipe = Pipeline.from_pretrained(**loading)
        seconds = time.perf_counter() - start
    if pipe.graphs is not None:
        pipe.graphs.report = console.print
    pipe.set_progress_bar_config(disable=True)  # commands show a bar of their own
    return pipe, seconds
