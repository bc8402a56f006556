"""Learns the text tokenizer of captions: `python -m recipes.tiny.text_tokenizer --pack pack.bin --out text.json`.

Every word of the training captions becomes a token, the most frequent first; some byte-pair merges are kept to spell
other words. Words are counted once per distinct phrase, not per image, so that rare subjects count as much as others.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from recipes.tiny.data import STYLES, Pack
from recipes.tiny.palette import BACKGROUND_PHRASES, SPRITE_COLOURS
from underdraw.cli.app import main
from underdraw.tokenizers.text import FIRST_BYTE, FIRST_MERGE, TextTokenizer, normalize, pre_tokenize

app = typer.Typer(add_completion=False)


@app.command()
def text_tokenizer(
    pack: Annotated[Path, typer.Option(metavar="FILE", help="Training pack.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Vocabulary to write.")],
    size: Annotated[int, typer.Option(min=FIRST_MERGE, help="Most tokens of the vocabulary.")] = 2048,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt; longer ones are cut.")] = 32,
) -> None:
    """Learn the text tokenizer from the captions of a pack."""
    tokenizer = learn_vocabulary(caption_texts(Pack(pack)), size, max_length=max_length)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    print(f"{out}: {tokenizer.size} tokens")


def learn_vocabulary(texts: Iterable[str], size: int = 2048, merges: int = 512, max_length: int = 32) -> TextTokenizer:
    """A tokenizer of at most `size` ids, `merges` of them byte-pair merges."""
    counts = Counter(piece for text in texts for piece in pre_tokenize(normalize(text)))
    learned = learn_merges(counts, merges)
    speller = TextTokenizer(learned)
    words = [word for word in counts if len(speller.encode_piece(word)) > 1]
    words.sort(key=lambda word: (-counts[word], word))
    return TextTokenizer(learned, words[: max(0, size - FIRST_MERGE - len(learned))], max_length)


def learn_merges(counts: Counter[str], number: int) -> list[tuple[int, int]]:
    """At most `number` byte-pair merges of words with these counts, as pairs of token ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    # One character per byte, in the order of the bytes, so that ties are resolved by token id.
    characters = [chr(0x100 + value) for value in range(256)]
    words = ("".join(characters[value] for value in piece.encode()) for piece in counts.elements())
    tokenizer = Tokenizer(BPE())
    vocabulary = 256 + number
    trainer = BpeTrainer(vocab_size=vocabulary, initial_alphabet=characters, min_frequency=0, show_progress=False)
    tokenizer.train_from_iterator(words, trainer)
    ids = {character: FIRST_BYTE + value for value, character in enumerate(characters)}
    merges: list[tuple[int, int]] = []
    for left, right in json.loads(tokenizer.to_str())["model"]["merges"]:
        ids.setdefault(left + right, FIRST_MERGE + len(merges))
        merges.append((ids[left], ids[right]))
    return merges


def caption_texts(pack: Pack) -> list[str]:
    """Every phrase of the training split once, and the words that captions put around them 20 times."""
    phrases = sorted({pack.pictures[row].phrase for row in pack.indices("train")})
    frame = [style.words for style in STYLES.values()] + list(BACKGROUND_PHRASES)
    frame += ["on the left and", "on the right", "a photo of", "in front of", ",", "on a gradient background to"]
    frame += ["a small", "a large", "facing left", "facing right", "at the top left", "at the bottom right"]
    frame += [f"a {colour}" for colour in SPRITE_COLOURS]
    return phrases + frame * 20


if __name__ == "__main__":
    sys.exit(main(command=app, name="python -m recipes.tiny.text_tokenizer"))
