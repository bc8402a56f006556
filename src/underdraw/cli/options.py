"""Options that several commands share, with their help texts, and the pipeline that they describe.

An option whose metavar is its own name in capitals spells that name out: typer 0.27 would take the one for the other.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from underdraw.ranges import check_guidance, check_sampling, check_seed
from underdraw.registry import policies

if TYPE_CHECKING:
    from underdraw.pipeline import Pipeline

PROMPTS, PARTS, SAMPLING, OUTPUT = "Prompts", "Model and drafting", "Sampling", "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        rich_help_panel=PARTS,
        help="tiny (comes with the package), a folder or file of weights, or OWNER/NAME on the Hugging Face hub.",
    ),
]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        metavar="DRAFTER",
        rich_help_panel=PARTS,
        help="What drafts tokens: auto (what the model was saved with, else its own, else jacobi-tree), "
        "jacobi-tree, jacobi, neighbour, a drafter's folder, or OWNER/NAME on the Hugging Face hub.",
    ),
]
Tree = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        rich_help_panel=PARTS,
        help=f"The draft tree: auto, {', '.join(policies.names())}, with options behind a colon, e.g. "
        "adjacency:init=both,nodes=24. With none there is no speculation.",
    ),
]
Verifier = Annotated[
    str,
    typer.Option(
        "--verifier",
        metavar="VERIFIER",
        rich_help_panel=PARTS,
        help="Which drafted tokens are accepted: auto (what the model was saved with, or exact), exact (the same image "
        "as plain sampling), rejection (another image from the same distribution) or lantern (relaxed: another image).",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", rich_help_panel=PARTS, help="auto, cpu, cuda or cuda:N.")
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE",
        rich_help_panel=PARTS,
        help="auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16.",
    ),
]
Numerics = Annotated[
    Literal["row-invariant", "fastest"],
    typer.Option(
        rich_help_panel=PARTS,
        help="On a GPU: row-invariant gives the same image for the same seed with every tree and batch; fastest may "
        "round differently in other trees and batches.",
    ),
]
Weights = Annotated[
    Literal["auto", "full", "int8", "fp8", "int4"],
    typer.Option(
        rich_help_panel=PARTS,
        help="Quantise the decoder's matrices on load: int8 or fp8 (half of the memory), int4 (a quarter), or full. "
        "auto is what the model was saved with, else full. The image is another one than that of full weights.",
    ),
]
Compile = Annotated[
    Literal["auto", "on", "capture", "off"],
    typer.Option(
        rich_help_panel=PARTS,
        help="How passes run on a GPU: replayed as CUDA graphs (capture), with --numerics fastest compiled before that "
        "(on), or eagerly (off). auto is on.",
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        rich_help_panel=SAMPLING,
        help="How strictly to follow the prompt; 1 turns guidance off. Without it, the model's default.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(metavar="NUMBER", rich_help_panel=SAMPLING, help="0 is greedy. Without it, the model's default."),
]
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k",
        metavar="COUNT",
        rich_help_panel=SAMPLING,
        help="Draw from the COUNT most likely codes; 0 is off. Without it, the model's default.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        metavar="SHARE",
        rich_help_panel=SAMPLING,
        help="Draw from the most likely codes that make up SHARE; 1 is off. Without it, the model's default.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        rich_help_panel=SAMPLING,
        help="Seed of the first image; image i has seed + i. Images of prompts with an id have seeds that follow "
        "from it and this one. Without it, a random one, which is printed.",
    ),
]
ResultFile = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FILE", rich_help_panel=OUTPUT, help="The result file (JSON).")
]
ForceFile = Annotated[
    bool, typer.Option("--force", "-f", rich_help_panel=OUTPUT, help="Replace the result file if it exists.")
]
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object as the last line and no progress."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print nothing but errors (and --json).")
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        envvar="UNDERDRAW_DATA",
        rich_help_panel=PROMPTS,
        help="The folder with the files of parti and coco.",
    ),
]
Overlong = Annotated[
    Literal["refuse", "skip"],
    typer.Option(rich_help_panel=PROMPTS, help="What to do with prompts that are too long for the model."),
]


def check_sampling_options(
    guidance: float | None, temperature: float | None, top_k: int | None, top_p: float | None, seed: int | None
) -> None:
    """Raise for sampling options that no model takes, before one is loaded."""
    check_seed(0 if seed is None else seed)
    check_guidance(1.0 if guidance is None else guidance)
    check_sampling(
        0.0 if temperature is None else temperature, 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
    )


def load_pipeline(
    model: str,
    drafter: str,
    tree: str,
    verifier: str,
    device: str,
    dtype: str,
    compile: Literal["auto", "on", "capture", "off"] = "auto",
    numerics: Literal["row-invariant", "fastest"] = "row-invariant",
    weights: Literal["auto", "full", "int8", "fp8", "int4"] = "auto",
    *,
    silent: bool,
) -> tuple[Pipeline, float]:
    """Load the pipeline; returns it with the seconds that took. torch is imported here, which is not counted."""
    from rich.console import Console

    console = Console(stderr=True, quiet=silent)
    with console.status(f"loading {model}"):
        from underdraw.pipeline import Pipeline

        start = time.perf_counter()
        pipe = Pipeline.from_pretrained(
            model,
            drafter=drafter,
            tree=tree,
            verifier=verifier,
            device=device,
            dtype=dtype,
            compile=compile,
            numerics=numerics,
            weights=weights,
        )
        seconds = time.perf_counter() - start
    if pipe.graphs is not None:
        pipe.graphs.report = console.print
    pipe.set_progress_bar_config(disable=True)  # commands show a bar of their own
    return pipe, seconds
