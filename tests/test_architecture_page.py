"""docs/architecture.md and docs/glossary.md name files, functions and tests that exist."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from underdraw.cli.app import main
from underdraw.engine import autotune
from underdraw.engine.window_costs import WindowCosts

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "underdraw"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
HOPS = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([\w.]+)` \|", ARCHITECTURE, re.M)
GLOSSARY = re.findall(r"^\| [^|]+ \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)[1:]


def defined_names(file: Path) -> set[str]:
    """Functions, classes, their methods as Class.method, and module-level variables of a file."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    names.add(f"{node.name}.{item.name}")
                elif isinstance(item, ast.AnnAssign):
                    names.add(f"{node.name}.{ast.unparse(item.target)}")
        if isinstance(node, ast.Assign | ast.AnnAssign):
            names |= {ast.unparse(target) for target in getattr(node, "targets", None) or [node.target]}
    return names


ALL_NAMES = {name for file in PACKAGE.rglob("*.py") for name in defined_names(file)}


def test_walk_is_short() -> None:
    assert 10 <= len(HOPS) <= 20


@pytest.mark.parametrize(("file", "function"), HOPS, ids=lambda part: part.replace("/", "."))
def test_hop_exists(file: str, function: str) -> None:
    assert function in defined_names(PACKAGE / file)


def test_walk_is_what_happens(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of `underdraw generate` contain the hops in this order, where drafts pay."""
    costs = WindowCosts(((1, 10.0), (8, 10.2), (32, 12.0)), tree=((8, 10.3), (32, 12.1)))
    monkeypatch.setattr(autotune, "load_or_measure_windows", lambda workload: costs)
    calls: list[tuple[str, str]] = []
    lines = {}  # of a hop's definition: (file, line) -> hop
    for file, function in HOPS:
        *classes, name = function.split(".")
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            body = [node] if not classes else node.body if getattr(node, "name", None) == classes[0] else []
            for item in body:
                if isinstance(item, ast.FunctionDef) and item.name == name:
                    start = min([item.lineno, *(decorator.lineno for decorator in item.decorator_list)])
                    lines[str(PACKAGE / file), start] = (file, function)

    def record(frame: Any, event: str, _: Any) -> None:
        hop = lines.get((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        if event == "call" and hop is not None:
            calls.append(hop)

    image = tmp_path / "fox.png"
    words = ["generate", "fox", "-m", small_model, "--drafter", "jacobi-tree", "--device", "cpu", "-o", image]
    sys.setprofile(record)
    try:
        code = main(list(map(str, words)))
    finally:
        sys.setprofile(None)
    assert code == 0 and image.exists()
    remaining = iter(calls)
    missing = [hop for hop in HOPS if hop not in remaining]  # `in` reads the iterator up to the hop
    assert not missing, missing


def test_folders_of_the_page_are_those_of_the_package() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert set(re.findall(r"^\| `(\w+)/` \|", ARCHITECTURE, re.M)) == folders
    modules = {path.stem for path in PACKAGE.glob("[a-z]*.py")} - {"constants", "extras"}
    assert modules <= set(re.findall(r"`(\w+)`", ARCHITECTURE))


@pytest.mark.parametrize(("folder", "lines"), re.findall(r"^\| `(\w+)/` \|.*\| ([\d,]+) \|$", ARCHITECTURE, re.M))
def test_size_of_the_folders_is_about_true(folder: str, lines: str) -> None:
    count = sum(len(file.read_text().splitlines()) for file in (PACKAGE / folder).rglob("*.py"))
    assert abs(count - int(lines.replace(",", ""))) < max(100, 0.3 * count)


def test_tests_of_the_invariants_exist() -> None:
    paths = re.findall(r"`(tests/[\w/.]+)`", ARCHITECTURE)
    assert len(paths) >= 10 and all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize("entry", GLOSSARY)
def test_code_of_the_glossary_exists(entry: str) -> None:
    for reference in re.findall(r"`([\w/.]+)`", entry):
        path, _, name = reference.partition(".")
        if reference.endswith(("/", ".py")):
            assert (PACKAGE / reference).exists(), reference
        elif (PACKAGE / f"{path}.py").exists():
            assert name in defined_names(PACKAGE / f"{path}.py"), reference
        else:
            assert reference in ALL_NAMES, reference
