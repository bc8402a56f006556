"""Traces: which trees were grown and how much of each was accepted, and decoding that repeats it with any model.

A model with random weights accepts nothing. To time the whole loop at the size of such a model, the accepted lengths of
real pictures, drawn by another model, are forced on it: all work is done, its outcome is put aside. What comes out is a
time, no picture, and every figure made this way says so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.history import History, StepResult
from underdraw.io import atomic_write
from underdraw.plan import TreePlan
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.exact import match_all_nodes

KIND = "underdraw-trace"


@dataclass(frozen=True, slots=True)
class Trace:
    """The passes of one picture, and what they were recorded from."""

    plans: tuple[TreePlan, ...]
    accepted: tuple[int, ...]
    about: dict[str, Any]

    @classmethod
    def of(cls, steps: Sequence[StepResult], about: dict[str, Any]) -> Trace:
        """The passes of the first image of a decode."""
        own = [step for step in steps if step.sequence == 0]
        return cls(tuple(step.plan for step in own), tuple(step.accepted for step in own), about)

    @property
    def tokens_per_pass(self) -> float:
        return (sum(self.accepted) + len(self.accepted)) / len(self.accepted)

    def save(self, path: Path) -> None:
        passes = [
            [accepted, plan.depth, plan.width, plan.branch, plan.nodes]
            for accepted, plan in zip(self.accepted, self.plans, strict=True)
        ]
        record = {"kind": KIND, "about": self.about, "columns": "accepted depth width branch nodes", "passes": passes}
        with atomic_write(path) as file:
            file.write((json.dumps(record) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Trace:
        """A trace from its file; fixed shapes come back as trees of the same size."""
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["kind"] != KIND or not record["passes"]:
                raise ValueError("it holds no passes")
            rows = [tuple(map(int, row)) for row in record["passes"]]
            plans = tuple(TreePlan(depth, width, branch, nodes) for _, depth, width, branch, nodes in rows)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is no trace ({error}); record one with underdraw generate --trace.") from None
        return cls(plans, tuple(row[0] for row in rows), dict(record.get("about", {})))


@dataclass(frozen=True, slots=True)
class Replan:
    """The plans of a trace, one after the other and from the start again."""

    trace: Trace

    def plan(self, history: History, step: int) -> TreePlan:
        return self.trace.plans[history.passes % len(self.trace.plans)]


class Replay:
    """A verifier that works like `exact` and then says what the trace says.

    Which pass it is counts a tensor on the device, so that it can be captured; `rewind` before each picture.
    """

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk")

    def __init__(self, trace: Trace, device: torch.device) -> None:
        self.lengths = torch.tensor(trace.accepted, device=device)  # (P,)
        self.passes = torch.zeros(1, dtype=torch.int64, device=device)

    def rewind(self) -> None:
        self.passes.zero_()

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        chosen = noise_window.sampler.layout.token_ids(noise_window.sample(logits, tree.depths + 1))  # (B, N)
        reach = noise_window.steps.shape[1]
        match_all_nodes(tree, reach, chosen)  # for its time
        length = torch.minimum(self.lengths[self.passes % len(self.lengths)], tree.depths.amax(1))  # (B,)
        self.passes.add_(1)
        node = (tree.depths == length[:, None]).int().argmax(1)  # a node of that depth: there is one
        rows = torch.arange(len(node), device=node.device)
        own = tree.ancestors[rows, node]  # (B, N)
        index, level = (torch.arange(count, device=node.device) for count in (tree.size, reach))
        path = ((own[:, None] & (tree.depths[:, None] == level[:, None])) * index).amax(-1)  # (B, reach)
        return AcceptedPath(path, length, chosen.gather(1, node[:, None])[:, 0], chosen)
