"""SimpleAR against transformers' Qwen2, and its image decoder against Cosmos's network for clips."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import newer_checkpoint_writers
import parity_cases
import pytest
import torch
from fake_hub import FakeHub
from parity_cases import CPU, ParityCase
from torch import Tensor

from underdraw.errors import CheckpointError
from underdraw.models import simplear as family
from underdraw.models.family import SamplingDefaults
from underdraw.models.loading import load_model, open_model
from underdraw.models.random_weights import model_shape
from underdraw.nn.row_invariant import unpack
from underdraw.nn.transformer import Transformer
from underdraw.pipeline import Pipeline
from underdraw.tokenizers.cosmos import CosmosArch, CosmosTokenizer, single_frame_state

PROMPT_TEXT = "a red fox"
TEXT = 256 + 8  # tokens of text in the small checkpoint: bytes and specials


def random_codes(count: int) -> Tensor:
    return torch.randint(0, 64000, (count,), generator=torch.Generator().manual_seed(2))


@torch.no_grad()
def logits(model: Any, row: tuple[int, ...], codes: Tensor) -> Tensor:
    """transformers' logits of the codes, after a prompt and after each code."""
    ids = torch.tensor([[*row, *(codes + TEXT).tolist()]])
    return model(input_ids=ids).logits[0, len(row) - 1 :, TEXT:]


def test_prompt_tokens(simplear: ParityCase) -> None:
    """The authors' templates; an empty negative prompt is the form that training drops captions to."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(simplear.path)
    size = simplear.model.sizes[0]
    prompt = simplear.model.make_prompt(PROMPT_TEXT, None, size)
    assert prompt.condition == tuple(tokenizer.encode("<|t2i|>A highly realistic image of a red fox<|soi|>"))
    assert isinstance(prompt.unconditional, tuple)
    assert tokenizer.decode(prompt.unconditional).startswith("<|t2i|>An image of aerial view, overexposed, low")
    assert simplear.model.make_prompt(PROMPT_TEXT, "", size).unconditional == (257, 259)
    assert len(tokenizer) == TEXT


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_logits_match_transformers(simplear: ParityCase, scale: float) -> None:
    """Two rows of different lengths; guidance on logits and on log-probabilities differ by a constant."""
    ours, cond, uncond = parity_cases.compare_guided_logits(simplear, PROMPT_TEXT, random_codes(11), scale, logits)
    torch.testing.assert_close(ours, uncond + scale * (cond - uncond), atol=2e-4, rtol=0)
    guided = uncond.log_softmax(-1) + scale * (cond.log_softmax(-1) - uncond.log_softmax(-1))
    torch.testing.assert_close(ours.softmax(-1), guided.softmax(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tree", ["none", "chain:depth=5"])
def test_greedy_images_match_transformers(simplear: ParityCase, tree: str) -> None:
    """transformers' loop with guidance by a negative prompt; text tokens are not allowed there."""
    model, size = simplear.model, simplear.model.sizes[0]
    prompt = model.make_prompt(PROMPT_TEXT, "blue", size)
    row, negative = (torch.tensor([part]) for part in (prompt.condition, prompt.unconditional))
    theirs = simplear.reference.generate(
        row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=16, guidance_scale=6.0,
        negative_prompt_ids=negative, negative_prompt_attention_mask=torch.ones_like(negative), pad_token_id=0,
        suppress_tokens=list(range(TEXT)),
    )[0, row.shape[1] :]  # fmt: skip
    pipe = Pipeline(model, drafter="jacobi", tree=tree)
    out = pipe(PROMPT_TEXT, negative_prompt="blue", temperature=0, output_type="codes")
    assert torch.equal(out.images[0].flatten() + TEXT, theirs)


def test_pixels_match_the_network_for_clips(simplear: ParityCase) -> None:
    network = newer_checkpoint_writers.small_cosmos()
    codes = random_codes(12).view(2, 2, 3)
    with torch.no_grad():
        theirs = network(codes[:, None])[:, :, 0].clamp(-1, 1)
    assert theirs.shape == (2, 3, 32, 48) and theirs.std() > 0.1
    torch.testing.assert_close(simplear.model.image_tokenizer.decode(codes), theirs, atol=1e-4, rtol=0)


def test_published_decoder() -> None:
    """66 M parameters as published, fewer after folding; 64000 codes of 16 pixels."""
    from cosmos_reference import CosmosVideoDecoder

    with torch.device("meta"):
        published = CosmosVideoDecoder(width=128, mults=(2, 4, 4), latent=16)
    assert sum(p.numel() for p in published.parameters()) == pytest.approx(66.1e6, rel=0.01)
    folded = single_frame_state({name: torch.empty(value.shape) for name, value in published.state_dict().items()})
    arch = CosmosArch.from_state(folded)
    assert arch == CosmosArch() and arch.downsample == 16
    tokenizer = CosmosTokenizer(arch)
    assert {name: value.shape for name, value in tokenizer.state_dict().items()} == {
        name: value.shape for name, value in folded.items()
    }
    assert tokenizer.codebook.shape == (64000, 6)
    assert tokenizer.codebook[1 + 8 * 7 + 512 * 4].tolist() == [-0.75, 0.75, -1.0, 1.0, -1.0, -1.0]


def test_untied_head_and_fast_tokenizer(simplear: ParityCase, tmp_path: Path) -> None:
    """Neither is published, but both are what transformers may save."""
    from transformers import AutoTokenizer

    folder = tmp_path / "m"
    reference = newer_checkpoint_writers.write_simplear(folder, tied=False, decoder=False)
    shutil.copytree(simplear.path.parent / family.IMAGE_TOKENIZER, tmp_path / family.IMAGE_TOKENIZER)
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    assert (folder / "tokenizer.json").exists()
    model = parity_cases.load(folder)
    assert torch.equal(unpack(model.target.net.head.weight), reference.lm_head.weight[TEXT:])
    assert not torch.equal(unpack(model.target.net.head.weight), model.target.net.embedding.weight[TEXT:])


def test_saved_pipeline_draws_the_same_image(simplear: ParityCase, tmp_path: Path) -> None:
    """The copy holds Cosmos's decoder too."""
    pipe = Pipeline.from_pretrained(simplear.path, drafter="jacobi", tree="none", device="cpu")
    pipe.save_pretrained(tmp_path / "copy")
    copy = Pipeline.from_pretrained(tmp_path / "copy", device="cpu", local_files_only=True)
    mine, theirs = (p(PROMPT_TEXT, seed=2, height=32, output_type="pt").images for p in (pipe, copy))
    assert torch.equal(mine, theirs) and mine.shape == (1, 3, 32, 32)


def test_only_cosmos_decoder_is_downloaded(simplear: ParityCase, fake_hub: FakeHub) -> None:
    name, images = "Daniel0724/SimpleAR-0.5B-RL", f"nvidia/{family.IMAGE_TOKENIZER}"
    fake_hub.add(name, simplear.path)
    fake_hub.add(images, simplear.path.parent / family.IMAGE_TOKENIZER, {"encoder.jit": 1, "autoencoder.jit": 1})
    model = load_model(open_model(name), CPU)
    assert fake_hub.downloaded(images) == ["decoder.jit"]
    codes = random_codes(4).view(1, 2, 2)
    assert torch.equal(model.image_tokenizer.decode(codes), simplear.model.image_tokenizer.decode(codes))


def test_uploaded_copy_needs_no_other_repository(simplear: ParityCase, fake_hub: FakeHub) -> None:
    """Cosmos's decoder has a suffix of its own, and is downloaded from the copy like its other files."""
    Pipeline.from_pretrained(simplear.path, drafter="jacobi", tree="none", device="cpu").push_to_hub("me/simplear")
    model, codes = load_model(open_model("me/simplear"), CPU), random_codes(4).view(1, 2, 2)
    assert "companions/decoder.jit" in fake_hub.downloaded("me/simplear")
    assert torch.equal(model.image_tokenizer.decode(codes), simplear.model.image_tokenizer.decode(codes))


def test_other_qwen2_models_are_not_taken_for_it(tmp_path: Path) -> None:
    from underdraw.models.checkpoint import Checkpoint

    config: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert not family.matches(Checkpoint(tmp_path, "m", config))
    assert family.matches(Checkpoint(tmp_path, "m", {**config, "architectures": ["SimpARForCausalLM"]}))
    newer_checkpoint_writers.write_qwen_tokenizer(tmp_path)
    assert family.matches(Checkpoint(tmp_path, "m", config))


def test_damaged_files_are_refused(simplear: ParityCase, tmp_path: Path) -> None:
    folder = shutil.copytree(simplear.path, tmp_path / "m")
    jit = shutil.copytree(simplear.path.parent / family.IMAGE_TOKENIZER, tmp_path / family.IMAGE_TOKENIZER)
    (jit / "decoder.jit").write_bytes(b"no TorchScript")
    with pytest.raises(CheckpointError, match=r"decoder\.jit cannot be read"):
        parity_cases.load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 64000}))
    with pytest.raises(CheckpointError, match="too few for 264 of text and 64000 of images"):
        parity_cases.load(folder)


def test_published_shapes(simplear: ParityCase) -> None:
    assert simplear.model.defaults == SamplingDefaults(6.0)
    for name, billions in (("simplear-0.5b", 0.61), ("simplear-1.5b", 1.74)):
        shape = model_shape(name)
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in Transformer(shape.arch).parameters())
        assert parameters == pytest.approx(billions * 1e9, rel=0.02)
        assert shape.layout.steps == 4096 and shape.layout.codes == range(151672, 215672)
