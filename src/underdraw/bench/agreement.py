"""How often passes over trees choose the tokens of plain decoding, and what quantised weights change.

`measure_agreement` compares one tree with plain decoding in two ways: end to end (share of identical pictures), and
with forced context (share of equal tokens, each compared after the tokens of the plain picture, so that one difference
does not cause others). `measure_matrix` compares chains and trees of many sizes, in batches and at temperatures, end to
end; the first tokens of a picture are enough to see rounding. `measure_quality` compares a quantised decoder with the
full one, with forced context.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.jacobi_tree import JacobiTree
from underdraw.engine.autotune import FixedPlan
from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.decode import decode
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.models.config import Placement
from underdraw.models.random_weights import ModelShape, model_shape, random_target
from underdraw.nn.linear import pack_weights
from underdraw.nn.target import DecoderTarget
from underdraw.plan import MAX_GPU_DEPTH, MAX_NODES, TreePlan
from underdraw.policies.fixed import NoTree
from underdraw.policies.trunk import Trunk
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
RANDOM = "random:"  # begins the names of models with random weights
QUALITY_NODES = 64  # of the passes over forced pictures
LONG_PROMPT = 256  # tokens more in every fifth prompt of a random model
PROMPTS = tuple(
    f"{subject}, 3D render, on a {colour} background"
    for colour in ("sky blue", "white", "purple", "green")
    for subject in ("a fox", "an owl", "a cat", "a horse", "a rabbit")
)


class ForcedPicture:
    """A drafter that drafts a finished picture and a verifier that accepts it, counting the target's equal choices."""

    proposes: ClassVar[Literal["chain"]] = "chain"
    proposals: ClassVar[tuple[Proposal, ...]] = ("coupled",)

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.tokens = torch.zeros(1, layout.steps + MAX_NODES, dtype=torch.int64, device=device)
        self.tokens[0, : layout.start] = torch.tensor(layout.prologue, dtype=torch.int64)
        self.drawn = slice(layout.start, layout.stop)
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # tokens, and tokens that the target chose too

    def set_tokens(self, tokens: Tensor) -> None:
        """Force another picture: all tokens that `draw` returns of it."""
        self.tokens[0, self.drawn].copy_(tokens)

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


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to draw pictures with, and the settings of its family."""

    name: str
    target: DecoderTarget
    layout: Layout
    prompts: list[Prompt]  # one per picture
    guidance: float
    top_k: int

    @property
    def device(self) -> torch.device:
        return self.target.net.head.weight.device


def random_prompts(shape: ModelShape, count: int) -> list[Prompt]:
    """Prompts of random text tokens and different lengths, every fifth with LONG_PROMPT tokens more.

    Different prompts give different pictures at T=0 too, and long ones attend to more blocks of the KV cache.
    """
    choose, codes = random.Random(0), shape.layout.codes
    text = [token for token in range(1, shape.arch.vocab) if token not in codes] or list(codes)
    prompts = []
    for index in range(count):
        shared = choose.choices(text, k=LONG_PROMPT if index % 5 == 4 else 0)
        length = shape.prompt_length - index % 4
        condition, unconditional = choose.choices(text, k=length), choose.choices(text, k=2)
        prompts.append(Prompt((*shared, *condition), (*shared, *unconditional)))
    return prompts


def load_subject(name: str, placement: Placement, pictures: int, layers: int | None = None) -> Subject:
    """A checkpoint, or random weights of a published shape (`random:anole-7b`), with fewer `layers` if given."""
    if name.startswith(RANDOM):
        shape = model_shape(name.removeprefix(RANDOM))
        target = random_target(replace(shape.arch, layers=layers or shape.arch.layers), placement)
        pack_weights(target.net)  # as those of a loaded checkpoint
        return Subject(name, target, shape.layout, random_prompts(shape, pictures), shape.guidance, shape.top_k)
    from underdraw.pipeline import Pipeline

    pipe = Pipeline.from_pretrained(
        name, device=placement.device, dtype=placement.dtype, drafter="jacobi", weights=placement.weights
    )
    request = pipe.request([PROMPTS[index % len(PROMPTS)] for index in range(pictures)], seed=0)
    layout = pipe.model.make_layout(request.size)
    return Subject(name, pipe.model.target, layout, pipe.prompts(request), request.guidance, request.top_k)


@dataclass(frozen=True, slots=True)
class Setting:
    """A drafter and its tree, and how many pictures are drawn at once."""

    kind: str  # chain or tree
    nodes: int
    batch: int

    def parts(self) -> tuple[Drafter, TreePolicy]:
        if self.kind == "chain":
            depth = min(self.nodes - 1, MAX_GPU_DEPTH)
            return Jacobi(window=depth), FixedPlan(TreePlan(depth, 1, 1, depth + 1))
        return JacobiTree(), Trunk(nodes=self.nodes)


def settings(nodes: Sequence[int], batches: Sequence[int]) -> Iterator[Setting]:
    """Every chain and tree in every batch, and plain decoding in batches of more than one picture."""
    for batch in batches:
        if batch > 1:
            yield Setting("plain", 1, batch)
        for count in nodes:
            if count - 1 <= MAX_GPU_DEPTH:
                yield Setting("chain", count, batch)
            yield Setting("tree", count, batch)


def draw(
    subject: Subject,
    seeds: Sequence[int],
    drafter: Drafter,
    policy: TreePolicy,
    *,
    temperature: float,
    graphs: GraphCache | None,
    tokens: int | None = None,
    verifier: Verifier | None = None,
) -> Tensor:
    """Tokens (B, steps) of the pictures with these seeds, drawn at once; of their first `tokens` cells if given."""
    layout, histories = subject.layout, [History(subject.layout) for _ in seeds]
    sampler = Sampler(layout, tuple(seeds), temperature=temperature, top_k=subject.top_k, device=subject.device)
    prompts = [subject.prompts[seed % len(subject.prompts)] for seed in seeds]
    stop = layout.stop if tokens is None else min(layout.start + tokens, layout.stop)
    for _ in decode(
        subject.target, drafter, policy, verifier or Exact(), prompts, sampler, guidance=subject.guidance,
        histories=histories, graphs=graphs,
    ):  # fmt: skip
        if all((history.tokens[layout.start : stop] >= 0).all() for history in histories):
            break
    return torch.stack([torch.from_numpy(history.tokens[layout.start : stop].copy()) for history in histories])


@torch.inference_mode()
def measure_agreement(
    subject: Subject, make_graphs: Callable[[int], GraphCache], *, temperature: float = 1.0
) -> dict[str, Any]:
    """Shares of equal tokens and of identical pictures, one picture per prompt.

    `make_graphs(n)` returns captured passes over at least n nodes. With n = 1 plain passes have one node; with the
    trees' number of nodes, plain and tree passes have the same GEMM shapes.
    """
    count, tree = len(subject.prompts), FixedPlan(TreePlan(NODES - 1, 1, 1, NODES))
    shapes = {}
    for min_nodes, name in ((1, "one node"), (NODES, "the shapes of tree passes")):
        options: dict[str, Any] = {"temperature": temperature, "graphs": make_graphs(min_nodes)}
        forced, identical = ForcedPicture(subject.layout, subject.device), 0
        for seed in range(count):
            plain = draw(subject, (seed,), Forced(), NoTree(), **options)[0]
            identical += torch.equal(plain, draw(subject, (seed,), Jacobi(), tree, **options)[0])
            forced.set_tokens(plain)
            draw(subject, (seed,), forced, tree, verifier=forced, **options)
        tokens, equal = forced.counts.tolist()
        shapes[name] = {"tokens_equal": equal / tokens, "pictures_equal": identical / count, "tokens": tokens}
    return {"kind": "agreement", "pictures": count, "nodes": NODES, "temperature": temperature, "shapes": shapes}


@torch.inference_mode()
def measure_matrix(
    subject: Subject,
    cells: Sequence[Setting],
    temperatures: Sequence[float],
    pictures: int,
    graphs: GraphCache | None,
    *,
    tokens: int | None = None,
    report: Callable[[dict[str, Any]], None] = lambda row: None,
) -> list[dict[str, Any]]:
    """A row per setting and temperature: how many pictures and tokens equal those of plain decoding one at a time."""
    rows = []
    for temperature in temperatures:
        options: dict[str, Any] = {"temperature": temperature, "graphs": graphs, "tokens": tokens}
        count = max([pictures, *(cell.batch for cell in cells)])
        plain = torch.cat([draw(subject, (seed,), Forced(), NoTree(), **options) for seed in range(count)])
        for cell in cells:
            drafter, policy = (Forced(), NoTree()) if cell.kind == "plain" else cell.parts()
            equal_pictures = equal_tokens = drawn = 0
            while drawn < pictures:
                seeds = range(drawn, drawn + cell.batch)
                expected = plain[[seed % count for seed in seeds]]
                same = draw(subject, [seed % count for seed in seeds], drafter, policy, **options) == expected
                equal_pictures += int(same.all(1).sum())
                equal_tokens += int(same.long().cumprod(1).sum())  # up to the first different one
                drawn += cell.batch
            row = {
                "temperature": temperature, "kind": cell.kind, "nodes": cell.nodes, "batch": cell.batch,
                "pictures": drawn, "pictures_equal": equal_pictures, "tokens": drawn * plain.shape[1],
                "tokens_equal": equal_tokens,
            }  # fmt: skip
            rows.append(row)
            report(row)
    return rows


class LogitsRecorder(ForcedPicture):
    """Draws a finished picture and keeps the target's logits before every token of it."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout, device)
        self.logits: list[Tensor] = []  # (tokens, codes) of each pass

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        accepted = super().verify(tree, logits, noise_window)
        self.logits.append(logits[0, : int(accepted.length) + 1].float().cpu())
        return accepted


def _forced_logits(subject: Subject, picture: int, tokens: Tensor) -> Tensor:
    """Guided logits (tokens, codes) of a model along a finished picture."""
    recorder = LogitsRecorder(subject.layout, subject.device)
    recorder.set_tokens(tokens)
    plan = FixedPlan(TreePlan(QUALITY_NODES - 1, 1, 1, QUALITY_NODES))
    draw(subject, (picture,), recorder, plan, temperature=1.0, graphs=None, verifier=recorder)
    return torch.cat(recorder.logits)


@torch.inference_mode()
def measure_quality(full: Subject, quantized: Subject, pictures: int, *, temperature: float) -> dict[str, Any]:
    """What quantisation changes along pictures of the full model: greedy choices, KL divergence, pictures drawn."""
    equal = count = identical = 0
    divergence = torch.zeros((), dtype=torch.float64)
    for picture in range(pictures):
        options: dict[str, Any] = {"temperature": temperature, "graphs": None}
        drawn = draw(full, (picture,), Forced(), NoTree(), **options)[0]
        identical += torch.equal(drawn, draw(quantized, (picture,), Forced(), NoTree(), **options)[0])
        p, q = (_forced_logits(subject, picture, drawn) for subject in (full, quantized))
        equal += int((p.argmax(1) == q.argmax(1)).sum())
        log_p, log_q = p.double().log_softmax(1), q.double().log_softmax(1)
        divergence += (log_p.exp() * (log_p - log_q)).sum()
        count += len(p)
    return {
        "pictures": pictures,
        "tokens": count,
        "greedy_equal": equal / count,
        "kl_nats": float(divergence) / count,
        "pictures_identical": identical,
    }
