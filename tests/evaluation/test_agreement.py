"""Agreement of plain and tree passes: complete where rounding does not depend on shapes, and it can be incomplete."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.bench.agreement import agreement
from underdraw.engine.cuda_graphs import EagerPass, GraphCache
from underdraw.nn.target import DecoderSession, DecoderTarget


def graphs(smallest: int) -> GraphCache:
    return GraphCache(capture=EagerPass, span_multiple=64, min_bucket=smallest)


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
def test_a_cpu_agrees_with_itself(layout: Any) -> None:
    found = agreement(toy_models.target(), layout, toy_models.prompts(3), 2.0, graphs)
    drawn = layout.stop - layout.start - 1
    assert found["pictures"] == 3
    for shares in found["shapes"].values():
        assert shares == {"tokens_equal": 1.0, "tokens": 3 * drawn, "pictures_equal": 1.0}


@dataclass(frozen=True)
class Rough(DecoderTarget):
    """Rounds by shape, and coarsely."""

    def open(self, prompts: Any, layout: Any, *, guidance: float) -> DecoderSession:
        session = super().open(prompts, layout, guidance=guidance)
        plain = session.forward

        def run(tree: Any, steps: Tensor) -> Any:
            output = plain(tree, steps)
            noise = torch.sin(output.logits * 1000) * (0.3 if tree.size > 2 else 0.0)
            return replace(output, logits=output.logits + noise)

        session.forward = run  # type: ignore[method-assign]
        return session


def test_rounding_by_shape_is_seen_and_padding_mends_it() -> None:
    found = agreement(Rough(toy_models.target().net), toy_models.PLAIN, toy_models.prompts(4), 2.0, graphs)["shapes"]
    assert found["one node"]["tokens_equal"] < 1 and found["one node"]["pictures_equal"] < 1
    assert found["the same shapes"]["tokens_equal"] == found["the same shapes"]["pictures_equal"] == 1
