"""Whatever a drafter returns, exact decoding gives the tokens of plain decoding: NaN, inf, huge and constant logits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import graph_checks
import pytest
import torch
import toy_models
from replay_tape import Tape

from torture import adversaries
from underdraw.calibration import Calibration
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.errors import ConfigError
from underdraw.registry import policies, verifiers
from underdraw.verifiers.tree_walk import TreeWalk

POLICIES = (
    "chain:depth=4",
    "static:shape=mc_sim_7b_63",
    "confidence:depth=3,top_k=4,nodes=12",
    "confidence",
    "adjacency:init=both,nodes=24",
    "adjacency:init=random,nodes=24",
    "cost:node=0.4,depth=5",
    "trunk:nodes=16",
)
DRAFTERS = ("eagle", "eagle-above", "block", "model")
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.0},
    {"top_k": 12, "guidance": 2.5},
    {"top_p": 0.8, "seeds": (7, 8, 9)},
    {"layout": toy_models.ROW_ENDS, "temperature": 0.7},
    {"layout": toy_models.ROW_ENDS, "proposal": "topk", "seeds": (1, 2)},
    {"proposal": "sampled"},
)


def cases() -> list[tuple[str, str, str, dict[str, Any]]]:
    """Every kind of logits with every policy and drafter; settings in turn."""
    pairs = list(itertools.product(adversaries.SPOILED, POLICIES, DRAFTERS))
    random.Random(3).shuffle(pairs)
    return [(*pair, SETTINGS[index % len(SETTINGS)]) for index, pair in enumerate(pairs)]


def check(spoiled: str, policy: str, name: str, settings: dict[str, Any], monkeypatch: Any, graphs: Any = None) -> None:
    target = toy_models.target()
    seeds = settings.get("seeds", (5,))
    plain = {key: value for key, value in settings.items() if key != "proposal"} | {"seeds": seeds}
    expected = toy_models.plain_tokens(target, **plain)
    drafter = SmallModel(target) if name == "model" else graph_checks.make_drafter(name, target)
    with adversaries.spoiled_logits(spoiled, monkeypatch):
        tokens, histories, _ = toy_models.run_decode(
            target, drafter, policies.build(policy), graphs=graphs, **{**settings, "seeds": seeds}
        )
    assert torch.equal(tokens, expected), (spoiled, policy, name, settings)
    assert all(history.done for history in histories)


def test_exact_with_some_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases()[:16]:
        check(*case, monkeypatch)


@pytest.mark.torture
@pytest.mark.parametrize("spoiled", adversaries.SPOILED)
def test_exact_with_every_kind_of_logits(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases():
        if case[0] == spoiled:
            check(*case, monkeypatch)


def check_captured(some: list[tuple[str, str, str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: passes are captured and replayed, and all nodes of a tree are verified at once."""
    monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda values: True)
    for case in some:
        if not case[1].startswith("cost"):  # reads from the device at every level
            check(*case, monkeypatch, GraphCache(capture=Tape, span_multiple=64))


def test_exact_in_some_captured_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    check_captured([case for case in cases() if case[0] in ("all NaN", "first row inf")][:4], monkeypatch)


@pytest.mark.torture
@pytest.mark.parametrize("spoiled", ["all NaN", "all inf", "some NaN", "first row NaN", "huge", "constant"])
def test_exact_in_captured_passes(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_captured([case for case in cases()[::2] if case[0] == spoiled], monkeypatch)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("policy", ["confidence:depth=3,top_k=4,nodes=12", "adjacency:init=both,nodes=24"])
def test_exact_with_weights_or_calibration_that_are_not_finite(value: float, policy: str) -> None:
    target = toy_models.target()
    expected = toy_models.plain_tokens(target, seeds=(3,))
    drafter = toy_models.eagle(target, above=True)
    spoiled = replace(drafter, calibration=adversaries.broken_calibration(value))
    assert torch.equal(toy_models.run_decode(target, spoiled, policies.build(policy), seeds=(3,))[0], expected)
    with torch.no_grad():
        drafter.net.fc.weight[3, 5] = value
    assert torch.equal(toy_models.run_decode(target, drafter, policies.build(policy), seeds=(3,))[0], expected)


@pytest.mark.parametrize("spoiled", ["all NaN", "some inf", "some NaN"])
def test_rejection_sampling_never_samples_from_what_is_not_a_number(
    spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = toy_models.target()
    with adversaries.spoiled_logits(spoiled, monkeypatch):
        tokens, histories, _ = toy_models.run_decode(
            target,
            toy_models.eagle(target),
            policies.build("static:shape=mc_sim_7b_63"),
            verifier=verifiers.build("rejection"),
            proposal="sampled",
        )
    assert all(history.done for history in histories)
    assert ((tokens >= toy_models.CODES.start) & (tokens < toy_models.CODES.stop)).all()


@pytest.mark.parametrize(
    "values",
    [
        {"slope": torch.nan},
        {"slope": -1.0},
        {"miss": torch.inf},
        {"miss": -0.1},
        {"biases": ()},
        {"biases": (0.0, torch.nan)},
        {"slope": "1"},
    ],
    ids=str,
)
def test_a_calibration_is_finite(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fit it again"):
        Calibration(**values)
