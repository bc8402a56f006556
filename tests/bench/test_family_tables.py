"""benchmarks/families.py and custom_generate.py: memory by computation, and the tables of the pages."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import call

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "families"


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("families")
    del sys.modules["families"]


def test_memory_in_the_table_is_that_of_the_models(families: Any) -> None:
    """The committed results are what the command computes now."""
    models = {model["name"]: model for model in json.loads((RESULTS / "families.json").read_text())["models"]}
    assert set(models) == set(families.SHAPES) - {"toy"}
    for name in ("llamagen-xl", "simplear-0.5b"):  # the fast ones
        computed = families.describe(name)
        assert {key: models[name][key] for key in computed} == computed


def test_published_files_have_their_size() -> None:
    """Sums of the files on the hub, in GB."""
    models = {model["name"]: model for model in json.loads((RESULTS / "families.json").read_text())["models"]}
    published = {"anole-7b": 14.03, "lumina-7b": 14.03, "glm-image-9b": 17.8, "llamagen-xl": 3.1}
    assert {name: models[name]["file_bytes"] / 1e9 for name in published} == pytest.approx(published, rel=0.005)


def test_measured_speed_becomes_a_table(families: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, page = tmp_path / "families.json", tmp_path / "page.md"
    monkeypatch.setattr(
        sys, "argv", ["families.py", "--only", "toy", "--passes", "2", "--device", "cpu", "--out", str(out)]
    )
    families.main()
    speed = json.loads(out.read_text())["models"][0]["speed"]
    assert 0 < speed["floor_ms"] < speed["plain_ms"] < speed["tree_ms"]
    page.write_text("<!-- results: families.json -->\n<!-- end -->\n")
    assert call("plot", "--page", page).code == 0
    text = page.read_text()
    assert "| plain, ms per token (bound) | pass over 64 nodes, ms |" in text
    assert f"| {speed['plain_ms']:.2f} ({speed['floor_ms']:.2f}) | {speed['tree_ms']:.2f} |" in text
    earlier = json.loads(out.read_text())
    record = {"models": [{key: value for key, value in earlier["models"][0].items() if key != "speed"}]}
    families.keep_earlier_speeds(record, {**earlier, "machine": {"commit": "0123456789abcdef"}})
    out.write_text(json.dumps({**earlier, **record}))
    assert call("plot", "--page", page).code == 0
    assert f"| {speed['tree_ms']:.2f}, at 0123456789ab |" in page.read_text()


def test_custom_generate_results_become_a_table(tmp_path: Path) -> None:
    result = {"seconds": 0.5, "speedup": 4.0, "tokens_per_pass": 5.5, "equal_codes": 1.0, "first_difference": None}
    level = {
        "accuracy": 0.8,
        "transformers_seconds": 2.0,
        "trees": {"none": {**result, "speedup": 1.5, "first_difference": 37}, "auto": result},
    }
    models = [
        {"family": family, "tokens": 256, "guidance": scale, "levels": [level]}
        for family, scale in (("janus", 5.0), ("chameleon", 1.0))
    ]
    machine = {"device": "a GPU", "torch": "2", "commit": "abc"}
    facts = {"kind": "custom-generate", "size": "published", "dtype": "bfloat16", "transformers": "5"}
    (tmp_path / "r.json").write_text(json.dumps({**facts, "machine": machine, "models": models}))
    page = tmp_path / "page.md"
    page.write_text("<!-- results: r.json -->\n<!-- end -->\n")
    assert call("plot", "--page", page).code == 0
    text = page.read_text()
    assert "greedy, guidance janus 5, bfloat16" in text
    assert "| janus | 256 | 80 % | `none` | 5.50 | 2.00 | 0.50 | 1.50 | the first 37 |" in text
    assert "| chameleon | 256 | 80 % | `auto` | 5.50 | 2.00 | 0.50 | 4.00 | all |" in text
