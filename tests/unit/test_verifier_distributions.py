"""Every supported pair of proposal and verifier samples images from the distribution of plain decoding.

Targets and drafters are tables, so the distribution of whole images can be enumerated and compared with samples. The
same test must reject relaxed acceptance and verifiers with typical bugs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lookup_models import TableDrafter, TableTarget, decode_tokens, joint_probs, look_up_logits, random_tables
from scipy import stats
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
TARGET, DRAFT = random_tables(PLAIN, seed=0)
SEEDS = range(8000)


@dataclass(frozen=True)
class Narrow:
    """A small fixed shape, narrow enough that drafts are often rejected."""

    shape: tuple[int, ...] = (-1, 0, 0, 1, 1, 2, 3)

    def plan(self, history: object, step: int) -> TreePlan:
        return TreePlan.from_shape(self.shape)


def p_value(images: np.ndarray, probs: np.ndarray) -> float:
    """Chi-square test of codes (B, cells) against joint probs; rare images are pooled."""
    table = np.zeros(probs.shape)
    np.add.at(table, tuple(images.T), 1)
    observed, expected = table.ravel(), probs.ravel() * len(images)
    assert observed[expected == 0].sum() == 0, "sampled an image that plain decoding never samples"
    rare = expected < 8
    counts = np.append(observed[~rare], observed[rare].sum())
    means = np.append(expected[~rare], expected[rare].sum())
    keep = means > 0
    return float(stats.chisquare(counts[keep], means[keep] * counts.sum() / means.sum()).pvalue)


def fit_p_value(
    verifier: object,
    proposal: Proposal,
    policy: object,
    *,
    layout: Layout = PLAIN,
    logits: tuple[Tensor, Tensor] = (TARGET, DRAFT),
    first_seed: int = 0,
    **settings: Any,
) -> float:
    """p-value of the joint distribution of the cells after the first; `logits` are the target's and the drafter's."""
    target, draft = logits
    seeds = [first_seed + seed for seed in SEEDS]
    tokens, histories = decode_tokens(
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
    assert accepted > 0.1, "nothing was accepted, the test is void"
    assert np.mean([history.passes for history in histories]) > 1.05, "nothing was rejected, the test is void"
    images = layout.grid(tokens).reshape(len(seeds), -1)
    return p_value(images[:, 1:], joint_probs(target, layout, **settings).sum(0))


LANTERN_OFF = Lantern(delta=0.0, k=3).bind(CODEBOOK)
SUPPORTED: list[tuple[Any, Proposal]] = [
    (Exact(), "coupled"),
    (Exact(), "topk"),
    (Exact(), "sampled"),
    (Rejection(), "sampled"),
    (LANTERN_OFF, "topk"),
    (LANTERN_OFF, "sampled"),
]
SUPPORTED_IDS = [f"{type(verifier).__name__.lower()}-{proposal}" for verifier, proposal in SUPPORTED]
P_UNBIASED, P_BIASED = 1e-4, 1e-9


def test_every_supported_pair_is_listed() -> None:
    listed = {(type(verifier), proposal) for verifier, proposal in SUPPORTED}
    assert listed == {(kind, proposal) for kind in (Exact, Rejection, Lantern) for proposal in kind.proposals}


@pytest.mark.parametrize(("verifier", "proposal"), SUPPORTED, ids=SUPPORTED_IDS)
def test_distribution_with_a_fixed_shape(verifier: Any, proposal: Proposal) -> None:
    assert fit_p_value(verifier, proposal, Narrow()) > P_UNBIASED


@pytest.mark.parametrize(("verifier", "proposal"), SUPPORTED, ids=SUPPORTED_IDS)
def test_distribution_with_filters(verifier: Any, proposal: Proposal) -> None:
    assert fit_p_value(verifier, proposal, Narrow(), first_seed=10**6, temperature=1.4, top_k=5, top_p=0.9) > P_UNBIASED


@pytest.mark.parametrize(("verifier", "proposal"), SUPPORTED, ids=SUPPORTED_IDS)
def test_distribution_with_more_children_than_codes(verifier: Any, proposal: Proposal) -> None:
    """The filter leaves two codes and the shape asks for four children: impossible codes are not children."""
    logits = (TARGET, random_tables(PLAIN, seed=5)[1])
    assert fit_p_value(verifier, proposal, Narrow((-1, 0, 0, 0, 0, 1, 1, 2, 2)), logits=logits, top_k=2) > P_UNBIASED


@pytest.mark.parametrize(
    "policy",
    ["confidence:depth=2,top_k=2,nodes=6", "adjacency:depth=2,d_min=1,nodes=5,d_max=3,width=2,k_min=1,k_max=3"],
)
@pytest.mark.parametrize(("verifier", "proposal"), SUPPORTED, ids=SUPPORTED_IDS)
def test_distribution_with_adaptive_trees(verifier: Any, proposal: Proposal, policy: str) -> None:
    """With `sampled` the shape is fixed before children are sampled; with the others it depends on the scores."""
    assert fit_p_value(verifier, proposal, policies.build(policy), first_seed=2 * 10**6, temperature=0.8) > P_UNBIASED


@pytest.mark.parametrize(("verifier", "proposal"), SUPPORTED, ids=SUPPORTED_IDS)
def test_distribution_with_row_ends(verifier: Any, proposal: Proposal) -> None:
    logits = random_tables(ROW_ENDS, seed=2)
    assert fit_p_value(verifier, proposal, Narrow(), layout=ROW_ENDS, logits=logits, first_seed=3 * 10**6) > P_UNBIASED


@pytest.mark.parametrize("policy", ["static:shape=mc_sim_7b_63", "chain:depth=3"])
def test_distribution_of_rejection_with_wide_and_narrow_trees(policy: str) -> None:
    assert fit_p_value(Rejection(), "sampled", policies.build(policy), first_seed=4 * 10**6) > P_UNBIASED


@pytest.mark.parametrize("verifier", [Rejection(), LANTERN_OFF], ids=["rejection", "lantern"])
def test_perfect_drafter_is_fully_accepted(verifier: Any) -> None:
    """With q = p every first child is accepted, and the token after it is sampled with the noise of its step."""
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


@pytest.mark.parametrize(
    ("verifier", "proposal"), [SUPPORTED[3], SUPPORTED[5]], ids=[SUPPORTED_IDS[3], SUPPORTED_IDS[5]]
)
def test_overconfident_drafter_does_not_bias(verifier: Any, proposal: Proposal) -> None:
    """A child whose q underflows must not count as one that the drafter never samples."""
    overconfident = DRAFT.clone()
    overconfident.scatter_add_(2, DRAFT.argmax(-1, keepdim=True), torch.full_like(DRAFT[..., :1], 150.0))
    assert fit_p_value(verifier, proposal, Narrow(), logits=(TARGET, overconfident)) > P_UNBIASED


# ------------------------------------------------------------------------------------- biased verifiers must fail


@pytest.mark.parametrize("proposal", Lantern.proposals)
@pytest.mark.parametrize(("delta", "ratio"), [(0.3, None), (1.0, 3.0)])
def test_relaxed_lantern_is_rejected(proposal: Proposal, delta: float, ratio: float | None) -> None:
    """Relaxed acceptance is not exact, and this test has the power to see it."""
    assert fit_p_value(Lantern(delta=delta, ratio=ratio, k=3).bind(CODEBOOK), proposal, Narrow()) < P_BIASED


@dataclass(frozen=True)
class AcceptsByRatio:
    """Accepts if u < p/q, however the children were chosen.

    With `coupled` the child is distributed as q, but the residual is sampled with the noise that chose the child. With
    `topk` children are not sampled at all.
    """

    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk")
    draft: Tensor

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        steps = noise_window.steps[:, :1] - 1 + tree.depths
        drafted = look_up_logits(self.draft, noise_window.sampler.layout, tree.tokens, steps)
        q = noise_window.filtered_logits(drafted, tree.depths + 1).softmax(-1)
        return Rejection().verify(replace(tree, q=q), logits, noise_window)


@dataclass(frozen=True)
class WithoutResidual:
    """Accepts if u < p/q, but samples from p instead of the residual after a rejection."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("sampled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        accepted_path = Rejection().verify(tree, logits, noise_window)
        last = accepted_path.path.gather(1, accepted_path.length[:, None])
        probs = target_probs(logits, tree.depths, noise_window)[torch.arange(len(last)), last[:, 0]]
        assert noise_window.noise is not None
        noise = noise_window.noise[torch.arange(len(last)), accepted_path.length]
        return replace(
            accepted_path, next_token=noise_window.sampler.layout.token_ids((probs.log() + noise).argmax(-1))
        )


def revealing_tables() -> tuple[Tensor, Tensor]:
    """Logits whose residual is a choice between a code that the drafter prefers and some that it does not."""
    target = torch.tensor([0.2, 0.5, 0.1, 0.1, 0.05, 0.05])
    draft = torch.tensor([0.6, 0.37, 0.01, 0.01, 0.005, 0.005])
    order = torch.stack([torch.arange(CODES).roll(shift) for shift in range(CODES)])  # another order after every code
    return tuple(probs.log()[order].expand(PLAIN.steps, -1, -1) for probs in (target, draft))  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("verifier", "proposal"),
    [
        (AcceptsByRatio(revealing_tables()[1]), "coupled"),
        (AcceptsByRatio(revealing_tables()[1]), "topk"),
        (WithoutResidual(), "sampled"),
    ],
    ids=["shared noise", "not sampled", "no residual"],
)
def test_biased_verifiers_are_rejected(verifier: Any, proposal: Proposal) -> None:
    assert fit_p_value(verifier, proposal, policies.build("chain:depth=2"), logits=revealing_tables()) < P_BIASED


@pytest.mark.parametrize(("verifier", "proposal"), SUPPORTED, ids=SUPPORTED_IDS)
def test_correct_verifiers_pass_where_biased_ones_fail(verifier: Any, proposal: Proposal) -> None:
    assert fit_p_value(verifier, proposal, policies.build("chain:depth=2"), logits=revealing_tables()) > P_UNBIASED


def test_other_temperature_is_rejected() -> None:
    tokens, _ = decode_tokens(
        TableTarget(TARGET), TableDrafter(DRAFT), Narrow(), Exact(), PLAIN, SEEDS, temperature=1.1
    )
    assert p_value(PLAIN.grid(tokens).reshape(len(SEEDS), -1)[:, 1:], joint_probs(TARGET, PLAIN).sum(0)) < P_BIASED
