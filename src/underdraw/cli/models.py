"""`underdraw models`: the families and their published checkpoints; `underdraw models inspect` a checkpoint."""

from __future__ import annotations

import json as serial
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from underdraw.models.inspect import Report

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(
    invoke_without_command=True,
    epilog="Examples:\n\nunderdraw models\n\nunderdraw models --json\n\nunderdraw models inspect FOLDER",
)
def models(ctx: typer.Context, json: Json = False) -> None:
    """List the families of models, their published checkpoints, licences and drafters."""
    if ctx.invoked_subcommand is not None:
        return
    from underdraw.models.inspect import list_families

    found = list_families()
    if json:
        print(serial.dumps({"families": found}))
        return
    for family in found:
        print(f"{family['family']}: {family['summary']}")
        for item in family["published"]:
            note = f"; {item['note']}" if item["note"] else ""
            print(f"  {item['id']}  ({item['licence']}{note})")
        for drafter in family["drafters"]:
            print(f"  drafter {drafter}")


@app.command(epilog="Example: underdraw models inspect leloy/Anole-7b-v0.1-hf --json")
def inspect(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A folder, a file, or OWNER/NAME on the hub.")],
    json: Json = False,
) -> None:
    """Say what a checkpoint is, how large it is, how much memory it needs and which drafter fits."""
    from underdraw.models.checkpoint import open_checkpoint
    from underdraw.models.inspect import inspect as look

    report = look(open_checkpoint(path))
    print(serial.dumps(report.json())) if json else print("\n".join(lines(report)))


def lines(report: Report) -> list[str]:
    """A report for people."""
    out = [
        f"{report.name}: {report.kind}, {report.family}",
        f"  files      {report.files}, {size(report.bytes)}",
    ]
    if report.decoder:
        known = report.decoder
        out.append(
            f"  decoder    {known['parameters'] / 1e6:,.1f} M parameters, {known['layers']} layers, width "
            f"{known['width']}, {known['tokens']} tokens, {known['codes']} of them image codes"
        )
        shown = report.sizes if len(report.sizes) <= 8 else [*report.sizes[:7], f"... ({len(report.sizes)} in all)"]
        out.append(f"  pictures   {', '.join(shown)} (height x width)")
        out.append("  settings   " + ", ".join(f"{key} {value:g}" for key, value in report.settings.items()))
        for name, need in report.memory.items():
            out.append(f"  {name:10} {size(need.weights)} of weights, {size(need.cache)} of cache for one picture")
        out.append(f"  drafters   {', '.join(report.drafters)}")
    if report.note:
        out.append(f"  note       {report.note}")
    return out


def size(count: int) -> str:
    """Bytes for people."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
