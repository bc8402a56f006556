"""`custom_generate` against transformers' own `generate` on small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoint_writers
import newer_checkpoint_writers
import pytest
import torch
from torch import Tensor

from underdraw.errors import ConfigError, UnsupportedError
from underdraw.integrations.transformers import custom_generate

START, PAD, IMAGE_START = 1, 2, 4  # of the small Janus


@pytest.fixture(scope="module")
def janus(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoint_writers.write_janus(tmp_path_factory.mktemp("janus"))


@pytest.fixture(scope="module")
def emu3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return checkpoint_writers.write_emu3(tmp_path_factory.mktemp("emu3"))


def janus_inputs() -> dict[str, Tensor]:
    ids = torch.tensor([[START, 20, 21, 22, IMAGE_START], [START, 23, 20, 25, IMAGE_START]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def emu3_inputs() -> dict[str, Any]:
    """A prompt for 4 x 4 codes, and what transformers' documentation passes to `generate`."""
    ids = torch.tensor([[1, 20, 21, 22, 3, 46, 39, 46, 5]])
    codes = list(range(240, 304))

    def allowed(_: int, row: Tensor) -> list[int]:
        """Rows of four codes with a row end (6), then frame end (7), image end (4) and end (2)."""
        step = len(row) - ids.shape[1]
        return codes if step < 20 and step % 5 != 4 else [6] if step < 20 else [[7, 4, 2][min(step - 20, 2)]]

    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "negative_prompt_ids": torch.tensor([[1, 27, 28, 3, 46, 39, 46, 5]]),
        "negative_prompt_attention_mask": torch.ones(1, 8, dtype=torch.long),
        "guidance_scale": 3.0,
        "prefix_allowed_tokens_fn": allowed,
        "max_new_tokens": 23,
    }


@pytest.mark.parametrize("tree", ["none", "chain:depth=5", "auto"])
def test_greedy_janus_equals_transformers(janus: Any, tree: str) -> None:
    expected = janus.generate(**janus_inputs(), generation_mode="image", do_sample=False)
    drawn = janus.generate(**janus_inputs(), custom_generate=custom_generate, do_sample=False, tree=tree)
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("tree", ["none", "chain:depth=5"])
def test_greedy_emu3_equals_transformers(emu3: Any, tree: str) -> None:
    """With a negative prompt of another length than the prompt."""
    expected = emu3.generate(**emu3_inputs(), do_sample=False)
    options = {"image_size": (4, 4), "tree": tree}
    drawn = emu3.generate(**emu3_inputs(), custom_generate=custom_generate, do_sample=False, **options)
    assert torch.equal(drawn, expected)


def test_sampled_tokens_do_not_depend_on_the_tree(janus: Any) -> None:
    """They are those of plain decoding with the seed; without one, torch's generator decides."""
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": True, "top_k": 0, "temperature": 0.9}
    plain, drawn, other = (
        janus.generate(**janus_inputs(), **options, seed=seed, tree=tree)
        for seed, tree in ((5, "none"), (5, "chain:depth=6"), (6, "none"))
    )
    assert torch.equal(plain, drawn) and not torch.equal(plain, other)
    torch.manual_seed(3)
    first = janus.generate(**janus_inputs(), **options)
    torch.manual_seed(3)
    assert torch.equal(first, janus.generate(**janus_inputs(), **options))


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon"])
def test_predictable_image_takes_few_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the benchmark: most cells follow the row above, so most drafts are right, and tokens stay equal."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import grid_models

    model = grid_models.FAMILIES[family](grid_models.Sizes(192, 384, 2, 2, side=8))
    model.scale_noise(0.3)
    accuracy = model.fit_head(cells=4096)
    expected = model.draw_plain(do_sample=False)
    assert 0.6 < accuracy < 0.85 and len(set(expected.tolist())) > 4  # neither noise nor one colour
    plain, plain_passes = model.draw(do_sample=False, tree="none")
    drawn, passes = model.draw(do_sample=False, tree="chain:depth=16")
    assert torch.equal(plain, expected) and torch.equal(drawn, expected)
    assert plain_passes == 63 and passes <= plain_passes / 2


def test_output_object(janus: Any) -> None:
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False, "return_dict_in_generate": True}
    output = janus.generate(**janus_inputs(), **options)
    assert output.sequences.shape == (2, 16) and len(output.passes) == 2 and max(output.passes) <= 15


def test_left_padding_is_ignored(janus: Any) -> None:
    inputs = janus_inputs()
    padded = torch.cat([torch.full((2, 3), PAD), inputs["input_ids"]], 1)
    mask = torch.cat([torch.zeros(2, 3, dtype=torch.long), inputs["attention_mask"]], 1)
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False}
    expected = janus.generate(**inputs, **options)
    assert torch.equal(janus.generate(input_ids=padded, attention_mask=mask, **options), expected)


def test_chameleon_draws_codes() -> None:
    """transformers hides image tokens from Chameleon's outputs; here its head is read without that mask."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    images = {
        "base_channels": 32,
        "channel_multiplier": [1, 1],
        "num_res_blocks": 1,
        "latent_channels": 8,
        "embed_dim": 8,
    }
    config = ChameleonConfig(
        **checkpoint_writers.CHAMELEON,
        vq_config={**images, "embed_dim": 8, "resolution": 64},
        vocabulary_map={"<image>": 8711, "IMGIMGAZ": 4},
    )
    model = ChameleonForConditionalGeneration(config).eval()
    checkpoint_writers.randomise(model, 3)
    ids = torch.tensor([[0, 8905, 8906, 8710, 8197]])
    drawn = model.generate(input_ids=ids, custom_generate=custom_generate, do_sample=False, max_new_tokens=16)
    row = ids
    with torch.no_grad():
        for _ in range(drawn.shape[1] - ids.shape[1]):
            logits = model.lm_head(model.model(input_ids=row).last_hidden_state[:, -1])[:, 4:8196]
            row = torch.cat([row, 4 + logits.argmax(-1, keepdim=True)], 1)
    assert torch.equal(drawn, row)


def test_greedy_glm_image_equals_transformers(tmp_path: Path) -> None:
    """Both grids and the image's end; transformers is kept from tokens that are no codes."""
    model = newer_checkpoint_writers.write_glm_image(tmp_path)
    ids = torch.tensor([[64, 80, 81, 73, 102, 103, 74, 64]])
    options: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, 2, 3], [1, 13, 19]]),
        "images_per_sample": torch.tensor([2]),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 76,
        "suppress_tokens": list(range(64, 72)),
        "max_new_tokens": 2 * 3 + 13 * 19,
    }
    expected = model.generate(ids, **options)
    drawn = model.generate(ids, **options, custom_generate=custom_generate, tree="chain:depth=6")
    assert torch.equal(drawn[:, :-1], expected) and drawn[0, -1] == 65


def test_missing_image_size_is_one_sentence(emu3: Any) -> None:
    with pytest.raises(ConfigError, match=r"image_size=\(rows, columns\)"):
        emu3.generate(**emu3_inputs(), custom_generate=custom_generate, do_sample=False)


def test_processors_that_would_be_ignored_are_refused(janus: Any) -> None:
    with pytest.raises(UnsupportedError, match="RepetitionPenaltyLogitsProcessor"):
        janus.generate(**janus_inputs(), custom_generate=custom_generate, repetition_penalty=1.5)


def test_other_models_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=32))
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel"):
        model.generate(torch.tensor([[1, 2]]), custom_generate=custom_generate, max_new_tokens=2)


def test_hub_folder(janus: Any) -> None:
    """integrations/hub, as a repository of the hub is loaded."""
    folder = str(Path(__file__).parents[2] / "integrations" / "hub")
    expected = janus.generate(**janus_inputs(), custom_generate=custom_generate, do_sample=False)
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, "do_sample": False}
    assert torch.equal(janus.generate(**janus_inputs(), **options, tree="chain:depth=4"), expected)
    long = torch.tensor([[START, *[20] * 30, IMAGE_START]])  # transformers' usual limit is 20 tokens
    assert janus.generate(input_ids=long, attention_mask=torch.ones_like(long), **options).shape == (1, 16)
