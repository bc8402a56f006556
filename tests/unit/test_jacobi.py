"""Speculative Jacobi decoding as published: guesses sampled anew and tested by p / q keep the target's distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lookup_models import TableTarget, decode_tokens, joint_probs, random_tables
from test_verifier_distributions import P_BIASED, P_UNBIASED, PLAIN, ROW_ENDS, TARGET, p_value
from torch import Tensor

from underdraw import Pipeline
from underdraw.drafters.jacobi import Jacobi
from underdraw.layout import Layout
from underdraw.plan import TreePlan
from underdraw.protocols import DraftRequest, Prompt, VerifiedStep
from underdraw.registry import policies
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.exact import Exact
from underdraw.verifiers.rejection import Rejection

SEEDS = range(8000)


def goodness_of_fit(verifier: Any, table: Tensor, layout: Layout, chain: int = 3, **settings: Any) -> float:
    """The p-value of a test of the joint distribution of all cells but the first."""
    policy = policies.build(f"chain:depth={chain}")
    tokens, histories = decode_tokens(
        TableTarget(table), Jacobi(), policy, verifier, layout, SEEDS, proposal="sampled", **settings
    )
    passes = np.mean([history.passes for history in histories])
    assert 1.05 < passes < layout.stop - layout.start - 1.05, "some tokens are accepted and some are rejected"
    images = layout.grid(tokens).reshape(len(SEEDS), -1)
    return p_value(images[:, 1:], joint_probs(table, layout, **settings).sum(0))


@pytest.mark.parametrize("verifier", [Rejection(), Exact()], ids=["rejection", "exact"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.4, "top_k": 5, "top_p": 0.9}], ids=["plain", "filters"])
def test_sampled_guesses_keep_the_distribution(verifier: Any, settings: dict[str, Any]) -> None:
    assert goodness_of_fit(verifier, TARGET, PLAIN, **settings) > P_UNBIASED


def test_sampled_guesses_keep_the_distribution_with_row_ends() -> None:
    assert goodness_of_fit(Rejection(), random_tables(ROW_ENDS, seed=3)[0], ROW_ENDS, chain=2) > P_UNBIASED


@dataclass(frozen=True)
class WrongQ:
    """Rejection sampling with a q that the guesses were not sampled from."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("sampled",)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        assert tree.q is not None
        return Rejection().verify(replace(tree, q=tree.q.flip(-1)), logits, noise_window)


def test_wrong_q_changes_the_distribution() -> None:
    assert goodness_of_fit(WrongQ(), TARGET, PLAIN) < P_BIASED


@pytest.mark.parametrize("init", ["left", "above"])
@pytest.mark.parametrize("by_verifier", [False, True], ids=["chosen-by-session", "chosen-by-verifier"])
def test_guesses_are_the_choices_of_the_previous_pass(by_verifier: bool, init: Any) -> None:
    """The guess for step s + 1 is the choice at the node of step s; new steps start from a neighbour."""
    layout = Layout(3, 4, range(4, 16))
    session = TableTarget(random_tables(layout, seed=1)[0]).open([Prompt((0,))] * 2, layout, guidance=1.0)
    draft = Jacobi(window=6, init=init).open([Prompt((0,))] * 2, layout, session.prefill, guidance=1.0)
    root, steps, sampler = torch.tensor([5, 9]), torch.tensor([0, 0]), Sampler(layout, [3, 4])
    noise_window = sampler.noise_window(steps, 5)
    tree = draft.draft(DraftRequest(root, steps, TreePlan(4, 1, 1, 5), noise_window))
    assert tree.tokens.tolist() == [[5] * 5, [9] * 5], "cells of the first row start from the left"
    output = session.forward(tree, steps)
    chosen = layout.token_ids(noise_window.sample(output.logits, tree.depths + 1))
    if by_verifier:
        chosen = (chosen - 3) % 12 + 4  # not what the session would choose
    accepted_path = AcceptedPath(torch.zeros(2, 1, dtype=torch.int64), torch.zeros_like(root), chosen[:, 0])
    accepted_path = replace(accepted_path, chosen=chosen if by_verifier else None).narrow(0)
    draft.commit(VerifiedStep(tree, accepted_path, output, noise_window, torch.ones_like(root), (1, 1)))
    tree = draft.draft(DraftRequest(chosen[:, 0], steps + 1, TreePlan(6, 1, 1, 7), sampler.noise_window(steps + 1, 7)))
    new = chosen[:, [4, 4]] if init == "left" else chosen[:, [1, 2]]  # cells (1, 2) and (1, 3), below steps 2 and 3
    assert torch.equal(tree.tokens, torch.cat([chosen, new], dim=1))


def test_greedy_tokens_equal_plain_decoding() -> None:
    fast, _ = decode_tokens(
        TableTarget(TARGET), Jacobi(), policies.build("chain"), Rejection(), PLAIN, [0], temperature=0
    )
    plain, _ = decode_tokens(TableTarget(TARGET), Jacobi(), policies.build("none"), Exact(), PLAIN, [0], temperature=0)
    assert np.array_equal(fast, plain)


def test_pipeline_uses_the_sampled_proposal_with_rejection(pipe: Pipeline) -> None:
    sjd = Pipeline(pipe.model, drafter="jacobi", tree="chain:depth=4", verifier="rejection")
    out = sjd(["fox", "red"], seed=1, output_type="codes")
    assert out.complete and out.stats.tokens_per_pass >= 1
