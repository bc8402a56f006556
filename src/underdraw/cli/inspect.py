"""`underdraw models inspect`: what a checkpoint is and what it needs, before it is loaded."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated

import typer

from underdraw.models.progress_bars import hidden_progress_bars

if TYPE_CHECKING:
    from underdraw.models.inspect import Report

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Path = Annotated[str, typer.Argument(metavar="PATH", help="A folder, a file, or OWNER/NAME on the hub.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(epilog="Examples:\n\nunderdraw models inspect leloy/Anole-7b-v0.1-hf --json")
def inspect(path: Path, json: Json = False) -> None:
    """Say what a checkpoint is, how large it is, how much memory it needs and which drafter fits."""
    from underdraw.models.inspect import inspect as inspect_checkpoint
    from underdraw.models.inspect import open_for_inspection

    with hidden_progress_bars(json):
        report = inspect_checkpoint(open_for_inspection(path))
    print(json_module.dumps(report.json()) if json else "\n".join(lines(report)))


def lines(report: Report) -> list[str]:
    """Format a report for people."""
    text = [
        f"{report.name}: {report.kind}, {report.family}",
        f"  files      {report.files}, {format_bytes(report.bytes)}",
    ]
    if report.decoder:
        decoder = report.decoder
        text.append(
            f"  decoder    {decoder['parameters'] / 1e6:,.1f} M parameters, {decoder['layers']} layers, width "
            f"{decoder['width']}, {decoder['tokens']} tokens, {decoder['codes']} of them image codes"
        )
        if report.image_tokenizer:
            text.append(f"  tokenizer  {report.image_tokenizer['parameters'] / 1e6:,.1f} M parameters, for images")
        sizes = report.sizes if len(report.sizes) <= 8 else [*report.sizes[:7], f"... ({len(report.sizes)} in all)"]
        text.append(f"  sizes      {', '.join(sizes)} (height x width)")
        text.append("  settings   " + ", ".join(f"{key} {value:g}" for key, value in report.settings.items()))
        for dtype, memory in report.memory.items():
            weights, cache = format_bytes(memory.weights), format_bytes(memory.cache)
            text.append(f"  {dtype:10} {weights} of weights, {cache} of KV cache per image")
        text.append(f"  drafters   {', '.join(report.drafters)}")
    if report.note:
        text.append(f"  note       {report.note}")
    return text


def format_bytes(count: int) -> str:
    """A number of bytes for people: "1.50 GB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} bytes"
