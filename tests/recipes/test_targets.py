"""The targets of the embedded model: checks by hand, and the whole command on a model without a drafter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import small_checkpoint
from commands import call

from recipes.tiny import targets
from underdraw.bench.presets import DEFAULT


def test_targets_by_hand() -> None:
    def entry(method: str, temperature: float, tau: float, speed: float, images: str = "4/4") -> dict[str, object]:
        spread = {"median": speed, "p10": speed - 0.4, "p90": speed + 1}
        return {
            "method": method, "temperature": temperature, "tau": tau, "speedup": spread, "equal_images": images,
        }  # fmt: skip

    summary = {"entries": [entry("AR", 1, 1, 1), entry(DEFAULT, 1.0, 3.6, 1.3), entry("chain", 0.0, 2, 1, "3/4")]}
    found = {(one["temperature"], one["what"].split(",")[0]): one for one in targets.checks(summary, [9.0, 16.0])}
    assert found["1", "tokens a pass"]["reached"] and not found["1", "speed-up over plain AR"]["reached"]
    assert not found["1", "never slower than plain AR"]["reached"] and found["1", "identical pictures"]["reached"]
    assert not found["0", "identical pictures"]["reached"] and found["0", "identical pictures"]["measured"] == "3"
    assert found["default", "seconds from the prompt to the saved picture"]["measured"] == "16.0 (9.0 to 16.0)"


def test_targets_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a trained drafter, with commands in this process."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red fox\n")
    model = small_checkpoint.write(tmp_path / "bare", side=3, drafter=False)

    def here(words: list[str]) -> None:
        if code := call(*words).code:
            raise SystemExit(code)

    monkeypatch.setattr(targets, "underdraw", here)
    given = ["--model", str(model), "--prompts", str(prompts), "--limit", "1", "--pictures", "1", "--repeats", "1"]
    targets.main([*given, "--out", str(tmp_path / "run")])
    found = json.loads((tmp_path / "run" / "targets.json").read_text())
    same = [one for one in found["checks"] if one["what"].startswith("identical")]
    assert len(same) == 10 and all(one["reached"] for one in same) and found["settings"]["drafter"] == "jacobi"
    assert "seconds from the prompt to the saved picture" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        targets.main([*given, "--drafter", "nobody", "--out", str(tmp_path / "other")])
