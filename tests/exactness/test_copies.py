"""Invariant 7: one device-to-host copy per pass, and shapes from a finite set of plans.

Run on the CPU with the code path of a GPU; torch's dispatcher finds every operation that would make the host wait.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import toy_models
from replay_tape import SYNCHRONISING
from torch.utils._python_dispatch import TorchDispatchMode

from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.nn.row_invariant import padded_rows
from underdraw.registry import policies, verifiers
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.tree_walk import TreeWalk


class SyncDetector(TorchDispatchMode):
    """Records operations that make the host wait for the device, with the line of underdraw that called them."""

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        is_mask_index = name in ("aten::index", "aten::index_put", "aten::index_put_") and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name.removeprefix("aten::") in SYNCHRONISING or is_mask_index:
            frame = sys._getframe()
            while frame.f_back is not None and "underdraw" not in frame.f_code.co_filename.replace("tests", ""):
                frame = frame.f_back
            self.syncs.append(f"{func.name()} in {frame.f_code.co_filename}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def drafters() -> dict[str, Any]:
    target = toy_models.target()
    return {
        "eagle": toy_models.eagle(target, above=True),
        "block": toy_models.block(target),
        "model": SmallModel(target),
        "jacobi": Jacobi(),
        "jacobi-tree": JacobiTree(),
        "neighbour": Neighbour(),
    }


CASES = [
    *(
        (name, policy, "exact", "skip")
        for name in drafters()
        for policy in ("static", "confidence", "adjacency:init=both")
    ),
    ("jacobi-tree", "trunk:nodes=16", "exact", "skip"),
    ("eagle", "static", "rejection", "skip"),
    ("eagle", "confidence", "lantern", "skip"),
    ("eagle", "confidence", "exact", "keep"),
]


@pytest.fixture(autouse=True)
def _row_invariance_is_measured() -> None:
    """Measured once per process, and it compares on the host: not part of a pass."""
    padded_rows(1, torch.float32)


@pytest.mark.parametrize(("name", "policy", "verifier", "token_stats"), CASES, ids=lambda part: str(part))
def test_one_copy_to_the_host_per_pass(
    name: str, policy: str, verifier: str, token_stats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TreeWalk, "uses_all_nodes", lambda on: True)  # as on a GPU
    copies = 0
    original_tolist = torch.Tensor.tolist

    def counting_tolist(tensor: torch.Tensor) -> Any:
        nonlocal copies
        copies += 1
        return original_tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counting_tolist)
    built = verifiers.build(verifier)
    if isinstance(built, Lantern):
        built = built.bind(torch.randn(len(toy_models.CODES), 4, generator=torch.Generator().manual_seed(0)))
    with SyncDetector() as detector:
        _, histories, _ = toy_models.run_decode(
            toy_models.target(),
            drafters()[name],
            policies.build(policy),
            verifier=built,
            layout=toy_models.ROW_ENDS,
            guidance=2.0,
            token_stats=token_stats,
        )
    assert detector.syncs == []
    setup = 2  # seeds and first tokens
    assert copies == histories[0].passes + setup


def test_adjacency_plans_come_from_a_finite_set() -> None:
    """Every plan of the adjacency policy is one of (depths) x (widths)."""
    policy = policies.build("adjacency:init=both,nodes=24")
    plans = set()
    for seed in range(6):
        _, _, steps = toy_models.run_decode(
            toy_models.target(), toy_models.eagle(toy_models.target()), policy, seeds=(seed,)
        )
        plans |= {step.plan for step in steps}
    assert 1 < len(plans) <= (policy.d_max + 1) * (policy.k_max - policy.k_min + 1)


def test_sync_detector_finds_every_wait() -> None:
    """Each of these operations makes the host wait, in and out of inference mode."""
    for mode in (True, False):
        with torch.inference_mode(mode), SyncDetector() as detector:
            values = torch.ones(3)
            bool(values.any())
            values.sum().item()
            values.nonzero()
            values[values > 0]
        assert len(detector.syncs) >= 4
