"""`underdraw bench` end to end on a small random model: rows, agreement, stop and resume, bad options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import small_checkpoint
import torch
from commands import call

from underdraw import Pipeline
from underdraw.bench.instrumentation import SpanTimer, TimedDrafter
from underdraw.bench.presets import AR, Method, method_grid
from underdraw.bench.results import ResultFolder
from underdraw.bench.runner import Bench, BenchPlan, stalled_seconds
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.engine.memory_stats import peak_bytes, reset_peak_bytes
from underdraw.history import History

TREE = "confidence:depth=2,top_k=2,nodes=5"
GRID = ["--tree", "chain:depth=2", "--tree", TREE, "--temperature", 0, "--temperature", 1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def command(mini: Path, prompts: Path) -> list[object]:
    return ["bench", "-m", mini, "--prompts", prompts, "--limit", 2, *GRID, "--json"]


@pytest.fixture(scope="module")
def run(command: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests must not change it."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    result = call(*command, "--out", folder)
    assert result.code == 0, result.err
    assert result.record["drawn"] == result.record["rows"] == 12
    return folder


def test_rows_have_all_columns(run: Path) -> None:
    rows = read_lines(run / "rows.jsonl")
    assert len(rows) == 12 and {row["method"] for row in rows} == {"AR", "chain:depth=2", TREE}
    for row in rows:
        assert row["passes"] * row["tau"] == pytest.approx(row["tokens"], rel=1e-4) and row["tokens"] == 8
        assert 0 < row["draft_seconds"] < row["seconds"] and row["memory"] > 10**7
        assert row["equal_image"] and row["equal_codes"] == 1  # all of these methods are exact
        assert {"torch", "processor", "threads", "commit"} <= set(row["machine"])
        assert row["settings"]["tree"] in ("none", *GRID)
        assert (row["tree_passes"] > 0) == (row["method"] != "AR")


def test_run_records_resolved_drafters(run: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    assert info["drafters"]["auto"] == info["settings"]["drafter"] == "drafter"


def test_methods_alternate_picture_by_picture(run: Path) -> None:
    """Plain first, and every method once, before the next prompt or temperature starts."""
    order = [(row["method"], row["prompt"], row["temperature"]) for row in read_lines(run / "rows.jsonl")]
    for start in range(0, 12, 3):
        names, *turn = zip(*order[start : start + 3], strict=True)
        assert names[0] == "AR" and len(set(names)) == 3
        assert all(len(set(values)) == 1 for values in turn)
    assert order[1][0] != order[7][0], "the method that follows plain rotates from prompt to prompt"


def test_summary_matches_rows(run: Path) -> None:
    rows, summary = read_lines(run / "rows.jsonl"), json.loads((run / "summary.json").read_text())
    assert len(summary["entries"]) == 6
    for entry in summary["entries"]:
        temperature = entry["temperature"]
        ours = [r for r in rows if (r["method"], r["temperature"]) == (entry["method"], temperature)]
        plain = [r for r in rows if (r["method"], r["temperature"]) == ("AR", temperature)]
        ratios = sorted(p["seconds"] / o["seconds"] for p, o in zip(plain, ours, strict=True))
        assert entry["speedup"]["median"] == pytest.approx(sum(ratios) / 2, abs=1e-3)
        assert entry["tau"] == pytest.approx(16 / sum(r["passes"] for r in ours), abs=1e-3)
        assert entry["equal_images"] == "2/2" and entry["prompts"] == 2
    table = (run / "summary.csv").read_text().splitlines()
    assert len(table) == 7 and table[0].startswith("method,temperature,prompts,rows,speedup_median")
    assert table[0].endswith("against_plain_mmd,against_plain_p")
    assert len({line.count(",") for line in table if '"' not in line}) == 1


class Stopped(KeyboardInterrupt):
    pass


def test_stopped_run_resumes(command: list[object], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = ResultFolder.append

    def append_five(self: ResultFolder, row: Mapping[str, Any], cells: Mapping[str, Any] | None) -> None:
        append(self, row, cells)
        if len(self.rows) == 5:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(ResultFolder, "append", append_five)
        result = call(*command, "--out", tmp_path / "run")
    assert result.code == 130 and "5 of 12 images are measured" in result.err
    path = tmp_path / "run" / "rows.jsonl"
    *rows, _ = path.read_text().splitlines()
    slow = json.dumps({**json.loads(rows[3]), "seconds": 1000.0})  # plain decoding of the turn that was stopped
    path.write_text("\n".join([*rows[:3], slow, rows[3][:-30]]))  # the last line is cut off
    first = path.read_text().splitlines()[:4]
    result = call(*command, "--out", tmp_path / "run")
    assert result.code == 0 and result.record["drawn"] == 8
    assert path.read_text().splitlines()[:4] == first
    keys = ("method", "temperature", "prompt", "repeat", "seed", "passes", "tokens")
    assert sorted(str([r[k] for k in keys]) for r in read_lines(path)) == sorted(
        str([r[k] for k in keys]) for r in read_lines(run / "rows.jsonl")
    )
    rows = read_lines(path)
    assert [row["plain_seconds"] for row in rows[:3]] == [rows[0]["seconds"]] * 3  # one session drew these
    assert all(row["plain_seconds"] < 100 for row in rows[4:6])  # plain decoding was timed again
    assert call(*command, "--out", tmp_path / "run").record["drawn"] == 0
    (tmp_path / "run" / "cells.jsonl").unlink()  # codes of plain pictures are drawn again, untimed
    more = [value if value != 2 else 3 for value in command]
    assert call(*more, "--out", tmp_path / "run").record["drawn"] == 6  # one more prompt
    again = call(*more, "--repeats", 2, "--out", tmp_path / "run").record
    assert again["drawn"] == 18 and all(entry["equal_images"] == "6/6" for entry in again["entries"])


def test_resume_with_other_settings_is_refused(command: list[object], run: Path, prompts: Path, tmp_path: Path) -> None:
    before = (run / "rows.jsonl").read_bytes()
    assert "seed 0, not 1" in call(*command, "--out", run, "--seed", 1).err
    other = tmp_path / "other.txt"
    other.write_text("a blue fox\n")
    result = call(*(other if value == prompts else value for value in command), "--out", run)
    assert result.code == 2 and "other prompts" in result.err
    assert (run / "rows.jsonl").read_bytes() == before


def test_resume_ignores_changed_descriptions_of_methods(tmp_path: Path) -> None:
    """`about` is text for readers; everything else of a method must stay."""
    folder = ResultFolder(tmp_path / "run")
    folder.open({"seed": 0}, {"AR": {"tree": "none", "about": "old"}}, overwrite=False)
    folder.start({})
    ResultFolder(tmp_path / "run").open({"seed": 0}, {"AR": {"tree": "none", "about": "new"}}, overwrite=False)
    with pytest.raises(ValueError, match="other settings"):
        ResultFolder(tmp_path / "run").open({"seed": 0}, {"AR": {"tree": "chain", "about": "old"}}, overwrite=False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--preset paper-mian", "Did you mean 'paper-main'?"),
        ("--preset paper-main --tree none", "leave out --tree"),
        ("--preset paper-main --drafter jacobi --drafter neighbour", "one --drafter"),
        ("--limit 0", "'--limit': 0 should"),
        ("--repeats 0", "'--repeats': 0 should"),
        ("--seed -1", "--seed -1"),
        ("--tree adjacancy", "'adjacancy'"),
        ("--tree chain --tree chain", "'chain' appears twice"),
        ("--verifier rejection --proposal coupled", "would bias the images"),
        ("--proposal top", "proposal 'top'"),
        ("--drafter nobody", "no drafter 'nobody'"),
        ("--temperature -1", "temperature -1"),
        ("--overlong refuse --prompts {here}/long.txt", "prompt 2: "),
    ],
)
def test_bad_option_prints_one_line_and_writes_nothing(
    words: str, message: str, mini: Path, prompts: Path, tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text("fox\n" + "fox " * 99)
    options = words.format(here=tmp_path).split()
    source = [] if "--prompts" in options else ["--prompts", prompts]
    result = call("bench", "-m", mini, *source, "--out", tmp_path / "run", *options)
    assert result.code == 2 and message in result.err and result.err.count("\n") == 1 and "Traceback" not in result.err
    assert not (tmp_path / "run").exists()


def test_start_is_announced_without_a_terminal(mini: Path, prompts: Path, tmp_path: Path) -> None:
    options = ["-m", mini, "--prompts", prompts, "--limit", 1, "--tree", "chain:depth=2"]
    result = call("bench", *options, "--out", tmp_path / "run")
    assert result.code == 0 and result.err == "measuring: 2 images\n" and "chain:depth=2" in result.out


def test_missing_extra_is_reported_before_measuring(
    mini: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    result = call("bench", "-m", mini, "--prompts", prompts, "--out", tmp_path / "run")
    assert result.code == 2 and "pip install 'underdraw[bench]'" in result.err and not (tmp_path / "run").exists()


def test_method_grid_names_what_varies() -> None:
    assert [m.name for m in method_grid(["a", "b"], ["exact"], ["auto"], ["topk", "coupled"])] == [
        "a topk", "a coupled", "b topk", "b coupled",
    ]  # fmt: skip
    assert [m.name for m in method_grid(["adjacency"], ["exact"], ["auto"], ["auto"])] == ["adjacency"]


def test_timing_does_not_change_the_picture(pipe: Pipeline) -> None:
    """The timed drafter gives the same picture in the same passes."""
    plan = BenchPlan((Method("tree", TREE),), (1.0,), ["a red fox"])
    bench = Bench(pipe, plan, {})
    method, key = next((m, k) for m, k in plan.images() if m is not AR)
    measurement = bench.draw(method, key)
    history = measurement.history
    pipe.tree = method.tree
    expected = pipe("a red fox", seed=0, temperature=1.0, output_type="codes").history
    assert torch.equal(torch.from_numpy(history.tokens), torch.from_numpy(expected.tokens))
    assert history.passes == expected.passes == measurement.tree_passes + (history.depth[-1] == 0)
    timer = SpanTimer(torch.device("cpu"))
    request = pipe.request("fox", seed=0)
    list(pipe.stream(request, [History(history.layout)], drafter=TimedDrafter(pipe.drafter, timer)))
    assert timer.seconds > 0


def test_methods_reuse_their_captured_passes(pipe: Pipeline, tmp_path: Path) -> None:
    """The timed drafter's passes are captured, and nothing new is captured while the clock runs."""
    pipe.graphs = GraphCache(capture=EagerPass)
    methods = (Method("chain", "chain:depth=2"), Method("tree", "confidence:depth=2,nodes=5"))
    plan = BenchPlan(methods, (0.0, 1.0), ["a red fox", "a blue cup"])
    bench, folder = Bench(pipe, plan, {}), ResultFolder(tmp_path / "run")
    folder.open(bench.settings(), {method.name: method.to_dict() for method in (AR, *methods)}, overwrite=True)
    captured: list[tuple[int, int]] = []
    bench.run(folder, lambda key: captured.append(pipe.graphs.pass_counts if pipe.graphs else (0, 0)))
    assert len(pipe.graphs.runners) == 2, "one set of buffers per temperature"
    assert captured[0][1] > 0 and len(set(captured)) == 1, "nothing new is captured while the clock runs"
    assert all(row["equal_image"] for row in folder.rows.values())


def test_stalls_are_separated_from_work() -> None:
    """The limit of a pass is three times the median, and at least a second above it."""
    assert stalled_seconds([1.0, 2.0, 1.0, 30.0, 1.0]) == 27.0
    assert stalled_seconds([1.0, 2.0, 1.0]) == stalled_seconds([]) == 0.0
    assert stalled_seconds([0.01, 0.01, 0.05]) == 0.0, "a large tree after small ones is no stall"
    assert stalled_seconds([0.25, 0.25, 3.0]) == 1.75


def test_peak_memory_is_reset() -> None:
    """On Linux, memory that was freed before the measurement does not count."""
    cpu = torch.device("cpu")
    big = torch.ones(60_000_000)
    reset_peak_bytes(cpu)
    high = peak_bytes(cpu)
    del big
    reset_peak_bytes(cpu)
    low = peak_bytes(cpu)
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system cannot reset the peak")
    assert high - low > 100_000_000


def test_preset_needs_a_drafter(tmp_path: Path, prompts: Path) -> None:
    model = small_checkpoint.write(tmp_path / "bare", side=3, drafter=False)
    result = call("bench", "-m", model, "--prompts", prompts, "--preset", "paper-main", "--out", tmp_path / "run")
    assert result.code == 2 and "comes without a drafter" in result.err and not (tmp_path / "run").exists()


def test_preset_uses_the_trained_drafter_even_if_it_is_not_the_default(tmp_path: Path, prompts: Path) -> None:
    model = small_checkpoint.write(tmp_path / "model", side=3)
    (model / "underdraw.json").write_text('{"drafter": "jacobi"}')
    options = ("--prompts", prompts, "--preset", "paper-main", "--limit", 1, "--temperature", 0, "--repeats", 1)
    assert call("bench", "-m", model, *options, "--out", tmp_path / "run").code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["drafter"] == "drafter"
