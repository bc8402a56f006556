"""Lumina-mGPT 2.0 against networks that are written down from its authors' layout: decoder, guidance rows, MoVQGAN."""

from __future__ import annotations

from pathlib import Path

import newer_checkpoint_writers
import parity_cases
import pytest
import reference_networks as reference
import torch
from fake_hub import FakeHub
from parity_cases import CPU, ParityCase
from torch import Tensor
from vqgan_shapes import movqgan_shapes

from underdraw.errors import CheckpointError
from underdraw.models import anole, lumina, lumina2
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.family import ImageSize, SamplingDefaults
from underdraw.models.loading import load_model, open_model
from underdraw.models.lumina2 import MAX_PATCHES
from underdraw.models.random_weights import model_shape
from underdraw.nn.transformer import Transformer
from underdraw.pipeline import Pipeline
from underdraw.tokenizers.vqgan import VQGAN, VQArch

PROMPT_TEXT = "a red fox"
START, IMAGE_START, IMAGE_END, SEPARATOR, ROW_END, FIRST_SIDE = range(256, 262)  # of the small checkpoint
SIZE = ImageSize(64, 64)


def random_tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(155000, 171384, (count,), generator=torch.Generator().manual_seed(seed))


def logits(case: ParityCase, row: list[int]) -> Tensor:
    """The reference's logits of the codes at every position of a row."""
    state = case.reference[0]
    features = reference.chameleon_features(state, torch.tensor(row), heads=4)
    return features @ state["lm_head.weight"][155000:171384].T


def test_prompt_and_header(lumina2: ParityCase) -> None:
    """Start, instruction with the width first, separator; without text the row is the image's header alone."""
    model, size = lumina2.model, ImageSize(64, 32)
    prompt = model.make_prompt(PROMPT_TEXT, None, size)
    condition = prompt.condition
    assert isinstance(condition, tuple)
    assert (condition[0], condition[-1], prompt.unconditional) == (START, SEPARATOR, ())
    from transformers import AutoTokenizer

    text = "Generate an image of 32x64 according to the following prompt:\na red fox"
    assert AutoTokenizer.from_pretrained(lumina2.path).decode(condition[1:-1]) == text
    layout = model.make_layout(size)
    assert layout.prologue == (IMAGE_START, FIRST_SIDE + 2, FIRST_SIDE + 1)
    assert (layout.height, layout.width, layout.row_end, layout.epilogue) == (8, 4, ROW_END, (IMAGE_END,))


def test_published_layout() -> None:
    """96 rows of 96 codes and a row end, 3 tokens before and 1 after: 9316."""
    layout = model_shape("lumina-2-7b").layout
    assert layout.steps == 3 + 96 * 97 + 1 and layout.prologue == (151665, 151671 + 24, 151671 + 24)
    assert layout.row_end == 151670 and layout.epilogue == (151666,) and layout.codes == range(155000, 171384)


def test_guided_logits_match_the_reference(lumina2: ParityCase) -> None:
    """Along a row, its end and the next row; the unconditional row starts at the header, at position 0."""
    model = lumina2.model
    layout, prompt = model.make_layout(SIZE), model.make_prompt(PROMPT_TEXT, None, SIZE)
    tokens = torch.cat([random_tokens(8), torch.tensor([ROW_END]), random_tokens(4, 1)])
    ours = parity_cases.chain_logits(model, prompt, layout, tokens, guidance=4.0)
    image = [*layout.prologue, *tokens.tolist()]
    assert isinstance(prompt.condition, tuple)
    cond = logits(lumina2, [*prompt.condition, *image])[len(prompt.condition) + 2 :]
    uncond = logits(lumina2, image)[2:]
    torch.testing.assert_close(ours, uncond + 4.0 * (cond - uncond), atol=2e-4, rtol=0)


@pytest.mark.parametrize("tree", ["none", "chain:depth=6"])
def test_greedy_images_match_the_reference(lumina2: ParityCase, tree: str) -> None:
    """Whole sequences of both guidance rows without a cache, the row ends forced as the authors' masks do."""
    model, size = lumina2.model, ImageSize(32, 64)
    layout, prompt = model.make_layout(size), model.make_prompt(PROMPT_TEXT, None, size)
    assert isinstance(prompt.condition, tuple)
    image = list(layout.prologue)
    for step in range(layout.start, layout.stop):
        if (step - layout.start + 1) % (layout.width + 1) == 0:
            image.append(ROW_END)
            continue
        cond, uncond = logits(lumina2, [*prompt.condition, *image])[-1], logits(lumina2, image)[-1]
        image.append(155000 + int((uncond + 4.0 * (cond - uncond)).argmax()))
    pipe = Pipeline(model, drafter="jacobi", tree=tree)
    out = pipe(PROMPT_TEXT, temperature=0, height=32, width=64, output_type="codes")
    assert out.history.tokens.tolist() == [*image, ROW_END, IMAGE_END]


def test_pixels_and_codes_match_the_reference(lumina2: ParityCase) -> None:
    codes = random_tokens(12).view(2, 2, 3) - 155000
    images, state = lumina2.model.image_tokenizer, lumina2.reference[1]
    decoded = images.decode(codes)
    assert decoded.shape == (2, 3, 16, 24)
    torch.testing.assert_close(decoded, reference.movq_decode(state, codes).clamp(-1, 1), atol=1e-4, rtol=0)
    pixels = torch.rand(2, 3, 16, 24, generator=torch.Generator().manual_seed(1)) * 2 - 1
    assert torch.equal(images.encode(pixels), reference.vq_encode(state, pixels, "chameleon"))


def test_published_image_tokenizer() -> None:
    """As many parameters as MoVQGAN 270M, under its names."""
    widths = (256, 512, 512, 1024)
    arch = VQArch(widths, latent=4, codes=16384, code_dim=4, attention=(3,), spatial_norm=True)
    with torch.device("meta"):
        state = VQGAN(arch).state_dict()
    shapes = dict(movqgan_shapes(widths, 16384, 4))
    assert {name: tuple(value.shape) for name, value in state.items()} == shapes
    ours = {name: value.numel() for name, value in state.items()}
    assert sum(ours.values()) == pytest.approx(270.7e6, rel=0.002)
    decoder = sum(count for name, count in ours.items() if name.startswith("decoder."))
    assert decoder == pytest.approx(161.1e6, rel=0.002) and arch.downsample == 8


def test_configuration_distinguishes_versions() -> None:
    first = {"model_type": "chameleon", "mask_image_logits": True, "vocab_size": 65536}
    second = {**first, "vocab_size": 171385}
    chameleon = {"model_type": "chameleon"}
    for config, expected in ((first, lumina), (second, lumina2), (chameleon, anole)):
        matching = [family for family in (anole, lumina, lumina2) if family.matches(Checkpoint(Path(), "m", config))]
        assert matching == [expected]


def test_defaults_sizes_and_shape(lumina2: ParityCase) -> None:
    assert lumina2.model.defaults == SamplingDefaults(4.0, top_k=4096)
    assert lumina2.model.target.max_positions is None  # the authors have no limit
    sides = [side // lumina.PATCH for size in lumina.list_sizes(768) for side in (size.height, size.width)]
    assert max(sides) == MAX_PATCHES
    with torch.device("meta"):
        net = Transformer(model_shape("lumina-2-7b").arch)
    head_rows = 171385 - 16384  # that are not loaded
    parameters = sum(parameter.numel() for parameter in net.parameters()) + head_rows * 4096
    assert parameters == pytest.approx(7.88e9, rel=0.001)


def test_saved_pipeline_draws_the_same_image(lumina2: ParityCase, tmp_path: Path) -> None:
    """The copy holds MoVQGAN too."""
    pipe = Pipeline.from_pretrained(lumina2.path, drafter="jacobi", tree="none", device="cpu")
    pipe.save_pretrained(tmp_path / "copy")
    copy = Pipeline.from_pretrained(tmp_path / "copy", device="cpu", local_files_only=True)
    mine, theirs = (p(PROMPT_TEXT, seed=2, height=32, width=64, output_type="pt").images for p in (pipe, copy))
    assert torch.equal(mine, theirs) and mine.shape == (1, 3, 32, 64)


def test_movqgan_is_downloaded(lumina2: ParityCase, fake_hub: FakeHub) -> None:
    """From a repository that holds several sizes of it."""
    name, images = "Alpha-VLLM/Lumina-mGPT-2.0", "ai-forever/MoVQGAN"
    fake_hub.add(name, lumina2.path)
    fake_hub.add(images, lumina2.path.parent / "movqgan" / "270M", {"movqgan_67M.ckpt": 1})
    load_model(open_model(name), CPU)
    assert fake_hub.downloaded(images) == ["movqgan_270M.ckpt"]


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    newer_checkpoint_writers.write_qwen_tokenizer(tmp_path / "m")
    config = {"model_type": "chameleon", "vocab_size": 171385}
    with pytest.raises(CheckpointError, match="has no token '<racm3:break>'"):
        lumina2.read_spec(Checkpoint(tmp_path / "m", "m", config))
