"""Monte-Carlo against enumeration: every legal pair of proposal and verifier draws from plain autoregression's law.

Targets and drafters are tables, so the law of whole images can be enumerated. The same test must reject relaxed
acceptance and verifiers that are wrong in the ways that are easy to get wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from tables import TableDrafter, TableTarget, draw, joint, look_up, tables
from torch import Tensor

from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.protocols import DraftRequest, Prompt
from underdraw.registry import policies
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.exact import Exact
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.rejection import Rejection
from underdraw.verifiers.rejection_sampling import target_probs

CODES = 6
PLAIN = Layout(1, 4, range(4, 4 + CODES))
ROW_ENDS = Layout(2, 2, range(4, 4 + CODES), prologue=(1,), row_end=20, epilogue=(2,))
CODEBOOK = torch.tensor([[0.0], [1.0], [2.1], [3.3], [4.6], [6.0]])
TARGET, DRAFT = tables(PLAIN, seed=0)
SEEDS = range(8000)


@dataclass(frozen=True)
class Narrow:
    """A small fixed shape, narrow enough that drafts are often rejected: two and two children, one below."""

    shape: tuple[int, ...] = (-1, 0, 0, 1, 1, 2, 3)

    def plan(self, history: object, step: int) -> TreePlan:
        return TreePlan.from_shape(self.shape)


def p_value(images: np.ndarray, chances: np.ndarray) -> float:
    """How well the codes (B, cells) fit a joint law: chi-square with rare images taken together."""
    table = np.zeros(chances.shape)
    np.add.at(table, tuple(images.T), 1)
    observed, expected = table.ravel(), chances.ravel() * len(images)
    assert observed[expected == 0].sum() == 0, "something was drawn that plain autoregression never draws"
    rare = expected < 8
    counts = np.append(observed[~rare], observed[rare].sum())
    means = np.append(expected[~rare], expected[rare].sum())
    keep = means > 0
    return float(stats.chisquare(counts[keep], means[keep] * counts.sum() / means.sum()).pvalue)


def fit(
    verifier: object,
    proposal: Proposal,
    policy: object,
    *,
    layout: Layout = PLAIN,
    logits: tuple[Tensor, Tensor] = (TARGET, DRAFT),
    first: int = 0,
    **settings: Any,
) -> float:
    """The p-value of the joint law of the three cells after the first; `logits` are the target's and the draft's."""
    target, draft = logits
    seeds = [first + seed for seed in SEEDS]
    tokens, histories = draw(
        TableTarget(target),
        TableDrafter(draft),
        policy,
        verifier,
        layout,
        seeds,
        proposal=proposal,
        **settings,
    )
    accepted = np.mean([history.accepted[layout.start + 1 : layout.stop].mean() for history in histories])
    assert accepted > 0.1, "nothing was accepted, so nothing was tested"
    assert np.mean([history.passes for history in histories]) > 1.05, "nothing was rejected, so nothing was tested"
    images = layout.grid(tokens).reshape(len(seeds), -1)
    return p_value(images[:, 1:], joint(target, layout, **settings).sum(0))


LANTERN_OFF = Lantern(delta=0.0, k=3).bind(CODEBOOK)
LEGAL: list[tuple[Any, Proposal]] = [
    (Exact(), "coupled"),
    (Exact(), "topk"),
    (Exact(), "sampled"),
    (Rejection(), "sampled"),
    (LANTERN_OFF, "topk"),
    (LANTERN_OFF, "sampled"),
]
LEGAL_IDS = [f"{type(verifier).__name__.lower()}-{proposal}" for verifier, proposal in LEGAL]
P_LEGAL, P_BIASED = 1e-4, 1e-9


def test_every_legal_pair_is_listed() -> None:
    """Invariant 11: what a verifier allows is what is tested here."""
    listed = {(type(verifier), proposal) for verifier, proposal in LEGAL}
    assert listed == {(kind, proposal) for kind in (Exact, Rejection, Lantern) for proposal in kind.proposals}


@pytest.mark.parametrize(("verifier", "proposal"), LEGAL, ids=LEGAL_IDS)
def test_legal_pairs_draw_from_the_law_with_a_fixed_shape(verifier: Any, proposal: Proposal) -> None:
    assert fit(verifier, proposal, Narrow()) > P_LEGAL


@pytest.mark.parametrize(("verifier", "proposal"), LEGAL, ids=LEGAL_IDS)
def test_legal_pairs_draw_from_the_law_with_filters(verifier: Any, proposal: Proposal) -> None:
    assert fit(verifier, proposal, Narrow(), first=10**6, temperature=1.4, top_k=5, top_p=0.9) > P_LEGAL


@pytest.mark.parametrize(("verifier", "proposal"), LEGAL, ids=LEGAL_IDS)
def test_legal_pairs_draw_from_the_law_with_more_children_than_codes(verifier: Any, proposal: Proposal) -> None:
    """The draft's filter leaves two codes and the shape asks for four: those that it cannot draw are no children."""
    logits = (TARGET, tables(PLAIN, seed=5)[1])
    assert fit(verifier, proposal, Narrow((-1, 0, 0, 0, 0, 1, 1, 2, 2)), logits=logits, top_k=2) > P_LEGAL


@pytest.mark.parametrize(
    "policy",
    ["confidence:depth=2,top_k=2,nodes=6", "adjacency:depth=2,d_min=1,nodes=5,d_max=3,width=2,k_min=1,k_max=3"],
)
@pytest.mark.parametrize(("verifier", "proposal"), LEGAL, ids=LEGAL_IDS)
def test_legal_pairs_draw_from_the_law_with_adaptive_trees(verifier: Any, proposal: Proposal, policy: str) -> None:
    """With `sampled` the shape is settled before the children are drawn; with the others growth is free to look."""
    assert fit(verifier, proposal, policies.build(policy), first=2 * 10**6, temperature=0.8) > P_LEGAL


@pytest.mark.parametrize(("verifier", "proposal"), LEGAL, ids=LEGAL_IDS)
def test_legal_pairs_draw_from_the_law_with_row_ends(verifier: Any, proposal: Proposal) -> None:
    logits = tables(ROW_ENDS, seed=2)
    assert fit(verifier, proposal, Narrow(), layout=ROW_ENDS, logits=logits, first=3 * 10**6) > P_LEGAL


@pytest.mark.parametrize("policy", ["static:shape=mc_sim_7b_63", "chain:depth=3"])
def test_rejection_draws_from_the_law_with_wide_and_narrow_trees(policy: str) -> None:
    assert fit(Rejection(), "sampled", policies.build(policy), first=4 * 10**6) > P_LEGAL


@pytest.mark.parametrize("verifier", [Rejection(), LANTERN_OFF], ids=["rejection", "lantern"])
def test_a_perfect_drafter_is_accepted_to_the_end(verifier: Any) -> None:
    """With q = p every first child is taken, and the token after the leaf is drawn with the noise of its own step."""
    count = 500
    noise_window = Sampler(PLAIN, range(count)).noise_window(torch.zeros(count, dtype=torch.int64), 4)
    target = TableTarget(TARGET).open([Prompt((0,))] * count, PLAIN, guidance=1.0)
    steps = torch.zeros(count, dtype=torch.int64)
    request = DraftRequest(torch.full((count,), 5), steps, TreePlan(3, 1, 1, 4), noise_window, "sampled")
    tree = TableDrafter(TARGET).open([], PLAIN, target.prefill, guidance=1.0).draft(request)
    logits = target.forward(tree, steps).logits
    accepted_path = verifier.verify(tree, logits, noise_window)
    assert accepted_path.length.tolist() == [3] * count
    assert accepted_path.path[:, :4].tolist() == [[0, 1, 2, 3]] * count
    assert torch.equal(accepted_path.next_token, PLAIN.token_ids(noise_window.sample(logits, tree.depths + 1))[:, 3])


@pytest.mark.parametrize(("verifier", "proposal"), [LEGAL[3], LEGAL[5]], ids=[LEGAL_IDS[3], LEGAL_IDS[5]])
def test_a_drafter_that_is_sure_of_itself_does_not_bias(verifier: Any, proposal: Proposal) -> None:
    """A child whose q is too small for a float must not be taken for one that the draft never draws."""
    sure = DRAFT.clone()
    sure.scatter_add_(2, DRAFT.argmax(-1, keepdim=True), torch.full_like(DRAFT[..., :1], 150.0))
    assert fit(verifier, proposal, Narrow(), logits=(TARGET, sure)) > P_LEGAL


# ------------------------------------------------------------------------------------------- what must be rejected


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize(("delta", "ratio"), [(0.3, None), (1.0, 3.0)])
def test_lantern_with_room_to_relax_fails_this_very_test(proposal: Proposal, delta: float, ratio: float | None) -> None:
    """Invariant 11: relaxed acceptance is not exact, and the harness sees it."""
    assert fit(Lantern(delta=delta, ratio=ratio, k=3).bind(CODEBOOK), proposal, Narrow()) < P_BIASED


@dataclass(frozen=True)
class JudgedByQ:
    """Accepts by u < p/q whatever the children came from.

    Shared noise (`coupled`) is the trap: the child has q's law, but the residual is drawn with the noise that chose it.
    The most likely codes (`topk`) have not been drawn at all.
    """

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk")
    draft: Tensor

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        steps = noise_window.steps[:, :1] - 1 + tree.depths
        drafted = look_up(self.draft, noise_window.sampler.layout, tree.tokens, steps)
        q = noise_window.filtered_logits(drafted, tree.depths + 1).softmax(-1)
        return Rejection().verify(replace(tree, q=q), logits, noise_window)


@dataclass(frozen=True)
class WithoutResidual:
    """Accepts by u < p/q and, after a rejection, draws from p instead of what is left of it."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("sampled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        accepted_path = Rejection().verify(tree, logits, noise_window)
        last = accepted_path.path.gather(1, accepted_path.length[:, None])
        law = target_probs(logits, tree.depths, noise_window)[torch.arange(len(last)), last[:, 0]]
        assert noise_window.noise is not None
        noise = noise_window.noise[torch.arange(len(last)), accepted_path.length]
        return replace(accepted_path, next_token=noise_window.sampler.layout.token_ids((law.log() + noise).argmax(-1)))


def trap() -> tuple[Tensor, Tensor]:
    """Logits of laws whose residual chooses between a code that the draft likes and some that it does not."""
    target = torch.tensor([0.2, 0.5, 0.1, 0.1, 0.05, 0.05])
    draft = torch.tensor([0.6, 0.37, 0.01, 0.01, 0.005, 0.005])
    order = torch.stack([torch.arange(CODES).roll(shift) for shift in range(CODES)])  # another one after every code
    return tuple(law.log()[order].expand(PLAIN.steps, -1, -1) for law in (target, draft))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("verifier", "proposal"),
    [(JudgedByQ(trap()[1]), "coupled"), (JudgedByQ(trap()[1]), "topk"), (WithoutResidual(), "sampled")],
    ids=["shared noise", "picked, not drawn", "no residual"],
)
def test_the_harness_rejects_biased_verifiers(verifier: Any, proposal: Proposal) -> None:
    """Invariant 11; the honest verifier passes with the same tables."""
    assert fit(verifier, proposal, policies.build("chain:depth=2"), logits=trap()) < P_BIASED


@pytest.mark.parametrize(("verifier", "proposal"), LEGAL, ids=LEGAL_IDS)
def test_honest_verifiers_pass_where_biased_ones_fail(verifier: Any, proposal: Proposal) -> None:
    assert fit(verifier, proposal, policies.build("chain:depth=2"), logits=trap()) > P_LEGAL


def test_the_harness_rejects_another_temperature() -> None:
    tokens, _ = draw(TableTarget(TARGET), TableDrafter(DRAFT), Narrow(), Exact(), PLAIN, SEEDS, temperature=1.1)
    assert p_value(PLAIN.grid(tokens).reshape(len(SEEDS), -1)[:, 1:], joint(TARGET, PLAIN).sum(0)) < P_BIASED
