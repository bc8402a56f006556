"""`underdraw train PART`: drafters for any family, and the samples they are trained on.

Each part has options of its own, which its module under `underdraw.training` knows; this only finds the module.
"""

from __future__ import annotations

import importlib

import typer

PARTS = {
    "samples": ("underdraw.training.samples", "Draw or encode the pictures that a drafter learns from."),
    "drafter": ("underdraw.training.drafter", "Train a drafter for any model."),
}
_AS_IT_IS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train a drafter for any family. Every part goes on where it stopped.",
    epilog="Examples:\n\nunderdraw train samples --prompts prompts.txt --out samples\n\n"
    "underdraw train drafter --samples samples --out drafter --seconds 600\n\nunderdraw train drafter --help",
)


def _add(part: str, module: str, summary: str) -> None:
    @app.command(part, help=summary, context_settings=_AS_IT_IS, add_help_option=False)
    def train(ctx: typer.Context) -> None:
        importlib.import_module(module).main(ctx.args)


for _part, (_module, _summary) in PARTS.items():
    _add(_part, _module, _summary)
