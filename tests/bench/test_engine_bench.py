"""`underdraw bench engine` on a toy shape, and replayed traces: the same lengths are accepted with any weights."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_models

from underdraw.bench.engine import fastest_attention
from underdraw.bench.engine_tables import aims_sections
from underdraw.bench.replay import ReplayPolicy, ReplayVerifier, Trace
from underdraw.bench.transformers_baseline import time_transformers
from underdraw.cli.app import main
from underdraw.cli.options import RANDOM_MODELS
from underdraw.drafters.jacobi import Jacobi
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.errors import ConfigError
from underdraw.models.family import Placement
from underdraw.models.random_weights import SHAPES, model_shape
from underdraw.nn.rope import Rope
from underdraw.nn.transformer import Transformer
from underdraw.plan import TreePlan
from underdraw.registry import policies

SIZES = [name for name in SHAPES if name != "toy"]
# Billions of parameters where they differ from the number in the model's name: those of the loaded decoder.
PARAMETERS = {
    "anole-7b": 6.7,
    "lumina-7b": 6.7,
    "llamagen-xl": 0.75,
    "janus-7b": 6.8,
    "janus-1b": 1.6,
    "simplear-0.5b": 0.6,
    "simplear-1.5b": 1.7,
}


@pytest.mark.parametrize("name", SIZES)
def test_random_models_have_published_sizes(name: str) -> None:
    model = model_shape(name)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in Transformer(model.arch).parameters())
    billions = PARAMETERS.get(name) or float(name.rpartition("-")[2].removesuffix("b"))
    assert abs(count / 1e9 / billions - 1) < 0.06
    assert model.layout.vocab_size >= len(model.arch.outputs or ())


def test_help_lists_the_random_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(RANDOM_MODELS) == set(SHAPES)
    assert main(["bench", "engine", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert [name for name in SHAPES if not re.search(rf"[ :]{re.escape(name)}[ ,.]", text)] == []


def record_trace() -> tuple[Trace, list[int]]:
    """A trace of a toy model's picture, and its accepted lengths."""
    _, _, steps = toy_models.run_decode(
        toy_models.target(), Jacobi(), policies.build("chain:depth=4"), layout=toy_models.ROW_ENDS, guidance=2.0
    )
    return Trace.from_steps(steps, {"model": "toy"}), [step.accepted for step in steps]


@pytest.mark.parametrize("name", ["eagle", "block", "jacobi"])
@pytest.mark.parametrize("captured", [True, False], ids=["captured", "eager"])
def test_replay_accepts_the_lengths_of_the_trace(name: str, captured: bool) -> None:
    trace, accepted = record_trace()
    assert sum(accepted) > 0
    target, layout = toy_models.target(9), toy_models.ROW_ENDS
    drafter: Any = {"eagle": toy_models.eagle(target), "block": toy_models.block(target), "jacobi": Jacobi()}[name]
    verifier, graphs = ReplayVerifier(trace, torch.device("cpu")), GraphCache(capture=EagerPass) if captured else None
    for _ in range(2):
        verifier.rewind()
        _, histories, steps = toy_models.run_decode(
            target, drafter, ReplayPolicy(trace), verifier=verifier, layout=layout, guidance=2.0, graphs=graphs
        )
        assert [step.accepted for step in steps] == accepted
        assert histories[0].done
        row_ends = histories[0].tokens[layout.start :][layout.width :: layout.row_stride]
        assert set(row_ends.tolist()) == {layout.row_end}, "row ends keep their token"


def test_traces_survive_saving(tmp_path: Path) -> None:
    trace, _ = record_trace()
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    assert again == trace
    assert again.tokens_per_pass > 1
    for text in ("{}", "nonsense", '{"kind": "underdraw-trace", "passes": []}', '{"kind": "x", "passes": [[1]]}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ConfigError, match="is not a trace"):
            Trace.load(tmp_path / "bad.json")


def test_engine_command_writes_a_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Trace((TreePlan(3, 2, 2, 8),), (2,), {"model": "made up"}).save(tmp_path / "trace.json")
    words = ["bench", "engine", "--model", "random:toy", "--passes", "2", "--no-transformers", "--json"]
    words += ["--replay", str(tmp_path / "trace.json"), "--out", str(tmp_path / "out.json"), "--device", "cpu"]
    assert main(words) == 0
    record = json.loads((tmp_path / "out.json").read_text())
    assert json.loads(capsys.readouterr().out) == record
    assert set(record["verify_ms"]) == {"1", "2", "8", "16", "32", "64", "128"}
    assert set(record["level_ms"]) == {"eagle", "block"}
    assert record["kind"] == "engine" and record["plain"]["over_floor"] > 1
    (replay,) = record["replays"]
    assert "forced" in replay["note"] and abs(replay["tokens_per_pass"] - 3) < 0.1
    check_engine_pages(tmp_path, record)


def check_engine_pages(folder: Path, record: dict[str, Any]) -> None:
    """A folder of records becomes a figure, a report and a block of a page; also one of a stopped run."""
    shapes = {"one node": {"tokens_equal": 0.9931, "pictures_equal": 0.25}}
    settings = {"guidance": 2.0, "temperature": 1.0, "nodes": 16, "kind": "agreement", "machine": record["machine"]}
    agreement = {"model": "tiny", "dtype": "bfloat16", "pictures": 20, "shapes": shapes, **settings}
    (folder / "agreement.json").write_text(json.dumps(agreement))
    page = folder / "page.md"
    page.write_text("before\n<!-- results: . -->\nold\n<!-- end -->\nafter\n")
    assert main(["plot", str(folder), "--quiet"]) == main(["plot", "--page", str(page), "--quiet"]) == 0
    text = page.read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    assert "(figures/pass_time.png)" in text and (folder / "figures" / "pass_time.png").is_file()
    assert text.index("### random:toy") < text.index("### Agreement"), "agreement comes last"
    assert "(forced)" in text and "| one node | 99.31 % | 25 % |" in text and "chains of 16 nodes" in text
    assert (
        f"torch {record['machine']['torch']}, commit" in text and "random:toy" in (folder / "report.html").read_text()
    )
    for part in ("plain", "verify_ms", "level_ms", "replays", "profiles"):
        del record[part]
        (folder / "out.json").write_text(json.dumps(record))
        assert main(["plot", "--page", str(page), "--quiet"]) == 0
        assert "| bandwidth bound of a pass |" in page.read_text()


def test_engine_command_shows_progress_from_the_start(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    """Without a terminal: a line when it starts, before anything heavy, and one per stage."""
    import underdraw.bench.engine as engine

    def fail(*_: Any, **__: Any) -> None:
        raise ConfigError("stopped here")

    monkeypatch.setattr(engine, "copy_bandwidth", fail)
    assert main(["bench", "engine", "--model", "random:toy", "--device", "cpu"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("s: loading random:toy") and lines[1].endswith("s: copy bandwidth")
    assert main(["bench", "engine", "--model", "random:toy", "--device", "cpu", "--quiet"]) == 2
    assert capsys.readouterr().err == "error: stopped here\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "tiny"], "no published shape"),
        (["--model", "random:gpt"], "random model"),
        (["--model", "random:toy", "--batch", "9"], "'--batch': 9 should be less than or equal to 8"),
        (["--model", "random:toy", "--device", "cpu", "--compile", "on"], "needs a CUDA device"),
        (["--model", "random:toy", "--replay-drafter", "block"], "more --replay-drafter than --replay"),
    ],
)
def test_bad_option_prints_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and ("random:gpt" not in words or len(error.splitlines()) == 1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("anole-7b", "ChameleonForConditionalGeneration"),
        ("lumina-7b", "ChameleonForConditionalGeneration"),
        ("llamagen-xl", "LlamaForCausalLM"),
        ("emu3-8b", "Emu3ForCausalLM"),
    ],
)
def test_transformers_baseline_of_every_family(name: str, expected: str) -> None:
    """The classes of transformers, with the family's vocabulary but small layers."""
    model = model_shape(name)
    arch = replace(model.arch, dim=32, layers=1, heads=4, kv_heads=2, head_dim=8, ffn=16, rope=Rope.one_axis(8))
    placement = Placement(torch.device("cpu"), torch.float32)
    record = time_transformers(name, replace(model, arch=arch), placement, 1)
    assert record["class"] == expected and record["ms_per_token"] > 0
    assert torch.get_default_dtype() == torch.float32


def test_gpu_session_with_a_toy_model(tmp_path: Path) -> None:
    """The script for a machine with a GPU, with a toy model: every command runs and writes its result."""
    root = Path(__file__).parent.parent.parent
    words = [sys.executable, "benchmarks/gpu_session.py", str(tmp_path), "--tiny", "--only", "engine"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # tests share the machine
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
    results = json.loads((tmp_path / "session.json").read_text())
    assert [result["code"] for result in results] == [0, 0]
    written = {path.name for path in (tmp_path / "results" / "engine").glob("*.json")}
    committed = {path.name for path in (root / "benchmarks" / "results" / "engine").glob("*.json")}
    assert written == {"anole-7b.json", "anole-7b-int8.json"} and written < committed
    assert "transformers" in json.loads((tmp_path / "results" / "engine" / "anole-7b.json").read_text())


def test_fastest_attention_backend() -> None:
    times = {"compiled, sdpa": {"1": 5.0, "64": 6.0}, "compiled, tree": {"1": 4.0, "64": 6.5}}
    assert fastest_attention(times) == "tree"
    assert fastest_attention({**times, "compiled, tree": {"error": "no triton"}}) == "sdpa"


def test_aims_are_compared_with_measurements() -> None:
    machine = {"device": "a GPU", "torch": "2.11", "python": "3.12", "commit": "c" * 40}
    common = {"model": "random:anole-7b", "dtype": "bfloat16", "numerics": "row-invariant", "machine": machine}
    full = {**common, "weights": "full", "floor_ms": 3.0, "verify_ms": {"1": 4.2, "64": 5.4}}
    full["plain"] = {"over_floor": 1.4, "host_share": 0.01}
    light = {**common, "weights": "int8", "floor_ms": 1.5, "verify_ms": {"1": 2.6, "64": 7.0}}
    other = {**full, "numerics": "fastest", "verify_ms": {"1": 9.9, "64": 9.9}}
    full["profiles"] = {"1": [{"kernel": name, "count": 2.0, "ms": 1.0} for name in ("_gemm", "_sums", "_topk")]}
    aims, passes, kernels = aims_sections([other, full, light])
    assert kernels.table is not None
    row = ["random:anole-7b, bfloat16, 1 node", "6", "1.00", "1.00", "0.00", "1.00", "3.00", "4.20"]
    assert kernels.table.rows == [row]
    assert aims.table is not None and passes.table is not None and "commit ccccccc" in aims.text
    measured = {row[0].partition(": ")[2]: row[1:] for row in aims.table.rows}
    assert measured["plain pass over the bandwidth bound"] == ("1.42", "1.400")
    assert measured["pass over 64 nodes over a pass over 1"] == ("1.25", "**1.286**")
    assert measured["`int8` over bfloat16, plain pass"] == ("0.65", "0.619")
    assert len(passes.table.rows) == 2 and aims_sections([other]) == []
