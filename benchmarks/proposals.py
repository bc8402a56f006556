"""Tokens per pass of the three proposals at temperature 1, and the gain of calibrated tree growth.

    python benchmarks/proposals.py
    python benchmarks/proposals.py --json

The target is a small random decoder whose head is scaled so that its entropy is about that of an image model. The
drafter is the same decoder with a context-dependent error on its logits, scaled to the distance from the target that a
trained one-layer drafter reaches (total variation about 0.37). All rows decode the same images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters.small_model import SmallModel, SmallModelSession
from underdraw.engine.decode import decode
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.nn.linear import to_input_major
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget, apply_guidance
from underdraw.nn.transformer import Arch, Transformer
from underdraw.protocols import PrefillOutput, Prompt
from underdraw.registry import policies, verifiers
from underdraw.sampling import Sampler, fast_topk, gumbel

CODES = 1024
LAYOUT = Layout(16, 16, range(8, 8 + CODES))


@dataclass(frozen=True)
class NoisyTarget(SmallModel):
    """A drafter that is the target with an error on its logits."""

    error: Tensor | None = None  # (K, D)

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> SmallModelSession:
        session = SmallModelSession(self, prompts, layout, guidance)
        session.logits = lambda features: apply_guidance(self.noisy_logits(features), guidance)  # type: ignore[method-assign]
        return session

    def noisy_logits(self, features: Tensor) -> Tensor:
        assert self.error is not None
        return self.target.net.logits(features) + features @ self.error.T


def build(seed: int = 0) -> tuple[DecoderTarget, NoisyTarget]:
    """Target and drafter of about the entropy (2.3 nats) and distance (0.37) of a small trained image model."""
    generator = torch.Generator().manual_seed(seed)
    arch = Arch(64, 2, 4, 128, 8 + CODES, Rope((4, 2, 2)), outputs=range(8, 8 + CODES))
    net = Transformer(arch).eval()
    with torch.no_grad():
        for name, parameter in sorted(net.named_parameters()):
            if parameter.ndim == 2:
                scale = {"embedding.weight": 1.0, "head.weight": 0.42}.get(name, parameter.shape[1] ** -0.5)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    to_input_major(net)
    target = DecoderTarget(net)
    return target, NoisyTarget(target, error=torch.randn(CODES, 64, generator=generator) * 0.115)


def run(
    target: DecoderTarget, drafter: SmallModel, tree: str, verifier: str, proposal: str, images: int, seed: int = 0
) -> list[History]:
    prompts = [Prompt((0, 1 + i % 7)) for i in range(images)]
    sampler = Sampler(LAYOUT, [seed + i for i in range(images)])
    histories = [History(LAYOUT) for _ in prompts]
    components = policies.build(tree), verifiers.build(verifier)
    for _ in decode(target, drafter, *components, prompts, sampler, proposal=proposal, histories=histories):  # type: ignore[arg-type]
        pass
    return histories


@torch.no_grad()
def fit(
    target: DecoderTarget, drafter: NoisyTarget, images: int = 4, branch: int = 10
) -> tuple[Calibration, dict[str, float]]:
    """A calibration fitted on other images than the table's, and how far the two models differ on them."""
    histories = run(target, drafter, "chain:depth=1", "exact", "coupled", images, seed=10_000)
    tokens = torch.stack([torch.from_numpy(h.tokens) for h in histories])  # (B, steps)
    session = target.open([Prompt((0, 1 + i % 7)) for i in range(images)], LAYOUT, guidance=1.0)
    steps = torch.arange(tokens.shape[1]).expand_as(tokens)
    x, cos_sin = target.net.embed(tokens), session.rope_table(steps)
    count = tokens.shape[1]
    features = session.decoder.append(x, cos_sin, torch.full((images,), count), [count] * images)[:, :-1].flatten(0, 1)
    p, q = target.net.logits(features), drafter.noisy_logits(features)  # (M, K)
    noise = gumbel(torch.arange(10_000, 10_000 + images), steps[:, 1:], CODES).flatten(0, 1)
    scores, children = fast_topk(q.log_softmax(-1) + noise, branch)
    is_accepted = children == fast_topk(p + noise, 1)[1]
    ranks = torch.where(is_accepted.any(-1), is_accepted.int().argmax(-1), branch)
    probs = p.softmax(-1)
    return Calibration.fit(scores, ranks), {
        "entropy": float(torch.special.entr(probs).sum(-1).mean()),
        "total_variation": float((probs - q.softmax(-1)).abs().sum(-1).mean() / 2),
        "first_child": float((ranks == 0).double().mean()),
    }


def table(images: int) -> tuple[dict[str, float], list[dict[str, object]]]:
    """How far the models differ, and one row per way to draft."""
    target, drafter = build()
    calibration, facts = fit(target, drafter)
    fitted, naive = replace(drafter, calibration=calibration), replace(drafter, calibration=None)
    dynamic, static = "confidence:nodes=59,depth=5,top_k=10", "static:shape=naive_extend_57"
    small = "confidence:nodes=16,depth=5,top_k=4"
    rows = [
        ("coupled, calibrated", dynamic, fitted, "exact", "coupled"),
        ("coupled, default calibration", dynamic, drafter, "exact", "coupled"),
        ("coupled, ranked by q", dynamic, naive, "exact", "coupled"),
        ("topk (EAGLE-2)", dynamic, drafter, "exact", "topk"),
        ("coupled, static", static, drafter, "exact", "coupled"),
        ("sampled, rejection (EAGLE-1)", static, drafter, "rejection", "sampled"),
        ("sampled, exact", static, drafter, "exact", "sampled"),
        ("coupled, calibrated", small, fitted, "exact", "coupled"),
        ("coupled, ranked by q", small, naive, "exact", "coupled"),
        ("topk (EAGLE-2)", small, drafter, "exact", "topk"),
    ]
    out: list[dict[str, object]] = []
    for name, tree, row_drafter, verifier, proposal in rows:
        histories = run(target, row_drafter, tree, verifier, proposal, images)
        tokens = sum(int((h.pass_index >= 0).sum()) for h in histories)
        out.append({"proposal": name, "tree": tree, "tokens_per_pass": tokens / sum(h.passes for h in histories)})
    return facts, out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)  # the models are too small for more
    facts, rows = table(options.images)
    if options.json:
        print(json.dumps({"models": facts, "images": options.images, "rows": rows, "torch": torch.__version__}))
        return
    print(", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in facts.items()))
    for row in rows:
        print(f"{row['proposal']!s:30} {row['tree']!s:38} {row['tokens_per_pass']:.2f}")


if __name__ == "__main__":
    main()
