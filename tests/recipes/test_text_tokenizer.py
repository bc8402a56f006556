"""The caption vocabulary: learning it, encoding with it, its file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from commands import run_script

from recipes.tiny import text_tokenizer
from recipes.tiny.compose import Composer
from recipes.tiny.data import Pack
from recipes.tiny.text_tokenizer import caption_texts, learn_merges, learn_vocabulary
from underdraw.errors import CheckpointError
from underdraw.tokenizers.text import BOS, FIRST_BYTE, FIRST_MERGE, PAD, TextTokenizer


def test_captions_round_trip(pack: Pack) -> None:
    tokenizer = learn_vocabulary(caption_texts(pack), size=600, merges=100)
    assert tokenizer.size <= 600
    untruncated = TextTokenizer(tokenizer.merges, tokenizer.words, 999)
    composer = Composer(pack)
    for text in composer.captions(composer.draw(50, np.random.default_rng(0))):
        assert tokenizer.decode(untruncated.encode(text)) == text.lower()
    assert len(tokenizer.encode("a t3, 3D render, on a white background")) == 11  # words of captions are whole tokens
    assert len(tokenizer.encode("an unheard-of word")) > 5  # others are spelled
    other_scripts = "狐狸 🦊 ÉCLAIR, zażółć\tgęślą"
    assert untruncated.decode(untruncated.encode(other_scripts)) == "狐狸 🦊 éclair, zażółć gęślą"
    assert tokenizer.encode("  A   Fox ") == tokenizer.encode("a fox")


def test_merges_are_those_of_byte_pair_encoding() -> None:
    """The most frequent pair first; ties go to the smaller pair of token ids."""
    a, b, c = (FIRST_BYTE + ord(letter) for letter in "abc")
    assert learn_merges(Counter({"ab": 3, "bc": 3, "abc": 1, "é": 2}), 1) == [(a, b)]
    assert learn_merges(Counter({"ab": 3, "bc": 3, "abc": 1}), 9) == [(a, b), (b, c), (FIRST_MERGE, c)]
    assert learn_merges(Counter({"a": 5}), 9) == []


def test_command_writes_a_vocabulary(pack: Pack, tmp_path: Path) -> None:
    out = tmp_path / "new" / "text.json"
    done = run_script(text_tokenizer, "--pack", pack.path, "--out", out, "--size", 500, "--max-length", 16)
    assert done.code == 0, done.err
    written, learned = TextTokenizer.load(out), learn_vocabulary(caption_texts(pack), 500, max_length=16)
    assert written.max_length == 16 and written.size == learned.size and f"{written.size} tokens" in done.out
    assert written.encode("a t5 on a red background") == learned.encode("a t5 on a red background")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TextTokenizer.load(tmp_path / "missing.json")


def test_prompts_are_cut_and_padded() -> None:
    tokenizer = TextTokenizer([], max_length=6)
    assert tokenizer.encode("abcdefgh") == [BOS, 2 + 32, 2 + 97, 2 + 98, 2 + 99, 2 + 100]
    left, right = tokenizer.encode_batch(["a", ""]), tokenizer.encode_batch(["a", ""], side="right")
    assert left == [[PAD, PAD, PAD, BOS, 34, 99], [PAD] * 5 + [BOS]]
    assert right == [[BOS, 34, 99, PAD, PAD, PAD], [BOS] + [PAD] * 5]
