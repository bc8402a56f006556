"""Learns the caption vocabulary: `python -m recipes.tiny.text --pack pack.bin --out text.json`.

Every word of the training captions becomes a token, the most frequent first; some byte-pair merges are kept for words
outside. Words are counted once per distinct phrase and not per picture, so that rare subjects count as much as others.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from recipes.tiny.compose import BACKGROUND_PHRASES
from recipes.tiny.data import STYLES, Pack
from underdraw.tokenizers.text import FIRST_BYTE, FIRST_MERGE, TextTokenizer, normalize, pre_tokenize
from underdraw.training.command import run

Pair = tuple[int, int]


def learn(texts: Iterable[str], size: int = 2048, merges: int = 512, max_length: int = 32) -> TextTokenizer:
    """A tokenizer of at most `size` ids, `merges` of them byte-pair merges; depends on nothing but the texts."""
    counts = Counter(piece for text in texts for piece in pre_tokenize(normalize(text)))
    learned = learn_merges(counts, merges)
    speller = TextTokenizer(learned)
    words = [word for word in counts if len(speller.encode_piece(word)) > 1]
    words.sort(key=lambda word: (-counts[word], word))
    return TextTokenizer(learned, words[: max(0, size - FIRST_MERGE - len(learned))], max_length)


def learn_merges(counts: Counter[str], number: int) -> list[Pair]:
    """At most `number` byte-pair merges of words counted so often; ties go to the smaller pair."""
    words = [[FIRST_BYTE + value for value in piece.encode()] for piece in counts]
    weights = list(counts.values())
    totals: Counter[Pair] = Counter()
    places: dict[Pair, set[int]] = defaultdict(set)
    for index, word in enumerate(words):
        _count(word, weights[index], index, totals, places)
    merges: list[Pair] = []
    while len(merges) < number:
        best = max(totals, key=lambda pair: (totals[pair], -pair[0], -pair[1]), default=None)
        if best is None:
            break
        token = FIRST_MERGE + len(merges)
        merges.append(best)
        for index in sorted(places[best]):
            _count(words[index], -weights[index], index, totals, places)
            words[index] = _replace(words[index], best, token)
            _count(words[index], weights[index], index, totals, places)
        del totals[best]
    return merges


def _count(word: list[int], weight: int, index: int, totals: Counter[Pair], places: dict[Pair, set[int]]) -> None:
    for pair in pairwise(word):
        totals[pair] += weight
        if weight > 0:
            places[pair].add(index)
        elif totals[pair] <= 0:
            del totals[pair]


def _replace(word: list[int], pair: Pair, token: int) -> list[int]:
    out: list[int] = []
    for value in word:
        if out and (out[-1], value) == pair:
            out[-1] = token
        else:
            out.append(value)
    return out


def caption_texts(pack: Pack) -> list[str]:
    """Every distinct phrase of the training split once, and the words captions put around them often."""
    phrases = sorted({pack.pictures[row].phrase for row in pack.indices("train")})
    frame = [style.words for style in STYLES.values()] + list(BACKGROUND_PHRASES)
    frame += ["on the left and", "on the right", "a photo of", "in front of", ",", "on a gradient background to"]
    return phrases + frame * 20


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pack", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--max-length", type=int, default=32)
    options = parser.parse_args(arguments)
    tokenizer = learn(caption_texts(Pack(options.pack)), options.size, max_length=options.max_length)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(options.out)
    print(f"{options.out}: {tokenizer.size} tokens")


if __name__ == "__main__":
    run(main)
