"""How often passes over trees choose what passes over one node chose: in half precision, kernels round by shape.

Measured twice: end to end, whether whole pictures are equal, and with forced context, where every choice is compared
after the very tokens of the plain picture, so that one difference does not make the rest differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.engine.autotune import FixedPlan
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.decode import decode_tokens
from underdraw.layout import Layout
from underdraw.nn.target import DecoderTarget
from underdraw.plan import MAX_NODES, TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import CapturableDraft, Drafter, DraftRequest, PrefillOutput, Prompt, TreePolicy, Verifier
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal, chain
from underdraw.verifiers.exact import Exact

NODES = 16  # of the trees, and of plain passes that are padded to their shape


class ReplayedPicture:
    """A drafter that drafts, and a verifier that follows, one known picture; counts where the target chose the same."""

    proposes: ClassVar[Literal["chain"]] = "chain"
    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled",)

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.tokens = torch.zeros(1, layout.steps + MAX_NODES, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # choices, and those that are the same

    def open(self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float) -> Following:
        return Following(self)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        layout, reach = noise_window.sampler.layout, noise_window.steps.shape[1]
        chosen = layout.token_ids(noise_window.sample(logits, tree.depths + 1))[:, :reach]
        length = tree.depths.amax(1)  # (1,)
        known = self.tokens.gather(1, noise_window.steps)  # (1, reach)
        order = torch.arange(reach, device=known.device)
        judged = (order <= length[:, None]) & (noise_window.steps < layout.stop)
        self.counts.add_(torch.stack([judged.sum(), (judged & (chosen == known)).sum()]))
        path = torch.where(order <= length[:, None], order, 0)
        return AcceptedPath(path, length, known.gather(1, length[:, None])[:, 0])


@dataclass(frozen=True, slots=True)
class Following(CapturableDraft):
    known: ReplayedPicture

    def draft(self, request: DraftRequest) -> DraftTree:
        steps = request.steps[:, None] + torch.arange(request.plan.depth + 1, device=request.steps.device)
        tokens = self.known.tokens.gather(1, steps).scatter(1, torch.zeros_like(steps[:, :1]), request.root[:, None])
        return chain(tokens, None if request.limits is None else request.limits.depth)


@torch.inference_mode()
def agreement(
    target: DecoderTarget,
    layout: Layout,
    prompts: Sequence[Prompt],
    guidance: float,
    make: Callable[[int], GraphCache],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
) -> dict[str, Any]:
    """One picture for each prompt: shares of choices and of pictures that are equal, by the least nodes of a pass.

    `make` gives captured passes of at least so many nodes. With 1, plain passes have one node; with as many as the
    trees have, both go through the same shapes.
    """
    device = target.net.head.weight.device
    tree = FixedPlan(TreePlan(NODES - 1, 1, 1, NODES))
    result: dict[str, Any] = {"pictures": len(prompts), "nodes": NODES, "temperature": temperature, "shapes": {}}
    for smallest in (1, NODES):
        graphs, known, equal = make(smallest), ReplayedPicture(layout, device), 0

        def draw(
            seed: int, drafter: Drafter, policy: TreePolicy, verifier: Verifier, graphs: GraphCache = graphs
        ) -> Tensor:
            sampler = Sampler(layout, (seed,), temperature=temperature, top_k=top_k, device=device)
            parts = target, drafter, policy, verifier, [prompts[seed]], sampler
            return decode_tokens(*parts, guidance=guidance, graphs=graphs)[0]

        for seed in range(len(prompts)):
            plain = draw(seed, Forced(), NoTree(), Exact())
            equal += torch.equal(plain, draw(seed, Jacobi(), tree, Exact()))
            known.tokens[0, : layout.steps].copy_(plain)
            draw(seed, known, tree, known)
        choices, same = known.counts.tolist()
        name = "one node" if smallest == 1 else "the same shapes"
        result["shapes"][name] = {
            "tokens_equal": same / choices, "tokens": choices, "pictures_equal": equal / len(prompts)
        }  # fmt: skip
    return result
