"""Lists what the training captions name: `python -m recipes.tiny.vocabulary --cache CACHE --out words.json`.

The tiny model knows the words of its training captions and no others. This writes all of them, and the phrases that a
prompt can be made of, for `underdraw models tiny --words`. Pictures are collected from the pinned packages but not
rendered.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from recipes.tiny.build import BuildConfig, collect
from recipes.tiny.collect import PORTRAIT_STYLES
from recipes.tiny.data import STYLES, Picture, is_held_out
from recipes.tiny.emoji import EMOJI_STYLES
from recipes.tiny.palette import COLOURS, SPRITE_COLOURS, plain_phrase
from underdraw.cli.app import main
from underdraw.io import atomic_write_json
from underdraw.models.vocabulary import STYLES as BY_STYLE
from underdraw.models.vocabulary import split_words

CAPTIONS = (
    "SUBJECT, STYLE, on a COLOUR background",
    "SUBJECT, STYLE, on a COLOUR to COLOUR gradient background",
    "SUBJECT, STYLE, in front of SCENE",
    "SUBJECT on the left and SUBJECT on the right, STYLE, on a COLOUR background",
    "PORTRAIT, PORTRAIT STYLE, on a COLOUR background",
    "a photo of PHOTO",
    "a photo of SCENE",
    "a small SPRITE COLOUR SUBJECT facing right at the top left, STYLE, on a COLOUR background",
    "a large SUBJECT facing left at the bottom right, STYLE, on a COLOUR background",
)
BEST_STYLES = ("fluent-3d", "fluent-color", "fluent-flat", "noto", "twemoji", "noto-v1")  # the best first
app = typer.Typer(add_completion=False)
_SKIN_TONE = re.compile(r" with [a-z-]+ skin tone(?: and (.*))?")


def vocabulary(pictures: Sequence[Picture]) -> dict[str, Any]:
    """The content of words.json: caption patterns, what fills them, and every word of a training caption."""
    phrases: dict[str, set[str]] = defaultdict(set)
    for picture in pictures:
        if not is_held_out(picture.subject):
            phrases[picture.group if picture.kind == "sprite" else picture.kind].add(picture.phrase)
    photos, scenes, portraits = (sorted(phrases.pop(kind, ())) for kind in ("photo", "landscape", "portrait"))
    frames = [re.sub("[A-Z]+", "", caption) for caption in CAPTIONS]
    frames += [plain_phrase(colour) for colour in COLOURS] + [style.words for style in STYLES.values()]
    frames += SPRITE_COLOURS
    texts = [*frames, *photos, *scenes, *portraits, *(phrase for group in phrases.values() for phrase in group)]
    return {
        "captions": list(CAPTIONS),
        "styles": sorted({STYLES[style].words for style in EMOJI_STYLES}),
        "colours": list(COLOURS),
        "sprite colours": list(SPRITE_COLOURS),
        "scenes": scenes,
        "photos": photos,
        "portrait styles": sorted({STYLES[style].words for style in PORTRAIT_STYLES}),
        "portraits, for example": portraits[:: max(1, len(portraits) // 8)][:8],
        "subjects": {
            group.replace("-", " and "): sorted(set(map(_without_skin_tone, phrases[group])), key=str.casefold)
            for group in sorted(phrases)
        },
        "words": sorted({word for text in texts for word in split_words(text)}),
        BY_STYLE: subjects_by_style(pictures),
    }


def subjects_by_style(pictures: Sequence[Picture]) -> dict[str, list[str]]:
    """Every training subject once, under the first of `BEST_STYLES` that there is a sprite in."""
    styles: dict[str, set[str]] = defaultdict(set)
    for picture in pictures:
        if picture.kind == "sprite" and not is_held_out(picture.subject):
            styles[picture.phrase].add(picture.style)
    best: dict[str, list[str]] = defaultdict(list)
    for phrase in sorted(styles):
        best[STYLES[min(styles[phrase], key=BEST_STYLES.index)].words].append(phrase)
    return dict(best)


def _without_skin_tone(phrase: str) -> str:
    """'a man with dark skin tone and a beard' -> 'a man with a beard'."""
    return _SKIN_TONE.sub(lambda match: f" with {match[1]}" if match[1] else "", phrase)


@app.command("vocabulary")
def vocabulary_command(
    cache: Annotated[Path, typer.Option(metavar="FOLDER", help="Downloaded packages.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="JSON", help="File to write.")],
) -> None:
    """Write the vocabulary of the training captions."""
    content = vocabulary([raw.picture for raw in collect(BuildConfig(), cache)])
    atomic_write_json(out, content)
    print(f"{out}: {sum(map(len, content['subjects'].values()))} subjects, {len(content['words'])} words")


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.vocabulary"))
