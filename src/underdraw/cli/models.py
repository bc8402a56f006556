"""`underdraw models`: the model families and their published checkpoints, and the words that a model knows."""

from __future__ import annotations

import json as json_module
import textwrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from underdraw.errors import ConfigError, UnsupportedError
from underdraw.models.progress_bars import hidden_progress_bars

if TYPE_CHECKING:
    from underdraw.models.vocabulary import Vocabulary

EXAMPLES = """
Examples:

underdraw models

underdraw models --json

underdraw models tiny --words

underdraw models inspect FOLDER
"""
app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
Model = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The model whose --words to list.")]
Words = Annotated[bool, typer.Option("--words", help="List the subjects, styles and backgrounds that the model knows.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command(epilog=EXAMPLES)
def models(model: Model = None, words: Words = False, json: Json = False) -> None:
    """List the families of models, their published checkpoints, licences and drafters."""
    if words != (model is not None):
        name = model or "tiny"
        raise ConfigError(
            f"MODEL and --words belong together: underdraw models {name} --words. To see what a checkpoint is, use "
            f"underdraw models inspect {name}."
        )
    if model is not None:
        list_words(model, json)
        return
    from underdraw.models.inspect import list_families

    families = list_families()
    print(json_module.dumps({"families": families}) if json else "\n".join(map(format_family, families)))


def format_family(family: dict[str, Any]) -> str:
    """A family for people: a line about it, and one for each checkpoint and drafter."""
    lines = [f"{family['family']}: {family['summary']}"]
    for item in family["published"]:
        counts = [f"{part} {count / 1e6:.1f} M parameters" for part, count in item["parameters"].items()]
        lines.append(f"  {item['id']}  ({'; '.join([item['licence'], *filter(None, [item['note']]), *counts])})")
    return "\n".join([*lines, *(f"  drafter {drafter}" for drafter in family["drafters"])])


def list_words(model: str, json: bool) -> None:
    """Print the phrases that prompts of a model can be made of."""
    from underdraw.models.checkpoint import open_small_files
    from underdraw.models.vocabulary import load_vocabulary

    with hidden_progress_bars(json):
        vocabulary = load_vocabulary(open_small_files(model))
    if vocabulary is None:
        raise UnsupportedError(f"{model} has no list of words; it reads any text.")
    if json:
        print(json_module.dumps({"model": model, **vocabulary.phrases, "words": sorted(vocabulary.words)}))
    else:
        print(format_vocabulary(vocabulary))


def format_vocabulary(vocabulary: Vocabulary) -> str:
    """The phrases of a vocabulary for people, one paragraph a list."""
    lists: dict[str, list[str]] = {}
    for title, phrases in vocabulary.phrases.items():
        lists |= (
            {f"{title}: {group}": phrases[group] for group in phrases}
            if isinstance(phrases, dict)
            else {title: phrases}
        )
    paragraphs = [
        f"{title} ({len(phrases)})\n"
        + textwrap.fill("; ".join(phrases), 100, initial_indent="  ", subsequent_indent="  ")
        for title, phrases in lists.items()
    ]
    return "\n".join([*paragraphs, f"{len(vocabulary.words)} words in all; --json lists them."])
