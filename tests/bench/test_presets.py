"""Every preset parses and runs with one prompt on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import call

from underdraw.bench.presets import PLAIN, PRESETS
from underdraw.registry import policies, verifiers


@pytest.mark.parametrize("name", PRESETS)
def test_methods_of_presets_parse(name: str) -> None:
    methods = PRESETS[name].methods
    assert len({method.name for method in methods}) == len(methods) and PLAIN not in {m.name for m in methods}
    for method in methods:
        verifier = verifiers.build(method.verifier)
        assert method.tree == "auto" or policies.build(method.tree)
        assert method.proposal in ("auto", *verifier.proposals)


def test_main_preset_has_the_rows_of_the_paper() -> None:
    """Tables I and II, and the methods that they are compared with."""
    names = [method.name for method in PRESETS["paper-main"].methods]
    assert {"EAGLE-1", "EAGLE-2", "LANTERN", "LANTERN++", "ADT-Tree", "ADT-Tree + LANTERN", "SJD"} < set(names)
    assert sum(name.startswith("ours") for name in names) == 2 and PRESETS["paper-main"].temperatures == (0.0, 1.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run_and_exact_methods_are_exact(name: str, mini: Path, prompts: Path, tmp_path: Path) -> None:
    temperatures = [] if name == "paper-main" else ["--temperature", 1]  # one preset with all its temperatures
    options = ["-m", mini, "--prompts", prompts, "--limit", 1, *temperatures, "--json"]
    result = call("bench", "--preset", name, *options, "--out", tmp_path / "run")
    assert result.code == 0, result.err
    methods = {method.name: method for method in PRESETS[name].methods}
    assert len(result.record["entries"]) == (len(methods) + 1) * (2 if name == "paper-main" else 1)
    for entry in result.record["entries"]:
        is_exact = entry["method"] == PLAIN or methods[entry["method"]].verifier == "exact"
        assert not is_exact or entry["equal_images"] == "1/1", entry["method"]
