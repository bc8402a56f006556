"""The experiments, as data: the paper's tables, and what its reviewers asked for. Nothing here runs.

Depth 5, top-k 10 and 59 nodes are the tree of EAGLE-2 in the published code of LANTERN; delta 0.5 and k 100 stand in
the published command line of ADT-Tree. LANTERN++'s ratio 2 and k 10 are our choice.
"""

from __future__ import annotations

from underdraw.bench.methods import Method, Preset
from underdraw.errors import unknown

LANTERN, LANTERN_PLUS = "lantern:delta=0.5,k=100", "lantern:delta=1,ratio=2,k=10"
WINDOW = 24  # tokens that Jacobi methods guess ahead: what pays for the embedded model on a CPU
DEPTHS = (3, 4, 5, 6, 8)
DEFAULT = "default"  # the name of the tree that is chosen where nobody chooses

MAIN = Preset(
    "paper-main",
    "How fast is each method, and is the image still the one of plain autoregression?",
    (
        Method("EAGLE-1", "static", "rejection", about="static tree, drawn from q, judged by p / q; exact law"),
        Method("EAGLE-2", "confidence", "exact", proposal="topk", about="dynamic tree of the top-k of q; exact"),
        Method("LANTERN", "confidence", LANTERN, about="EAGLE-2's tree, relaxed acceptance; not exact"),
        Method(
            "LANTERN++", "static", LANTERN_PLUS, proposal="sampled", about="static tree, relaxed acceptance; not exact"
        ),
        Method("ADT-Tree", "adjacency", "exact", proposal="topk", about="adjacency-adaptive tree as published; exact"),
        Method("ADT-Tree + LANTERN", "adjacency", LANTERN, about="the same with relaxed acceptance; not exact"),
        Method(
            "SJD", f"chain:depth={WINDOW}", "rejection", f"jacobi:window={WINDOW}",
            about="speculative Jacobi decoding as published, no drafter; exact law",
        ),
        Method(
            "SJD, shared noise", f"chain:depth={WINDOW}", "exact", f"jacobi:window={WINDOW}",
            about="Jacobi with the target's noise, no drafter; exact",
        ),
        Method("ours: adjacency", "adjacency", "exact", proposal="coupled", about="ADT-Tree with shared noise; exact"),
        Method("ours: cost", "auto", "exact", proposal="coupled", about="shared noise, trees as large as pays; exact"),
    ),
    prompts=100,
)  # fmt: skip

INIT = Preset(
    "paper-init",
    "Whose state should a tree start from: the left neighbour's, the one's above, both, or a random one?",
    tuple(
        Method(f"{init}, {proposal}", f"adjacency:init={init}", "exact", proposal=proposal)
        for proposal in ("topk", "coupled")
        for init in ("horizontal", "vertical", "both", "random")
    ),
    prompts=16,
)

BUDGET = Preset(
    "fair-budget",
    "Does ADT-Tree beat trees of one size that have its own mean depth and node budget?",
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
    "Is it the neighbour in the picture that helps, or any adaptation, or just the drafter's confidence?",
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
    "How fast are the defaults beside plain autoregression, and do all trees give its very pixels?",
    (
        Method(DEFAULT, "auto", about="what a user gets who chooses nothing"),
        *(Method(tree, tree, drafter="trained") for tree in ("chain", "static", "confidence", "adjacency")),
    ),
    prompts=12,
    drafter="any",
)

PRESETS = {preset.name: preset for preset in (MAIN, INIT, BUDGET, SENSITIVITY, HELPS, DELTA, TARGETS)}


def preset(name: str) -> Preset:
    """The preset of a name."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
