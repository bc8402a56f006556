"""Checks of continuous batching, for replay tapes on a CPU and CUDA graphs on a GPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import graph_checks
import toy_models

from underdraw.engine.cuda_graphs import GraphCache
from underdraw.engine.slot_batch import BatchImage, BatchParts, SlotBatch
from underdraw.engine.slot_layout import SlotLayout
from underdraw.engine.slot_sampler import SamplingParams
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.nn.target import DecoderTarget
from underdraw.protocols import Prompt
from underdraw.registry import policies
from underdraw.verifiers.exact import Exact

# Drafters that can mix sizes, with their policies.
MIXING = [
    ("jacobi-tree", "chain:depth=7"),
    ("jacobi", "chain:depth=4"),
    ("jacobi-tree", "trunk:nodes=24"),
    ("forced", "none"),
]


def make_parts(
    target: DecoderTarget, drafter: str, policy: str, *, graphs: GraphCache | None = None, **options: Any
) -> BatchParts:
    tree = policies.build(policy)
    settings: dict[str, Any] = {"verifier": Exact(), "proposal": "coupled", "token_stats": "skip", **options}
    return BatchParts(
        target=target,
        drafter=graph_checks.make_drafter(drafter, target),
        graphs=graphs,
        resolve_policy=lambda images: tree,
        **settings,
    )


def make_image(
    layout: Layout, choose: random.Random, *, guided: bool, greedy: bool = False, length: int | None = None
) -> BatchImage:
    """An image with random settings and a random prompt."""
    prompt = tuple(choose.choice((38, 39)) for _ in range(length or choose.randrange(1, 9)))
    params = SamplingParams(
        seed=choose.randrange(10**6),
        temperature=0.0 if greedy else choose.choice((0.6, 1.0, 1.3)),
        top_k=choose.choice((0, 0, 3, 12, 31)),
        top_p=choose.choice((1.0, 1.0, 0.7)),
    )
    guidance = choose.choice((0.0, 1.5, 3.0)) if guided else 1.0
    return BatchImage(Prompt((0, *prompt), (0, 3)), params, guidance, History(layout))


def plain_tokens(target: DecoderTarget, image: BatchImage) -> list[int]:
    """The tokens of an image that is drawn alone, without drafts."""
    params = image.params
    tokens = toy_models.plain_tokens(
        target,
        layout=image.history.layout,
        seeds=(params.seed,),
        rows=[image.prompt],
        guidance=image.guidance,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
    )
    return tokens[0].tolist()  # type: ignore[no-any-return]


def open_batch(parts: BatchParts, layout: Layout, *, guided: bool, greedy: bool = False, slots: int = 4) -> SlotBatch:
    return SlotBatch(parts, parts.key(layout, is_guided=guided, is_greedy=greedy), slots)


def check_arrivals(
    parts: BatchParts,
    layout: Layout | Sequence[Layout],
    choose: random.Random,
    *,
    guided: bool,
    greedy: bool = False,
    images: int = 6,
    slots: int = 3,
    batch: SlotBatch | None = None,
) -> SlotBatch:
    """Random images arrive at random times, some are cancelled; the others have the tokens of plain decoding.

    With many layouts, each image has one of them, and images of one size are admitted together.
    """
    layouts = [layout] if isinstance(layout, Layout) else list(layout)
    batch = batch or open_batch(parts, layouts[0], guided=guided, greedy=greedy, slots=slots)
    waiting = [make_image(choose.choice(layouts), choose, guided=guided, greedy=greedy) for _ in range(images)]
    everything, cancelled = list(waiting), []
    for _ in range(100 * max(size.steps for size in layouts)):
        arriving = min(choose.choice((0, 0, 1, 2)), batch.free, len(waiting))
        if arriving or (not batch.running and waiting):
            count = max(arriving, 1)
            count = next((i for i in range(count) if waiting[i].history.layout != waiting[0].history.layout), count)
            assert batch.admit(waiting[:count]) == count
            waiting = waiting[count:]
        if choose.random() < 0.03 and batch.running > 1:
            cancelled.append(choose.choice([image for image in batch.slots if image is not None]))
            batch.remove(cancelled[-1:])
        if batch.running:
            results, failures = batch.step()
            assert not failures and len(results) <= slots
        elif not waiting:
            break
    for image in everything:
        tokens, expected = image.history.tokens.tolist(), plain_tokens(parts.target, image)
        if image in cancelled:
            tokens, expected = tokens[: image.root_step + 1], expected[: image.root_step + 1]
        assert tokens == expected, image
    assert len(cancelled) < images
    return batch


def check_sizes(parts: BatchParts, layout: str, choose: random.Random) -> None:
    """Images of several sizes arrive in one batch: larger and smaller, narrower and wider ones.

    The prologue may name the size.
    """
    first = graph_checks.LAYOUTS[layout]
    others = [replace(first, height=height, width=width) for height, width in ((3, 9), (8, 3), (6, 5))]
    sizes = [first, *(replace(size, prologue=first.prologue[::-1]) for size in others)]
    batch = check_arrivals(parts, sizes, choose, guided=True, images=8, slots=4)
    assert batch._runner is not None and isinstance(batch._runner.sampler.layout, SlotLayout)
    assert len({parts.key(size, is_guided=True, is_greedy=False) for size in sizes}) == 1
