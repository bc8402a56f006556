"""`underdraw models`: parameter counts of the embedded model, and the words that it knows."""

from __future__ import annotations

import json
import logging
import re
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
from commands import call

from underdraw import Pipeline
from underdraw.models.vocabulary import load_vocabulary, split_words
from underdraw.tokenizers.text import TextTokenizer

TINY = Path(str(files("underdraw") / "assets" / "tiny"))
ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def model_with_words(small_model: Path, tmp_path: Path) -> Path:
    """The small model with a list of words."""
    folder = shutil.copytree(small_model, tmp_path / "model")
    words = {"subjects": {"animals": ["a fox"]}, "colours": ["red"], "words": ["a", "red", "fox", "plughs"]}
    (folder / "words.json").write_text(json.dumps(words))
    return folder


def test_parameter_counts_are_those_of_the_card() -> None:
    """The card's table and the commands agree with the files."""
    card = dict(
        re.findall(r"^\| (image tokenizer|decoder) \|.*\| ([\d.]+ M) \|", (TINY / "README.md").read_text(), re.M)
    )
    assert len(card) == 2
    text = call("models").out
    for part, count in card.items():
        assert f"{part} {count} parameters" in text
    report = call("models", "inspect", "tiny", "--json").record
    assert f"{report['decoder']['parameters'] / 1e6:.1f} M" == card["decoder"]
    assert f"{report['image_tokenizer']['parameters'] / 1e6:.1f} M" == card["image tokenizer"]
    (tiny,) = [family for family in call("models", "--json").record["families"] if family["family"] == "tiny"]
    assert tiny["published"][0]["parameters"]["decoder"] == report["decoder"]["parameters"]


def test_words_of_the_embedded_model() -> None:
    text = call("models", "tiny", "--words").out
    for phrase in ("a fox", "3D render", "sky blue", "snowy mountains", "SUBJECT, STYLE, on a COLOUR background"):
        assert phrase in text
    record = call("models", "tiny", "--words", "--json").record
    assert {"captions", "styles", "colours", "scenes", "subjects", "words"} <= set(record)
    assert "fox" in record["words"] and len(record["words"]) > 1000


def test_listed_words_are_tokens_but_for_three() -> None:
    """Three words came into the captions after the text tokenizer was learnt; they are spelled."""
    tokenizer, vocabulary = TextTokenizer.load(TINY / "decoder" / "text.json"), load_vocabulary(TINY)
    assert vocabulary is not None
    spelled = {word: min(len(tokenizer.encode_piece(form)) for form in (word, f" {word}")) for word in vocabulary.words}
    assert {word for word, tokens in spelled.items() if tokens > 1} == {"bottom", "large", "pumpkin"}
    listed = {word for phrases in vocabulary.phrases["subjects"].values() for p in phrases for word in split_words(p)}
    assert listed <= vocabulary.words


def test_unknown_words_of_the_benchmark_prompts() -> None:
    vocabulary = load_vocabulary(TINY)
    assert vocabulary is not None
    prompts = (ROOT / "benchmarks" / "prompts128.txt").read_text().splitlines()
    assert set(vocabulary.unknown_words(prompts)) == {"pirate", "lighthouse", "waterfall"}
    assert vocabulary.similar_words(["three", "strawberries", "cute", "ballons"]) == ["strawberry", "balloon"]


def test_unknown_words_are_reported(
    model_with_words: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ("-m", model_with_words, "--tree", "none", "--json")
    record = call("generate", "a Red XYZZY fox, plugh", "-o", "a.png", *quick).record
    assert record["unknown_words"] == ["xyzzy", "plugh"]
    (warning,) = caplog.messages
    assert "the words 'xyzzy', 'plugh'" in warning and "(it knows 'plughs')" in warning
    assert f"underdraw models {model_with_words} --words" in warning
    caplog.clear()
    assert call("generate", "a red fox", "-o", "b.png", *quick).record["unknown_words"] == [] and not caplog.messages
    Path("p.txt").write_text("a fox\nxyzzy\nxyzzy plugh\n")
    assert call("generate", "--prompts", "p.txt", "-o", "p", *quick).record["unknown_words"] == ["xyzzy", "plugh"]
    assert len(caplog.messages) == 1  # once for the folder, not once for each image


def test_unknown_words_in_python(model_with_words: Path, caplog: pytest.LogCaptureFixture) -> None:
    Pipeline.from_pretrained(model_with_words, tree="none")("xyzzy", seed=1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] and "the word 'xyzzy'" in caplog.text


def test_model_without_a_list_of_words(small_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "reads any text" in call("models", small_model, "--words").err
    assert "belong together" in call("models", "tiny").err and "belong together" in call("models", "--words").err
    out = tmp_path / "a.png"
    record = call("generate", "xyzzy", "-m", small_model, "-o", out, "--tree", "none", "--json").record
    assert record["unknown_words"] == [] and not caplog.messages


def test_damaged_list_of_words(model_with_words: Path, tmp_path: Path) -> None:
    for content in ("{", "[]", '{"words": 3}'):
        (model_with_words / "words.json").write_text(content)
        done = call("generate", "fox", "-m", model_with_words, "-o", tmp_path / "a.png")
        assert done.code == 2 and "words.json" in done.err and done.err.count("\n") == 1
