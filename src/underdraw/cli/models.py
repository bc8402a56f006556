"""`underdraw models`: the model families and their published checkpoints."""

from __future__ import annotations

import json as json_module
from typing import Annotated

import typer

EXAMPLES = """
Examples:

underdraw models

underdraw models --json

underdraw models inspect FOLDER
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(epilog=EXAMPLES)
def models(json: Json = False) -> None:
    """List the families of models, their published checkpoints, licences and drafters."""
    from underdraw.models.inspect import list_families

    families = list_families()
    if json:
        print(json_module.dumps({"families": families}))
        return
    for family in families:
        print(f"{family['family']}: {family['summary']}")
        for item in family["published"]:
            note = f"; {item['note']}" if item["note"] else ""
            print(f"  {item['id']}  ({item['licence']}{note})")
        for drafter in family["drafters"]:
            print(f"  drafter {drafter}")
