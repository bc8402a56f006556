"""Agreement of plain and tree passes: complete where rounding is independent of shapes, incomplete where it is not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.bench.agreement import measure_agreement
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.nn.target import DecoderSession, DecoderTarget


def make_graphs(min_nodes: int) -> GraphCache:
    return GraphCache(capture=EagerPass, span_multiple=64, min_bucket=min_nodes)


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
def test_cpu_agrees_completely(layout: Any) -> None:
    record = measure_agreement(toy_models.target(), layout, toy_models.prompts(3), 2.0, make_graphs)
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
    shapes = measure_agreement(target, toy_models.PLAIN, toy_models.prompts(4), 2.0, make_graphs)["shapes"]
    assert shapes["one node"]["tokens_equal"] < 1 and shapes["one node"]["pictures_equal"] < 1
    assert shapes["the same shapes"]["tokens_equal"] == shapes["the same shapes"]["pictures_equal"] == 1
