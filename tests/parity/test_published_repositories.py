"""Published repositories on a faked hub: which files are downloaded, copied by `save_pretrained`, and documented."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import author_layouts
import checkpoint_writers
import newer_checkpoint_writers
import pytest
import torch
from fake_hub import FakeHub

from underdraw.models import chameleon, lumina, lumina2
from underdraw.models.loading import all_families
from underdraw.pipeline import Pipeline

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
PICTURES = {"README.md": 1, "teaser.png": 1}  # in most repositories
T5_TWICE = {"pytorch_model-00001-of-00001.bin": 11_400_000_000, "tf_model.h5": 1, "flax_model.msgpack": 1}


def add_deepseek_janus(hub: FakeHub, folder: Path) -> None:
    author_layouts.write_deepseek_janus(folder / "janus", checkpoint_writers.write_janus(folder / "converted"))
    hub.add("deepseek-ai/Janus-Pro-1B", folder / "janus", PICTURES)


def add_baai_emu3(hub: FakeHub, folder: Path) -> None:
    author_layouts.write_baai_emu3(folder / "emu3", folder / "images")
    code = {"modeling_emu3.py": 1, "tokenization_emu3.py": 1}
    hub.add("BAAI/Emu3-Gen", folder / "emu3", {**PICTURES, **code})
    hub.add("BAAI/Emu3-VisionTokenizer", folder / "images", {**PICTURES, "modeling_emu3visionvq.py": 1})


def add_llamagen_for_text(hub: FakeHub, folder: Path) -> None:
    checkpoint_writers.write_llamagen_converted(folder / "LlamaGen-T2I")
    hub.add("jadohu/LlamaGen-T2I", folder / "LlamaGen-T2I", PICTURES)
    hub.files["peizesun/llamagen_t2i"] = {"vq_ds16_t2i.pt": folder / "vq_ds16_t2i.pt", "t2i_XL_stage1_256.pt": 1}
    hub.add("google/flan-t5-xl", folder / "t5" / "flan-t5-xl", {**PICTURES, **T5_TWICE})


def add_llamagen_for_classes(hub: FakeHub, folder: Path) -> None:
    checkpoint_writers.write_llamagen(folder / "c2i", "c2i", name="c2i_B_64.pt")
    hub.add("FoundationVision/LlamaGen", folder / "c2i", {"c2i_3B_384.pt": 12_000_000_000})


def add_simplear(hub: FakeHub, folder: Path) -> None:
    newer_checkpoint_writers.write_simplear(folder / "simplear")
    hub.add("Daniel0724/SimpleAR-0.5B-RL", folder / "simplear", PICTURES)
    name = "Cosmos-1.0-Tokenizer-DV8x16x16"
    hub.add(f"nvidia/{name}", folder / name, {"encoder.jit": 1, "autoencoder.jit": 1})


@dataclass(frozen=True)
class Case:
    """A model, and the files that are downloaded for it from other repositories."""

    add: Callable[[FakeHub, Path], None]
    files: dict[str, set[str]]


T5_FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
CASES = {
    "deepseek-ai/Janus-Pro-1B": Case(add_deepseek_janus, {}),
    "BAAI/Emu3-Gen": Case(add_baai_emu3, {"BAAI/Emu3-VisionTokenizer": {"config.json", "model.safetensors"}}),
    "jadohu/LlamaGen-T2I": Case(
        add_llamagen_for_text, {"peizesun/llamagen_t2i": {"vq_ds16_t2i.pt"}, "google/flan-t5-xl": T5_FILES}
    ),
    "FoundationVision/LlamaGen/c2i_B_64.pt": Case(
        add_llamagen_for_classes, {"FoundationVision/LlamaGen": {"c2i_B_64.pt", "vq_ds16_c2i.pt"}}
    ),
    "Daniel0724/SimpleAR-0.5B-RL": Case(
        add_simplear, {"nvidia/Cosmos-1.0-Tokenizer-DV8x16x16": {"decoder.jit"}}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_model_is_drawn_and_saved_with_its_files(fake_hub: FakeHub, tmp_path: Path, name: str) -> None:
    """From the hub, then from a copy when neither the hub nor its cache is there."""
    CASES[name].add(fake_hub, tmp_path / "published")
    pipe = Pipeline.from_pretrained(name, drafter="jacobi", tree="none", device="cpu")
    expected = pipe("red fox", seed=2, output_type="pt").images
    repository = "/".join(name.split("/")[:2])
    fetched = {other: set(fake_hub.downloaded(other)) for other in fake_hub.files if other != repository}
    assert fetched == {other: files for other, files in CASES[name].files.items() if other != repository}
    assert CASES[name].files.get(repository, set()) <= set(fake_hub.downloaded(repository))
    assert not [file for file in fake_hub.downloaded(repository) if file.endswith((".md", ".png", ".py", "384.pt"))]
    copy = pipe.save_pretrained(tmp_path / "copy")
    fake_hub.files.clear()
    shutil.rmtree(fake_hub.cache)
    loaded = Pipeline.from_pretrained(copy, device="cpu")
    assert torch.equal(loaded("red fox", seed=2, output_type="pt").images, expected)


def test_companions_are_documented_with_their_sizes() -> None:
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("|") and row.endswith((" GB |", " MB |"))]
    others = {lumina.TEXT_TOKENIZER, lumina2.IMAGE_TOKENIZER_HUB_ID, chameleon.IMAGE_TOKENIZER_HUB_ID}
    for name in (*others, *(name for case in CASES.values() for name in case.files)):
        repository = "/".join(name.split("/")[:2])
        assert any(f"| `{repository}` |" in row for row in rows), repository


def test_published_checkpoints_are_documented() -> None:
    """In a row of a table, in full or as another one of the same owner with its own ending, such as `-7B`."""
    rows = [row for row in PAGE.read_text().splitlines() if row.startswith("|")]
    for published in (item for family in all_families() for item in family.published):
        name = "/".join(published.id.split("/")[:2])
        names = {name} | {name[index:] for index, letter in enumerate(name) if letter == "-"}
        owner = name.partition("/")[0]
        of_owner = [row for row in rows if f"`{owner}/" in row or f"`{owner}`" in row]
        assert any(f"`{text}`" in row or f"`{text}/" in row for row in of_owner for text in names), published.id
