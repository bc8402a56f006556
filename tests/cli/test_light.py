"""The command line answers at once: help without torch, a package that imports nothing heavy, complete help texts."""

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


def test_importing_the_package_imports_no_torch() -> None:
    assert python("import underdraw, sys; print('torch' in sys.modules, 'numpy' in sys.modules)") == "False False\n"
    assert python("from underdraw import Pipeline; import sys; print('torch' in sys.modules)") == "True\n"


def test_a_pipeline_imports_no_compiler() -> None:
    """torch's takes longer to import than torch."""
    assert python("from underdraw import Pipeline; import sys; print('torch._dynamo' in sys.modules)") == "False\n"


@pytest.mark.parametrize("words", [["--help"], *([*name.split(), "--help"] for name in COMMANDS)], ids=" ".join)
def test_help_needs_no_torch(words: list[str]) -> None:
    code = f"import sys; from underdraw.cli.app import main; main({words!r}); print('torch' in sys.modules)"
    assert python(code).endswith("False\n")


def test_help_answers_in_half_a_second() -> None:
    """Of its own time: the machine may be busy with something else. Once in a few tries will do."""
    seconds: list[float] = []
    while len(seconds) < 6 and min(seconds, default=1.0) >= 0.5:
        before = os.times()
        subprocess.run([sys.executable, "-m", "underdraw", "generate", "--help"], check=True, capture_output=True)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        seconds.append(spent)
    assert min(seconds) < 0.5


def test_mistakes_are_told_before_torch_is_loaded() -> None:
    code = (
        "import sys; from underdraw.cli.app import main; "
        "print(main(['generate', 'fox', '-o', 'fox.gif']), 'torch' in sys.modules)"
    )
    assert python(code) == "2 False\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_complete(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option says what it does, and there are examples that name only options that exist.

    An example of a command inside a group has that command's options, which its own tests know.
    """
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    text = call(*name.split(), "--help").out
    options, _, examples = text.partition("Examples:")
    assert f"underdraw {name}" in examples
    known = {}
    for line in options.splitlines():
        found = re.match(r"│ +(?:\* +)?(--[a-z-]+) +(?:-\w +)?(?:\S+ {2,})?(.*?) *│$", line)
        if found:
            known[found[1]] = found[2]
    assert known and all(len(words) > 8 for words in known.values()), known
    inner = re.findall(r"^│ ([a-z]+) {2,}", options, re.M)
    own = re.sub(rf"underdraw {name} (?:{'|'.join(inner)})\b.*", "", examples) if inner else examples
    assert set(re.findall(r"--[a-z-]+", own)) <= set(known)
