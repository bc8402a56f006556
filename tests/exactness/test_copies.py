"""Invariant 7: one device-to-host copy a pass, and shapes from a finite set of plans.

Run on the CPU as if it were a device: every operation that would make the host wait is noticed by the dispatcher.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import toy
from torch.utils._python_dispatch import TorchDispatchMode

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.nn.row_invariant import padded_rows
from underdraw.registry import policies, verifiers
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.tree_walk import TreeWalk

WAITING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense",
        "item",
        "is_nonzero",
        "nonzero",
        "masked_select",
        "_unique2",
        "equal",
        "allclose",
    )
}


class Watch(TorchDispatchMode):
    """Notes operations whose result the host has to wait for, with the place in underdraw that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        masked = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in WAITING or masked:
            frame = sys._getframe()
            while frame.f_back is not None and "underdraw" not in frame.f_code.co_filename.replace("tests", ""):
                frame = frame.f_back
            self.waited.append(f"{func.name()} in {frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def drafters() -> dict[str, Any]:
    of = toy.target()
    return {
        "eagle": toy.eagle(of, above=True),
        "block": toy.block(of),
        "model": SmallModel(of),
        "jacobi": Jacobi(),
        "neighbour": Neighbour(),
    }


CASES = [
    *(
        (name, policy, "exact", "skip")
        for name in drafters()
        for policy in ("static", "confidence", "adjacency:init=both")
    ),
    ("eagle", "static", "rejection", "skip"),
    ("eagle", "confidence", "lantern", "skip"),
    ("eagle", "confidence", "exact", "keep"),
]


@pytest.fixture(autouse=True)
def _row_invariance_is_measured() -> None:
    """Measured once per process, and it compares on the host: not part of a pass."""
    padded_rows(1, torch.float32)


@pytest.mark.parametrize(("name", "policy", "verifier", "token_stats"), CASES, ids=lambda part: str(part))
def test_one_copy_a_pass(
    name: str, policy: str, verifier: str, token_stats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda on: True)  # as on a device
    copies = 0
    plain = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        return plain(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    check = verifiers.build(verifier)
    if isinstance(check, Lantern):
        check = check.bind(torch.randn(len(toy.CODES), 4, generator=torch.Generator().manual_seed(0)))
    with Watch() as watch:
        _, histories, _ = toy.run(
            toy.target(), drafters()[name], policies.build(policy), verifier=check, layout=toy.ROW_ENDS, guidance=2.0,
            token_stats=token_stats,
        )  # fmt: skip
    assert watch.waited == []
    opening = 2  # the seeds, and the first tokens
    assert copies == histories[0].passes + opening


def test_plans_are_a_finite_set() -> None:
    """Every plan that adjacency can return is one of (depths) x (widths)."""
    policy = policies.build("adjacency:init=both,nodes=24")
    seen = set()
    for seed in range(6):
        _, _, steps = toy.run(toy.target(), toy.eagle(toy.target()), policy, seeds=(seed,))
        seen |= {step.plan for step in steps}
    assert 1 < len(seen) <= (policy.d_max + 1) * (policy.k_max - policy.k_min + 1)


def test_waiting_is_noticed() -> None:
    """The watch itself: each of these would make the host wait, in and out of inference mode."""
    for mode in (True, False):
        with torch.inference_mode(mode), Watch() as watch:
            values = torch.ones(3)
            bool(values.any())
            values.sum().item()
            values.nonzero()
            values[values > 0]
        assert len(watch.waited) >= 4
