"""`custom_generate` against transformers' own `generate` on small random models."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_writers
import newer_checkpoint_writers
import numpy as np
import pytest
import torch
import transformers
from transformers import GenerationConfig
from transformers_inputs import IMAGE_START, PAD, START, chameleon_model, emu3_inputs, glm_inputs, janus_inputs

from underdraw.errors import ConfigError
from underdraw.integrations import transformers as integration
from underdraw.integrations.transformers import custom_generate
from underdraw.layout import Layout
from underdraw.pipeline import Pipeline
from underdraw.sampling import Sampler


@pytest.mark.skipif(
    (5, 13) <= tuple(int(part) for part in transformers.__version__.split(".")[:2]) <= (5, 17),
    reason="these versions of transformers cannot draw with Janus by themselves",
)
@pytest.mark.parametrize("tree", ["none", "chain:depth=5", "auto"])
def test_greedy_janus_equals_transformers(janus: Any, tree: str) -> None:
    expected = janus.generate(**janus_inputs(), generation_mode="image", do_sample=False)
    drawn = janus.generate(**janus_inputs(), custom_generate=custom_generate, do_sample=False, tree=tree)
    assert torch.equal(drawn, expected)


def test_janus_uses_the_guidance_scale_of_call_or_model(janus: Any) -> None:
    """Its text mode drops the call's scale before `custom_generate` sees it; a folder of the hub does see it."""
    folder = str(Path(__file__).parents[2] / "integrations" / "hub")
    own: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False}
    hub = {**own, "custom_generate": folder, "trust_remote_code": True}
    model = copy.deepcopy(janus)
    expected = model.generate(**janus_inputs(), **own, guidance=3)
    assert not torch.equal(expected, model.generate(**janus_inputs(), **own))
    config = GenerationConfig(**{**model.generation_config.to_dict(), "guidance_scale": 3})
    assert torch.equal(model.generate(**janus_inputs(), **hub, guidance_scale=3), expected)
    assert torch.equal(model.generate(**janus_inputs(), **hub, generation_config=config), expected)
    model.generation_config.guidance_scale = 3
    assert torch.equal(model.generate(**janus_inputs(), **own), expected)


@pytest.mark.parametrize("tree", ["none", "chain:depth=5"])
def test_greedy_emu3_equals_transformers(emu3: Any, tree: str) -> None:
    """With a negative prompt of another length than the prompt."""
    expected = emu3.generate(**emu3_inputs(), do_sample=False)
    sizes = torch.tensor([[4, 4]])  # `image_sizes` of the processor
    options = {"image_size": sizes[0], "tree": tree}
    drawn = emu3.generate(**emu3_inputs(), custom_generate=custom_generate, do_sample=False, **options)
    height, width = sizes[0]
    options["image_size"] = (height, width)
    assert torch.equal(emu3.generate(**emu3_inputs(), custom_generate=custom_generate, **options), drawn)
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


def write_chameleon(folder: Path) -> Any:
    """A checkpoint that the family Anole reads too; the codes have no names in the vocabulary."""
    model = chameleon_model({"<image>": 8711})
    model.save_pretrained(folder)
    checkpoint_writers.write_text_tokenizer(folder / "tokenizer.json", 8900)
    images = checkpoint_writers.vqgan("chameleon", 8192, (32, 32, 64))
    torch.save({"state_dict": images}, folder / "vqgan.ckpt")  # transformers has no decoder of images
    return model


FAMILIES: dict[str, Callable[[Path], Any]] = {
    "janus": checkpoint_writers.write_janus,
    "emu3": checkpoint_writers.write_emu3,
    "chameleon": write_chameleon,
    "glm_image": newer_checkpoint_writers.write_glm_image,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_tokens_are_those_of_the_pipeline(family: str, tmp_path: Path) -> None:
    """underdraw's own plain decoding of the same seeds, guidance, temperature, top-k and top-p."""
    model = FAMILIES[family](tmp_path / family)
    pipe = Pipeline.from_pretrained(tmp_path / family, drafter="jacobi", tree="none", device="cpu")
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 12, "top_p": 0.9}
    size = {"height": 64, "width": 96} if family == "glm_image" else {}
    scale = 1.0 if family == "glm_image" else 3.0
    request = pipe.request("a red fox", num_images_per_prompt=2, seed=5, guidance_scale=scale, **size, **sampling)
    expected = pipe.generate(request, output_type="codes")
    prompt = pipe.prompts(request)[0]
    ids, negative = (torch.tensor([row]).repeat(2, 1) for row in (prompt.condition, prompt.unconditional or (0,)))
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": True, "seed": 5, "guidance": scale}
    if family == "emu3":
        options |= {"negative_prompt_ids": negative, "guidance_scale": 2.0, "image_size": (4, 4), "max_new_tokens": 1}
    if family == "glm_image":
        options |= {"image_grid_thw": torch.tensor([[1, 2, 3], [1, 13, 19]] * 2)}
    drawn = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), tree="chain:depth=6", **options, **sampling
    )
    layout = pipe.model.make_layout(request.size)
    tokens = torch.tensor(np.stack([history.tokens for history in expected.histories]))
    assert torch.equal(drawn[:, -layout.steps :], tokens - (layout.codes.start if family == "janus" else 0))
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(0.8, 12, 0.9), (1.0, 0, 0.75), (1.3, 50, 1.0)])
def test_distribution_is_that_of_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """What its logits processors leave of the same logits, in the order in which `generate` applies them."""
    logits = 3 * torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    theirs = transformers.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        theirs = transformers.TopKLogitsWarper(top_k)(None, theirs)
    if top_p < 1:
        theirs = transformers.TopPLogitsWarper(top_p)(None, theirs)
    config = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p)
    sampler = Sampler(Layout(4, 4, range(200)), [0], **integration._sampling(config, 200))
    ours = sampler.filter_logits(logits)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-6, rtol=0)


def test_many_rows_take_turns(janus: Any) -> None:
    """More than a pipeline draws at once, with the default tree, which is chosen by measured costs."""
    inputs = {name: tensor.repeat(9, 1) for name, tensor in janus_inputs().items()}
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": True, "seed": 5}
    drawn = janus.generate(**inputs, **options)
    assert torch.equal(drawn, janus.generate(**inputs, **options, tree="none")) and drawn.shape == (18, 16)


@pytest.mark.parametrize("family", ["janus", "emu3", "chameleon"])
def test_predictable_image_takes_few_passes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of the benchmark: most cells follow the row above, so most drafts are right, and tokens stay equal."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import grid_families

    model = grid_families.FAMILIES[family](grid_families.Sizes(192, 384, 2, 2, side=8))
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


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_chameleon_draws_codes(guidance: float) -> None:
    """transformers hides image tokens from Chameleon's outputs; here its head is read without that mask."""
    model = chameleon_model({"<image>": 8711, "IMGIMGAZ": 4})
    ids = torch.tensor([[0, 8905, 8906, 8710, 8197]])
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False, "max_new_tokens": 16}
    drawn = model.generate(input_ids=ids, guidance=guidance, **options)
    with pytest.raises(ConfigError, match="must end with token 8197"):  # which its processor does not add
        model.generate(input_ids=ids[:, :-1], **options)
    row, start = ids, torch.tensor([[0, 8197]])  # without text: the image's start after that of the text
    with torch.no_grad():
        for _ in range(drawn.shape[1] - ids.shape[1]):
            rows = (row, torch.cat([start, row[:, ids.shape[1] :]], 1))
            cond, uncond = (model.lm_head(model.model(input_ids=r).last_hidden_state[:, -1])[:, 4:8196] for r in rows)
            row = torch.cat([row, 4 + (uncond + guidance * (cond - uncond)).argmax(-1, keepdim=True)], 1)
    assert torch.equal(drawn, row)


def test_greedy_glm_image_equals_transformers(glm_image: Any) -> None:
    """Both grids and the image's end."""
    expected = glm_image.generate(**glm_inputs())
    drawn = glm_image.generate(**glm_inputs(), custom_generate=custom_generate, tree="chain:depth=6")
    assert torch.equal(drawn[:, :-1], expected) and drawn[0, -1] == 65


def test_guidance_without_a_negative_prompt_equals_transformers(emu3: Any) -> None:
    """Its unconditional row begins with the last token of the prompt."""
    inputs = {name: value for name, value in emu3_inputs().items() if not name.startswith("negative")}
    expected = emu3.generate(**inputs, do_sample=False)
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False, "image_size": (4, 4)}
    drawn = emu3.generate(**inputs, **options, tree="chain:depth=5")
    assert torch.equal(drawn, expected)
    assert not torch.equal(drawn, emu3.generate(**{**inputs, "guidance_scale": 1.0}, **options))


def test_files_of_the_working_directory_are_not_the_models(
    glm_image: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "GlmImagePipeline"}')
    monkeypatch.chdir(tmp_path)
    assert integration.WrappedModel(glm_image).spec.arch.dim == 64


def test_copied_weights_follow_a_cast(janus: Any) -> None:
    model = copy.deepcopy(janus)
    copied = integration._wrap(model)
    assert integration._wrap(model) is copied
    cast = integration._wrap(model.bfloat16())
    dtypes = [next(wrapped.loaded.target.net.parameters()).dtype for wrapped in (copied, cast)]
    assert dtypes == [torch.float32, torch.bfloat16]


def test_copied_weights_follow_training(janus: Any) -> None:
    model = copy.deepcopy(janus)
    options: dict[str, Any] = {"custom_generate": custom_generate, "do_sample": False}
    before = model.generate(**janus_inputs(), **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)  # as an optimizer does, in place
    after = model.generate(**janus_inputs(), **options)
    assert not torch.equal(after, before)
    assert torch.equal(after, copy.deepcopy(model).generate(**janus_inputs(), **options))


def test_hub_folder(janus: Any) -> None:
    """integrations/hub, as a repository of the hub is loaded."""
    folder = str(Path(__file__).parents[2] / "integrations" / "hub")
    expected = janus.generate(**janus_inputs(), custom_generate=custom_generate, do_sample=False)
    options: dict[str, Any] = {"custom_generate": folder, "trust_remote_code": True, "do_sample": False}
    assert torch.equal(janus.generate(**janus_inputs(), **options, tree="chain:depth=4"), expected)
    long = torch.tensor([[START, *[20] * 30, IMAGE_START]])  # transformers' usual limit is 20 tokens
    assert janus.generate(input_ids=long, attention_mask=torch.ones_like(long), **options).shape == (1, 16)


@pytest.mark.parametrize("family", ["emu3", "glm_image"])
def test_hub_folder_samples_the_same_tokens(family: str, request: pytest.FixtureRequest) -> None:
    """With everything that transformers hands over unprepared: negative prompts, allowed tokens, grids."""
    model, inputs = request.getfixturevalue(family), emu3_inputs() if family == "emu3" else glm_inputs()
    options: dict[str, Any] = {"do_sample": True, "seed": 4, "tree": "chain:depth=6"}
    options |= {"image_size": (4, 4)} if family == "emu3" else {}
    folder = str(Path(__file__).parents[2] / "integrations" / "hub")
    expected = model.generate(**{**inputs, **options}, custom_generate=custom_generate)
    drawn = model.generate(**{**inputs, **options}, custom_generate=folder, trust_remote_code=True)
    assert torch.equal(drawn, expected)


def test_model_repository_with_the_hub_folder(tmp_path: Path) -> None:
    """transformers then replaces the model's `generate` by that of the folder."""
    from transformers import JanusForConditionalGeneration

    folder = Path(__file__).parents[2] / "integrations" / "hub" / "custom_generate"
    expected = checkpoint_writers.write_janus(tmp_path / "janus").generate(
        **janus_inputs(), custom_generate=custom_generate, do_sample=False
    )
    shutil.copytree(folder, tmp_path / "janus" / "custom_generate")
    model = JanusForConditionalGeneration.from_pretrained(tmp_path / "janus", trust_remote_code=True)
    options: dict[str, Any] = {"do_sample": False, "tree": "chain:depth=4"}
    assert torch.equal(model.generate(**janus_inputs(), **options), expected)
    assert torch.equal(model.generate(**janus_inputs(), **options, generation_mode="image"), expected)
