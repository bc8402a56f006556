"""Options that several commands share, with their help texts.

An option whose metavar is its own name in capitals spells that name out: typer 0.27 would take the one for the other.
"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from underdraw.registry import policies

PARTS, SAMPLING, OUTPUT = "Model and drafting", "Sampling", "Output"

Model = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL", rich_help_panel=PARTS,
        help="tiny (comes with the package), a folder or file of weights, or OWNER/NAME on the Hugging Face hub.",
    ),
]  # fmt: skip
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter", metavar="DRAFTER", rich_help_panel=PARTS,
        help="Who guesses ahead: auto (the model's own, or jacobi), jacobi, neighbour, a drafter's folder, or "
        "OWNER/NAME on the Hugging Face hub.",
    ),
]  # fmt: skip
Tree = Annotated[
    str,
    typer.Option(
        metavar="POLICY", rich_help_panel=PARTS,
        help=f"How large a tree of guesses: auto, {', '.join(policies.names())}, with options behind a colon, e.g. "
        "adjacency:init=both,nodes=24. With none there is no speculation.",
    ),
]  # fmt: skip
Verifier = Annotated[
    str,
    typer.Option(
        "--verifier", metavar="VERIFIER", rich_help_panel=PARTS,
        help="When a guess counts: auto (what the model was saved with, or exact), exact (the very image of plain "
        "sampling), rejection (another image of the same law) or lantern (faster, not exact).",
    ),
]  # fmt: skip
Device = Annotated[
    str, typer.Option("--device", metavar="DEVICE", rich_help_panel=PARTS, help="auto, cpu, cuda or cuda:N.")
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="TYPE", rich_help_panel=PARTS,
        help="auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16 or float16.",
    ),
]  # fmt: skip
Compile = Annotated[
    Literal["auto", "on", "capture", "off"],
    typer.Option(
        rich_help_panel=PARTS,
        help="Compile, capture and replay passes (on); only capture and replay, which starts at once and runs slower "
        "(capture); neither (off). auto is on for a GPU.",
    ),
]
Guidance = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", rich_help_panel=SAMPLING,
        help="How strictly to follow the prompt; 1 turns guidance off. Without it, the model's own setting.",
    ),
]  # fmt: skip
Temperature = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", rich_help_panel=SAMPLING, help="0 is greedy. Without it, the model's own setting."
    ),
]  # fmt: skip
TopK = Annotated[
    int | None,
    typer.Option(
        "--top-k", metavar="COUNT", rich_help_panel=SAMPLING,
        help="Draw from the COUNT most likely codes; 0 is off. Without it, the model's own setting.",
    ),
]  # fmt: skip
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p", metavar="SHARE", rich_help_panel=SAMPLING,
        help="Draw from the most likely codes that make up SHARE; 1 is off. Without it, the model's own setting.",
    ),
]  # fmt: skip
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER", rich_help_panel=SAMPLING,
        help="Seed of the first image; image i has seed + i. Without it, a random one, which is printed.",
    ),
]  # fmt: skip
Json = Annotated[
    bool,
    typer.Option("--json", rich_help_panel=OUTPUT, help="Print one JSON object as the last line and no progress."),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print nothing but errors (and --json).")
]
