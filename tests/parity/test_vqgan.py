"""VQGAN image tokenizers against an independent implementation, and the tensor shapes of the published files."""

from __future__ import annotations

from pathlib import Path

import checkpoint_writers
import pytest
import reference_networks as reference
import torch
from parity_cases import CPU
from vqgan_shapes import vqgan_shapes

from underdraw.errors import CheckpointError, ConfigError
from underdraw.models.vqgan_checkpoint import CHAMELEON, LLAMAGEN, VQGANFormat, load_vqgan
from underdraw.tokenizers.vqgan import VQGAN, VQArch

FORMATS = {"chameleon": CHAMELEON, "llamagen": LLAMAGEN}
WIDTHS = {"chameleon": (32, 32, 64), "llamagen-16": (32, 32, 32, 32, 64), "llamagen-8": (32, 64, 64, 32)}


def write(path: Path, kind: str, widths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    state = checkpoint_writers.vqgan(kind, 64, widths)
    torch.save({"state_dict" if kind == "chameleon" else "model": state}, path)
    return state


def load(path: Path, kind: str) -> VQGAN:
    return load_vqgan(path, FORMATS[kind], CPU, ignored=["loss", r"quantize\.codebook_used$"])


@pytest.mark.parametrize("name", WIDTHS)
def test_decode_and_encode(tmp_path: Path, name: str) -> None:
    kind, widths = name.partition("-")[0], WIDTHS[name]
    state = write(tmp_path / "vq.pt", kind, widths)
    images = load(tmp_path / "vq.pt", kind)
    side = 2 ** (len(widths) - 1)
    assert images.downsample == side
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 64, (2, 3, 2), generator=generator)
    decoded = images.decode(codes)
    assert decoded.shape == (2, 3, 3 * side, 2 * side)
    expected = reference.vq_decode(state, codes, kind).clamp(-1, 1)
    torch.testing.assert_close(decoded, expected, atol=1e-4, rtol=0)
    pixels = torch.rand(2, 3, 2 * side, 3 * side, generator=generator) * 2 - 1
    assert torch.equal(images.encode(pixels), reference.vq_encode(state, pixels, kind))


def test_decoder_levels_in_either_order_and_any_prefix(tmp_path: Path) -> None:
    """The hub's copy of Chameleon's tokenizer may count decoder levels as they run, and have a prefix."""
    state = write(tmp_path / "vq.pt", "chameleon", (32, 32, 64))
    reordered = {}
    for name, value in state.items():
        parts = name.split(".")
        if name.startswith("decoder.up."):
            parts[2] = str(2 - int(parts[2]))
        reordered["model.vqmodel." + ".".join(parts)] = value
    torch.save(reordered, tmp_path / "reordered.pt")
    codes = torch.arange(4).view(1, 2, 2)
    images = [load(tmp_path / name, "chameleon").decode(codes) for name in ("vq.pt", "reordered.pt")]
    assert torch.equal(*images)


def test_codes_have_length_one_only_for_llamagen(tmp_path: Path) -> None:
    """Oracle 13."""
    for kind, unit in (("llamagen", True), ("chameleon", False)):
        state = write(tmp_path / "vq.pt", kind, (32, 32))
        images = load(tmp_path / "vq.pt", kind)
        cells = images.quantize.lookup(torch.arange(64).view(1, 8, 8))
        lengths = cells.norm(dim=1)
        assert torch.allclose(lengths, torch.ones_like(lengths)) == unit
        assert torch.equal(images.codebook, state["quantize.embedding.weight"])


@pytest.mark.parametrize(
    ("file_format", "arch", "count", "parameters"),
    [
        (CHAMELEON, VQArch((128, 128, 256, 256, 512)), 293, 68.7e6),
        (LLAMAGEN, VQArch((128, 128, 256, 256, 512), codes=16384, code_dim=8, attention=(4,)), 343, 72e6),
        (LLAMAGEN, VQArch((128, 256, 256, 512), codes=16384, code_dim=8, attention=(3,)), 299, 70e6),
    ],
)
def test_published_shapes(file_format: VQGANFormat, arch: VQArch, count: int, parameters: float) -> None:
    """As many tensors and parameters as the published files have (LlamaGen's also count code usage)."""
    with torch.device("meta"):
        state = VQGAN(arch).state_dict()
    assert len(state) == count
    assert sum(value.numel() for value in state.values()) == pytest.approx(parameters, rel=0.03)
    kind = "chameleon" if file_format is CHAMELEON else "llamagen"
    shapes = dict(vqgan_shapes(kind, arch.widths, arch.codes, arch.code_dim, 256))
    levels = 0 if kind == "chameleon" else len(arch.widths)
    ours = {file_format.tensor_name(name, levels): tuple(value.shape) for name, value in state.items()}
    assert ours == {name: shape for name, shape in shapes.items() if "codebook_used" not in name}


def test_shortcuts_are_where_the_width_changes() -> None:
    names = [name for name, _ in vqgan_shapes("llamagen", (128, 128, 256, 256, 512), 16, 8, 256)]
    blocks = [name.removesuffix(".nin_shortcut.weight") for name in names if name.endswith("nin_shortcut.weight")]
    assert sorted(blocks) == [
        "decoder.conv_blocks.1.res.0", "decoder.conv_blocks.3.res.0",
        "encoder.conv_blocks.2.res.0", "encoder.conv_blocks.4.res.0",
    ]  # fmt: skip


def test_images_of_odd_sizes_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "vq.pt", "chameleon", (32, 32))
    with pytest.raises(ConfigError, match="9x8 pixels is not a multiple of 2 on both sides; crop it to 8x8"):
        load(tmp_path / "vq.pt", "chameleon").encode(torch.zeros(1, 3, 9, 8))


def test_files_that_are_not_tokenizers_are_refused(tmp_path: Path) -> None:
    state = checkpoint_writers.vqgan("chameleon", 64, (32, 32))
    torch.save({name: value for name, value in state.items() if "quantize" not in name}, tmp_path / "vq.pt")
    with pytest.raises(CheckpointError, match=r"no quantize\.embedding\.weight"):
        load(tmp_path / "vq.pt", "chameleon")
    torch.save({**state, "decoder.extra.weight": torch.zeros(1)}, tmp_path / "vq.pt")
    with pytest.raises(CheckpointError, match=r"has unexpected decoder\.extra\.weight"):
        load(tmp_path / "vq.pt", "chameleon")
