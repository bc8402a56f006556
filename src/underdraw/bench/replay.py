"""Traces of decoded images (tree plans and accepted lengths), and decoding that replays one with any model.

A model with random weights accepts nothing. To time the whole loop at its size, the accepted lengths of a real image
of another model are forced on it: all work is done, and its verdict is discarded. The result is a time and no image,
and every number measured this way says so.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.history import History, StepResult
from underdraw.io import atomic_write, atomic_write_text, check_regular, parse_json, read_json_object
from underdraw.plan import TreePlan
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.exact import match_all_nodes

TRACE_KIND = "underdraw-trace"
MAX_PASSES = 1024  # of a trace that a `ReplayVerifier` can load later


@dataclass(frozen=True, slots=True)
class Trace:
    """Plan and accepted length of every pass of one image, and what they were recorded from."""

    plans: tuple[TreePlan, ...]
    accepted: tuple[int, ...]
    about: dict[str, Any]

    @classmethod
    def from_steps(cls, steps: Sequence[StepResult], about: dict[str, Any]) -> Trace:
        """The passes of the first image of a decode."""
        passes = [step for step in steps if step.sequence == 0]
        return cls(tuple(step.plan for step in passes), tuple(step.accepted for step in passes), about)

    @property
    def tokens_per_pass(self) -> float:
        return (sum(self.accepted) + len(self.accepted)) / len(self.accepted)

    def save(self, path: Path) -> None:
        passes = [
            [accepted, plan.depth, plan.width, plan.branch, plan.nodes]
            for accepted, plan in zip(self.accepted, self.plans, strict=True)
        ]
        columns = "accepted depth width branch nodes"
        record = {"kind": TRACE_KIND, "about": self.about, "columns": columns, "passes": passes}
        atomic_write_text(path, json.dumps(record) + "\n")

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read a trace. Plans with a fixed shape come back as plans of the same size."""
        try:
            record = read_json_object(path, "a trace")
            if record["kind"] != TRACE_KIND or not record["passes"]:
                raise ValueError("it holds no passes")
            rows = [tuple(map(int, row)) for row in record["passes"]]
            plans = tuple(TreePlan(depth, width, branch, nodes) for _, depth, width, branch, nodes in rows)
        except (ValueError, KeyError, TypeError, ConfigError) as error:
            raise ConfigError(f"{path} is not a trace ({error}); record one with underdraw generate --trace.") from None
        return cls(plans, tuple(row[0] for row in rows), dict(record.get("about", {})))


def save_traces(path: Path, traces: Sequence[Trace]) -> None:
    """Write many traces into one compressed file: four bytes per pass, and what they were recorded from as JSON."""
    columns = [
        [accepted, plan.depth, plan.branch, plan.nodes]
        for trace in traces
        for accepted, plan in zip(trace.accepted, trace.plans, strict=True)
    ]
    about = json.dumps([trace.about for trace in traces])
    with atomic_write(path) as file:
        np.savez_compressed(
            file,
            passes=np.array(columns, dtype=np.uint8),
            counts=np.array([len(trace.plans) for trace in traces], dtype=np.int32),
            about=np.frombuffer(about.encode(), dtype=np.uint8),
        )


def load_traces(path: Path) -> list[Trace]:
    """The traces of `save_traces`."""
    check_regular(path, "traces")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            passes, counts = arrays["passes"].astype(int), arrays["counts"]
            about = parse_json(arrays["about"].tobytes())
        parts = np.split(passes, np.cumsum(counts)[:-1])
        return [
            Trace(
                tuple(
                    TreePlan(depth, 2 if branch > 1 else 1, branch, nodes) for _, depth, branch, nodes in part.tolist()
                ),
                tuple(part[:, 0].tolist()),
                facts,
            )
            for part, facts in zip(parts, about, strict=True)
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} holds no traces ({error}); benchmarks/replay_kinds.py writes such a file.") from None


@dataclass(frozen=True, slots=True)
class ReplayPolicy:
    """A tree policy that repeats the plans of a trace, from the start again when they are used up."""

    trace: Trace

    def plan(self, history: History, step: int) -> TreePlan:
        return self.trace.plans[history.passes % len(self.trace.plans)]


class ReplayVerifier:
    """A verifier that does the work of `exact` and then accepts as many tokens as the trace says.

    The number of the pass is a tensor on the device, so that passes can be captured; call `rewind` before each image.
    """

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk")

    def __init__(self, trace: Trace, device: torch.device) -> None:
        self.lengths = torch.zeros(max(MAX_PASSES, len(trace.accepted)), dtype=torch.int64, device=device)
        self.count = torch.ones(1, dtype=torch.int64, device=device)  # passes of the trace
        self.pass_number = torch.zeros(1, dtype=torch.int64, device=device)
        self.load(trace)

    def load(self, trace: Trace) -> None:
        """Replay another trace from its start, in the same tensors, so that captured passes stay valid."""
        accepted = torch.tensor(trace.accepted)
        self.lengths[: len(accepted)].copy_(accepted)
        self.count.fill_(len(accepted))
        self.rewind()

    def rewind(self) -> None:
        self.pass_number.zero_()

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        chosen = noise_window.sampler.layout.token_ids(noise_window.sample(logits, tree.depths + 1))  # (B, N)
        reach = noise_window.steps.shape[1]
        match_all_nodes(tree, reach, chosen)  # only for its time
        length = torch.minimum(self.lengths[self.pass_number % self.count], tree.depths.amax(1))  # (B,)
        self.pass_number.add_(1)
        index, level = (torch.arange(count, device=length.device) for count in (tree.size, reach))
        # The last node of that depth: on a branch, where there is one, whose keys and values have to be moved.
        node = ((tree.depths == length[:, None]) * index).amax(1)
        rows = torch.arange(len(node), device=node.device)
        ancestors = tree.ancestors[rows, node]  # (B, N)
        path = ((ancestors[:, None] & (tree.depths[:, None] == level[:, None])) * index).amax(-1)  # (B, reach)
        return AcceptedPath(path, length, chosen.gather(1, node[:, None])[:, 0], chosen)
