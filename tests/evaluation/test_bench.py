"""`underdraw bench` end to end on a small random model: rows, agreement, stop and resume, mistakes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import call

from underdraw import Pipeline
from underdraw.bench.instrumentation import Clock, Timed
from underdraw.bench.methods import AR, Method, grid
from underdraw.bench.results import Store
from underdraw.bench.runner import Bench, Plan, stalled
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.engine.memory_stats import peak_bytes, reset_peak_bytes

GRID = [
    "--tree",
    "chain:depth=2",
    "--tree",
    "confidence:depth=2,top_k=2,nodes=5",
    "--temperature",
    0,
    "--temperature",
    1,
]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def command(mini: Path, prompts: Path) -> list[object]:
    return ["bench", "-m", mini, "--prompts", prompts, "--limit", 2, *GRID, "--json"]


@pytest.fixture(scope="module")
def run(command: list[object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    done = call(*command, "--out", folder)
    assert done.code == 0, done.err
    assert done.record["drawn"] == done.record["rows"] == 12
    return folder


def test_rows_hold_everything(run: Path) -> None:
    rows = lines(run / "rows.jsonl")
    assert len(rows) == 12 and {row["method"] for row in rows} == {"AR", "chain:depth=2", GRID[3]}
    for row in rows:
        assert row["passes"] * row["tau"] == pytest.approx(row["tokens"], rel=1e-4) and row["tokens"] == 8
        assert 0 < row["draft_seconds"] < row["seconds"] and row["memory"] > 10**7
        assert row["equal_image"] and row["equal_codes"] == 1  # every one of these methods is exact
        assert {"torch", "processor", "threads", "commit"} <= set(row["machine"])
        assert row["settings"]["tree"] in ("none", *GRID)
        assert (row["tree_passes"] > 0) == (row["method"] != "AR")


def test_methods_take_turns(run: Path) -> None:
    """Plain autoregression first, and every method once, before the next prompt or temperature begins."""
    order = [(row["method"], row["prompt"], row["temperature"]) for row in lines(run / "rows.jsonl")]
    for start in range(0, 12, 3):
        names, *where = zip(*order[start : start + 3], strict=True)
        assert names[0] == "AR" and len(set(names)) == 3
        assert all(len(set(place)) == 1 for place in where)
    assert order[1][0] != order[7][0], "who goes first after plain changes from prompt to prompt"


def test_the_summary_says_what_the_rows_say(run: Path) -> None:
    rows, summary = lines(run / "rows.jsonl"), json.loads((run / "summary.json").read_text())
    assert len(summary["entries"]) == 6
    for entry in summary["entries"]:
        own = [r for r in rows if (r["method"], r["temperature"]) == (entry["method"], entry["temperature"])]
        plain = [r for r in rows if (r["method"], r["temperature"]) == ("AR", entry["temperature"])]
        ratios = sorted(p["seconds"] / o["seconds"] for p, o in zip(plain, own, strict=True))
        assert entry["speedup"]["median"] == pytest.approx(sum(ratios) / 2, abs=1e-3)
        assert entry["tau"] == pytest.approx(16 / sum(r["passes"] for r in own), abs=1e-3)
        assert entry["equal_images"] == "2/2" and entry["prompts"] == 2
    table = (run / "summary.csv").read_text().splitlines()
    assert len(table) == 7 and table[0].startswith("method,temperature,prompts,rows,speedup_median")
    assert len({line.count(",") for line in table if '"' not in line}) == 1


class Stopped(KeyboardInterrupt):
    pass


def test_a_stopped_run_goes_on(
    command: list[object], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Store.append

    def five(self: Store, row: Mapping[str, Any], cells: Mapping[str, Any] | None) -> None:
        append(self, row, cells)
        if len(self.rows) == 5:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", five)
        done = call(*command, "--out", tmp_path / "run")
    assert done.code == 130 and "5 of 12 pictures are measured" in done.err
    path = tmp_path / "run" / "rows.jsonl"
    path.write_bytes(path.read_bytes()[:-30])  # the last line was cut off
    first = path.read_text().splitlines()[:4]
    done = call(*command, "--out", tmp_path / "run")
    assert done.code == 0 and done.record["drawn"] == 8
    assert path.read_text().splitlines()[:4] == first
    keys = ("method", "temperature", "prompt", "repeat", "seed", "passes", "tokens")
    assert sorted(str([r[k] for k in keys]) for r in lines(path)) == sorted(
        str([r[k] for k in keys]) for r in lines(run / "rows.jsonl")
    )
    assert call(*command, "--out", tmp_path / "run").record["drawn"] == 0
    (tmp_path / "run" / "cells.jsonl").unlink()  # what happened where may be thrown away
    more = [value if value != 2 else 3 for value in command]
    assert call(*more, "--out", tmp_path / "run").record["drawn"] == 6  # one more prompt
    again = call(*more, "--repeats", 2, "--out", tmp_path / "run").record
    assert again["drawn"] == 18 and all(entry["equal_images"] == "6/6" for entry in again["entries"])


def test_other_settings_are_refused(command: list[object], run: Path, prompts: Path, tmp_path: Path) -> None:
    before = (run / "rows.jsonl").read_bytes()
    assert "seed 0, not 1" in call(*command, "--out", run, "--seed", 1).err
    other = tmp_path / "other.txt"
    other.write_text("a blue fox\n")
    done = call(*(other if value == prompts else value for value in command), "--out", run)
    assert done.code == 2 and "other prompts" in done.err
    assert (run / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--preset paper-mian", "Did you mean 'paper-main'?"),
        ("--preset paper-main --tree none", "leave out --tree"),
        ("--limit 0", "--limit 0"),
        ("--repeats 0", "--repeats 0"),
        ("--seed -1", "--seed -1"),
        ("--tree adjacancy", "'adjacancy'"),
        ("--tree chain --tree chain", "'chain' is asked for twice"),
        ("--verifier rejection --proposal coupled", "would bias the images"),
        ("--proposal top", "proposal 'top'"),
        ("--drafter nobody", "no drafter 'nobody'"),
        ("--temperature -1", "temperature -1"),
        ("--overlong refuse --prompts {here}/long.txt", "prompt 2: "),
    ],
)
def test_mistakes_are_one_sentence(words: str, says: str, mini: Path, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("fox\n" + "fox " * 99)
    given = words.format(here=tmp_path).split()
    source = [] if "--prompts" in given else ["--prompts", prompts]
    done = call("bench", "-m", mini, *source, "--out", tmp_path / "run", *given)
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1 and "Traceback" not in done.err
    assert not (tmp_path / "run").exists()


def test_a_grid_names_what_differs() -> None:
    assert [m.name for m in grid(["a", "b"], ["exact"], ["auto"], ["topk", "coupled"])] == [
        "a topk", "a coupled", "b topk", "b coupled",
    ]  # fmt: skip
    assert [m.name for m in grid(["adjacency"], ["exact"], ["auto"], ["auto"])] == ["adjacency"]


def test_keeping_time_changes_nothing(pipe: Pipeline) -> None:
    """The wrapped drafter gives the same picture in the same passes, and its time is part of the whole."""
    plan = Plan((Method("tree", "confidence:depth=2,top_k=2,nodes=5"),), (1.0,), ["a red fox"])
    bench = Bench(pipe, plan, {})
    method, key = next((m, k) for m, k in plan.units() if m is not AR)
    drawn = bench.draw(method, key)
    pipe.tree = method.tree
    out = pipe("a red fox", seed=0, temperature=1.0, output_type="codes")
    assert torch.equal(torch.from_numpy(drawn.history.tokens), torch.from_numpy(out.history.tokens))
    assert drawn.history.passes == out.history.passes == drawn.tree_passes + (drawn.history.depth[-1] == 0)
    clock = Clock(torch.device("cpu"))
    list(
        pipe.stream(
            pipe.request("fox", seed=0), [type(out.history)(out.history.layout)], drafter=Timed(pipe.drafter, clock)
        )
    )
    assert clock.seconds > 0


def test_methods_come_back_to_their_captured_passes(pipe: Pipeline, tmp_path: Path) -> None:
    """Where passes are captured, the drafter's clock does not keep them from it, and warming up meets their kinds."""
    pipe.graphs = GraphCache(capture=EagerPass)
    methods = (Method("chain", "chain:depth=2"), Method("tree", "confidence:depth=2,nodes=5"))
    plan = Plan(methods, (0.0, 1.0), ["a red fox", "a blue cup"])
    bench, store = Bench(pipe, plan, {}), Store(tmp_path / "run")
    store.open(bench.settings(), {method.name: method.record() for method in (AR, *methods)}, anew=True)
    seen: list[tuple[int, int]] = []
    bench.run(store, lambda key: seen.append(pipe.graphs.pass_counts if pipe.graphs else (0, 0)))
    assert len(pipe.graphs.runners) == 2, "one set of buffers a temperature"
    assert seen[0][1] > 0 and len(set(seen)) == 1, "nothing new is met or captured on the clock"
    assert all(row["equal_image"] for row in store.rows.values())


def test_standing_still_is_told_from_work() -> None:
    """Passes of one and two seconds, and one of thirty: three times the median of one are what a pass may take."""
    assert stalled([1.0, 2.0, 1.0, 30.0, 1.0]) == 27.0 and stalled([1.0, 2.0, 1.0]) == 0.0 and stalled([]) == 0.0
    assert stalled([0.01, 0.01, 0.05]) == 0.0, "a large tree after small ones"
    assert stalled([0.25, 0.25, 3.0]) == 1.75


def test_memory_is_that_of_the_picture() -> None:
    """On Linux the mark starts anew: what was freed before it does not count."""
    cpu = torch.device("cpu")
    big = torch.ones(60_000_000)
    reset_peak_bytes(cpu)
    high = peak_bytes(cpu)
    del big
    reset_peak_bytes(cpu)
    low = peak_bytes(cpu)
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not forget its high-water mark")
    assert high - low > 100_000_000


def test_a_preset_needs_a_drafter(tmp_path: Path, prompts: Path) -> None:
    import small_checkpoint

    model = small_checkpoint.write(tmp_path / "bare", side=3, drafter=False)
    done = call("bench", "-m", model, "--prompts", prompts, "--preset", "paper-main", "--out", tmp_path / "run")
    assert done.code == 2 and "no drafter of its own" in done.err and not (tmp_path / "run").exists()


def test_a_preset_drafts_with_the_models_own_drafter(tmp_path: Path, prompts: Path) -> None:
    """Even if the model was saved with another one as its default."""
    import small_checkpoint

    model = small_checkpoint.write(tmp_path / "model", side=3)
    (model / "underdraw.json").write_text('{"drafter": "jacobi"}')
    options = ("--prompts", prompts, "--preset", "paper-main", "--limit", 1, "--temperature", 0, "--repeats", 1)
    assert call("bench", "-m", model, *options, "--out", tmp_path / "run").code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["drafter"] == "drafter"
