"""What a drafter would have drafted at every cell of a picture that is known already: ranks of the true tokens.

The picture is drawn token by token; before each token the drafter is asked, level by level, about the tokens that are
known to come, as if all before them had been accepted. Nothing is drafted, so every cell is a root once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from underdraw.drafters.network import NetworkDraftSession
from underdraw.engine.decode import decode_tokens
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.pipeline import Pipeline
from underdraw.plan import TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.request import GenerationRequest
from underdraw.tree import DraftTree, Frontier, root_only
from underdraw.verifiers.exact import Exact


class Probe:
    """A drafter with a network, asked about `history`'s tokens. `ranks` and `plain` fill up while it follows a decode.

    Both are (steps, depth): the place of the true token among the best of log q + noise, and of q alone, at each root
    step and level; -1 where nothing was asked.
    """

    def __init__(self, drafter: Drafter, history: History, depth: int) -> None:
        self.drafter, self.depth, self.proposes = drafter, depth, drafter.proposes
        self.tokens = torch.from_numpy(history.tokens)
        self.ranks: NDArray[np.int64] = np.full((history.layout.steps, depth), -1)
        self.plain = self.ranks.copy()

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> ProbeSession:
        session = self.drafter.open(prompts, layout, prefill, guidance=guidance)
        assert isinstance(session, NetworkDraftSession), "only drafters with a network are asked level by level"
        return ProbeSession(self, session, layout)


class ProbeSession:
    def __init__(self, probe: Probe, session: NetworkDraftSession, layout: Layout) -> None:
        self.probe, self.session, self.layout = probe, session, layout

    def draft(self, request: DraftRequest) -> DraftTree:
        probe, layout, root = self.probe, self.layout, int(request.steps[0])
        depth = min(probe.depth, layout.stop - 1 - root)
        plan = TreePlan(depth, 1, 1, depth + 1)
        noise_window = request.noise_window.sampler.noise_window(request.steps, max(depth, 1))
        wide = self.session.fit_request(replace(request, plan=plan, noise_window=noise_window, limits=None))
        expand = self.session.begin_tree(wide)
        nought = torch.zeros_like(request.root)[:, None]
        for level in range(wide.plan.depth):
            step = root + level + 1
            token = probe.tokens[step - 1].to(nought.device).expand_as(nought)
            logits = expand(Frontier(level, token, nought))
            if layout.is_row_end(step):
                continue
            column = int(layout.vocab_indices(probe.tokens[step]))
            for scores, found in (
                (noise_window.level_scores(logits, level + 1), probe.ranks),
                (noise_window.level_filtered_logits(logits, level + 1), probe.plain),
            ):
                found[root, level] = int((scores[0, 0] > scores[0, 0, column]).sum())
        return root_only(request.root)

    def commit(self, verified: VerifiedStep) -> None:
        self.session.commit(verified)


def can_probe(drafter: Drafter, pipe: Pipeline, job: GenerationRequest) -> bool:
    """Whether a drafter has levels to ask about."""
    prompts = [pipe.model.make_prompt(job.prompts[0], job.negative_prompts[0], job.size)]
    layout = pipe.model.make_layout(job.size)
    with torch.inference_mode():
        prefill = pipe.model.target.open(prompts, layout, guidance=job.guidance).prefill
        return isinstance(drafter.open(prompts, layout, prefill, guidance=job.guidance), NetworkDraftSession)


def probe(pipe: Pipeline, job: GenerationRequest, history: History, depth: int) -> Probe:
    """Ask the pipeline's drafter about a picture (one job of one prompt) that was drawn exactly."""
    asked = Probe(pipe.drafter, history, depth)
    prompts = [pipe.model.make_prompt(job.prompts[0], job.negative_prompts[0], job.size)]
    parts = pipe.model.target, asked, NoTree(), Exact(), prompts, pipe.sampler(job)
    decode_tokens(*parts, guidance=job.guidance)
    return asked
