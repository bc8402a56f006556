"""Copies by `save_pretrained`: what is copied of a user's folder, and what is refused before anything is copied."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import checkpoint_writers
import newer_checkpoint_writers
import pytest

from underdraw.errors import CapacityError, CheckpointError, ConfigError
from underdraw.pipeline import Pipeline


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Lumina-mGPT, whose image tokenizer is beside its folder."""
    checkpoint_writers.write_lumina(tmp_path / "mine")
    return tmp_path / "mine"


def load(folder: Path | str) -> Pipeline:
    return Pipeline.from_pretrained(folder, drafter="jacobi", tree="none", device="cpu")


def test_copy_inside_of_the_model_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would contain itself, and so on until the disk is full."""
    shutil.copytree(folder.parent / "chameleon", folder / "chameleon")
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with pytest.raises(ConfigError, match="copy is inside of the model's folder"):
        load(".").save_pretrained("copy")
    assert sorted(folder.rglob("*")) == before


def test_hidden_files_are_not_copied(folder: Path) -> None:
    """Of a clone, .git holds the weights once more."""
    for name in (".git/lfs/objects/weights", ".cache/huggingface/download/lock", ".gitattributes"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    copy = load(folder).save_pretrained(folder.parent / "copy")
    assert not list(copy.rglob(".*"))
    visible = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert {path.name for path in copy.iterdir()} == {*visible, "companions"}


def test_room_is_needed_for_companions_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, others = load(folder), folder / ".git"
    others.mkdir()
    (others / "weights").write_bytes(bytes(10**7))  # not copied, so no room is needed for it
    sizes = {path: path.stat().st_size for path in folder.parent.rglob("*") if path.is_file()}
    tokenizer = next(path for path in sizes if path.name == "vqgan.ckpt")
    needed = sum(size for path, size in sizes.items() if path.parent == folder) + sizes[tokenizer]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(CapacityError, match=r"a copy of .*mine needs .* make room"):
        pipe.save_pretrained(folder.parent / "copy")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert (pipe.save_pretrained(folder.parent / "copy") / "companions" / "vqgan.ckpt").exists()


def test_text_tokenizer_of_another_folder_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Anole's in the layout of LANTERN, which no repository of the hub has in its place."""
    checkpoint_writers.write_anole(tmp_path / "anole")
    others = tmp_path / "files" / "chameleon" / "tokenizer"
    others.mkdir(parents=True)
    tokenizer = (tmp_path / "anole" / "tokenizer.json").rename(others / "text_tokenizer.json")
    monkeypatch.setenv("UNDERDRAW_FILES", str(tmp_path / "files"))
    pipe = load(tmp_path / "anole")
    copy = pipe.save_pretrained(tmp_path / "far" / "copy")
    monkeypatch.delenv("UNDERDRAW_FILES")
    sizes = pipe.model.sizes
    assert load(copy).model.make_prompt("a fox", None, sizes[0]) == pipe.model.make_prompt("a fox", None, sizes[0])
    monkeypatch.setenv("UNDERDRAW_FILES", str(tmp_path / "files"))
    tokenizer.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json, which .*anole needs, is gone"):
        pipe.save_pretrained(tmp_path / "far" / "other")


def test_text_tokenizer_beside_the_decoder_of_glm_image_is_copied(tmp_path: Path) -> None:
    """With its chat template; the folder of the decoder alone has neither."""
    newer_checkpoint_writers.write_glm_image(tmp_path / "glm")
    pipe = load(tmp_path / "glm" / "vision_language_encoder")
    copy = load(pipe.save_pretrained(tmp_path / "far" / "copy"))
    size = pipe.model.sizes[0]
    assert copy.model.make_prompt("a fox", None, size) == pipe.model.make_prompt("a fox", None, size)
