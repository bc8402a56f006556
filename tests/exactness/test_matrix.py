"""Invariant 1, same seed, same image: every policy, drafter, temperature, filter, batch, guidance and layout.

The whole matrix is marked `full`; a covering part of it, in which every pair of settings of any two factors meets,
always runs.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import toy

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.registry import policies

POLICIES = (
    "none",
    "chain:depth=4",
    "static:shape=mc_sim_7b_63",
    "static:shape=reverse_balanced_25",
    "confidence",
    "confidence:depth=3,top_k=4,nodes=12",
    "adjacency:init=horizontal,nodes=24",
    "adjacency:init=vertical,nodes=24,beta=0.2",
    "adjacency:init=random,nodes=24",
    "adjacency:init=both,nodes=40,l_d=2",
    "cost:node=0.4,depth=5",
    "cost:plain=2,base=6,node=0.5,retry=3,nodes=24",
)
DRAFTERS = (
    "eagle",
    "eagle-above",
    "eagle-deep",
    "block",
    "small-model",
    "perfect",
    "adversary",
    "jacobi-left",
    "jacobi-above",
    "jacobi-random",
    "neighbour",
)
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
FILTERS = ({}, {"top_k": 12}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9})
SEEDS = ((5,), (7, 8, 9))
GUIDANCES = (1.0, 2.5)
LAYOUTS = {"plain": toy.PLAIN, "row-ends": toy.ROW_ENDS}


@functools.cache
def target() -> Any:
    return toy.target()


@functools.cache
def drafter(name: str) -> Any:
    of = target()
    return {
        "eagle": lambda: toy.eagle(of),
        "eagle-above": lambda: toy.eagle(of, above=True),
        "eagle-deep": lambda: toy.eagle(of, above=True, layers=2),
        "block": lambda: toy.block(of),
        "small-model": lambda: SmallModel(toy.target(3, toy.arch(layers=1))),
        "perfect": lambda: SmallModel(of),
        "adversary": lambda: toy.Adversary(SmallModel(of)),
        "jacobi-left": lambda: Jacobi(init="left"),
        "jacobi-above": lambda: Jacobi(window=6),
        "jacobi-random": lambda: Jacobi(init="random"),
        "neighbour": lambda: Neighbour(),
    }[name]()


@dataclass(frozen=True)
class Case:
    policy: str
    drafter: str
    temperature: float
    filters: int
    seeds: tuple[int, ...]
    guidance: float
    layout: str

    def __str__(self) -> str:
        return "-".join(
            map(
                str,
                (
                    self.policy,
                    self.drafter,
                    self.temperature,
                    self.filters,
                    len(self.seeds),
                    self.guidance,
                    self.layout,
                ),
            )
        )

    @property
    def settings(self) -> dict[str, Any]:
        return {
            "layout": LAYOUTS[self.layout],
            "seeds": self.seeds,
            "temperature": self.temperature,
            "guidance": self.guidance,
            **FILTERS[self.filters],
        }


FACTORS = (POLICIES, DRAFTERS, TEMPERATURES, tuple(range(len(FILTERS))), SEEDS, GUIDANCES, tuple(LAYOUTS))
ALL = [Case(*values) for values in itertools.product(*FACTORS)]


def covering() -> list[Case]:
    """Every policy with every drafter, twice; the other factors are dealt out."""
    others = list(itertools.product(TEMPERATURES, range(len(FILTERS)), SEEDS, GUIDANCES, LAYOUTS))
    deal = random.Random(0)
    pairs = [pair for pair in itertools.product(POLICIES, DRAFTERS) for _ in range(2)]
    return [Case(*pair, *deal.choice(others)) for pair in pairs]


@functools.lru_cache(maxsize=4096)
def plain(temperature: float, filters: int, seeds: tuple[int, ...], guidance: float, layout: str) -> torch.Tensor:
    return toy.plain(target(), **Case("none", "", temperature, filters, seeds, guidance, layout).settings)


def check(case: Case) -> None:
    expected = plain(case.temperature, case.filters, case.seeds, case.guidance, case.layout)
    tokens, histories, steps = toy.run(target(), drafter(case.drafter), policies.build(case.policy), **case.settings)
    assert torch.equal(tokens, expected)
    assert all(len(step.tokens) >= 1 for step in steps), "invariant 2: every target pass commits at least one token"
    assert all(history.done for history in histories)


@pytest.mark.parametrize("case", covering(), ids=str)
def test_same_seed_same_image(case: Case) -> None:
    check(case)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_image_everywhere(policy: str) -> None:
    for case in ALL:
        if case.policy == policy:
            check(case)


def test_the_covering_part_covers() -> None:
    """Any two settings of any two factors meet in some case that always runs."""
    cases = [(c.policy, c.drafter, c.temperature, c.filters, c.seeds, c.guidance, c.layout) for c in covering()]
    assert len(cases) >= 200
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)


def test_rows_of_a_batch_are_images_of_their_own() -> None:
    """An image does not depend on what else is in its batch."""
    together = toy.plain(target(), seeds=(7, 8, 9), guidance=2.0)
    for index, seed in enumerate((7, 8, 9)):
        alone = toy.run(
            target(), drafter("eagle"), policies.build("confidence"), seeds=(seed,), guidance=2.0, first=index
        )[0]
        assert torch.equal(alone[0], together[index])


def test_a_perfect_drafter_fills_its_trees() -> None:
    """With the target itself as drafter every chain is accepted to its end: the matrix does test long paths."""
    _, histories, _ = toy.run(target(), drafter("perfect"), policies.build("chain:depth=4"), temperature=1.0)
    assert histories[0].passes == -(-(toy.PLAIN.cells - 1) // 5)


def test_another_seed_gives_another_image() -> None:
    assert not torch.equal(toy.plain(target(), seeds=(1,)), toy.plain(target(), seeds=(2,)))
