"""The promises of docs/reliability.md, one by one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call

from torture.checks import run_hostile, snapshot
from underdraw.drafters.trained import load_drafter
from underdraw.engine import autotune
from underdraw.errors import CheckpointError, ConfigError
from underdraw.io import (
    atomic_write,
    check_regular,
    expand_user,
    parse_json,
    path_inside,
    read_json,
    read_text,
    split_lines,
)
from underdraw.models.checkpoint import open_checkpoint
from underdraw.models.loading import load_model, resolve_placement
from underdraw.nn import weights
from underdraw.nn.weights import load_weights, save_weights


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_two_outputs_name_one_file(small_model: Path, here: Path) -> None:
    base = ("generate", "fox", "-m", small_model, "--tree", "none", "--seed", 1)
    for more in (
        ("-o", "a.png", "--trace", "a.png"),
        ("-o", "a.png", "--heatmap", "./a.png"),
        ("--trace", "fox-1.png"),
    ):
        done = run_hostile(*base, *more)
        assert done.code == 2 and "named twice" in done.err
    os.symlink("a.png", "link.png")
    assert "named twice" in run_hostile(*base, "-o", "a.png", "--heatmap", "link.png").err
    assert sorted(snapshot(here)) == ["link.png"]


def test_nothing_that_exists_is_replaced(small_model: Path, here: Path) -> None:
    base = ("generate", "fox", "-m", small_model, "--tree", "none", "--seed", 1, "--quiet")
    (here / "photo.jpg").write_text("precious")
    done = run_hostile(*base, "-n", 2, "-o", "run", "--sheet", "photo.jpg")
    assert done.code == 2 and "photo.jpg exists" in done.err and (here / "photo.jpg").read_text() == "precious"
    done = run_hostile(*base, "-n", 2, "-o", "run", "--sheet", "run/00000.png")
    assert done.code == 2 and "could be a picture of the run" in done.err and not (here / "run").exists()
    for _ in range(2):  # a resumed run replaces its own sheet
        assert run_hostile(*base, "-n", 2, "-o", "run", "--sheet", "sheet.jpg").code == 0
    assert run_hostile(*base, "-o", "/dev/null", "--force").code == 2
    assert run_hostile(*base, "-o", "x.png", "--trace", "/dev/full", "--force").code == 2
    done = run_hostile(*base, "-o", "n" * 300 + ".png")
    assert done.code == 2 and "longer than 255 bytes" in done.err


def test_seeds_up_to_the_limit(small_model: Path, here: Path) -> None:
    base = ("generate", "fox", "-m", small_model, "--quiet", "--tree", "chain:depth=2")
    assert run_hostile(*base, "--seed", 2**62 - 1, "-o", "a.png").code == 0
    assert run_hostile(*base, "--seed", 2**62, "-o", "b.png").code == 2
    assert run_hostile(*base, "--seed", 2**62 - 1, "-n", 2, "-o", "c").code == 2  # the second image has the next seed


def test_pipes_and_devices_are_refused(here: Path) -> None:
    os.mkfifo("fifo")
    os.symlink("loop", "loop")
    for path in ("fifo", "loop", "/dev/zero", "."):
        with pytest.raises(ConfigError, match="cannot be read as prompts"):
            check_regular(Path(path), "prompts")
    with pytest.raises(ConfigError, match="a user that does not exist"):
        expand_user("~nosuchuser/x")


def test_the_reading_layer(here: Path) -> None:
    cases: list[tuple[bytes, str]] = [
        (b"[" * 10**5, "nested deeper"), (b"[" * 70 + b"]" * 70, "nested deeper"), (b"{", "cannot be read"),
        (b"\xff", "cannot be read"), (b"9" * 5000, "cannot be read"), (b"", "cannot be read"),
    ]  # fmt: skip
    for content, message in cases:
        (here / "a.json").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_json(here / "a.json", "a record")
    assert parse_json("[" * 60 + "]" * 60)
    (here / "bad.txt").write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is not UTF-8"):
        read_text(here / "bad.txt", "prompts")
    assert split_lines("a\r\nb\x0b\x0c\u2028\x85c\nd") == ["a", "b\x0b\x0c\u2028\x85c", "d"]
    for name in ("../x", "/etc/passwd", "a/../../b", "", None, "a\0"):
        with pytest.raises(CheckpointError):
            path_inside(here, name, "an index")


def test_an_index_cannot_lead_out_of_its_folder(here: Path) -> None:
    (here / "config.json").write_text("{}")
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "../../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside of"):
        open_checkpoint(here).weight_files()


def test_weights_of_several_files_are_replaced_as_a_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever saving stops, the folder holds the old weights or the new ones."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 3000)
    states = [{name: torch.full((40, 30), float(value)) for name in "abcd"} for value in (1, 2)]
    real, writes = weights.write_safetensors, []

    def stop(path: Path, *arguments: Any) -> None:
        if len(writes) == limit:
            raise KeyboardInterrupt
        writes.append(path)
        real(path, *arguments)

    for limit in range(5):
        monkeypatch.setattr(weights, "write_safetensors", real)
        save_weights(here / "w", states[0], {"version": 1})
        writes.clear()
        monkeypatch.setattr(weights, "write_safetensors", stop)
        with suppress(KeyboardInterrupt):
            save_weights(here / "w", states[1], {"version": 2})
        state, about = load_weights(here / "w")
        assert about["version"] == (2 if limit == 4 else 1)
        assert all(bool((value == about["version"]).all()) for value in state.values())


def test_drafters_that_are_not_finite_are_refused(small_model: Path, here: Path) -> None:
    model = load_model(open_checkpoint(small_model), resolve_placement("cpu", "auto"))
    for change in ("weights", "calibration"):
        state, about = load_weights(small_model / "drafter")
        if change == "weights":
            next(iter(state.values())).view(-1)[0] = torch.nan
        else:
            about["calibration"]["slope"] = float("nan")
        save_weights(here / change, state, about)
        with pytest.raises(CheckpointError, match="not finite"):
            load_drafter(here / change, model.target)
        done = run_hostile("generate", "fox", "-m", small_model, "--drafter", here / change, "-o", "a.png")
        assert done.code == 2 and "not finite" in done.err


def test_a_model_that_is_not_finite_is_refused(small_model: Path, here: Path) -> None:
    for part in ("decoder", "tokenizer"):
        copy = here / part
        shutil.copytree(small_model, copy)
        state, about = load_weights(copy / part)
        sorted(state.items())[-1][1].view(-1)[-1] = torch.inf
        save_weights(copy / part, state, about)
        done = run_hostile("generate", "fox", "-m", copy, "-o", here / "a.png")
        assert done.code == 2 and "not finite" in done.err and not (here / "a.png").exists()


@pytest.fixture
def samples(small_model: Path, here: Path) -> Path:
    (here / "prompts.txt").write_text("a red fox\na fox\nred\nblue\n")
    done = call(
        "train", "samples", "-m", small_model, "--prompts", "prompts.txt", "--count", 4, "--batch", 2, "-o", "s"
    )
    assert done.code == 0, done
    return here / "s"


def train(small_model: Path, samples: Path, out: str, *more: object) -> Any:
    sizes = ("--layers", 1, "--ffn", 8, "--depth", 2, "--roots", 1, "--evaluate-images", 1, "--markov-dim", 4)
    budget = ("--seconds", 0.2, "--held-out", 1, "--batch", 1)
    return call("train", "drafter", "-m", small_model, "--samples", samples, "--out", out, *sizes, *budget, *more)


def test_training_stops_where_it_is_not_finite(small_model: Path, samples: Path, here: Path) -> None:
    assert train(small_model, samples, "d", "--learning-rate", "inf").code == 2
    with pytest.MonkeyPatch.context() as patch:
        from underdraw.training.trainer import Trainer

        patch.setattr(Trainer, "learning_rate", lambda self, progress: 1e30)
        done = train(small_model, samples, "d")
    assert done.code == 1 and "not finite" in done.err and "lower --learning-rate" in done.err
    assert "no weights were written" in done.err and not (here / "d").exists()
    assert train(small_model, samples, "d").code == 0
    before = snapshot(here / "d")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "learning_rate", lambda self, progress: 1e30)
        done = train(small_model, samples, "d", "--seconds", 0.4)
    assert done.code == 1 and "are those before it" in done.err
    assert snapshot(here / "d") == before, "the last good weights and state stay"


def test_resuming_with_other_options_names_both(small_model: Path, samples: Path, here: Path) -> None:
    assert train(small_model, samples, "d").code == 0
    for more, message in ((("--kind", "eagle"), "kind 'block', not 'eagle'"), (("--ffn", 16), "ffn 8, not 16")):
        done = train(small_model, samples, "d", "--seconds", 1, *more)
        assert done.code == 2 and message in done.err
    torch.save({}, here / "d" / "state.pt")
    assert "holds no state" in train(small_model, samples, "d", "--seconds", 1).err
    again = ("train", "samples", "-m", small_model, "--prompts", "prompts.txt", "--count", 4, "--batch", 2, "-o", "s")
    for more, message in ((("--seed", 7), "seed 0, not 7"), (("--temperature", 1), "temperatures [], not [1.0]")):
        done = run_hostile(*again, *more)
        assert done.code == 2 and message in done.err


def test_damaged_costs_are_set_aside(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = here / "costs.json"
    good = {"plain": 1.0, "base": 1.0, "node": 0.1, "level": 0.1, "curve": [], "levels": []}
    file.write_text(json.dumps({"a": good}))
    assert autotune.read_costs("a", file) == autotune.PassCosts(1.0, 1.0, 0.1, 0.1)
    wrong = [{**good, "plain": value} for value in (float("nan"), "1", None, -1, 1e999, [])]
    for row in [*wrong, {**good, "curve": 5}, {**good, "curve": [[1, float("nan")]]}, {}, [], 5, "x"]:
        file.write_text(json.dumps({"a": row}))
        assert autotune.read_costs("a", file) is None
    for content in ("[]", "{", "", "[" * 5000):
        file.write_text(content)
        assert autotune.read_costs("a", file) is None and (here / "costs.json.damaged").read_text() == content
        assert not file.exists()


def test_a_crash_in_the_first_write_can_be_resumed(small_model: Path, here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / ".1234-abcdef01.part").write_text('{"underdraw"')
    base = ("generate", "fox", "-m", small_model, "--tree", "none", "--seed", 1, "-n", 2, "-o", "run", "--quiet")
    assert run_hostile(*base).code == 0
    assert sorted(snapshot(here / "run")) == ["00000.png", "00001.png", "metadata.jsonl", "run.json", "timings.jsonl"]
    metadata = here / "run" / "metadata.jsonl"
    metadata.write_text(metadata.read_text() * 2)  # as two processes once wrote it
    assert run_hostile(*base).code == 0
    assert len(metadata.read_text().splitlines()) == 2


def test_atomic_write_never_replaces_a_device(here: Path) -> None:
    os.mkfifo("fifo")
    with pytest.raises(ConfigError, match="not a regular file"), atomic_write(here / "fifo"):
        pass


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&- >&- 2>&-", "> /dev/full", "| head -c 1"])
def test_closed_streams(closed: str, small_model: Path, here: Path) -> None:
    """A command with closed or broken streams ends without a traceback."""
    environment = {key: value for key, value in os.environ.items() if key != "HOME"}
    line = f"{sys.executable} -m underdraw --help {closed}"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], env=environment, capture_output=True, text=True)
    assert done.returncode in ((2,) if "full" in closed else (0, 1) if "head" in closed else (0,)), done
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
