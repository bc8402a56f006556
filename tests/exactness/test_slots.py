"""Continuous batching gives the tokens of drawing each image alone: random arrivals, cancellations and settings.

Every drafter and policy, eagerly and with replay tapes, which stand for CUDA graphs.
"""

from __future__ import annotations

import random

import graph_checks
import pytest
import slot_checks
import toy_models
from replay_tape import Tape

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.verifiers.tree_walk import TreeWalk


def tape_cache() -> GraphCache:
    return GraphCache(capture=Tape, span_multiple=64)


def cases() -> list[tuple[str, str, str, bool, bool]]:
    """Drafter, policy, layout, guidance and capture: every drafter with every policy, the rest alternates."""
    return [
        (drafter, policy, list(graph_checks.LAYOUTS)[(i + j) % 2], (i + j // 2) % 2 == 0, (i // 2 + j) % 2 == 0)
        for i, drafter in enumerate(graph_checks.DRAFTERS)
        for j, policy in enumerate((*graph_checks.POLICIES, "cost:depth=4,nodes=12,node=2"))
    ]


@pytest.mark.parametrize(("drafter", "policy", "layout", "guided", "captured"), cases())
def test_random_arrivals_equal_plain(
    drafter: str, policy: str, layout: str, guided: bool, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if captured:
        monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda on: True)  # as on a GPU
    target = toy_models.target()
    parts = slot_checks.make_parts(target, drafter, policy, graphs=tape_cache() if captured else None)
    seed = sum(map(ord, drafter + policy))
    slot_checks.check_arrivals(parts, graph_checks.LAYOUTS[layout], random.Random(seed), guided=guided, images=7)
