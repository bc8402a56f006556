"""The losses of drafters compare the logits that a draft session computes along its path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.layout import Layout
from underdraw.policies.fixed import Chain
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.training.batches import FeatureExtractor
from underdraw.training.losses import BlockLoss, EagleLoss, cross_entropy
from underdraw.tree import DraftTree, Frontier

GUIDANCE = 2.0


@dataclass
class RecordingDrafter:
    """A drafter that records the logits of each level of the trees it grows."""

    proposes: ClassVar[str] = "tree"

    drafter: Any
    records: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)  # steps of the roots, logits by level

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> RecordingSession:
        return RecordingSession(self, self.drafter.open(prompts, layout, prefill, guidance=guidance))


class RecordingSession:
    def __init__(self, recorder: RecordingDrafter, session: Any) -> None:
        self.session = session
        make_expand_fn = session.make_expand_fn

        def recording_expand_fn(request: DraftRequest) -> Any:
            expand, levels = make_expand_fn(request), []
            recorder.records.append((request.steps.clone(), levels))

            def record(level: Frontier) -> Tensor:
                levels.append(expand(level))
                return levels[-1]

            return record

        session.make_expand_fn = recording_expand_fn

    def draft(self, request: DraftRequest) -> DraftTree:
        return self.session.draft(request)

    def commit(self, verified: VerifiedStep) -> None:
        self.session.commit(verified)


@pytest.mark.parametrize("layout", [toy_models.PLAIN, toy_models.ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("kind", ["eagle", "eagle, two layers", "block"])
@torch.no_grad()
def test_loss_uses_the_logits_of_a_draft_session(kind: str, layout: Layout) -> None:
    torch.set_num_threads(1)
    target = toy_models.target()
    drafter: Any = (
        toy_models.block(target)
        if kind == "block"
        else toy_models.eagle(target, above=True, layers=1 + ("two" in kind))
    )
    recorder = RecordingDrafter(drafter)
    prompts, depth = toy_models.prompts(4), 4
    tokens, _, steps = toy_models.run_decode(
        target, recorder, Chain(depth), layout=layout, seeds=(3, 4, 5, 6), guidance=GUIDANCE, temperature=0.5,
        rows=prompts,
    )  # fmt: skip
    batch = FeatureExtractor(target, layout).batch(prompts, tokens)
    net = drafter.net
    loss: Any = BlockLoss(net, target.net) if kind == "block" else EagleLoss(net, target.net, depth)
    compared = 0
    for roots, levels in recorder.records:
        draft, _, valid = loss.logits(batch, roots[:, None].clamp(max=layout.stop - 2), torch.tensor(GUIDANCE))
        for image, root in enumerate(roots.tolist()):
            step = next((s for s in steps if s.sequence == image and s.start == root), None)
            for level in range(min(len(levels), (step.accepted if step else -1) + 1)):
                if not valid[image, 0, level]:
                    continue
                torch.testing.assert_close(levels[level][image, 0], draft[image, 0, level], rtol=1e-4, atol=1e-4)
                compared += level > 0
    assert compared > 3


@torch.no_grad()
def test_batch_reproduces_the_targets_logits() -> None:
    """At temperature 0 the target sampled the argmax of the logits that a batch computes again."""
    torch.set_num_threads(1)
    target, prompts = toy_models.target(), toy_models.prompts(2)
    tokens = toy_models.plain_tokens(target, seeds=(3, 4), guidance=GUIDANCE, temperature=0.0, rows=prompts)
    batch = FeatureExtractor(target, toy_models.PLAIN).batch(prompts, tokens)
    steps = torch.arange(toy_models.PLAIN.start, toy_models.PLAIN.stop).expand(2, -1)
    best = batch.target_logits(target.net, steps, torch.tensor(GUIDANCE)).argmax(-1)
    assert torch.equal(toy_models.PLAIN.token_ids(best), tokens[:, toy_models.PLAIN.start : toy_models.PLAIN.stop])


def test_cross_entropy_is_least_for_equal_logits() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    least = cross_entropy(logits, logits)
    torch.testing.assert_close(least, torch.distributions.Categorical(logits=logits).entropy())
    assert (cross_entropy(logits.roll(1, -1), logits) > least).all()
