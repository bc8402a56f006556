"""Every script of the recipe: help, options that README documents, and one line for a wrong option."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from commands import run_script

SCRIPTS = {
    path.stem
    for path in (Path(__file__).parents[2] / "recipes" / "tiny").glob("*.py")
    if "__main__" in path.read_text()
}


def test_scripts_are_listed() -> None:
    assert {"build", "train_tokenizer", "train_decoder", "train_drafter", "grade_subjects"} <= SCRIPTS


@pytest.mark.parametrize("script", sorted(SCRIPTS))
def test_help_describes_every_option(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    done = run_script(importlib.import_module(f"recipes.tiny.{script}"), "--help")
    assert (done.code == 0 and "--out" in done.out) or "--pack" in done.out
    assert "Usage: python -m recipes.tiny." in done.out


@pytest.mark.parametrize(
    ("script", "options", "message"),
    [
        ("build", ["--out", "out.bin", "--drop", "oil paintings"], "oil paintings"),
        ("build", ["--out", "out.bin", "--px", "0"], "--px"),
        ("captions", ["--pack", "missing.bin", "--out", "out.txt"], "no training pack"),
        ("combinations", ["--pack", "missing.bin", "--prompts", "missing.txt"], "missing.txt"),
        ("text_tokenizer", ["--pack", "missing.bin", "--out", "out.json"], "no training pack"),
        ("text_tokenizer", ["--pack", "missing.bin", "--out", "out.json", "--size", "3"], "--size"),
        ("train_decoder", ["--pack", "missing.bin", "--out", "out", "--tokenizer", "missing"], "no training pack"),
        ("train_drafter", ["--pack", "missing.bin", "--out", "out", "--samples", "missing"], "no samples"),
        ("train_tokenizer", ["--pack", "missing.bin", "--out", "out"], "no training pack"),
        ("train_tokenizer", ["--pack", "missing.bin", "--out", "out", "--secnds", "3"], "--secnds"),
        ("train_tokenizer", ["--pack", "missing.bin", "--out", "out", "--seconds", "0"], "--seconds 0"),
        ("train_tokenizer", ["--pack", "missing.bin", "--out", "out", "--levels", "8 5"], "--levels"),
    ],
)
def test_bad_option_prints_one_line_and_writes_nothing(
    script: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run_script(importlib.import_module(f"recipes.tiny.{script}"), *options)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
