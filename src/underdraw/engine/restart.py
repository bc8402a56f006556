"""Bring an image back whose batch crashed: replay its committed tokens in a session of its own.

After an exception inside a pass nobody knows what was written to KV caches and drafter states, but the tokens in the
histories are safe. Replayed passes run the code of ordinary ones, so the state afterwards, and with it every token that
follows, is that of an image that was never interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from underdraw.engine.step import StepRunner
from underdraw.history import History
from underdraw.plan import TreePlan
from underdraw.protocols import DrafterSession, DraftRequest, TreePolicy, VerifiedStep
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal, chain
from underdraw.verifiers.exact import match_all_nodes

_CHAIN = TreePlan(31, 1, 1, 32)  # of drafters that take any chain


@dataclass(frozen=True, slots=True)
class CommittedTokens:
    """A verifier that accepts what one image has committed; steps behind that are sampled by the target."""

    tokens: Tensor  # (steps,) token ids, -1 where there is none yet
    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled", "topk", "sampled")

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        sampled = noise_window.sampler.layout.token_ids(noise_window.sample(logits, tree.depths + 1))  # (1, N)
        steps = noise_window.steps[:, :1] + tree.depths.clamp(min=0)
        committed = self.tokens[steps.clamp(max=len(self.tokens) - 1)]
        chosen = torch.where((committed >= 0) & (steps < len(self.tokens)), committed, sampled)
        return match_all_nodes(tree, noise_window.steps.shape[1], chosen)


@dataclass(frozen=True, slots=True)
class CommittedChain:
    """A session of a drafter of chains that drafts the committed tokens instead: all of them are accepted."""

    session: DrafterSession
    tokens: Tensor  # (steps,) as above

    def draft(self, request: DraftRequest) -> DraftTree:
        self.session.draft(request)  # for what it records of the request
        index = torch.arange(request.plan.depth + 1, device=request.root.device)
        return chain(self.tokens[request.steps[:, None] + index])

    def commit(self, verified: VerifiedStep) -> None:
        self.session.commit(verified)


def replay(runner: StepRunner, history: History, policy: TreePolicy, *, is_chain: bool) -> int:
    """Run a new runner of one image, which has been prefilled, up to the last token of its history.

    `is_chain` tells that the drafter proposes chains. Returns the step of the last token: the next root.
    """
    last_step, step = history.next_step - 1, history.layout.start
    tokens = torch.tensor(history.tokens, device=runner.steps.device)
    verifier, draft = runner.verifier, runner.draft
    runner.sample_first()
    runner.root.copy_(tokens[step])
    runner.verifier = CommittedTokens(tokens)
    if is_chain:
        runner.draft = CommittedChain(draft, tokens)
    while step < last_step:
        plan = _CHAIN if is_chain else policy.plan(history, step)
        _, (accepted,) = runner.step([plan.truncate(last_step - step - 1)], [step])
        step += len(accepted.tokens)
    runner.verifier, runner.draft = verifier, draft
    return step
