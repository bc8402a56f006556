"""The FSQ image tokenizer: codes, shapes, size, and codes that depend only on their surroundings."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from recipes.tiny.train_tokenizer import SMOKE_ARCH
from underdraw.errors import CheckpointError, ConfigError
from underdraw.nn.weights import save_weights
from underdraw.tokenizers.fsq import FiniteScalarQuantizer, FSQArch, FSQTokenizer, load_tokenizer, save_tokenizer


@pytest.fixture
def tokenizer() -> FSQTokenizer:
    torch.manual_seed(0)
    return FSQTokenizer(SMOKE_ARCH).eval()


def count_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_shipped_size_stays_small() -> None:
    model = FSQTokenizer(FSQArch())
    assert count_parameters(model.decoder) <= 8.5e6
    assert count_parameters(model.encoder) <= 6e6
    assert model.arch.codes == 4096 and model.downsample == 8


@pytest.mark.parametrize("levels", [(8, 8, 8, 8), (5, 3), (2, 7, 4)])
def test_every_code_is_recovered_from_its_cell(levels: tuple[int, ...]) -> None:
    quantizer = FiniteScalarQuantizer(levels)
    codes = torch.arange(len(quantizer.codebook)).view(1, 1, -1)
    latents = torch.atanh(quantizer.lookup(codes) * 0.999)  # (1, D, 1, K)
    assert torch.equal(quantizer(latents).codes, codes)
    assert torch.allclose(quantizer(latents).cells, quantizer.lookup(codes), atol=1e-6)
    assert len(torch.unique(quantizer.codebook, dim=0)) == len(quantizer.codebook)
    assert quantizer.codebook.min() == -1 and quantizer.codebook.max() == 1


def test_encode_and_decode_shapes(tokenizer: FSQTokenizer) -> None:
    pixels = torch.rand(2, 3, 64, 48) * 2 - 1
    codes = tokenizer.encode(pixels)
    assert codes.shape == (2, 8, 6) and codes.dtype == torch.int64
    assert codes.min() >= 0 and codes.max() < 4096
    decoded = tokenizer.decode(codes)
    assert decoded.shape == pixels.shape
    assert decoded.min() >= -1 and decoded.max() <= 1
    assert tokenizer.codebook.shape == (4096, 4)


def test_forward_agrees_with_encode_then_decode(tokenizer: FSQTokenizer) -> None:
    pixels = torch.rand(1, 3, 32, 32) * 2 - 1
    reconstruction = tokenizer(pixels)
    assert torch.equal(reconstruction.codes, tokenizer.encode(pixels))
    decoded = tokenizer.decode(reconstruction.codes)
    assert torch.allclose(reconstruction.pixels.clamp(-1, 1), decoded, atol=1e-5)


def test_gradients_pass_through_the_rounding(tokenizer: FSQTokenizer) -> None:
    tokenizer(torch.rand(1, 3, 32, 32)).pixels.square().mean().backward()
    gradient = tokenizer.encoder[0].weight.grad
    assert gradient is not None and gradient.abs().sum() > 0


def test_images_of_odd_sizes_are_refused(tokenizer: FSQTokenizer) -> None:
    with pytest.raises(ConfigError, match="96x192"):
        tokenizer.encode(torch.zeros(1, 3, 100, 192))


@pytest.mark.parametrize(("norm", "local"), [("cell", True), ("group", False)])
def test_cell_norm_keeps_codes_local(norm: str, local: bool) -> None:
    torch.manual_seed(0)
    model = FSQTokenizer(dataclasses.replace(SMOKE_ARCH, encoder_norm=norm))
    with torch.no_grad():
        for parameter in model.parameters():  # blocks are the identity until trained
            parameter.add_(0.05 * torch.randn_like(parameter))
        pixels = torch.rand(1, 3, 160, 160) * 2 - 1
        changed = pixels.clone()
        changed[..., :16, :16] = 1.0
        before, after = model.encoder(pixels), model.encoder(changed)
    assert not torch.allclose(before[..., :2, :2], after[..., :2, :2], atol=1e-3)
    assert torch.allclose(before[..., 15:, 15:], after[..., 15:, 15:], atol=1e-5) is local


def test_arch_round_trip_through_json() -> None:
    arch = FSQArch(levels=(8, 5, 5, 5), encoder_norm="group")
    assert FSQArch(**json.loads(json.dumps(dataclasses.asdict(arch)))) == arch


def test_arch_with_uneven_depths_is_refused() -> None:
    with pytest.raises(ConfigError, match="as many widths as blocks"):
        FSQArch(encoder_widths=(64, 128))


def test_checkpoint_round_trip(tokenizer: FSQTokenizer, tmp_path) -> None:
    path = tmp_path / "tokenizer"
    save_tokenizer(path, tokenizer, {"step": 7, "seconds": 1.5})
    loaded, progress = load_tokenizer(path)
    assert progress == {"step": 7, "seconds": 1.5} and loaded.arch == tokenizer.arch
    for name, value in tokenizer.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float()), name
    assert [file.name for file in path.iterdir()] == ["model-0.safetensors"]  # and no temporary file


def test_damaged_and_other_checkpoints_are_refused(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="holds no weights"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "model-0.safetensors").write_bytes(b"not a checkpoint at all")
    with pytest.raises(CheckpointError, match="damaged"):
        load_tokenizer(tmp_path)
    save_weights(tmp_path, {"weight": torch.zeros(2, 2)}, {"kind": "something else"})
    with pytest.raises(CheckpointError, match="no image tokenizer"):
        load_tokenizer(tmp_path)
