"""Start-up is fast: help and bad options do not import torch. Help texts are complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from commands import call

from underdraw.cli.app import COMMANDS


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_package_does_not_import_torch() -> None:
    assert python("import underdraw, sys; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False\n"
    assert python("from underdraw import Pipeline; import sys; print('torch' in sys.modules)") == "True\n"


def test_pipeline_does_not_import_dynamo() -> None:
    """It takes longer to import than torch itself."""
    assert python("from underdraw import Pipeline; import sys; print('torch._dynamo' in sys.modules)") == "False\n"


@pytest.mark.parametrize("words", [["--help"], *([*name.split(), "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_does_not_import_torch(words: list[str]) -> None:
    code = f"import sys; from underdraw.cli.app import main; main({words!r}); print('torch' in sys.modules)"
    assert python(code).endswith("False\n")


def test_help_takes_less_than_half_a_second() -> None:
    """CPU time, the best of a few runs: the machine may be busy."""
    seconds: list[float] = []
    while len(seconds) < 6 and min(seconds, default=1.0) >= 0.5:
        before = os.times()
        subprocess.run([sys.executable, "-m", "underdraw", "generate", "--help"], check=True, capture_output=True)
        after = os.times()
        seconds.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(seconds) < 0.5


def test_bad_option_is_reported_before_torch_is_imported() -> None:
    code = (
        "import sys; from underdraw.cli.app import main; "
        "print(main(['generate', 'fox', '-o', 'fox.gif']), 'torch' in sys.modules)"
    )
    assert python(code) == "2 False\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option has a description, and the examples use only options that exist.

    The examples of a group's subcommands are not checked here; their own help is.
    """
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    text = call(*name.split(), "--help").out
    options, _, examples = text.partition("Examples:")
    assert f"underdraw {name}" in examples
    line = re.compile(r"^│ +(?:\* +)?(--[a-z-]+) +(?:-\w +)?(?:\S+ {2,})?(.*?) *│$", re.M)
    descriptions = dict(line.findall(options))
    assert descriptions and all(len(words) > 8 for words in descriptions.values()), descriptions
    subcommands = re.findall(r"^│ ([a-z]+) {2,}", options, re.M)
    if subcommands:
        examples = re.sub(rf"underdraw {name} (?:{'|'.join(subcommands)})\b.*", "", examples)
    assert set(re.findall(r"--[a-z-]+", examples)) <= set(descriptions)
