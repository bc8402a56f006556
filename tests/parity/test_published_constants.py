"""Constants that the published systems agree on: token ids, lengths, RoPE tables, sampling defaults, draft trees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import checkpoint_writers
import pytest
import reference_networks as reference
import torch
from parity_cases import ParityCase

from underdraw.history import History
from underdraw.layout import Layout
from underdraw.models import anole as anole_family
from underdraw.models import chameleon, lumina
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import ImageSize, SamplingDefaults
from underdraw.nn.rope import Rope
from underdraw.nn.row_invariant import unpack
from underdraw.nn.target import apply_guidance
from underdraw.nn.transformer import Arch, Transformer, causal_attention
from underdraw.plan import TreePlan
from underdraw.policies.fixed import Static
from underdraw.sampling import Sampler
from underdraw.tree import Frontier, grow_tree


def test_lumina_token_ids(lumina: ParityCase) -> None:
    layout = lumina.model.make_layout(lumina.model.sizes[0])
    assert layout.token_ids(0) == 4 and layout.token_ids(8191) == 8195
    assert layout.vocab_indices(4) == 0 and layout.vocab_indices(8195) == 8191
    assert layout.row_end == 8803 and chameleon.SEPARATOR == 8710


@pytest.mark.parametrize(("side", "token"), [(512, 8820), (768, 8828), (1024, 8836)])
def test_lumina_size_tokens(side: int, token: int) -> None:
    assert lumina.make_layout(ImageSize(side, side)).prologue == (8197, token, token)


def test_lumina_sequence_lengths() -> None:
    """2352 cells and row ends, 2353 with the end, 2356 with the header, 2357 with the separator."""
    layout = lumina.make_layout(ImageSize(768, 768))
    assert layout.row_stride * layout.height == 2352
    assert layout.steps - len(layout.prologue) - 1 == 2353
    assert layout.steps - 1 == 2356 and layout.steps == 2357
    assert layout.epilogue == (8196, 8710)
    ends = [step for step in range(3, 3 + 2352) if layout.is_row_end(step)]
    assert ends == [3 + 48 + 49 * row for row in range(48)]


def test_lumina_image_sizes() -> None:
    """The same sizes as walking along the hyperbola of the area in patches of 32, none longer than 4:1."""
    sizes = lumina.list_sizes(768)
    assert sizes[0] == ImageSize(768, 768) and len(set(sizes)) == len(sizes)
    walked, width, height = set(), 24 * 24, 1
    while width > 0:
        if max(width, height) <= 4 * min(width, height):
            walked.add(ImageSize(height * 32, width * 32))
        if (height + 1) * width <= 24 * 24:
            height += 1
        else:
            width -= 1
    assert set(sizes) == walked and ImageSize(1024, 576) in walked


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("Alpha-VLLM/Lumina-mGPT-7B-512", 512),
        ("Alpha-VLLM/Lumina-mGPT-7B-1024", 1024),
        ("/ckpts/Lumina-mGPT-7B-768-Omni", 768),
        ("/ckpts/mine", None),
        ("/ckpts/Lumina-mGPT-7B-768/mine", None),
        (".", None),
    ],
)
def test_lumina_side_from_its_published_name(name: str, side: int | None) -> None:
    assert lumina.trained_side(Checkpoint(Path(), name)) == side
    assert lumina.trained_side(Checkpoint(Path(name), ".")) == side


def test_lumina_side_of_a_model_that_was_trained_from_another() -> None:
    """Its configuration may name that one; the path of the hub's cache names this one."""
    config = {"_name_or_path": "Alpha-VLLM/Lumina-mGPT-7B-768"}
    cache = Path("/cache/models--Alpha-VLLM--Lumina-mGPT-7B-1024/snapshots/0123abc")
    assert lumina.trained_side(Checkpoint(cache, ".", config)) == 1024
    assert lumina.trained_side(Checkpoint(Path(), "Alpha-VLLM/Lumina-mGPT-7B-512", config)) == 512
    assert lumina.trained_side(Checkpoint(Path("/ckpts/mine"), "mine", config)) == 768


@pytest.mark.parametrize("side", [16, 24, 32])
def test_llamagen_rope_table(side: int) -> None:
    """120 zero rows, no rotation of the first cell, and rotation of the first 16 pairs alone in row 1, column 0."""
    rope = Rope((0, 16, 16), pairing="interleaved", rotate_prompt=False)
    assert not rope.prompt_rotation(120, torch.device("cpu")).any()
    layout = Layout(side, side, range(16384))
    table = rope.image_rotation(layout, torch.arange(side * side)[None], torch.zeros(1, dtype=torch.int64))[0]
    assert torch.equal(table[0, 0], torch.ones(32)) and not table[0, 1].any()
    rates = 10000.0 ** (-torch.arange(16) / 16)
    torch.testing.assert_close(table[side, 1], torch.cat([rates.sin(), torch.zeros(16)]))
    expected = reference.rotation_table(side, 64, 120)
    torch.testing.assert_close(torch.complex(table[:, 0], table[:, 1]), expected[120:], atol=1e-5, rtol=0)
    assert not expected[:120].any()


def test_per_head_norm_with_equal_rows_equals_a_shared_norm() -> None:
    """32 equal rows (Anole) are one row (Lumina)."""
    arch = Arch(64, 1, 4, 32, 40, Rope.one_axis(16), qk_norm="layer")
    shared, per_head = Transformer(arch), Transformer(replace(arch, qk_norm_heads="per_head"))
    state = shared.state_dict()
    repeated = {
        name: value.repeat(4, 1) if "k_norm" in name or "q_norm" in name else value for name, value in state.items()
    }
    per_head.load_state_dict(repeated)
    assert per_head.state_dict()["blocks.0.q_norm.weight"].shape == (4, 16)
    x = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0))
    rotation = arch.rope.prompt_rotation(5, x.device)[None]
    with torch.no_grad():
        assert torch.equal(shared(x, rotation, causal_attention), per_head(x, rotation, causal_attention))


@pytest.mark.parametrize(
    ("shape", "nodes", "leaves"),
    [
        ("mc_sim_7b_63", 25, 15),
        ("mc_sim_7b_63_balanced", 25, 16),
        ("naive_extend_57", 57, 33),
        ("medusa_2_7b_63", 63, 42),
        ("reverse_balanced_25", 25, 15),
        ("chain", 5, 1),
    ],
)
def test_static_tree_shapes(shape: str, nodes: int, leaves: int) -> None:
    """Number of drafted nodes and of leaves."""
    layout = Layout(8, 8, range(64))
    if shape == "chain":
        plan = TreePlan.from_shape([-1, 0, 1, 2, 3, 4])
    else:
        plan = Static(shape=shape).plan(History(layout), 0)  # type: ignore[arg-type]
    assert plan.shape is not None
    assert len(plan.shape) - 1 == nodes
    assert len(set(range(len(plan.shape))) - set(plan.shape)) == leaves


def test_dynamic_tree_of_the_published_settings() -> None:
    """59 nodes with the root, depth at most 5, parents first: the nodes with the highest sums of log q."""
    layout = Layout(8, 8, range(64))
    generator = torch.Generator().manual_seed(0)
    paths: list[list[tuple[int, ...]]] = []  # of the expanded nodes, level by level
    scores: dict[tuple[int, ...], float] = {(): 0.0}  # of every child of an expanded node

    def expand(level: Frontier) -> torch.Tensor:
        tokens, parents = level.tokens[0].tolist(), level.parents[0].tolist()
        expanded = [(*paths[-1][p], t) for p, t in zip(parents, tokens, strict=True)] if paths else [()]
        paths.append(expanded)
        logits = 2 * torch.randn(1, len(expanded), 64, generator=generator)
        for path, log_probs in zip(expanded, logits[0].log_softmax(-1), strict=True):
            best = log_probs.topk(10)
            for value, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                scores[(*path, token)] = scores[path] + value
        return logits

    noise_window = Sampler(layout, [0], temperature=1.0).noise_window(torch.tensor([0]), 6)
    tree = grow_tree(expand, torch.tensor([0]), TreePlan(5, 10, 10, 59), noise_window, proposal="topk")
    depths, parents, tokens = (part[0].tolist() for part in (tree.depths, tree.parents, tree.tokens))
    assert len(depths) == 59 and min(depths) == 0 and max(depths) <= 5
    assert all(parent < node for node, parent in enumerate(parents))
    kept: list[tuple[int, ...]] = [()]
    for node in range(1, 59):
        assert depths[node] == depths[parents[node]] + 1
        kept.append((*kept[parents[node]], tokens[node]))
    assert set(kept) == {(), *sorted(scores.keys() - {()}, key=scores.__getitem__)[-58:]}


def test_head_is_cut_to_the_image_codes(anole: ParityCase) -> None:
    """Rows 4 to 8195 of lm_head."""
    assert torch.equal(unpack(anole.model.target.net.head.weight), anole.reference["lm_head.weight"][4:8196])


def test_guidance_formula() -> None:
    """u + s (c - u)."""
    c, u = torch.randn(2, 1, 3, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(apply_guidance(torch.cat([c, u]), 3.0), u + 3 * (c - u))


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("anole", SamplingDefaults(3.0, temperature=0.7, top_p=0.9)),
        ("lumina", SamplingDefaults(4.0, top_k=2000)),
        ("t2i", SamplingDefaults(7.5, top_k=1000)),
        ("c2i", SamplingDefaults(4.0, top_k=2000)),
        ("janus", SamplingDefaults(5.0)),
        ("emu3", SamplingDefaults(3.0, top_k=2048)),
    ],
)
def test_sampling_defaults_of_the_authors(
    request: pytest.FixtureRequest, case: str, expected: SamplingDefaults
) -> None:
    assert request.getfixturevalue(case).model.defaults == expected


def test_anole_published_configuration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """512 px are 1024 tokens without row ends."""
    config = {"model_type": "chameleon", "vq_config": {"resolution": 512}}
    folder = tmp_path_factory.mktemp("anole")
    checkpoint_writers.write_shards(folder, {"x": torch.zeros(1)}, 1)
    spec = anole_family.read_spec(Checkpoint(folder, "anole", config))
    layout = spec.make_layout(spec.sizes[0])
    assert (layout.height, layout.width, layout.steps, layout.row_end) == (32, 32, 1024, None)
    assert spec.arch.dim == 4096 and spec.arch.layers == 32 and spec.arch.vocab == 65536
