"""What a drafter would propose at every cell of a finished image: the ranks of the tokens that the target chose.

The image is decoded again token by token. Before each token the drafter expands the chain of the tokens that follow,
level by level, as if all of them had been accepted. Nothing is drafted, so every cell is a root once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from underdraw.drafters.network import NetworkDraftSession
from underdraw.engine.decode import collect_passes, decode
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.pipeline import Pipeline
from underdraw.plan import TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import Drafter, DraftRequest, Guidance, PrefillOutput, Prompt, VerifiedStep
from underdraw.request import GenerationRequest
from underdraw.tree import DraftTree, Frontier, root_only
from underdraw.verifiers.exact import Exact


class DraftProbe:
    """A drafter that records ranks and proposes nothing.

    `ranks` (steps, depth) holds the rank of the target's token by log q + noise at each root step and level,
    `noiseless_ranks` the rank by q alone; -1 where nothing was probed.
    """

    def __init__(self, drafter: Drafter, history: History, depth: int) -> None:
        self.drafter, self.depth, self.proposes = drafter, depth, drafter.proposes
        self.tokens = torch.from_numpy(history.tokens)
        self.ranks: NDArray[np.int64] = np.full((history.layout.steps, depth), -1)
        self.noiseless_ranks = self.ranks.copy()

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> DraftProbeSession:
        session = self.drafter.open(prompts, layout, prefill, guidance=guidance)
        assert isinstance(session, NetworkDraftSession), "only drafters with a network have levels to probe"
        return DraftProbeSession(self, session, layout)


class DraftProbeSession:
    def __init__(self, probe: DraftProbe, session: NetworkDraftSession, layout: Layout) -> None:
        self.probe, self.session, self.layout = probe, session, layout

    def draft(self, request: DraftRequest) -> DraftTree:
        probe, layout, root = self.probe, self.layout, int(request.steps[0])
        depth = min(probe.depth, layout.stop - 1 - root)
        plan = TreePlan(depth, 1, 1, depth + 1)
        noise_window = request.noise_window.sampler.noise_window(request.steps, max(depth, 1))
        chain_request = self.session.fit_request(replace(request, plan=plan, noise_window=noise_window, limits=None))
        expand = self.session.begin_tree(chain_request)
        parent = torch.zeros_like(request.root)[:, None]  # a chain: every level has one node
        for level in range(chain_request.plan.depth):
            step = root + level + 1
            token = probe.tokens[step - 1].to(parent.device).expand_as(parent)
            logits = expand(Frontier(level, token, parent))
            if layout.is_row_end(step):
                continue
            index = int(layout.vocab_indices(probe.tokens[step]))
            for scores, ranks in (
                (noise_window.level_scores(logits, level + 1), probe.ranks),
                (noise_window.level_filtered_logits(logits, level + 1), probe.noiseless_ranks),
            ):
                ranks[root, level] = int((scores[0, 0] > scores[0, 0, index]).sum())
        return root_only(request.root)

    def commit(self, verified: VerifiedStep) -> None:
        self.session.commit(verified)


def can_probe(drafter: Drafter, pipe: Pipeline, request: GenerationRequest) -> bool:
    """Whether a drafter expands trees level by level with a network."""
    prompts = [pipe.model.make_prompt(request.prompts[0], request.negative_prompts[0], request.size)]
    layout = pipe.model.make_layout(request.size)
    with torch.inference_mode():
        prefill = pipe.model.target.open(prompts, layout, guidance=request.guidance).prefill
        return isinstance(drafter.open(prompts, layout, prefill, guidance=request.guidance), NetworkDraftSession)


def probe_draft(pipe: Pipeline, request: GenerationRequest, history: History, depth: int) -> DraftProbe:
    """Probe the pipeline's drafter on the image of a request with one prompt, which was decoded exactly."""
    probe = DraftProbe(pipe.drafter, history, depth)
    prompts = [pipe.model.make_prompt(request.prompts[0], request.negative_prompts[0], request.size)]
    parts = pipe.model.target, probe, NoTree(), Exact(), prompts, pipe.sampler(request)
    collect_passes(decode(*parts, guidance=request.guidance))
    return probe
