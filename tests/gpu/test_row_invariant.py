"""Row-invariant numerics on a GPU: the tokens of plain decoding in half precision, for every tree, bucket and batch."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import attention_cases
import pytest
import torch
import toy_models
from torch import Tensor

from underdraw.drafters.forced import Forced
from underdraw.drafters.jacobi import Jacobi
from underdraw.drafters.small_model import SmallModel
from underdraw.engine.cuda_graphs import GraphCache, make_graph_cache
from underdraw.layout import Layout
from underdraw.nn.rope import Rope
from underdraw.nn.target import DecoderTarget
from underdraw.registry import policies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Longer than the tail of the attention kernel, so that blocks below it are read as well.
LAYOUTS = {
    "plain": Layout(12, 13, toy_models.CODES),
    "preview": Layout(11, 12, toy_models.CODES, preview=(4, 6), epilogue=(2,)),
    "row-ends": Layout(13, 11, toy_models.CODES, prologue=(1, 36), row_end=37, epilogue=(2,)),
}
ARCHES = {
    "mha": {},
    "gqa-rms": {"kv_heads": 2, "qk_norm": "rms"},
    "layer-per-head": {"qk_norm": "layer", "qk_norm_heads": "per_head"},
    "sandwich-mrope": {
        "kv_heads": 2,
        "qkv_bias": True,
        "norm": "sandwich",
        "rope": Rope((2, 2, 2), mrope=True, unrotated=2),
    },
}
WIDE_ARCHES = {  # heads as wide as those of LlamaGen-XL and of a 7B
    "heads-of-64": {"head_dim": 64, "rope": Rope.one_axis(64)},
    "heads-of-128-gqa": {"head_dim": 128, "kv_heads": 2, "rope": Rope.one_axis(128), "qk_norm": "layer"},
}
SEEDS = (3, 4, 5)


@dataclass(frozen=True)
class Setting:
    """How images are decoded: drafter, tree policy, images at once, and whether passes are captured."""

    drafter: str
    policy: str
    batch: int
    is_captured: bool = True

    def __str__(self) -> str:
        return f"{self.drafter}-{self.policy}-b{self.batch}-{'captured' if self.is_captured else 'eager'}"


SETTINGS = (
    *(Setting("jacobi", f"chain:depth={depth}", batch) for depth in (7, 23, 63) for batch in (1, 3)),
    *(Setting("eagle", "adjacency:nodes=24", batch) for batch in (1, 3)),
    Setting("block", "adjacency:nodes=64", 2),
    Setting("small-model", "static", 2),
    Setting("jacobi", "chain:depth=15", 3, is_captured=False),
    Setting("forced", "none", 3),
)


@functools.cache
def target(arch: str, dtype: torch.dtype) -> DecoderTarget:
    options = {**ARCHES, **WIDE_ARCHES}[arch]
    return toy_models.target(architecture=toy_models.arch(dim=64, **options), device="cuda", dtype=dtype)  # type: ignore[arg-type]


@functools.cache
def plain_tokens(arch: str, dtype: torch.dtype, layout: str, temperature: float) -> Tensor:
    """Tokens of plain decoding, one image at a time."""
    images = [
        toy_models.plain_tokens(
            target(arch, dtype), layout=LAYOUTS[layout], seeds=(seed,), first=index, temperature=temperature,
            guidance=2.0, top_k=20, graphs=graph_cache(arch, dtype),
        )
        for index, seed in enumerate(SEEDS)
    ]  # fmt: skip
    return torch.cat(images)


@functools.cache
def graph_cache(arch: str, dtype: torch.dtype) -> GraphCache | None:
    return make_graph_cache(torch.device("cuda"), "auto")


def drafter(name: str, of: DecoderTarget) -> object:
    if name == "jacobi":
        return Jacobi(window=63)
    if name == "small-model":
        return SmallModel(of)
    if name == "forced":
        return Forced()
    return toy_models.eagle(of) if name == "eagle" else toy_models.block(of)


def check(arch: str, dtype: torch.dtype, layout: str, temperature: float, setting: Setting) -> None:
    of = target(arch, dtype)
    tokens = toy_models.run_decode(
        of, drafter(setting.drafter, of), policies.build(setting.policy), layout=LAYOUTS[layout],
        seeds=SEEDS[: setting.batch], temperature=temperature, guidance=2.0, top_k=20,
        graphs=graph_cache(arch, dtype) if setting.is_captured else None,
    )[0]  # fmt: skip
    assert torch.equal(tokens, plain_tokens(arch, dtype, layout, temperature)[: setting.batch])


CASES = list(itertools.product(ARCHES, LAYOUTS, (0.0, 0.5, 1.0), SETTINGS))


@pytest.mark.parametrize(("arch", "layout", "temperature", "setting"), CASES, ids=lambda part: str(part))
def test_bfloat16_tokens_equal_plain_decoding(arch: str, layout: str, temperature: float, setting: Setting) -> None:
    check(arch, torch.bfloat16, layout, temperature, setting)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_other_dtypes_equal_plain_decoding(dtype: torch.dtype, setting: Setting) -> None:
    check("gqa-rms", dtype, "row-ends", 1.0, setting)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("arch", WIDE_ARCHES)
def test_wide_heads_equal_plain_decoding(arch: str, setting: Setting, temperature: float) -> None:
    check(arch, torch.bfloat16, "plain", temperature, setting)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize(
    "case",
    [
        attention_cases.Case((300, 290), 20, copies=2),
        attention_cases.Case((250, 17), 64, width=128, copies=2),
        attention_cases.Case((200, 190), 100, heads=8, kv_heads=2, width=64, copies=2),
        attention_cases.Case((128, 250, 60, 5), 12, earlier_nodes=20, copies=2),
    ],
    ids=str,
)
def test_tail_kernel_gives_the_same_bits(case: attention_cases.Case, keys: int, dtype: torch.dtype) -> None:
    from underdraw.kernels.tree_attention import TailTuning, default_tuning, tree_attention

    inputs = attention_cases.attention_inputs(case, torch.device("cuda"), dtype)
    tuning = default_tuning(case.kv_heads, case.width, case.heads // case.kv_heads * case.nodes, dtype)
    expected = tree_attention(*inputs, tuning._replace(tail=None))
    for queries, columns in ((16, 64), (64, 32)):
        tail = TailTuning(queries, columns, keys, 4)
        assert torch.equal(tree_attention(*inputs, tuning._replace(tail=tail)), expected), tail


def test_enough_cases() -> None:
    assert len(CASES) >= 200


def test_fastest_numerics_are_another_set_of_kernels() -> None:
    """`fastest` runs, and its target is not served by the row-invariant kernels."""
    of = replace(target("mha", torch.bfloat16), numerics="fastest")
    tokens = toy_models.plain_tokens(of, layout=LAYOUTS["plain"], seeds=(3,), guidance=2.0)
    assert tokens.shape == (1, LAYOUTS["plain"].steps)
    session = of.open(toy_models.prompts(1), LAYOUTS["plain"], guidance=2.0)
    assert session.decoder.attention_backend == "sdpa"
