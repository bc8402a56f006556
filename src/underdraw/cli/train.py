"""`underdraw train samples` and `underdraw train drafter`: train a drafter for any model.

torch is imported when the work starts, so that help and wrong options answer at once.
"""

from __future__ import annotations

import logging
import math
import shlex
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from underdraw.cli import options
from underdraw.cli.outputs import check_folder
from underdraw.errors import ConfigError
from underdraw.ranges import check_seed

if TYPE_CHECKING:
    from underdraw.models.family import LoadedModel

MAX_SAMPLES, MAX_BATCH = 10**7, 4096
MAX_COUNT, MAX_WIDTH = 10**5, 2**16
input_option = partial(typer.Option, rich_help_panel="Input")
net_option = partial(typer.Option, rich_help_panel="Drafter")
training_option = partial(typer.Option, rich_help_panel="Training")
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a drafter for a model: first samples of the model, then the drafter. Both continue where they stopped.",
    epilog="Examples:\n\nunderdraw train samples --prompts prompts.txt --out samples\n\n"
    "underdraw train drafter --samples samples --out drafter --seconds 600",
)

# Options of every training, for the recipes of checkpoints as well.
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Continued if it holds unfinished work.")]
Seconds = Annotated[float, training_option(help="Budget, evaluation not included.")]
Pause = Annotated[
    float,
    training_option(show_default=False, help="Stop after so many seconds, to continue later."),
]
Batch = Annotated[int, training_option(min=1, max=MAX_BATCH, help="Images per batch.")]
LearningRate = Annotated[float, training_option(help="Highest learning rate.")]
ReportEvery = Annotated[float, training_option(help="Seconds between log lines.")]
EvaluateEvery = Annotated[float, training_option(help="Seconds between evaluations.")]
Compile = Annotated[Literal["auto", "on", "off"], training_option(help="torch.compile; auto: on a GPU.")]
Seed = Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Random seed.")]

# Options of samples.
Prompts = Annotated[
    str | None,
    input_option("--prompts", metavar="FILE", help="Text file with one prompt per line."),
]
Images = Annotated[
    Path | None,
    input_option(
        metavar="FOLDER",
        help="Encode these images instead: a folder or shards that `underdraw generate` wrote, with their prompts.",
    ),
]
Count = Annotated[
    int,
    typer.Option(
        "--count", min=1, max=MAX_SAMPLES, metavar="COUNT", help="Images to sample; fewer prompts are used repeatedly."
    ),
]
SampleBatch = Annotated[
    int, typer.Option(min=1, max=MAX_BATCH, metavar="COUNT", help="Images sampled at once, and per file.")
]
Workers = Annotated[
    int, typer.Option(min=1, metavar="COUNT", help="Processes that sample, each with a GPU or a share of the cores.")
]
Temperature = Annotated[
    list[float] | None,
    typer.Option(min=0, metavar="NUMBER", help="Repeat it to alternate by batch. Default: that of the model."),
]

# Options of the drafter.
SamplesFolder = Annotated[Path, input_option(metavar="FOLDER", help="Folder that `underdraw train samples` wrote.")]
HeldOut = Annotated[int, input_option(min=1, max=MAX_COUNT, help="Texts of the samples kept for evaluation.")]
KeepFeatures = Annotated[bool, input_option("--keep-features", help="Cache the target's features with the samples.")]
Kind = Annotated[
    Literal["eagle", "block"],
    net_option(help="eagle drafts level by level, block all levels in one pass."),
]
Layers = Annotated[int, net_option(min=1, max=64, help="Decoder layers.")]
Ffn = Annotated[int, net_option(min=0, max=MAX_WIDTH, help="Width of the MLP; 0: as the target.")]
KvHeads = Annotated[int, net_option(min=0, max=MAX_WIDTH, help="KV heads; 0: as the target.")]
MarkovDim = Annotated[int, net_option(min=1, max=MAX_COUNT, help="Width of a block drafter's Markov head.")]
Depth = Annotated[int, net_option(min=1, max=127, help="Tokens to look ahead.")]
Accumulate = Annotated[int, training_option(min=1, max=MAX_COUNT, help="Batches per optimiser step.")]
Roots = Annotated[int, training_option(min=1, max=MAX_COUNT, help="Draft trees per image (block only).")]
EvaluateImages = Annotated[int, training_option(min=1, max=MAX_COUNT, help="Held-out samples per evaluation.")]


@app.command(epilog="Example: underdraw train samples --prompts prompts.txt --count 2000 --batch 16 --out samples")
@options.grouped
def samples(
    out: Out,
    prompts: Prompts = None,
    images: Images = None,
    count: Count = 1024,
    batch: SampleBatch = 64,
    workers: Workers = 1,
    temperature: Temperature = None,
    seed: Seed = 0,
    *,
    model_options: options.ModelOptions,
) -> None:
    """Sample images from a model, or encode image files, for a drafter to learn from.

    Ranks of torchrun and SLURM share the work.
    """
    if (prompts is None) == (images is None):
        raise ConfigError("give either --prompts FILE to sample images, or --images FOLDER to encode them.")
    check_seed(seed, count)
    for number in temperature or []:
        options.check_sampling_options(None, number, None, None, None)
    check_folder(out)
    from underdraw.distributed.ranks import current_rank, local_rank, run_ranks
    from underdraw.prompts import load_prompts
    from underdraw.training.samples import Samples, encode_samples, generate_samples, read_captioned_images

    began, rank = time.perf_counter(), current_rank()
    if workers > 1:
        source = ["--images", str(images)] if prompts is None else ["--prompts", str(prompts), "--count", str(count)]
        heat = [word for value in temperature or () for word in ("--temperature", str(value))]
        words = ["--out", out, "--batch", batch, "--seed", seed]
        words += [word for name, value in asdict(model_options).items() for word in (f"--{name}", value)]
        run_ranks(["train", "samples", *source, *map(str, words), *heat], min(workers, -(-count // batch)))
        written = Samples.load(out)
    elif images is not None:
        pairs = read_captioned_images(images)
        target = load_target(model_options.model, model_options.device, model_options.dtype, local_rank())
        written = encode_samples(target, pairs, out, batch=batch, rank=rank)
    else:
        texts = load_prompts(str(prompts))
        repeated = [texts[index % len(texts)] for index in range(count)]
        target = load_target(model_options.model, model_options.device, model_options.dtype, local_rank())
        written = generate_samples(
            target, repeated, out, batch=batch, seed=seed, temperatures=temperature or (), rank=rank
        )
    seconds = time.perf_counter() - began
    print(f"{out}: {len(written)} samples of {len(set(written.texts))} texts, {seconds:.1f} s")


@dataclass(frozen=True)
class DrafterGroup:
    """The options that become `training.drafter.DrafterOptions`, which imports torch."""

    kind: Kind = "block"
    layers: Layers = 2
    ffn: Ffn = 0
    kv_heads: KvHeads = 0
    markov_dim: MarkovDim = 128
    depth: Depth = 12
    seconds: Seconds = 300.0
    pause: Pause = math.inf
    batch: Batch = 32
    accumulate: Accumulate = 1
    learning_rate: LearningRate = 1e-3
    roots: Roots = 24
    report_every: ReportEvery = 15.0
    evaluate_every: EvaluateEvery = 60.0
    evaluate_images: EvaluateImages = 16
    seed: Seed = 0


@app.command(epilog="Example: underdraw train drafter --samples samples --out drafter --seconds 3600")
@options.grouped
def drafter(
    samples: SamplesFolder,
    out: Out,
    held_out: HeldOut = 64,
    keep_features: KeepFeatures = False,
    compile: Compile = "auto",
    *,
    drafter_options: DrafterGroup,
    model_options: options.ModelOptions,
) -> None:
    """Train a drafter for a model on its samples. Many GPUs: `accelerate launch -m underdraw train drafter ...`."""
    floats = ("seconds", "pause", "learning_rate", "report_every", "evaluate_every")
    check_training_options(**{name: getattr(drafter_options, name) for name in floats})
    check_seed(drafter_options.seed)
    check_folder(out)
    from underdraw.training.drafter import DrafterOptions, train_drafter
    from underdraw.training.samples import Samples
    from underdraw.training.trainer import TrainingProcesses

    settings = DrafterOptions(**asdict(drafter_options))
    processes = TrainingProcesses()
    start_logging(is_main=processes.is_main)
    data = Samples.load(samples)
    target = load_target(model_options.model, processes.device or model_options.device, model_options.dtype)
    is_compiled = compile == "on" or (compile == "auto" and target.placement.device.type == "cuda")
    command = f"underdraw {shlex.join(sys.argv[1:])}"
    quality = train_drafter(
        target, data, out, settings, held_out=held_out, keep_features=keep_features, compiled=is_compiled,
        processes=processes, command=command,
    )  # fmt: skip
    if processes.is_main:
        print(f"{out}: loss {quality.loss:.4f}, top-1 acceptance {quality.sampled[0][0]:.2f}; details in README.md")


def check_training_options(**values: float) -> None:
    """Raise for seconds and rates that a training cannot have; `--pause` may be infinite."""
    for name, value in values.items():
        most = 10.0 if name == "learning_rate" else math.inf
        if not 0 < value <= most or (math.isinf(value) and name != "pause"):  # also refuses nan
            limit = f" and at most {most:g}" if most < math.inf else ""
            raise ConfigError(f"--{name.replace('_', '-')} {value:g} is not allowed; use a number above 0{limit}.")


def start_logging(*, is_main: bool = True) -> None:
    """Print log lines of the training on stderr, those of the main process only."""
    level = logging.INFO if is_main else logging.ERROR
    logging.basicConfig(level=level, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")


def load_target(model: str, device: str, dtype: str, number: int = 0) -> LoadedModel:
    """The model that a drafter is trained for, with TF32 matrix products on a GPU: that of process `number`."""
    import torch

    from underdraw.distributed.worker import worker_device
    from underdraw.models.loading import UnloadedModel, check_weights_fit, load_model, open_model, resolve_placement

    torch.set_float32_matmul_precision("high")
    placement = resolve_placement(worker_device(device, number), dtype)

    def check(found: UnloadedModel) -> None:
        found.check_size(None, None)
        check_weights_fit(found.family, found.checkpoint, placement)

    return load_model(open_model(model, check=check), placement)
