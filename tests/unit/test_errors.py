"""Bad input raises the right error, whose message names the value and what to do."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import toy_models
from lookup_models import TableDrafter, TableTarget, decode_tokens, random_tables
from torch import Tensor

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.neighbour import Neighbour
from underdraw.engine.decode import decode
from underdraw.errors import CapacityError, CheckpointError, ConfigError, UnderdrawError, UnsupportedError
from underdraw.history import History
from underdraw.layout import Layout
from underdraw.nn.cached_decoder import CachedDecoder
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.nn.transformer import Arch, Transformer
from underdraw.plan import TreePlan
from underdraw.policies.adjacency import Adjacency
from underdraw.policies.confidence import Confidence
from underdraw.policies.fixed import Chain, NoTree, Static
from underdraw.protocols import DraftRequest, PrefillOutput, Prompt, VerifiedStep
from underdraw.registry import drafters, parse, policies, verifiers
from underdraw.sampling import Sampler
from underdraw.tree import DraftTree, chain
from underdraw.verifiers.exact import Exact
from underdraw.verifiers.lantern import Lantern
from underdraw.verifiers.rejection import Rejection

CODES = range(4, 12)
LAYOUT = Layout(2, 3, CODES)


def run(
    *,
    target: Any = None,
    drafter: Any = None,
    verifier: Any = None,
    seeds: Sequence[int] = (0,),
    prompts: Sequence[Prompt] = (Prompt((0,)),),
    layout: Layout = LAYOUT,
    device: str = "cpu",
    **options: Any,
) -> None:
    """Decode with lookup models and the components passed."""
    target_table, draft_table = random_tables(layout, seed=0)
    sampler = Sampler(layout, seeds, device=device)
    target, drafter = target or TableTarget(target_table), drafter or TableDrafter(draft_table)
    list(decode(target, drafter, Confidence(2, 2, 5), verifier or Exact(), prompts, sampler, **options))


def decoder(positions: int | None = None, **options: Any) -> DecoderTarget:
    net = Transformer(Arch(8, 1, 1, 8, 16, Rope.one_axis(8), outputs=CODES, **options)).eval()
    return DecoderTarget(net, max_positions=positions)


def on_meta() -> DecoderTarget:
    return DecoderTarget(decoder().net.to("meta"))


def overfull() -> None:
    net = decoder().net
    cos_sin = torch.zeros(1, 65, 2, net.arch.head_width)
    CachedDecoder(net, 1, 64).append(torch.zeros(1, 65, 8), cos_sin, torch.tensor([65]), [65])


@dataclass(frozen=True)
class Bad:
    """An action, the error that it must raise, and texts that the message must contain."""

    name: str
    action: Callable[[], Any]
    message_parts: tuple[str, ...]
    kind: type[UnderdrawError] = ConfigError


BAD = [
    # Names and options.
    Bad("unknown policy", lambda: policies.build("adjacancy"), ("'adjacancy'", "Did you mean 'adjacency'?", "chain")),
    Bad("unknown verifier", lambda: verifiers.build("exakt"), ("verifier 'exakt'", "'exact'", "rejection")),
    Bad("unknown drafter", lambda: drafters.build("jakobi"), ("drafter 'jakobi'", "'jacobi'")),
    Bad("unknown option", lambda: policies.build("confidence:topk=3"), ("'topk'", "Did you mean 'top_k'?", "nodes")),
    Bad("unknown value", lambda: policies.build("adjacency:init=left"), ("adjacency:init", "'left'", "horizontal")),
    Bad("not a whole number", lambda: policies.build("chain:depth=2.5"), ("chain:depth", "whole number", "'2.5'")),
    Bad("not a number", lambda: verifiers.build("lantern:delta=a"), ("lantern:delta", "a number", "'a'")),
    Bad(
        "not by text", lambda: verifiers.build("lantern:neighbours=3"), ("lantern:neighbours", "cannot be set by text")
    ),
    Bad("no name", lambda: parse(":depth=3"), ("':depth=3'", "name:key=value")),
    Bad("no value", lambda: parse("chain:depth"), ("'depth'", "'chain:depth'", "key=value")),
    Bad("twice", lambda: parse("chain:depth=3,depth=4"), ("'depth'", "twice")),
    # Trees.
    Bad("unknown table", lambda: Static("naive_extend"), ("'naive_extend'", "Did you mean 'naive_extend_57'?")),
    Bad("no such file", lambda: Static("nowhere/tree.json"), ("'nowhere/tree.json'", "No such file", "JSON list")),
    Bad("negative depth", lambda: TreePlan(-1, 1, 1, 1), ("depth -1", "at least 0")),
    Bad("no width", lambda: TreePlan(1, 0, 1, 2), ("width 0", "at least 1")),
    Bad("no branch", lambda: TreePlan(1, 1, 0, 2), ("branch 0", "at least 1")),
    Bad("budget below depth", lambda: TreePlan(5, 1, 1, 5), ("5 nodes", "depth 5", "at least 6")),
    Bad("too many nodes", lambda: TreePlan(5, 10, 10, 129), ("129 nodes", "at most 128")),
    Bad("too much drafting", lambda: TreePlan(30, 9, 1, 128), ("depth 30", "width 9", "256", "less of either")),
    Bad("confidence budget", lambda: policies.build("confidence:nodes=200"), ("200 nodes", "at most 128")),
    Bad("adjacency depth", lambda: Adjacency(depth=11), ("d_min <= depth <= d_max", "2, 11, 10")),
    Bad("adjacency width", lambda: Adjacency(k_min=9), ("k_min <= width <= k_max", "9, 8, 12")),
    Bad("adjacency beta", lambda: Adjacency(beta=1.5), ("beta 1.5", "[0, 1]")),
    Bad("adjacency beta nan", lambda: Adjacency(beta=math.nan), ("beta nan", "[0, 1]")),
    Bad("adjacency step", lambda: Adjacency(l_d=-1), ("l_d -1", "not be negative")),
    Bad("adjacency budget", lambda: Adjacency(nodes=10), ("10 nodes", "depth 10", "at least 11")),
    Bad("adjacency too large", lambda: Adjacency(d_max=40, nodes=60), ("depth 40", "width 12", "256")),
    Bad("shape without root", lambda: TreePlan.from_shape((0, 0)), ("root", "-1")),
    Bad("empty shape", lambda: TreePlan.from_shape(()), ("root", "-1")),
    Bad("child before parent", lambda: TreePlan.from_shape((-1, 2, 0)), ("node 1", "parent 2", "before its children")),
    # Layouts.
    Bad("no height", lambda: Layout(0, 3, CODES), ("height 0", "from 1 to 1024")),
    Bad("negative width", lambda: Layout(3, -1, CODES), ("width -1", "from 1 to 1024")),
    Bad("codes with gaps", lambda: Layout(2, 2, range(4, 12, 2)), ("range(4, 12, 2)", "consecutive")),
    Bad("number of codes", lambda: Layout(2, 2, 8), ("codes 8", "a range")),  # type: ignore[arg-type]
    Bad("height as text", lambda: Layout("2", 2, CODES), ("height '2'", "whole number")),  # type: ignore[arg-type]
    Bad("one code", lambda: Layout(2, 2, range(4, 5)), ("range(4, 5)", "at least 2")),
    Bad("code in prologue", lambda: Layout(2, 2, CODES, prologue=(1, 5)), ("prologue (1, 5)", "outside range(4, 12)")),
    Bad("negative epilogue", lambda: Layout(2, 2, CODES, epilogue=(-1,)), ("epilogue (-1,)", "negative")),
    Bad("prologue as number", lambda: Layout(2, 2, CODES, prologue=3), ("prologue 3", "tuple of token ids")),  # type: ignore[arg-type]
    Bad("epilogue as text", lambda: Layout(2, 2, CODES, epilogue=("a",)), ("epilogue ('a',)", "tuple of token ids")),  # type: ignore[arg-type]
    Bad("row end as text", lambda: Layout(2, 2, CODES, row_end="a"), ("row_end a", "must be a token id")),  # type: ignore[arg-type]
    Bad("preview as number", lambda: Layout(2, 2, CODES, preview=3), ("preview of 3", "(rows, columns)")),  # type: ignore[arg-type]
    Bad("empty preview", lambda: Layout(2, 2, CODES, preview=(0, 2)), ("rows 0", "from 1 to 1024")),
    Bad("code as row end", lambda: Layout(2, 2, CODES, row_end=5), ("row_end 5", "outside", "range(4, 12)")),
    Bad("cell outside", lambda: LAYOUT.step(2, 0), ("(2, 0)", "outside the 2 x 3 grid")),
    Bad("half an image", lambda: LAYOUT.grid(torch.zeros(5)), ("5 tokens", "has 6")),
    # Sampling.
    Bad("temperature as text", lambda: Sampler(LAYOUT, [0], temperature="1"), ("temperature '1'", "pass a number")),  # type: ignore[arg-type]
    Bad("top_k as text", lambda: Sampler(LAYOUT, [0], top_k="3"), ("top_k '3'", "whole number")),  # type: ignore[arg-type]
    Bad("negative temperature", lambda: Sampler(LAYOUT, [0], temperature=-1), ("temperature -1", "0 (greedy)")),
    Bad("temperature nan", lambda: Sampler(LAYOUT, [0], temperature=math.nan), ("temperature nan", "0 (greedy)")),
    Bad("temperature inf", lambda: Sampler(LAYOUT, [0], temperature=math.inf), ("temperature inf", "positive")),
    Bad("tiny temperature", lambda: Sampler(LAYOUT, [0], temperature=1e-5), ("temperature 1e-05", "use 0")),
    Bad("negative top_k", lambda: Sampler(LAYOUT, [0], top_k=-1), ("top_k -1", "0 (off)")),
    Bad("top_p zero", lambda: Sampler(LAYOUT, [0], top_p=0), ("top_p 0", "(0, 1]", "1 turns it off")),
    Bad("top_p above one", lambda: Sampler(LAYOUT, [0], top_p=1.5), ("top_p 1.5", "(0, 1]")),
    Bad("top_p nan", lambda: Sampler(LAYOUT, [0], top_p=math.nan), ("top_p nan", "(0, 1]")),
    Bad("one seed", lambda: Sampler(LAYOUT, 7), ("seeds 7", "a list of whole numbers")),  # type: ignore[arg-type]
    Bad("no seeds", lambda: Sampler(LAYOUT, []), ("no seeds", "one seed per image")),
    Bad("negative seed", lambda: Sampler(LAYOUT, [3, -1]), ("seed -1", "0 to 2**62 - 1")),
    Bad("seed as text", lambda: Sampler(LAYOUT, ["abc"]), ("seed 'abc'", "whole numbers")),  # type: ignore[list-item]
    Bad("seed in a list", lambda: Sampler(LAYOUT, [[1]]), ("seed [1]", "whole numbers")),  # type: ignore[list-item]
    Bad("seed of a fraction", lambda: Sampler(LAYOUT, [0.5]), ("seed 0.5", "whole numbers")),  # type: ignore[list-item]
    Bad("seed true", lambda: Sampler(LAYOUT, [True]), ("seed True", "whole numbers")),
    Bad("huge seed", lambda: Sampler(LAYOUT, [2**62]), (str(2**62), "0 to 2**62 - 1")),
    # Combinations.
    Bad(
        "coupled + rejection",
        lambda: run(verifier=Rejection(), proposal="coupled"),
        ("'coupled'", "rejection", "use sampled"),
    ),
    Bad("topk + rejection", lambda: run(verifier=Rejection(), proposal="topk"), ("'topk'", "rejection", "use sampled")),
    Bad(
        "coupled + lantern",
        lambda: run(verifier=Lantern(), proposal="coupled"),
        ("'coupled'", "lantern", "use topk or sampled"),
    ),
    Bad("lantern without codebook", lambda: run(verifier=Lantern()), ("codebook", "Lantern().bind(codebook)")),
    Bad("rejection without q", lambda: run(verifier=Rejection(), drafter=Forced()), ("rejection", "'sampled'", "no q")),
    Bad("seeds and prompts", lambda: run(seeds=(0, 1)), ("1 prompts", "2 seeds", "one seed per prompt")),
    Bad("negative guidance", lambda: run(guidance=-1.0), ("guidance -1.0", "at least 0", "1 turns it off")),
    Bad("guidance as text", lambda: run(guidance="3"), ("guidance '3'", "pass a number")),
    Bad("guidance nan", lambda: run(guidance=math.nan), ("guidance nan", "1 turns it off")),
    Bad("guidance inf", lambda: run(guidance=math.inf), ("guidance inf", "1 turns it off")),
    Bad(
        "guidance alone",
        lambda: run(target=decoder(), guidance=3.0),
        ("guidance other than 1", "unconditional prompt", "use guidance 1"),
    ),
    Bad("mixed devices", lambda: run(target=on_meta()), ("sampler is on cpu", "model on meta", "one device")),
    # Verifiers and drafters.
    Bad("delta", lambda: Lantern(delta=2.0), ("delta 2.0", "[0, 1]")),
    Bad("ratio", lambda: Lantern(ratio=0.5), ("ratio 0.5", "at least 1")),
    Bad("ratio inf", lambda: Lantern(ratio=math.inf), ("ratio inf", "at least 1")),
    Bad("no neighbours", lambda: Lantern(k=0), ("k 0", "at least 1")),
    Bad("no window", lambda: Jacobi(window=0), ("window of 0", "1 to 127")),
    Bad("large window", lambda: Jacobi(window=128), ("window of 128", "1 to 127")),
    Bad("negative weight", lambda: Neighbour(left=-1), ("not be negative",)),
    Bad("no floor", lambda: Neighbour(floor=0), ("floor must be positive",)),
    # Networks and sessions.
    Bad("heads", lambda: toy_models.arch(dim=30), ("dim 30", "4 heads", "head_dim or another number")),
    Bad("key-value heads", lambda: toy_models.arch(kv_heads=3), ("4 heads", "3 key-value heads", "divisor")),
    Bad("rope", lambda: toy_models.arch(rope=Rope((3, 0, 0))), ("axes (3, 0, 0)", "width 8 need 4")),
    Bad(
        "head and layout",
        lambda: run(target=decoder(), layout=Layout(2, 3, range(4, 9))),
        ("8 outputs", "5 codes", "cut the head"),
    ),
    Bad("no prompts", lambda: decoder().open([], LAYOUT, guidance=1.0), ("no prompts", "at least one")),
    Bad("empty prompt", lambda: run(target=decoder(), prompts=[Prompt(())]), ("empty prompt", "at least one")),
    Bad(
        "features",
        lambda: run(target=decoder(), prompts=[Prompt(torch.zeros(3, 8))]),
        ("prompt tokens", "not text features"),
    ),
    Bad("positions", lambda: run(target=decoder(positions=6)), ("7 positions", "has 6", "shorten"), CapacityError),
    Bad("capacity", overfull, ("65 tokens", "cache of 64", "more capacity"), CapacityError),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_message_names_the_value_and_the_remedy(bad: Bad) -> None:
    with pytest.raises(UnderdrawError) as caught:
        bad.action()
    assert type(caught.value) is bad.kind
    message = str(caught.value)
    assert message.endswith("."), "a sentence"
    for text in bad.message_parts:
        assert text in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "cannot be read"),
        ("[-1, 0,", "cannot be read"),
        ('{"parents": [-1, 0]}', "JSON list of whole numbers"),
        ('[-1, "0"]', "JSON list of whole numbers"),
        ("[-1, 0.5]", "JSON list of whole numbers"),
        ("[]", "starts with its root"),
        ("[0, 0, 1]", "starts with its root"),
        ("[-1, 0, 3]", "node 2 of the tree shape has parent 3"),
        (json.dumps([-1] + [0] * 128), "129 nodes is too large"),
    ],
)
def test_malformed_shape_files(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "tree.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Static(str(file))


def test_error_classes() -> None:
    """One base class to catch; a ConfigError is also a ValueError."""
    for kind in (ConfigError, CheckpointError, CapacityError, UnsupportedError):
        assert issubclass(kind, UnderdrawError)
    assert issubclass(ConfigError, ValueError)
    assert not issubclass(CapacityError, ValueError)


def finished_history() -> History:
    """The history of a complete decode."""
    target, draft = random_tables(LAYOUT, seed=0)
    return decode_tokens(TableTarget(target), TableDrafter(draft), NoTree(), Exact(), LAYOUT, [0])[1][0]


INCOMPATIBLE = [
    Bad("chain too long", lambda: Chain(depth=500), ("at most 128",)),
    Bad("chain below zero", lambda: Chain(depth=-1), ("-1",)),
    Bad("half a seed", lambda: Sampler(LAYOUT, [1.5]), ("1.5",)),  # type: ignore[list-item]
    Bad("negative codes", lambda: Layout(2, 2, range(-4, 4)), ("range(-4, 4)",)),
    Bad("weight nan", lambda: Neighbour(left=math.nan), ("nan",)),
    Bad("weight inf", lambda: drafters.build("neighbour:left=inf"), ("inf",)),
    Bad("history of a size", lambda: History((2, 3)), ("a Layout, not (2, 3)", "make one")),  # type: ignore[arg-type]
    Bad("one history", lambda: run(histories=History(LAYOUT)), ("a list of histories", "History(")),
    Bad("too few histories", lambda: run(histories=[]), ("histories",)),
    Bad("used histories", lambda: run(histories=[finished_history()]), ("histories",)),
    Bad("histories of another layout", lambda: run(histories=[History(Layout(1, 2, CODES))]), ("histories",)),
    Bad("another range of codes", lambda: run(target=decoder(), layout=Layout(2, 3, range(8))), ("range(4, 12)",)),
    Bad("token outside the vocabulary", lambda: run(target=decoder(), prompts=[Prompt((99,))]), ("99", "16")),
    Bad("another codebook", lambda: run(verifier=Lantern(delta=0.5).bind(torch.randn(99, 2))), ("99", "8")),
    Bad("sampler on meta", lambda: run(target=decoder(), device="meta"), ("sampler is on meta", "model on cpu")),
]


@pytest.mark.parametrize("bad", INCOMPATIBLE, ids=lambda bad: bad.name)
def test_incompatible_components_are_rejected(bad: Bad) -> None:
    test_message_names_the_value_and_the_remedy(bad)


# ------------------------------------------------------------------------------------------------------ valid input


def test_extreme_valid_settings_are_accepted() -> None:
    Sampler(LAYOUT, [0, 2**62 - 1], temperature=1e-4, top_k=10**6, top_p=1.0)
    Sampler(LAYOUT, [0], temperature=0)
    Adjacency(beta=0.0, l_d=0, l_k=0)
    Adjacency(beta=1.0, d_min=1, k_min=1)
    Lantern(delta=1.0, ratio=1.0, k=1)
    TreePlan(127, 1, 1, 128)
    run(target=decoder(positions=7))
    run(guidance=0.0)


def test_image_of_one_cell_needs_no_pass() -> None:
    layout = Layout(1, 1, CODES)
    target, draft = random_tables(layout, seed=0)
    tokens, histories = decode_tokens(TableTarget(target), TableDrafter(draft), NoTree(), Exact(), layout, [0, 1])
    assert tokens.shape == (2, 1)
    assert all(history.done and history.passes == 0 for history in histories)


@dataclass(frozen=True)
class UnevenDrafter:
    """Drafts the true tokens, but for one image only: in turns, or always for the first."""

    proposes: ClassVar[str] = "chain"

    tokens: Tensor  # (B, steps)
    alternates: bool

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: float
    ) -> UnevenSession:
        return UnevenSession(self)


class UnevenSession:
    def __init__(self, drafter: UnevenDrafter) -> None:
        self.tokens, self.alternates, self.turn = drafter.tokens, drafter.alternates, 0

    def draft(self, request: DraftRequest) -> DraftTree:
        steps = request.steps[:, None] + torch.arange(request.plan.depth + 1)
        drafted = self.tokens.gather(1, steps.clamp(max=self.tokens.shape[1] - 1))
        is_drafted = torch.arange(2) == self.turn % 2
        lengths = is_drafted * (request.plan.depth if request.limits is None else request.limits.depth)
        self.turn += self.alternates
        return chain(drafted, lengths)

    def commit(self, verified: VerifiedStep) -> None:
        pass


@pytest.mark.parametrize("alternates", [True, False], ids=["in turns", "one far ahead"])
def test_kv_cache_holds_images_that_advance_unevenly(alternates: bool) -> None:
    """It must hold the longest row, not the sum of the longest advances, and nothing for finished images."""
    layout = Layout(1, 230, CODES)
    target, prompts = decoder(), [Prompt((0,)), Prompt((0, 1))]
    images: list[list[list[int]]] = []
    for policy in (NoTree(), Chain(depth=20)):
        drafter: Any = UnevenDrafter(torch.tensor(images[0]), alternates) if images else Jacobi()
        histories = [History(layout), History(layout)]
        list(decode(target, drafter, policy, Exact(), prompts, Sampler(layout, [0, 1]), histories=histories))
        images.append([history.tokens.tolist() for history in histories])
    assert images[0] == images[1]
