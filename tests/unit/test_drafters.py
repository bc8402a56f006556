"""Inputs of drafters: the target's features one position before each token, and the row above each cell to come.

No exactness test fails for a drafter with wrong inputs; it only drafts badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.eagle import ABOVE, EagleSession, above_tokens
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.neighbour import Neighbour
from underdraw.drafters.small_model import SmallModel
from underdraw.layout import Layout
from underdraw.nn.rope import Rope, RopeTable, apply_rope, split_cos_sin
from underdraw.policies.confidence import Confidence
from underdraw.policies.fixed import Chain, NoTree
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt
from underdraw.sampling import gumbel


@dataclass(frozen=True)
class RecordingDrafter:
    """An EAGLE drafter that records the inputs of its network: token, feature, step and row above of every token."""

    proposes: ClassVar[str] = "tree"

    drafter: Any
    inputs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def open(self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float) -> Any:
        session = self.drafter.open(prompts, layout, prefill, guidance=guidance)
        assert isinstance(session, EagleSession)
        append_pending = session.append_pending

        def record_and_append(request: DraftRequest) -> None:
            pending = session.pending
            last = (pending.counts - 1).clamp(min=0)[:, None]
            tokens = pending.tokens.scatter(1, last, request.root.repeat(session.copies)[:, None])
            above = above_tokens(session.committed, layout, pending.steps + 1, session.roots, session.copies)
            for row, count in enumerate(pending.host_counts):
                parts = (tokens, pending.features, pending.steps, above)
                self.inputs.append(tuple(part[row, :count] for part in parts))  # type: ignore[arg-type]
            append_pending(request)

        session.append_pending = record_and_append  # type: ignore[method-assign]
        return session


def target_features(target: Any, layout: Layout, tokens: Tensor, prompt: tuple[int, ...]) -> Tensor:
    """The target's features of every token of one row, by one plain forward pass."""
    session = target.open([Prompt(prompt)], layout, guidance=1.0)
    steps = torch.arange(layout.start, layout.stop)[None]
    x, cos_sin = target.net.embed(tokens[steps]), session.rope_table(steps)
    count = steps.shape[1]
    with torch.no_grad():
        image = session.decoder.append(x, cos_sin, torch.tensor([count]), [count])
    return torch.cat([session.prefill.features, image], dim=1)[0]


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
def test_eagle_reads_target_features_and_row_above(layout: Layout) -> None:
    """At step s: the token of s, the feature of the token before, the tokens above and above-right of cell s + 1."""
    target = toy_models.target()
    drafter = RecordingDrafter(toy_models.eagle(target, above=True))
    tokens = toy_models.run_decode(target, drafter, Confidence(depth=4, top_k=4, nodes=20), layout=layout, seeds=(5,))[
        0
    ][0]
    prompt = toy_models.prompts(1)[0].condition
    expected_features = target_features(target, layout, tokens, prompt)
    checked = 0
    for ids, features, steps, above in drafter.inputs:
        for token, feature, step, pair in zip(ids, features, steps.tolist(), above.tolist(), strict=True):
            if step < layout.start:
                continue
            assert token == tokens[step]
            assert torch.equal(feature, expected_features[len(prompt) + step - 1])
            expected_pair = []
            for cols in (0, 1):
                neighbour, is_inside = layout.neighbour(step + 1, -1, cols)
                expected_pair.append(int(tokens[neighbour]) if is_inside else -1)
            assert pair == expected_pair
            checked += 1
    assert checked >= layout.stop - layout.start - 6, "every token but those of the last tree is an input"


DRAFTERS = {
    "eagle": toy_models.eagle,
    "block": toy_models.block,
    "model": lambda target: SmallModel(toy_models.target(3)),
}


@pytest.mark.parametrize("make_drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_kv_cache_is_the_same_for_any_acceptance_length(make_drafter: Any) -> None:
    """Appending the accepted tokens at once leaves the keys and values of appending them one by one."""
    target = toy_models.target()
    drafter = make_drafter(target)
    plain, with_trees = SessionKeeper(drafter), SessionKeeper(drafter)
    settings: dict[str, Any] = {"seeds": (1, 2), "guidance": 2.0}
    toy_models.run_decode(target, plain, NoTree(), **settings)
    toy_models.run_decode(target, with_trees, Confidence(depth=4, top_k=6, nodes=40), **settings)
    first, second = plain.sessions[0].cache, with_trees.sessions[0].cache
    for row in range(4):
        length = min(first.host_lengths[row], second.host_lengths[row])
        assert length > 20
        assert torch.allclose(first.keys[:, row, :, :length], second.keys[:, row, :, :length], atol=1e-5)
        assert torch.allclose(first.values[:, row, :, :length], second.values[:, row, :, :length], atol=1e-5)


@dataclass(frozen=True)
class SessionKeeper:
    """A drafter that keeps its sessions."""

    proposes: ClassVar[str] = "tree"

    drafter: Any
    sessions: list[Any] = field(default_factory=list)

    def open(self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float) -> Any:
        self.sessions.append(self.drafter.open(prompts, layout, prefill, guidance=guidance))
        return self.sessions[-1]


def test_jacobi_accepts_long_chains_if_the_context_does_not_matter() -> None:
    """Every code has the same probability, so the noise alone decides and the target's choices are right guesses."""
    _, histories, _ = toy_models.run_decode(toy_models.target(head=0.0), Jacobi(window=8), Chain(8))
    assert histories[0].tokens_per_pass > 4


def test_neighbour_drafts_an_image_of_one_code() -> None:
    target = toy_models.target(head=0.0)
    with torch.no_grad():
        target.net.head.weight.zero_()
    _, histories, _ = toy_models.run_decode(target, Neighbour(), Chain(5), temperature=0.0)
    assert histories[0].tokens_per_pass > 4


def test_calibration_fit_recovers_the_slope_of_gumbel_errors() -> None:
    """Scores with Gumbel errors of scale 1 / slope: the fitted slope is that one, and probabilities match counts."""
    generator = torch.Generator().manual_seed(0)
    count, codes, slope = 20_000, 32, 2.0
    scores = torch.randn(count, codes, generator=generator) * 1.5
    errors = gumbel(torch.tensor([3]), torch.arange(count)[None], codes)[0] / slope
    best, columns = scores.topk(8, dim=-1)
    hit = columns == (scores + errors).argmax(-1, keepdim=True)
    ranks = torch.where(hit.any(-1), hit.int().argmax(-1), 8)
    fitted = Calibration.fit(best, ranks)
    assert abs(fitted.slope - slope) < 0.2
    assert all(abs(bias) < 0.35 for bias in fitted.biases)
    probs = fitted.log_acceptance_probability(best, has_forced_tokens=False).exp()
    for rank in range(3):
        assert abs(probs[:, rank].mean() - (ranks == rank).double().mean()) < 0.01


@pytest.mark.parametrize("forcing", [False, True])
@pytest.mark.parametrize(
    "calibration", [Calibration(), Calibration(2.0, (0.0, -0.7, 0.4), 0.01), Calibration(1.0, (0.3,), 0.0)], ids=str
)
def test_acceptance_probability_matches_its_formula(calibration: Calibration, forcing: bool) -> None:
    """Also with impossible children; where tokens may be forced, the only possible child is certain."""
    scores = torch.tensor([[1.5, 1.0, 0.2, -3.0], [2.0, 1.0, -torch.inf, -torch.inf], [7.0, *[-torch.inf] * 3]])
    bias = torch.tensor([calibration.biases[min(rank, len(calibration.biases) - 1)] for rank in range(4)])
    weight = (bias + (scores - scores[:, :1]) * calibration.slope).exp().double()
    miss = torch.tensor([calibration.miss, calibration.miss, 0.0 if forcing else calibration.miss])
    log_probs = calibration.log_acceptance_probability(scores, has_forced_tokens=forcing)
    torch.testing.assert_close(
        log_probs.exp().double(), weight / (weight.sum(-1) + miss)[:, None], atol=1e-6, rtol=1e-5
    )
    assert torch.equal(log_probs == -torch.inf, scores == -torch.inf) and bool((log_probs <= 0).all())


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("rope", [Rope((2, 3, 3)), Rope((2, 3, 3), pairing="interleaved")], ids=["half", "interleaved"])
def test_rope_table_equals_computed_factors(layout: Layout, rope: Rope) -> None:
    offset = torch.tensor([5, 9])
    table = RopeTable(rope, layout, offset, torch.float32)
    steps = torch.arange(layout.start, layout.steps).expand(2, -1)
    for moved in (0, 4):
        offset.add_(moved)
        table.update()
        rotation = rope.image_rotation(layout, steps, offset)
        assert torch.equal(table(steps), rope.cos_sin(rotation, torch.float32))
        x = torch.randn(2, steps.shape[1], 3, 16, generator=torch.Generator().manual_seed(0))
        pairs = (-1, (2, 8)) if rope.pairing == "half" else (-1, (8, 2))
        one, other = x.unflatten(*pairs).unbind(-2 if rope.pairing == "half" else -1)
        cos, sin = rotation[:, :, None].unbind(-2)
        expected = torch.stack([one * cos - other * sin, other * cos + one * sin], -2 if rope.pairing == "half" else -1)
        assert torch.allclose(apply_rope(x, split_cos_sin(table(steps)), rope.pairing), expected.flatten(-2), atol=1e-6)
    ends = torch.tensor([[-3, layout.steps + 7]]).expand(2, -1)
    assert torch.equal(table(ends), table(ends.clamp(0, layout.steps - 1)))


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
def test_above_tokens_by_hand(layout: Layout) -> None:
    """Every cell's neighbours above and above-right, unless they come after the root."""
    committed = torch.arange(100, 100 + layout.steps)[None]
    root = layout.step(1, 1)
    steps = torch.arange(-2, layout.steps + 3)[None]
    pairs = above_tokens(committed, layout, steps, torch.tensor([root]), 1)[0].tolist()
    for step, pair in zip(steps[0].tolist(), pairs, strict=True):
        cell = layout.cell(step)
        for (down, right), token in zip(ABOVE, pair, strict=True):
            row, col = (cell[0] + down, cell[1] + right) if cell is not None else (-1, -1)
            is_inside = row >= 0 and 0 <= col < layout.width and layout.step(row, col) <= root
            if cell is not None:
                assert token == (100 + layout.step(row, col) if is_inside else -1), (step, down, right)
            elif step < layout.start:
                assert token == -1
