"""Training sees what drafting sees: the logits that a loss compares are those that a session gives along its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import toy
from torch import Tensor

from underdraw.layout import Layout
from underdraw.policies.fixed import Chain
from underdraw.protocols import Opening, Outcome, Prompt, Request
from underdraw.training.teacher import Teacher
from underdraw.training.unroll import BlockLoss, EagleLoss, distance
from underdraw.tree import DraftTree, Level

GUIDANCE = 2.0


@dataclass
class Watched:
    """A drafter that notes the logits it gives to each level of the trees it grows."""

    drafter: Any
    seen: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # steps of the roots, logits by level

    def open(self, prompts: Sequence[Prompt], layout: Layout, first: Opening, *, guidance: float) -> WatchedSession:
        return WatchedSession(self, self.drafter.open(prompts, layout, first, guidance=guidance))


class WatchedSession:
    def __init__(self, watch: Watched, session: Any) -> None:
        self.session = session
        expander = session.expander

        def watched(request: Request) -> Any:
            expand, levels = expander(request), []
            watch.seen.append((request.steps.clone(), levels))

            def noted(level: Level) -> Tensor:
                levels.append(expand(level))
                return levels[-1]

            return noted

        session.expander = watched

    def draft(self, request: Request) -> DraftTree:
        return self.session.draft(request)

    def commit(self, outcome: Outcome) -> None:
        self.session.commit(outcome)


@pytest.mark.parametrize("layout", [toy.PLAIN, toy.ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("kind", ["eagle", "eagle, two layers", "block"])
@torch.no_grad()
def test_a_loss_compares_what_a_session_gives(kind: str, layout: Layout) -> None:
    torch.set_num_threads(1)
    of = toy.target()
    drafter: Any = toy.block(of) if kind == "block" else toy.eagle(of, above=True, layers=1 + ("two" in kind))
    watch = Watched(drafter)
    rows, depth = toy.prompts(4), 4
    tokens, _, steps = toy.run(
        of, watch, Chain(depth), layout=layout, seeds=(3, 4, 5, 6), guidance=GUIDANCE, temperature=0.5, rows=rows
    )
    lesson = Teacher(of, layout).lesson(rows, tokens)
    net = drafter.net
    loss: Any = BlockLoss(net, of.net) if kind == "block" else EagleLoss(net, of.net, depth)
    compared = 0
    for roots, levels in watch.seen:
        draft, _, valid = loss.ahead(lesson, roots[:, None].clamp(max=layout.stop - 2), torch.tensor(GUIDANCE))
        for image, root in enumerate(roots.tolist()):
            step = next((s for s in steps if s.sequence == image and s.start == root), None)
            for level in range(min(len(levels), (step.accepted if step else -1) + 1)):
                if not valid[image, 0, level]:
                    continue
                torch.testing.assert_close(levels[level][image, 0], draft[image, 0, level], rtol=1e-4, atol=1e-4)
                compared += level > 0
    assert compared > 3


@torch.no_grad()
def test_a_lesson_knows_the_targets_own_distribution() -> None:
    """The teacher's logits at a step are those that the target itself chose the token from."""
    torch.set_num_threads(1)
    of, rows = toy.target(), toy.prompts(2)
    tokens = toy.plain(of, seeds=(3, 4), guidance=GUIDANCE, temperature=0.0, rows=rows)
    lesson = Teacher(of, toy.PLAIN).lesson(rows, tokens)
    steps = torch.arange(toy.PLAIN.start, toy.PLAIN.stop).expand(2, -1)
    chosen = lesson.logits(of.net, steps, torch.tensor(GUIDANCE)).argmax(-1)
    assert torch.equal(toy.PLAIN.tokens(chosen), tokens[:, toy.PLAIN.start : toy.PLAIN.stop])


def test_distance_is_least_for_the_target_itself() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    own = distance(logits, logits)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(own, entropy)
    assert (distance(logits.roll(1, -1), logits) > own).all()
