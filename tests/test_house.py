"""Limits of the source: sizes of files and functions, numbers of parameters, and no six lines that stand twice."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = {file: ast.parse(file.read_text()) for file in sorted((ROOT / "src" / "underdraw").rglob("*.py"))}
MAX_LINES, MAX_FUNCTION_LINES, MAX_PARAMETERS, RUN = 400, 60, 12, 6


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def test_files_are_short() -> None:
    assert [file.name for file in FILES if len(file.read_text().splitlines()) > MAX_LINES] == []


def test_functions_are_short_and_have_few_parameters() -> None:
    """Triton kernels may be longer and take what they need; commands have as many options as they need."""
    too_long, too_many = [], []
    for file, tree in FILES.items():
        for node in functions(tree) if file.parent.name != "kernels" else ():
            if node.end_lineno is not None and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                too_long.append(f"{file.name}: {node.name}")
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            if len(names) > MAX_PARAMETERS and file.parent.name != "cli":
                too_many.append(f"{file.name}: {node.name}")
    assert too_long == [] and too_many == []


def unchecked_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines of imports and of signatures, which may be alike."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            numbers |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef):
            numbers |= set(range(node.lineno, node.body[0].lineno))
    return numbers


def test_no_six_lines_stand_twice() -> None:
    positions: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for file, tree in FILES.items():
        unchecked = unchecked_lines(tree)
        lines = [
            (number, line.strip())
            for number, line in enumerate(file.read_text().splitlines(), start=1)
            if number not in unchecked and any(letter.isalnum() for letter in line)
        ]
        for start in range(len(lines) - RUN + 1):
            window = lines[start : start + RUN]
            positions[tuple(text for _, text in window)].append(f"{file.relative_to(ROOT)}:{window[0][0]}")
    assert [twice for twice in positions.values() if len(twice) > 1] == []
