"""How often passes over trees choose the tokens of plain decoding: in half precision, rounding depends on GEMM shapes.

Measured in two ways: end to end (share of identical pictures), and with forced context (share of equal tokens, each
compared after the tokens of the plain picture, so that one difference does not cause others).
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
from underdraw.engine.decode import collect_passes, decode
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.nn.target import DecoderTarget
from underdraw.plan import MAX_NODES, TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.protocols import (
    CapturableDraft,
    Drafter,
    DraftRequest,
    Guidance,
    PrefillOutput,
    Prompt,
    TreePolicy,
    Verifier,
)
from underdraw.sampling import NoiseWindow, Sampler
from underdraw.tree import AcceptedPath, DraftTree, Proposal, chain
from underdraw.verifiers.exact import Exact

NODES = 16  # of the trees, and of plain passes that run over the same shapes


class ForcedPicture:
    """A drafter that drafts a finished picture and a verifier that accepts it, counting the target's equal choices."""

    proposes: ClassVar[Literal["chain"]] = "chain"
    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled",)

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.tokens = torch.zeros(1, layout.steps + MAX_NODES, dtype=torch.int64, device=device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # tokens, and tokens that the target chose too

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> ForcedPictureSession:
        return ForcedPictureSession(self)

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        layout, reach = noise_window.sampler.layout, noise_window.steps.shape[1]
        chosen = layout.token_ids(noise_window.sample(logits, tree.depths + 1))[:, :reach]
        length = tree.depths.amax(1)  # (1,)
        expected = self.tokens.gather(1, noise_window.steps)  # (1, reach)
        level = torch.arange(reach, device=expected.device)
        is_compared = (level <= length[:, None]) & (noise_window.steps < layout.stop)
        self.counts.add_(torch.stack([is_compared.sum(), (is_compared & (chosen == expected)).sum()]))
        path = torch.where(level <= length[:, None], level, 0)
        return AcceptedPath(path, length, expected.gather(1, length[:, None])[:, 0])


@dataclass(frozen=True, slots=True)
class ForcedPictureSession(CapturableDraft):
    picture: ForcedPicture

    def draft(self, request: DraftRequest) -> DraftTree:
        steps = request.steps[:, None] + torch.arange(request.plan.depth + 1, device=request.steps.device)
        tokens = self.picture.tokens.gather(1, steps).scatter(1, torch.zeros_like(steps[:, :1]), request.root[:, None])
        return chain(tokens, None if request.limits is None else request.limits.depth)


@torch.inference_mode()
def measure_agreement(
    target: DecoderTarget,
    layout: Layout,
    prompts: Sequence[Prompt],
    guidance: float,
    make_graphs: Callable[[int], GraphCache],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
) -> dict[str, Any]:
    """Shares of equal tokens and of identical pictures, one picture per prompt.

    `make_graphs(n)` returns captured passes over at least n nodes. With n = 1 plain passes have one node; with the
    trees' number of nodes, plain and tree passes have the same GEMM shapes.
    """
    device = target.net.head.weight.device
    tree = FixedPlan(TreePlan(NODES - 1, 1, 1, NODES))
    result: dict[str, Any] = {
        "kind": "agreement", "pictures": len(prompts), "nodes": NODES, "temperature": temperature, "shapes": {}
    }  # fmt: skip
    for min_nodes, name in ((1, "one node"), (NODES, "the same shapes")):
        graphs, forced, identical = make_graphs(min_nodes), ForcedPicture(layout, device), 0

        def draw(
            seed: int, drafter: Drafter, policy: TreePolicy, verifier: Verifier, graphs: GraphCache = graphs
        ) -> Tensor:
            sampler = Sampler(layout, (seed,), temperature=temperature, top_k=top_k, device=device)
            parts = target, drafter, policy, verifier, [prompts[seed]], sampler
            history = History(layout)
            collect_passes(decode(*parts, guidance=guidance, histories=[history], graphs=graphs))
            return torch.from_numpy(history.tokens)

        for seed in range(len(prompts)):
            plain = draw(seed, Forced(), NoTree(), Exact())
            identical += torch.equal(plain, draw(seed, Jacobi(), tree, Exact()))
            forced.tokens[0, : layout.steps].copy_(plain)
            draw(seed, forced, tree, forced)
        tokens, equal = forced.counts.tolist()
        shares = {"tokens_equal": equal / tokens, "pictures_equal": identical / len(prompts)}
        result["shapes"][name] = {**shares, "tokens": tokens}
    return result
