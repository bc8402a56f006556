"""Drafters see what they should: true features one place before each token, and the row above each cell to come.

No exactness test notices a drafter that is fed wrongly; it only drafts badly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import toy
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
class Watched:
    """An EAGLE drafter, with what goes into its network."""

    proposes: ClassVar[str] = "tree"

    drafter: Any
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = field(default_factory=list)

    def open(self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float) -> Any:
        session = self.drafter.open(prompts, layout, prefill, guidance=guidance)
        assert isinstance(session, EagleSession)
        follow = session.follow

        def watched(request: DraftRequest) -> None:
            pending = session.pending
            last = (pending.counts - 1).clamp(min=0)[:, None]
            tokens = pending.tokens.scatter(1, last, request.root.repeat(session.copies)[:, None])
            for row, count in enumerate(pending.host_counts):
                steps = pending.steps[row, :count]
                above = session.above(pending.steps)[row, :count]
                self.seen.append((tokens[row, :count], pending.features[row, :count], steps, above))
            follow(request)

        session.follow = watched  # type: ignore[method-assign]
        return session


def features_of(of: Any, layout: Layout, tokens: Tensor, prompt: tuple[int, ...]) -> Tensor:
    """The target's features of every token of one row, by one plain pass."""
    session = of.open([Prompt(prompt)], layout, guidance=1.0)
    steps = torch.arange(layout.start, layout.stop)[None]
    x, cos_sin = of.net.embed(tokens[steps]), session.rope_table(steps)
    count = steps.shape[1]
    with torch.no_grad():
        image = session.decoder.append(x, cos_sin, torch.tensor([count]), [count])
    return torch.cat([session.prefill.features, image], dim=1)[0]


@pytest.mark.parametrize("layout", [toy.PLAIN, toy.ROW_ENDS], ids=["plain", "row-ends"])
def test_eagle_is_fed_true_features_and_the_row_above(layout: Layout) -> None:
    """At step s: the token of s, the feature of the token before, the tokens above and above-right of cell s + 1."""
    of = toy.target()
    watched = Watched(toy.eagle(of, above=True))
    tokens = toy.run(of, watched, Confidence(depth=4, top_k=4, nodes=20), layout=layout, seeds=(5,))[0][0]
    prompt = toy.prompts(1)[0].condition
    truth = features_of(of, layout, tokens, prompt)
    checked = 0
    for ids, features, steps, above in watched.seen:
        for token, feature, step, over in zip(ids, features, steps.tolist(), above.tolist(), strict=True):
            if step < layout.start:
                continue
            assert token == tokens[step]
            assert torch.equal(feature, truth[len(prompt) + step - 1])
            expected = []
            for cols in (0, 1):
                place, inside = layout.neighbour(step + 1, -1, cols)
                expected.append(int(tokens[place]) if inside else -1)
            assert over == expected
            checked += 1
    assert checked >= layout.stop - layout.start - 6, "all but the last tree's tokens were fed"


MAKERS = {"eagle": toy.eagle, "block": toy.block, "model": lambda of: SmallModel(toy.target(3))}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_drafters_cache_does_not_depend_on_how_much_was_accepted(make: Any) -> None:
    """Feeding the accepted tokens in one go leaves what feeding them one by one leaves."""
    of = toy.target()
    drafter = make(of)
    one, many = Kept(drafter), Kept(drafter)
    settings: dict[str, Any] = {"seeds": (1, 2), "guidance": 2.0}
    toy.run(of, one, NoTree(), **settings)
    toy.run(of, many, Confidence(depth=4, top_k=6, nodes=40), **settings)
    first, second = one.sessions[0].cache, many.sessions[0].cache
    for row in range(4):
        length = min(first.host_lengths[row], second.host_lengths[row])
        assert length > 20
        assert torch.allclose(first.keys[:, row, :, :length], second.keys[:, row, :, :length], atol=1e-5)
        assert torch.allclose(first.values[:, row, :, :length], second.values[:, row, :, :length], atol=1e-5)


@dataclass(frozen=True)
class Kept:
    """A drafter whose sessions are kept."""

    proposes: ClassVar[str] = "tree"

    drafter: Any
    sessions: list[Any] = field(default_factory=list)

    def open(self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float) -> Any:
        self.sessions.append(self.drafter.open(prompts, layout, prefill, guidance=guidance))
        return self.sessions[-1]


def test_jacobi_takes_the_targets_choices_for_guesses() -> None:
    """With a target that forgets all but the last token, guesses converge and chains get long."""
    of = toy.target(head=0.0)  # every code equally likely: the noise alone decides
    _, histories, _ = toy.run(of, Jacobi(window=8), Chain(8))
    assert histories[0].tokens_per_pass > 4


def test_neighbour_copies_what_repeats() -> None:
    """On a picture of one code the copies are right wherever they are asked for."""
    of = toy.target(head=0.0)
    with torch.no_grad():
        of.net.head.weight.zero_()
    _, histories, _ = toy.run(of, Neighbour(), Chain(5), temperature=0.0)
    assert histories[0].tokens_per_pass > 4


def test_calibration_finds_what_made_the_errors() -> None:
    """Gumbel errors of scale 1 / slope on every score: the fitted slope is that one, and chances add up."""
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
    chance = fitted.log_acceptance_probability(best, has_forced_tokens=False).exp()
    for rank in range(3):
        assert abs(chance[:, rank].mean() - (ranks == rank).double().mean()) < 0.01


@pytest.mark.parametrize("forcing", [False, True])
@pytest.mark.parametrize(
    "calibration", [Calibration(), Calibration(2.0, (0.0, -0.7, 0.4), 0.01), Calibration(1.0, (0.3,), 0.0)], ids=str
)
def test_chances_are_their_definition(calibration: Calibration, forcing: bool) -> None:
    """Also where children are impossible; and the only possible one is certain where tokens are forced."""
    scores = torch.tensor([[1.5, 1.0, 0.2, -3.0], [2.0, 1.0, -torch.inf, -torch.inf], [7.0, *[-torch.inf] * 3]])
    bias = torch.tensor([calibration.biases[min(rank, len(calibration.biases) - 1)] for rank in range(4)])
    weight = (bias + (scores - scores[:, :1]) * calibration.slope).exp().double()
    miss = torch.tensor([calibration.miss, calibration.miss, 0.0 if forcing else calibration.miss])
    found = calibration.log_acceptance_probability(scores, has_forced_tokens=forcing)
    torch.testing.assert_close(found.exp().double(), weight / (weight.sum(-1) + miss)[:, None], atol=1e-6, rtol=1e-5)
    assert torch.equal(found == -torch.inf, scores == -torch.inf) and bool((found <= 0).all())


@pytest.mark.parametrize("layout", [toy.PLAIN, toy.ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("rope", [Rope((2, 3, 3)), Rope((2, 3, 3), pairing="interleaved")], ids=["half", "interleaved"])
def test_rotations_are_looked_up_as_they_are_computed(layout: Layout, rope: Rope) -> None:
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


@pytest.mark.parametrize("layout", [toy.PLAIN, toy.ROW_ENDS], ids=["plain", "row-ends"])
def test_tokens_above_by_hand(layout: Layout) -> None:
    """Every cell's neighbours above and above-right, as far as they come before the root."""
    known = torch.arange(100, 100 + layout.steps)[None]
    root = layout.step(1, 1)
    steps = torch.arange(-2, layout.steps + 3)[None]
    found = above_tokens(known, layout, steps, torch.tensor([root]), 1)[0].tolist()
    for step, pair in zip(steps[0].tolist(), found, strict=True):
        cell = layout.cell(step)
        for (down, right), token in zip(ABOVE, pair, strict=True):
            row, col = (cell[0] + down, cell[1] + right) if cell is not None else (-1, -1)
            inside = row >= 0 and 0 <= col < layout.width and layout.step(row, col) <= root
            if cell is not None:
                assert token == (100 + layout.step(row, col) if inside else -1), (step, down, right)
            elif step < layout.start:
                assert token == -1
