"""The policy `budget` by passes and costs: hardly ever slower than plain decoding, close to the best fixed size."""

from __future__ import annotations

import functools

import jacobi_pictures as pictures
import numpy as np
import pytest

from underdraw.policies import running_sums
from underdraw.policies.budget import Budget, format_costs, passes_per_token
from underdraw.policies.fixed import Chain
from underdraw.protocols import TreePolicy

SIZES = (4, 8, 12, 24, 32, 64)
CURVES = {  # two cores with the embedded model, where nodes cost time; one GPU with a 7B model, where they hardly do
    "cpu": ((1, 11.35), *((nodes, 11.66 + 1.02 * nodes) for nodes in (2, 4, 8, 12, 18, 24, 32, 64))),
    "gpu": ((1, 4.3), (8, 4.7), (16, 5.0), (32, 5.3), (64, 5.95)),
}
SEEDS = range(2)
PASSES = pictures.SIZE**2 - 1  # of plain decoding


@functools.cache
def fixed_nodes(kind: str, seed: int, size: int) -> list[int]:
    return pictures.decode(pictures.Picture.of_kind(kind, seed), Chain(size - 1))[1]


def budget_ms(kind: str, curve: str, allowance: float = 0.01) -> list[float]:
    policy = Budget(format_costs(CURVES[curve]), allowance=allowance)
    drawn = [pictures.decode(pictures.Picture.of_kind(kind, seed), policy)[1] for seed in SEEDS]
    return [pictures.total_ms(nodes, CURVES[curve]) for nodes in drawn]


def best_fixed_ms(kind: str, curve: str) -> float:
    costs = CURVES[curve]
    plain = PASSES * costs[0][1]
    sizes = [size for size in SIZES if size in dict(costs)]
    return min(plain, *(np.mean([pictures.total_ms(fixed_nodes(kind, s, n), costs) for s in SEEDS]) for n in sizes))


def test_budget_is_hardly_slower_than_plain_decoding_on_photos() -> None:
    """One per cent for the first tries, 1.5 for those after the first rows."""
    plain = PASSES * CURVES["cpu"][0][1]
    spent = budget_ms("photo", "cpu")
    assert max(spent) <= 1.025 * plain
    assert budget_ms("photo", "cpu", allowance=0.0) == pytest.approx([plain] * len(SEEDS))


@pytest.mark.parametrize("curve", CURVES)
def test_budget_is_close_to_the_best_fixed_size_on_every_kind_of_picture(curve: str) -> None:
    ratios = {kind: float(np.mean(budget_ms(kind, curve))) / best_fixed_ms(kind, curve) for kind in pictures.KINDS}
    assert max(ratios.values()) < 1.1, ratios
    assert float(np.mean(list(ratios.values()))) < 1.045, ratios


def test_budget_drafts_again_where_a_picture_becomes_easy() -> None:
    """A hard upper half must not decide the lower one: repeated tokens show that guesses are good."""
    is_hard = pictures.ROWS < 12
    picture = pictures.Picture.make(np.where(is_hard, 25.0, 0.0), np.where(is_hard, 0.0, 9.0), seed=0)
    costs = CURVES["cpu"]
    _, nodes = pictures.decode(picture, Budget(format_costs(costs)))
    best = min(pictures.total_ms(pictures.decode(picture, Chain(size - 1))[1], costs) for size in (4, 12, 24))
    assert pictures.total_ms(nodes, costs) < 0.95 * best
    assert max(nodes[-20:]) >= 12


def test_budget_drafts_again_after_hard_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A photographed sky, say: no token repeats, and drafts double the time of a pass."""
    costs = ((1, 0.385), (8, 0.62), (16, 0.65), (32, 0.70), (64, 0.76))
    is_sky = pictures.ROWS < 2
    difficulty, repeats = np.where(is_sky, 25.0, 1.4), np.where(is_sky, 0.0, 1.0)
    drawn = [pictures.Picture.make(difficulty, repeats, seed) for seed in range(3)]

    def total_ms(policy: TreePolicy) -> float:
        return sum(pictures.total_ms(pictures.decode(picture, policy)[1], costs) for picture in drawn)

    best, budget = total_ms(Chain(63)), Budget(format_costs(costs))
    assert total_ms(budget) < 1.05 * best
    monkeypatch.setattr(running_sums, "RETRY_ROWS", pictures.SIZE)
    assert total_ms(budget) > 1.5 * best


@pytest.mark.parametrize("is_tree", [False, True])
def test_expected_passes_fall_with_nodes_and_grow_with_difficulty(is_tree: bool) -> None:
    by_nodes = [passes_per_token(nodes, 0.2, 24, is_tree=is_tree) for nodes in (2, 4, 8, 12, 24, 64, 128)]
    assert by_nodes == sorted(by_nodes, reverse=True) and by_nodes[0] <= 1
    by_difficulty = [passes_per_token(24, difficulty, 24, is_tree=is_tree) for difficulty in (0.0, 0.3, 1.0)]
    assert by_difficulty == sorted(by_difficulty) and passes_per_token(1, 0.0, 24) == pytest.approx(0.95)
