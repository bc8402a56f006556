"""Agreement of plain and tree passes: complete where rounding is independent of shapes, incomplete where it is not."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.bench import agreement
from underdraw.bench.agreement import Subject, measure_agreement, measure_matrix, measure_quality
from underdraw.cli.app import main
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.nn.target import DecoderSession, DecoderTarget


def make_graphs(min_nodes: int) -> GraphCache:
    return GraphCache(capture=EagerPass, span_multiple=64, min_bucket=min_nodes)


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
def test_cpu_agrees_completely(layout: Any) -> None:
    drawn = Subject("toy", toy_models.target(), layout, toy_models.prompts(3), guidance=2.0, top_k=0)
    record = measure_agreement(drawn, make_graphs)
    decoded = layout.stop - layout.start - 1
    assert record["pictures"] == 3
    for shares in record["shapes"].values():
        assert shares == {"tokens_equal": 1.0, "tokens": 3 * decoded, "pictures_equal": 1.0}


@dataclass(frozen=True)
class ShapeDependentTarget(DecoderTarget):
    """A target whose logits depend on the number of nodes of a pass."""

    def open(self, prompts: Any, layout: Any, *, guidance: float) -> DecoderSession:
        session = super().open(prompts, layout, guidance=guidance)
        exact_forward = session.forward

        def forward(tree: Any, steps: Tensor) -> Any:
            output = exact_forward(tree, steps)
            noise = torch.sin(output.logits * 1000) * (0.3 if tree.size > 2 else 0.0)
            return replace(output, logits=output.logits + noise)

        session.forward = forward  # type: ignore[method-assign]
        return session


def test_shape_dependent_rounding_is_detected_and_equal_shapes_agree() -> None:
    target = ShapeDependentTarget(toy_models.target().net)
    shapes = measure_agreement(subject(target), make_graphs)["shapes"]
    assert shapes["one node"]["tokens_equal"] < 1 and shapes["one node"]["pictures_equal"] < 1
    assert (
        shapes["the shapes of tree passes"]["tokens_equal"]
        == shapes["the shapes of tree passes"]["pictures_equal"]
        == 1
    )


def subject(target: DecoderTarget) -> Subject:
    return Subject("toy", target, toy_models.PLAIN, toy_models.prompts(4), guidance=2.0, top_k=20)


def test_matrix_agrees_completely_on_a_cpu() -> None:
    cells = list(agreement.settings((8, 24), (1, 3)))
    assert {cell.kind for cell in cells} == {"plain", "chain", "tree"}
    seen: list[dict[str, Any]] = []
    rows = measure_matrix(subject(toy_models.target()), cells, (0.0, 1.0), 4, None, tokens=9, report=seen.append)
    assert rows == seen and len(rows) == 2 * len(cells)
    for row in rows:
        assert row["pictures"] >= 4 and row["pictures_equal"] == row["pictures"]
        assert row["tokens"] == row["tokens_equal"] == 9 * row["pictures"]


def test_matrix_counts_tokens_up_to_the_first_difference() -> None:
    cells = list(agreement.settings((8,), (1,)))
    of = subject(ShapeDependentTarget(toy_models.target().net))
    (chain, tree) = measure_matrix(of, cells, (1.0,), 4, None)
    for row in (chain, tree):
        assert row["pictures_equal"] < row["pictures"] and 0 < row["tokens_equal"] < row["tokens"]


def test_quality_of_the_same_model_is_perfect_and_of_a_worse_one_is_not() -> None:
    full = subject(toy_models.target())
    same = measure_quality(full, full, 2, temperature=1.0)
    decoded = toy_models.PLAIN.stop - toy_models.PLAIN.start - 1
    assert same["tokens"] == 2 * decoded and same["greedy_equal"] == 1.0 and abs(same["kl_nats"]) < 1e-12
    worse = subject(toy_models.target())
    with torch.no_grad():
        worse.target.net.head.weight.mul_(1.5)
    other = measure_quality(full, worse, 2, temperature=1.0)
    assert other["kl_nats"] > 1e-4


def test_command_writes_a_record_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "agreement.json"
    words = ["--model", "random:toy", "--device", "cpu", "--nodes", "8", "--batch", "1", "--pictures", "1"]
    more = ["--tokens", "12", "--temperature", "1", "--weights", "int8", "--out", str(out)]
    assert main(["bench", "agreement", *words, *more]) == 0
    text = capsys.readouterr().out
    assert "chain of 8" in text and "2 of 2 pictures equal" in text
    record = json.loads(out.read_text())
    assert record["weights"] == "int8" and record["quality"]["float32"]["greedy_equal"] > 0.8


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "1"], "'--nodes': 1 should be greater than or equal to 2"),
        (["--nodes", "500"], "'--nodes': 500 should be less than or equal to 128"),
        (["--batch", "0"], "'--batch': 0 should"),
        (["--model", "random:nope"], "error: unknown random model 'nope'"),
    ],
)
def test_bad_option_prints_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "agreement", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and "loading" not in error
