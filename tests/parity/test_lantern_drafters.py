"""LANTERN's published EAGLE heads: files, formulas, alignment with the target, refusals, tables of nearest codes."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import checkpoint_writers
import numpy as np
import parity_cases
import pytest
import reference_networks as reference
import torch
from fake_hub import FakeHub
from parity_cases import ParityCase
from torch import Tensor

from underdraw.drafters.eagle import Eagle, EagleSession
from underdraw.drafters.padded_eagle import PaddedEagle, pad_prefill
from underdraw.errors import CheckpointError, ConfigError
from underdraw.models.hub import HubOptions
from underdraw.models.lantern_drafters import load_nearest_codes
from underdraw.models.loading import load_drafter_by_name, load_drafter_files
from underdraw.nn.row_invariant import unpack
from underdraw.pipeline import Pipeline
from underdraw.plan import TreePlan
from underdraw.protocols import DraftRequest, PrefillOutput
from underdraw.sampling import Sampler
from underdraw.verifiers.lantern import Lantern

KINDS = {"anole": ("anole", 4), "lumina": ("anole", 1), "t2i": ("llamagen", 0)}


def apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    """Half-split rotation of (L, heads, width) by (L, width / 2)."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def layer_norm(x: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return x * state[f"{name}.weight"] + state[f"{name}.bias"]


def attention_and_ffn(state: dict[str, Tensor], x: Tensor, scores: Tensor, v: Tensor, eps: float) -> Tensor:
    """The rest of a layer: x (L, D), scores (heads, L, L) before the causal mask, v (L, heads, width)."""
    scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(x.shape)
    x = x + attended @ state["layers.0.self_attn.o_proj.weight"].T
    normal = reference.rms(x, state["layers.0.post_attention_layernorm.weight"], eps)
    gate, up = (normal @ state[f"layers.0.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
    return x + (reference.swish(gate) * up) @ state["layers.0.mlp.down_proj.weight"].T


def chameleon_head(state: dict[str, Tensor], tokens: Tensor, features: Tensor) -> Tensor:
    """The head's features (L, D) from its formulas: fc([embedding; feature]), one layer, no norm at the end."""
    x = torch.cat([state["embed_tokens.weight"][tokens], features], -1) @ state["fc.weight"].T + state["fc.bias"]
    length = len(x)
    normal = reference.rms(x, state["layers.0.input_layernorm.weight"], 1e-5)
    q, k, v = ((normal @ state[f"layers.0.self_attn.{part}_proj.weight"].T).view(length, 4, -1) for part in "qkv")
    rates = 10000.0 ** (-torch.arange(4) / 4)
    angles = torch.arange(length)[:, None] * rates
    q = apply_rope(layer_norm(q, state, "layers.0.self_attn.q_norm"), angles)
    k = apply_rope(layer_norm(k, state, "layers.0.self_attn.k_norm"), angles)
    return attention_and_ffn(state, x, torch.einsum("ihd,jhd->hij", q, k) / 8**0.5, v, eps=1e-5)


def llamagen_head(state: dict[str, Tensor], tokens: Tensor, features: Tensor) -> Tensor:
    """The same for LlamaGen: no norm before attention, 119 zero rotations, then the grid."""
    x = torch.cat([state["embed_tokens.weight"][tokens], features], -1) @ state["fc.weight"].T + state["fc.bias"]
    length = len(x)
    table = reference.rotation_table(4, 64, 119)[:length, None]
    q, k, v = ((x @ state[f"layers.0.self_attn.{part}_proj.weight"].T).view(length, 1, -1) for part in "qkv")
    q, k = (
        torch.view_as_real(torch.view_as_complex(part.reshape(length, 1, -1, 2)) * table).flatten(2) for part in (q, k)
    )
    return attention_and_ffn(state, x, torch.einsum("ihd,jhd->hij", q, k) / 8, v, eps=1e-6)


def open_session(drafter: Eagle, case: ParityCase) -> tuple[EagleSession, PrefillOutput]:
    size = case.model.sizes[0]
    prompt, layout = case.model.make_prompt("a red fox", None, size), case.model.make_layout(size)
    prefill = case.model.target.open([prompt], layout, guidance=1.0).prefill
    session = drafter.open([prompt], layout, prefill, guidance=1.0)
    noise_window = Sampler(layout, [0], temperature=0).noise_window(torch.tensor([layout.start]), 1)
    session.draft(
        DraftRequest(torch.tensor([layout.codes[11]]), torch.tensor([layout.start]), TreePlan(1, 1, 1, 2), noise_window)
    )
    return session, prefill


@pytest.mark.parametrize(("kind", "rows", "count"), [("anole", 4, 16), ("anole", 1, 16), ("llamagen", 0, 11)])
def test_written_heads_have_the_published_tensor_count(tmp_path: Path, kind: str, rows: int, count: int) -> None:
    assert len(checkpoint_writers.write_drafter(tmp_path, kind, rows=rows)) == count


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("name", KINDS)
def test_head_features_match_the_formulas(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, suffix: str
) -> None:
    """Position i reads the target's feature of position i and token i + 1; the root comes last."""
    case: ParityCase = request.getfixturevalue(name)
    kind, rows = KINDS[name]
    state = checkpoint_writers.write_drafter(tmp_path, kind, rows=rows, suffix=suffix)
    drafter = load_drafter_files(tmp_path, case.model)
    assert isinstance(drafter, PaddedEagle) == (name == "t2i") and isinstance(drafter, Eagle)
    session, prefill = open_session(drafter, case)
    root = torch.tensor([case.model.make_layout(case.model.sizes[0]).codes[11]])
    features = prefill.features[0]
    if name == "t2i":
        features = torch.cat([torch.zeros(120 - features.shape[0], features.shape[1]), features])
        tokens = torch.cat([torch.zeros(119, dtype=torch.int64), root])
        expected = llamagen_head(state, tokens, features)
    else:
        expected = chameleon_head(state, torch.cat([prefill.prefix[0, 1:], root]), features)
    torch.testing.assert_close(session.root_output[0, 0], expected[-1], atol=1e-4, rtol=0)
    head = unpack(case.model.target.net.head.weight)
    torch.testing.assert_close(session.logits(session.root_output)[0, 0], expected[-1] @ head.T, atol=1e-3, rtol=0)


def test_prefill_is_padded_for_the_head() -> None:
    features = torch.arange(12.0).view(2, 3, 2)
    first = PrefillOutput(torch.zeros(1, 1, 4), features, torch.full((2, 3), -1), torch.tensor([3, 1]), (3, 1))
    out = pad_prefill(first, 5)
    assert out.features[0].tolist() == [[0, 0], [0, 0], [0, 1], [2, 3], [4, 5]]
    assert out.features[1].tolist() == [[0, 0]] * 4 + [[6, 7]]
    assert out.lengths.tolist() == [5, 5] and out.host_lengths == (5, 5)
    assert pad_prefill(first, 3) is first


def test_embed_upscale_multiplies_the_embedding(tmp_path: Path, lumina: ParityCase) -> None:
    """A field of Lumina's heads."""
    state = checkpoint_writers.write_drafter(tmp_path, "anole", rows=1)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"embed_upscale": 2.0, ', 1))
    drafter = load_drafter_files(tmp_path, lumina.model)
    assert torch.equal(drafter.net.body.embedding.weight, state["embed_tokens.weight"] * 2)


def test_head_for_another_target_is_refused(tmp_path: Path, anole: ParityCase, t2i: ParityCase) -> None:
    checkpoint_writers.write_drafter(tmp_path / "anole", "anole")
    checkpoint_writers.write_drafter(tmp_path / "small", "anole", vocab=9000)
    checkpoint_writers.write_drafter(tmp_path / "llamagen", "llamagen")
    with pytest.raises(
        CheckpointError, match=r"9216 tokens, hidden size 32 and a query norm, and this one has 64 tokens"
    ):
        load_drafter_files(tmp_path / "anole", t2i.model)
    with pytest.raises(
        CheckpointError, match=r"64 tokens, hidden size 64 and no query norm, and this one has 9216 tokens"
    ):
        load_drafter_files(tmp_path / "llamagen", anole.model)
    with pytest.raises(CheckpointError, match="9000 tokens"):
        load_drafter_files(tmp_path / "small", anole.model)


def test_folder_without_a_head_is_an_error(tmp_path: Path, anole: ParityCase) -> None:
    state = checkpoint_writers.write_drafter(tmp_path, "anole")
    torch.save({name: value for name, value in state.items() if name != "fc.weight"}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"no EAGLE head: it has no fc\.weight"):
        load_drafter_files(tmp_path, anole.model)
    torch.save({**state, "layers.0.extra": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has unexpected layers\.0\.extra; it is incomplete"):
        load_drafter_files(tmp_path, anole.model)
    with pytest.raises(ConfigError, match=r"there is no drafter 'nowhere'; use auto, .*a folder or an owner/name"):
        load_drafter_by_name("nowhere", anole.model)


def test_drafter_loaded_as_a_model_is_an_error(tmp_path: Path) -> None:
    for kind in ("anole", "llamagen"):
        checkpoint_writers.write_drafter(tmp_path / kind, kind)
        checkpoint_writers.write_text_tokenizer(tmp_path / kind / "tokenizer.json", 8900)
        torch.save(checkpoint_writers.vqgan("chameleon", 64), tmp_path / kind / "vqgan.ckpt")
        with pytest.raises(CheckpointError, match="is a drafter, not a model; pass it with --drafter"):
            parity_cases.load(tmp_path / kind)


def test_nearest_codes_are_read_or_computed(tmp_path: Path) -> None:
    """LANTERN's table lists every other code by distance, as uint16, nearest first, without the code itself."""
    codebook = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    order = torch.cdist(codebook, codebook).fill_diagonal_(torch.inf).argsort(1)[:, :31]
    computed = load_nearest_codes(codebook, 5)
    assert torch.equal(computed, order[:, :5])
    table = order.numpy().astype(np.uint16)
    table[0, :2] = table[0, 1::-1]  # swapped, to distinguish reading from computing
    np.save(tmp_path / "top_31_indices.npy", table)
    read = load_nearest_codes(codebook, 5, tmp_path)
    assert torch.equal(read[1:], computed[1:]) and not torch.equal(read[0], computed[0])
    assert load_nearest_codes(codebook, 5, tmp_path).dtype == torch.int64


@pytest.mark.parametrize("damage", ["shape", "values", "bytes"])
def test_damaged_table_is_an_error(tmp_path: Path, damage: str) -> None:
    codebook, path = torch.randn(8, 2), tmp_path / "top_7_indices.npy"
    table = np.zeros((8, 7 if damage != "shape" else 3), np.uint16) + (99 if damage == "values" else 0)
    np.save(path, table)
    if damage == "bytes":
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"top_7_indices\.npy .*(delete|outside)"):
        load_nearest_codes(codebook, 5, tmp_path)


def test_head_is_loaded_from_the_hub_cache(tmp_path: Path, anole: ParityCase) -> None:
    """Offline, from an earlier download."""
    snapshot = tmp_path / "models--jadohu--anole_drafter" / "snapshots" / ("0" * 40)
    checkpoint_writers.write_drafter(snapshot, "anole")
    (tmp_path / "models--jadohu--anole_drafter" / "refs").mkdir()
    (tmp_path / "models--jadohu--anole_drafter" / "refs" / "main").write_text("0" * 40)
    hub = HubOptions(cache_dir=str(tmp_path), local_files_only=True)
    model = replace(anole.model, hub=hub)
    assert isinstance(load_drafter_files("jadohu/anole_drafter", model), Eagle)
    shutil.rmtree(snapshot)
    with pytest.raises(CheckpointError, match="jadohu/anole_drafter could not be downloaded"):
        load_drafter_files("jadohu/anole_drafter", model)


def test_pipeline_loads_heads_by_folder_and_auto(tmp_path: Path, anole: ParityCase) -> None:
    """A folder given by name; and `auto` finds one inside the checkpoint's folder."""
    checkpoint_writers.write_drafter(tmp_path / "head", "anole")
    assert isinstance(Pipeline(anole.model, drafter=str(tmp_path / "head")).drafter, Eagle)
    checkpoint_writers.write_anole(tmp_path / "model")
    checkpoint_writers.write_drafter(tmp_path / "model" / "drafter-lantern", "anole")
    pipe = Pipeline.from_pretrained(tmp_path / "model", device="cpu")
    assert isinstance(pipe.drafter, Eagle) and pipe.drafter_name == "drafter-lantern"


def test_lantern_verifier_reads_the_drafters_table(tmp_path: Path, t2i: ParityCase) -> None:
    codes = checkpoint_writers.LLAMAGEN["vocab"]
    checkpoint_writers.write_drafter(tmp_path, "llamagen")
    table = np.stack([np.roll(np.arange(codes), -code)[1:] for code in range(codes)]).astype(np.uint16)
    np.save(tmp_path / f"top_{codes - 1}_indices.npy", table)
    verifier = Pipeline(t2i.model, drafter=str(tmp_path), verifier="lantern:k=3").verifier
    assert isinstance(verifier, Lantern) and verifier.neighbours is not None
    assert verifier.neighbours[5].tolist() == [6, 7, 8]
    without = Pipeline(t2i.model, drafter="jacobi", verifier="lantern:k=3").verifier
    assert isinstance(without, Lantern) and torch.equal(
        without.neighbours, load_nearest_codes(t2i.model.image_tokenizer.codebook, 3)
    )


def test_lantern_downloads_the_table_of_a_hub_drafter(fake_hub: FakeHub, tmp_path: Path, t2i: ParityCase) -> None:
    """The table is large, so other verifiers do not download it."""
    codes = checkpoint_writers.LLAMAGEN["vocab"]
    table = f"top_{codes - 1}_indices.npy"
    checkpoint_writers.write_drafter(tmp_path / "head", "llamagen")
    neighbours = np.stack([np.roll(np.arange(codes), -code)[1:] for code in range(codes)]).astype(np.uint16)
    np.save(tmp_path / "head" / table, neighbours)
    fake_hub.add("owner/head", tmp_path / "head")
    Pipeline(t2i.model, drafter="owner/head")
    assert fake_hub.downloads and table not in fake_hub.downloaded("owner/head")
    verifier = Pipeline(t2i.model, drafter="owner/head", verifier="lantern:k=3").verifier
    assert table in fake_hub.downloaded("owner/head")
    assert isinstance(verifier, Lantern) and verifier.neighbours is not None
    assert verifier.neighbours[5].tolist() == [6, 7, 8]


@pytest.mark.parametrize(("side", "input_type"), [(256, "t2i"), (512, "t2i2")])
def test_llamagen_head_for_another_image_size_is_refused(tmp_path: Path, side: int, input_type: str) -> None:
    """Their tensors have the same shapes; `input_type` in the head's config.json is all that differs."""
    path, _ = checkpoint_writers.write_llamagen(tmp_path / "model", "t2i", name=f"t2i_XL_{side}.pt")
    model = parity_cases.load(path)
    for name in ("t2i", "t2i2"):
        checkpoint_writers.write_drafter(tmp_path / name, "llamagen", input_type=name)
    assert isinstance(load_drafter_files(tmp_path / input_type, model), PaddedEagle)
    other, other_side = ("t2i2", 512) if input_type == "t2i" else ("t2i", 256)
    message = rf"was trained for {other_side}x{other_side} images \(input_type '{other}'\), but .* {side}x{side}; use a"
    with pytest.raises(CheckpointError, match=message):
        load_drafter_files(tmp_path / other, model)


def test_llamagen_head_without_image_size_warns(
    tmp_path: Path, t2i: ParityCase, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint_writers.write_drafter(tmp_path, "llamagen")
    load_drafter_files(tmp_path, t2i.model)
    assert "does not say for which image size it was trained" in caplog.text
