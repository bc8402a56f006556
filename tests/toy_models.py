"""Very small random targets and drafters, and decodes with them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from underdraw.drafters.block import BlockDrafter, BlockNet
from underdraw.drafters.eagle import Eagle, EagleNet
from underdraw.drafters.forced import Forced
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.decode import decode
from underdraw.history import History, StepResult
from underdraw.layout import Layout
from underdraw.nn.linear import pack_weights
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.policies.fixed import NoTree
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree
from underdraw.verifiers.exact import Exact

CODES = range(4, 36)
PLAIN = Layout(5, 6, CODES)
ROW_ENDS = Layout(6, 4, CODES, prologue=(1, 36), row_end=37, epilogue=(2,))


def arch(layers: int = 2, dim: int = 32, *, rope: Rope | None = None, **options: object) -> Arch:
    return Arch(dim, layers, 4, 48, 40, rope or Rope.one_axis(dim // 4), outputs=CODES, **options)  # type: ignore[arg-type]


def randomise(module: torch.nn.Module, seed: int, head: float = 1.0) -> None:
    """Random weights, scaled so that distributions are neither flat nor one-hot."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.ndim < 2:
                continue
            scale = 1.0 if "embedding" in name else parameter.shape[1] ** -0.5
            parameter.copy_(
                torch.randn(parameter.shape, generator=generator) * scale * (head if "head" in name else 1.0)
            )


def target(
    seed: int = 0,
    architecture: Arch | None = None,
    head: float = 1.6,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DecoderTarget:
    net = Transformer(architecture or arch()).eval()
    randomise(net, seed, head)
    net = net.to(device, dtype)
    pack_weights(net)
    return DecoderTarget(net)


def eagle(target: DecoderTarget, seed: int = 1, *, above: bool = False, layers: int = 1) -> Eagle:
    net = EagleNet(arch(layers=layers, dim=target.net.arch.dim), target.net.arch.dim, above=above).eval()
    randomise(net, seed)
    net.body.head = target.net.head
    return Eagle(net.to(target.net.head.weight.device, target.net.head.weight.dtype))


def block(target: DecoderTarget, seed: int = 2) -> BlockDrafter:
    net = BlockNet(arch(layers=1, dim=target.net.arch.dim), target.net.arch.dim, slots=4, markov_dim=16).eval()
    randomise(net, seed)
    net.body.head = target.net.head
    return BlockDrafter(net.to(target.net.head.weight.device, target.net.head.weight.dtype))


def near(target: DecoderTarget, noise: float = 0.3, seed: int = 3) -> SmallModel:
    """A drafter that is often right and often wrong, on any processor: the target with noise on its weights."""
    net = copy.deepcopy(target.net)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(net.named_parameters()):
            if parameter.ndim > 1:
                parameter += torch.randn(parameter.shape, generator=generator) * parameter.std() * noise
    return SmallModel(replace(target, net=net))


@dataclass(frozen=True)
class Adversary:
    """Drafts the tokens that the target finds least likely. Its session cannot be captured."""

    model: SmallModel
    proposes: ClassVar[str] = "tree"

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> AdversarySession:
        session = self.model.open(prompts, layout, prefill, guidance=guidance)
        return AdversarySession(session)


class AdversarySession:
    def __init__(self, inner: object) -> None:
        self.inner = inner
        logits = inner.logits  # type: ignore[attr-defined]
        inner.logits = lambda features: -logits(features)  # type: ignore[attr-defined]

    def draft(self, request: DraftRequest) -> DraftTree:
        return self.inner.draft(request)  # type: ignore[attr-defined, no-any-return]

    def commit(self, verified: VerifiedStep) -> None:
        self.inner.commit(verified)  # type: ignore[attr-defined]


def prompts(count: int, *, unconditional: bool = True) -> list[Prompt]:
    """Prompts of different lengths."""
    rows = [tuple(38 + (i * j) % 2 for j in range(3 + 2 * i)) for i in range(count)]
    return [Prompt((0, *row), (0, 3) if unconditional else None) for row in rows]


def run_decode(
    target: DecoderTarget,
    drafter: object,
    policy: object,
    *,
    layout: Layout = PLAIN,
    seeds: Sequence[int] = (0,),
    verifier: object | None = None,
    guidance: float = 1.0,
    proposal: str | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    first: int = 0,
    rows: Sequence[Prompt] | None = None,
    token_stats: str = "skip",
    graphs: GraphCache | None = None,
) -> tuple[Tensor, list[History], list[StepResult]]:
    """Tokens (B, steps), histories and step results of one decode; `first` is the index of the first prompt."""
    device = target.net.head.weight.device
    sampler = Sampler(layout, seeds, temperature=temperature, top_k=top_k, top_p=top_p, device=device)
    histories = [History(layout) for _ in seeds]
    steps = list(
        decode(
            target,
            drafter,
            policy,
            verifier or Exact(),
            rows or prompts(first + len(seeds))[first:],
            sampler,
            guidance=guidance,
            proposal=proposal,
            histories=histories,
            token_stats=token_stats,  # type: ignore[arg-type]
            graphs=graphs,
        )
    )
    return torch.stack([torch.from_numpy(h.tokens) for h in histories]), histories, steps


def plain_tokens(target: DecoderTarget, **options: object) -> Tensor:
    """The tokens (B, steps) of plain autoregression."""
    return run_decode(target, Forced(), NoTree(), **options)[0]  # type: ignore[arg-type]
