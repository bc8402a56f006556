"""The targets of the embedded model: which are reached, and the command that measures them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_checkpoint
from commands import call, run_script

from recipes.tiny import targets
from underdraw.bench.presets import DEFAULT


def test_checks_by_hand() -> None:
    def entry(method: str, temperature: float, tau: float, speed: float, images: str = "4/4") -> dict[str, object]:
        spread = {"median": speed, "p10": speed - 0.4, "p90": speed + 1}
        return {"method": method, "temperature": temperature, "tau": tau, "speedup": spread, "equal_images": images}

    summary = {"entries": [entry("AR", 1, 1, 1), entry(DEFAULT, 1.0, 3.6, 1.3), entry("chain", 0.0, 2, 1, "3/4")]}
    checks = {
        (check["temperature"], check["what"].split(",")[0]): check for check in targets.checks(summary, [9.0, 16.0])
    }
    assert checks["1", "tokens a pass"]["reached"] and not checks["1", "speed-up over plain AR"]["reached"]
    assert not checks["1", "never slower than plain AR"]["reached"] and checks["1", "identical pictures"]["reached"]
    assert not checks["0", "identical pictures"]["reached"] and checks["0", "identical pictures"]["measured"] == "3"
    assert checks["default", "seconds from the prompt to the saved picture"]["measured"] == "16.0 (9.0 to 16.0)"


def test_command_measures_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a trained drafter, and with its commands in this process."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red fox\n")
    model = small_checkpoint.write(tmp_path / "bare", side=3, drafter=False)

    def run_here(arguments: list[str]) -> None:
        if code := call(*arguments).code:
            raise SystemExit(code)

    monkeypatch.setattr(targets, "run_underdraw", run_here)
    options = ["--model", model, "--prompts", prompts, "--limit", 1, "--images", 1, "--repeats", 1]
    done = run_script(targets, *options, "--out", tmp_path / "run")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "run" / "targets.json").read_text())
    identical = [check for check in record["checks"] if check["what"].startswith("identical")]
    assert len(identical) == 10 and all(check["reached"] for check in identical)
    assert record["settings"]["drafter"] == "jacobi-tree"
    assert "seconds from the prompt to the saved picture" in done.out
    with pytest.raises(SystemExit, match="2"):
        run_script(targets, *options, "--drafter", "nobody", "--out", tmp_path / "other")
