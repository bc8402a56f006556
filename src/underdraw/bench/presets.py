"""Benchmark methods and the experiments (presets) that compare them with plain autoregression. Data only: no torch.

Depth 5, top-k 10 and 59 nodes are EAGLE-2's tree in the published code of LANTERN; delta 0.5 and k 100 are in the
published command line of ADT-Tree. LANTERN++'s ratio 2 and k 10 are our choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from underdraw.errors import ConfigError, unknown

PLAIN = "AR"  # the name of plain autoregression, the baseline of every run
DEFAULT = "default"  # the method of a user who sets no options
LANTERN, LANTERN_PLUS = "lantern:delta=0.5,k=100", "lantern:delta=1,ratio=2,k=10"
JACOBI_WINDOW = 24  # tokens that Jacobi methods draft ahead: the fastest for the embedded model on a CPU
DEPTHS = (3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Method:
    """One row of a table: a combination of tree policy, verifier, drafter and proposal, as on the command line."""

    name: str
    tree: str
    verifier: str = "exact"
    drafter: str = "auto"  # "trained": the drafter that comes with the model, even if another one is its default
    proposal: str = "auto"
    about: str = ""  # one line for readers

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Preset:
    """An experiment: its question, and the methods that it compares with plain autoregression."""

    name: str
    question: str
    methods: tuple[Method, ...]
    temperatures: tuple[float, ...] = (0.0, 1.0)
    prompts: int | None = None  # how many prompts are enough; None: all of them
    drafter: Literal["trained", "any"] = "trained"  # "any": also runs with the fallback of a model without a drafter
    has_cost_model: bool = True  # whether costs are fitted to extra images, to check the cost model


AR = Method(PLAIN, tree="none", drafter="forced", about="plain autoregression, one token a pass")


def method_grid(
    trees: Sequence[str], verifiers: Sequence[str], drafters: Sequence[str], proposals: Sequence[str]
) -> tuple[Method, ...]:
    """Every combination of the four parts, named by the parts that vary."""
    axes = (trees, verifiers, drafters, proposals)
    methods = []
    for parts in itertools.product(*axes):
        varying = [part for part, axis in zip(parts, axes, strict=True) if len(axis) > 1]
        methods.append(Method(" ".join(varying) or parts[0], *parts))
    return tuple(methods)


def check_method_names(methods: Sequence[Method]) -> None:
    """Raise a ConfigError if two methods of a run have the same name."""
    names = [method.name for method in methods]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise ConfigError(f"method {duplicates[0]!r} appears twice; every method of a run needs a different name.")


MAIN = Preset(
    "paper-main",
    "How fast is each method, and is its image identical to that of plain autoregression?",
    (
        Method(
            "EAGLE-1",
            "static",
            "rejection",
            about="static tree sampled from q, accepted by p / q; the same distribution, other images",
        ),
        Method("EAGLE-2", "confidence", "exact", proposal="topk", about="dynamic tree of the top-k of q; exact"),
        Method("LANTERN", "confidence", LANTERN, about="EAGLE-2's tree, relaxed acceptance; not exact"),
        Method(
            "LANTERN++", "static", LANTERN_PLUS, proposal="sampled", about="static tree, relaxed acceptance; not exact"
        ),
        Method("ADT-Tree", "adjacency", "exact", proposal="topk", about="adjacency-adaptive tree as published; exact"),
        Method("ADT-Tree + LANTERN", "adjacency", LANTERN, about="the same with relaxed acceptance; not exact"),
        Method(
            "SJD",
            f"chain:depth={JACOBI_WINDOW}",
            "rejection",
            f"jacobi:window={JACOBI_WINDOW}",
            about="speculative Jacobi decoding as published, no drafter network; the same distribution, other images",
        ),
        Method(
            "SJD, shared noise",
            f"chain:depth={JACOBI_WINDOW}",
            "exact",
            f"jacobi:window={JACOBI_WINDOW}",
            about="Jacobi decoding with the target's noise, no drafter network; exact",
        ),
        Method("ours: adjacency", "adjacency", "exact", proposal="coupled", about="ADT-Tree with shared noise; exact"),
        Method(
            "ours: cost",
            "auto",
            "exact",
            proposal="coupled",
            about="shared noise, tree size from the cost model; exact",
        ),
    ),
    prompts=100,
)

INIT = Preset(
    "paper-init",
    "Which neighbour's tree state should a tree start from: left, above, both, or a random one?",
    tuple(
        Method(f"{init}, {proposal}", f"adjacency:init={init}", "exact", proposal=proposal)
        for proposal in ("topk", "coupled")
        for init in ("horizontal", "vertical", "both", "random")
    ),
    prompts=16,
)

BUDGET = Preset(
    "fair-budget",
    "Does ADT-Tree beat fixed-size trees with the same mean depth and node budget?",
    (
        Method("ADT-Tree", "adjacency", "exact", proposal="topk"),
        Method("ADT-Tree, shared noise", "adjacency", "exact", proposal="coupled"),
        *(
            Method(f"{name}, depth {depth}", f"confidence:depth={depth}", verifier, proposal=proposal)
            for name, verifier, proposal in (
                ("EAGLE-2", "exact", "topk"),
                ("static", "rejection", "sampled"),
                ("shared noise", "exact", "coupled"),
            )
            for depth in DEPTHS
        ),
    ),
    prompts=12,
)

_BETAS, _STEPS = (0.2, 0.35, 0.5, 0.65, 0.8), (1, 2, 3)
_ONE_AT_A_TIME = (
    *(f"l_k={step}" for step in (0, 2, 4)),
    *(f"d_max={bound}" for bound in (6, 8, 14)),
    *(f"d_min={bound}" for bound in (1, 3)),
    *(f"k_max={bound}" for bound in (8, 16)),
    *(f"k_min={bound}" for bound in (1, 4)),
    *(f"nodes={count}" for count in (12, 16, 24, 32, 48, 96)),
)
SENSITIVITY = Preset(
    "sensitivity",
    "Which threshold, steps, bounds and node budget should the adjacency policy have?",
    (
        *(
            Method(f"beta={beta}, l_d={step}", f"adjacency:beta={beta},l_d={step}", proposal="coupled")
            for beta in _BETAS
            for step in _STEPS
        ),
        *(Method(option, f"adjacency:{option}", proposal="coupled") for option in _ONE_AT_A_TIME),
    ),
    prompts=8,
    temperatures=(1.0,),
)

HELPS = Preset(
    "what-helps",
    "What helps: the neighbouring cell's tree, any adaptation, or the drafter's confidence alone?",
    tuple(
        Method(f"{name}, {proposal}", tree, "exact", proposal=proposal)
        for proposal in ("topk", "coupled")
        for name, tree in (
            ("adjacency", "adjacency"),
            ("confidence only", "confidence:depth=5,top_k=8"),
            ("previous tree only", "adjacency:init=previous"),
            ("random adaptation", "adjacency:init=random"),
        )
    ),
    prompts=16,
)

DELTA = Preset(
    "lantern-delta",
    "What does LANTERN's delta buy, and what does it cost?",
    (
        *(
            Method(f"LANTERN delta={delta}", "confidence", f"lantern:delta={delta},k=100", proposal="topk")
            for delta in (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.8)
        ),
        Method("ours: cost", "auto", "exact", proposal="coupled"),
    ),
    temperatures=(1.0,),
    prompts=32,
)

TARGETS = Preset(
    "targets",
    "How fast are the defaults compared with plain autoregression, and are all images identical to its images?",
    (
        Method(DEFAULT, "auto", about="no options set"),
        *(Method(tree, tree, drafter="trained") for tree in ("chain", "static", "confidence", "adjacency")),
    ),
    prompts=12,
    drafter="any",
)

JACOBI_NODES = 64  # of the fixed Jacobi chain and trees of `kinds`
_CHAIN = f"chain:depth={JACOBI_NODES - 1}"
KINDS = Preset(
    "kinds",
    "Which method is fastest on which kind of picture?",
    (
        Method(
            "EAGLE-2", "confidence", drafter="trained", proposal="topk", about="dynamic tree of the top-k of q; exact"
        ),
        Method("ADT-Tree", "adjacency", drafter="trained", proposal="topk", about="adjacency-adaptive tree; exact"),
        Method(
            "ADT-Tree + LANTERN (published rule)",
            "adjacency",
            f"{LANTERN},rule=published",
            drafter="trained",
            proposal="topk",
            about="the same with relaxed acceptance as in the authors' code; not exact",
        ),
        Method(
            "SJD", _CHAIN, "rejection", "jacobi:window=63", about="Jacobi chain of 64 nodes, resampled; other images"
        ),
        Method(
            "SJD-PAC tree",
            "static:shape=sjd_pac_64",
            drafter="jacobi-tree",
            about="three levels of three, then a chain",
        ),
        Method("Jacobi chain", _CHAIN, drafter="jacobi:window=63", about="64 nodes, shared noise; exact"),
        Method(
            "Jacobi tree, fixed",
            "trunk:init=fixed,base=44",
            drafter="jacobi-tree",
            about="64 nodes, trunk of 44; exact",
        ),
        Method(
            "Jacobi tree, row above", "trunk", drafter="jacobi-tree", about="64 nodes, trunk by the row above; exact"
        ),
        Method("auto", "auto", drafter="jacobi-tree", about="size and shape by measured costs; exact"),
    ),
    temperatures=(1.0, 0.5),
    prompts=40,
    has_cost_model=False,
)

_INITS = ("above", "left", "above-right", "both", "previous", "random")
TRUNK = Preset(
    "jacobi-trunk",
    "Which neighbour should the trunk of a Jacobi tree follow, and by which rule?",
    (
        Method("chain", _CHAIN, drafter="jacobi:window=63"),
        Method("fixed trunk", "trunk:init=fixed,base=44", drafter="jacobi-tree"),
        *(Method(f"{init}, linear rule", f"trunk:init={init}", drafter="jacobi-tree") for init in _INITS),
        *(
            Method(f"{init}, paper's rule", f"trunk:init={init},rule=paper", drafter="jacobi-tree")
            for init in _INITS
            if init != "random"
        ),
    ),
    temperatures=(1.0,),
    prompts=40,
    drafter="any",
)

PRESETS = {p.name: p for p in (MAIN, INIT, BUDGET, SENSITIVITY, HELPS, DELTA, TARGETS, KINDS, TRUNK)}


def find_preset(name: str) -> Preset:
    """The preset with this name, or a ConfigError that lists all of them."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
