"""Invariant 1, same seed, same image: every policy, drafter, temperature, filter, batch, guidance and layout.

The whole matrix is marked `full`. A part of it always runs that covers every pair of values of any two factors.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import toy_models

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.jacobi_tree import JacobiTree
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
    "trunk:nodes=16",
    "trunk:nodes=40,init=both,rule=paper",
    "budget:chain=1:10/4:10.5/8:12/24:30,tree=12:11/24:14",
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
    "jacobi-tree",
    "jacobi-tree-narrow",
    "neighbour",
)
TEMPERATURES = (0.0, 0.7, 1.0, 1.5)
FILTERS = ({}, {"top_k": 12}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.9})
SEEDS = ((5,), (7, 8, 9))
GUIDANCES = (1.0, 2.5)
LAYOUTS = {"plain": toy_models.PLAIN, "row-ends": toy_models.ROW_ENDS}


@functools.cache
def target() -> Any:
    return toy_models.target()


@functools.cache
def drafter(name: str) -> Any:
    model = target()
    return {
        "eagle": lambda: toy_models.eagle(model),
        "eagle-above": lambda: toy_models.eagle(model, above=True),
        "eagle-deep": lambda: toy_models.eagle(model, above=True, layers=2),
        "block": lambda: toy_models.block(model),
        "small-model": lambda: SmallModel(toy_models.target(3, toy_models.arch(layers=1))),
        "perfect": lambda: SmallModel(model),
        "adversary": lambda: toy_models.Adversary(SmallModel(model)),
        "jacobi-left": lambda: Jacobi(init="left"),
        "jacobi-above": lambda: Jacobi(window=6),
        "jacobi-random": lambda: Jacobi(init="random"),
        "jacobi-tree": lambda: JacobiTree(),
        "jacobi-tree-narrow": lambda: JacobiTree(ranks=2),
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
        values = (
            self.policy,
            self.drafter,
            self.temperature,
            self.filters,
            len(self.seeds),
            self.guidance,
            self.layout,
        )
        return "-".join(map(str, values))

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


def covering_cases() -> list[Case]:
    """Every policy with every drafter, twice, with random values of the other factors."""
    others = list(itertools.product(TEMPERATURES, range(len(FILTERS)), SEEDS, GUIDANCES, LAYOUTS))
    generator = random.Random(0)
    pairs = [pair for pair in itertools.product(POLICIES, DRAFTERS) for _ in range(2)]
    return [Case(*pair, *generator.choice(others)) for pair in pairs]


@functools.lru_cache(maxsize=4096)
def plain(temperature: float, filters: int, seeds: tuple[int, ...], guidance: float, layout: str) -> torch.Tensor:
    return toy_models.plain_tokens(target(), **Case("none", "", temperature, filters, seeds, guidance, layout).settings)


def check_equals_plain(case: Case) -> None:
    expected = plain(case.temperature, case.filters, case.seeds, case.guidance, case.layout)
    tokens, histories, steps = toy_models.run_decode(
        target(), drafter(case.drafter), policies.build(case.policy), **case.settings
    )
    assert torch.equal(tokens, expected)
    assert all(len(step.tokens) >= 1 for step in steps), "invariant 2: every target pass commits at least one token"
    assert all(history.done for history in histories)


@pytest.mark.parametrize("case", covering_cases(), ids=str)
def test_same_seed_same_image(case: Case) -> None:
    check_equals_plain(case)


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_same_image_everywhere(policy: str) -> None:
    for case in ALL:
        if case.policy == policy:
            check_equals_plain(case)


def test_covering_cases_contain_every_pair_of_values() -> None:
    cases = [(c.policy, c.drafter, c.temperature, c.filters, c.seeds, c.guidance, c.layout) for c in covering_cases()]
    assert len(cases) >= 200
    for a, b in itertools.combinations(range(len(FACTORS)), 2):
        assert {(case[a], case[b]) for case in cases} == set(itertools.product(FACTORS[a], FACTORS[b])), (a, b)


def test_image_does_not_depend_on_its_batch() -> None:
    together = toy_models.plain_tokens(target(), seeds=(7, 8, 9), guidance=2.0)
    for index, seed in enumerate((7, 8, 9)):
        alone = toy_models.run_decode(
            target(), drafter("eagle"), policies.build("confidence"), seeds=(seed,), guidance=2.0, first=index
        )[0]
        assert torch.equal(alone[0], together[index])


def test_perfect_drafter_is_accepted_completely() -> None:
    """With the target as drafter every chain is accepted to its end, so the matrix includes long paths."""
    _, histories, _ = toy_models.run_decode(
        target(), drafter("perfect"), policies.build("chain:depth=4"), temperature=1.0
    )
    assert histories[0].passes == -(-(toy_models.PLAIN.cells - 1) // 5)


def test_different_seeds_give_different_images() -> None:
    assert not torch.equal(toy_models.plain_tokens(target(), seeds=(1,)), toy_models.plain_tokens(target(), seeds=(2,)))
