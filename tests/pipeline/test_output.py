"""PipelineOutput in the manner of diffusers, PNG files with metadata, and the progress bar."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import call
from PIL import Image

from underdraw import Pipeline
from underdraw.errors import ConfigError


def test_output_is_a_tuple_of_images(pipe: Pipeline) -> None:
    out = pipe(["fox", "tree"], seed=1)
    assert out[0] is out.images and out["images"] is out.images and out["seeds"] == [1, 2]
    (images,) = out
    assert images is out.images and out.to_tuple() == (out.images,) and len(out) == 1
    assert out[:1] == (out.images,)
    with pytest.raises(KeyError, match="an output has no 'nothing'; it has images, prompts"):
        out["nothing"]
    with pytest.raises(IndexError):
        out[1]


def test_return_dict_false_returns_a_tuple(pipe: Pipeline) -> None:
    result = pipe("fox", seed=1, return_dict=False)
    assert isinstance(result, tuple) and len(result) == 1
    assert result[0][0].tobytes() == pipe("fox", seed=1).images[0].tobytes()


def test_save_writes_the_metadata_of_the_command_line(pipe: Pipeline, small_model: Path, tmp_path: Path) -> None:
    arguments = ("-m", small_model, "--tree", "chain:depth=2", "--seed", 3, "-o", tmp_path / "command.png")
    call("generate", "a red fox", *arguments)
    (file,) = Pipeline.from_pretrained(str(small_model), tree="chain:depth=2")("a red fox", seed=3).save(
        tmp_path / "python.png"
    )
    ours, theirs = Image.open(file), Image.open(tmp_path / "command.png")
    assert ours.tobytes() == theirs.tobytes()
    assert ours.text == theirs.text and ours.text["prompt"] == "a red fox"  # type: ignore[attr-defined]


def test_save_writes_a_folder(pipe: Pipeline, tmp_path: Path) -> None:
    out = pipe(["fox", "tree"], seed=1)
    files = out.save(tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["00000.png", "00001.png"]
    assert [Image.open(file).text["seed"] for file in files] == ["1", "2"]  # type: ignore[attr-defined]
    assert [Image.open(file).tobytes() for file in files] == [image.tobytes() for image in out.images]
    with pytest.raises(ConfigError, match="2 images; pass a folder"):
        out.save(tmp_path / "one.png")
    with pytest.raises(ConfigError, match=r"fox\.JPG is one file and the call drew 2 images; pass a folder"):
        out.save(tmp_path / "fox.JPG")
    assert not (tmp_path / "fox.JPG").exists()
    with pytest.raises(ConfigError, match=r"unknown array of a history 'accept'\. Did you mean 'accepted'"):
        out.history.grid("accept")
    with pytest.raises(ConfigError, match="output_type='pil'"):
        pipe("fox", output_type="pt").save(tmp_path / "tensor.png")
    assert not (tmp_path / "one.png").exists() and not (tmp_path / "tensor.png").exists()


@pytest.mark.parametrize(
    ("name", "format"), [("fox.PNG", "PNG"), ("fox.jpg", "JPEG"), ("new/fox.jpeg", "JPEG"), ("fox.webp", "WEBP")]
)
def test_save_writes_the_format_of_the_name(pipe: Pipeline, tmp_path: Path, name: str, format: str) -> None:
    out = pipe("fox", seed=1)
    assert out.save(tmp_path / name) == [tmp_path / name]
    saved = Image.open(tmp_path / name)
    assert (saved.format, saved.size) == (format, out.images[0].size)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]


def test_formats_that_pillow_lacks_are_refused(pipe: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.init()
    monkeypatch.delitem(Image.SAVE, "WEBP")
    with pytest.raises(ConfigError, match=r"fox\.webp names a format that this Pillow cannot write; pass a name"):
        pipe("fox", seed=1).save(tmp_path / "new" / "fox.webp")
    assert not list(tmp_path.iterdir())


def test_images_that_are_not_there(pipe: Pipeline) -> None:
    out = pipe("fox", seed=1)
    for show in (out.metadata, out.heatmap):
        with pytest.raises(ConfigError, match="there is no image 1; the call drew 1, from 0 on"):
            show(1)
    with pytest.raises(ConfigError, match="ndarray is no image to draw over; pass a PIL image"):
        out.history.heatmap(np.zeros((8, 8, 3)))  # type: ignore[arg-type]


def test_folders_that_cannot_be_created(pipe: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for save in (pipe("fox", seed=1).save, pipe.save_pretrained):
        with pytest.raises(ConfigError, match=r"file.* cannot be created .*; choose another folder"):
            save(tmp_path / "file" / "new" / "fox")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_bar_is_shown_on_a_terminal_only(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe("fox", seed=1)
    assert capsys.readouterr().err == ""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    pipe("fox", seed=1)
    assert "35/35" in terminal.getvalue().replace(" ", "") or "0/35" in terminal.getvalue()
    hidden = Terminal()
    monkeypatch.setattr(sys, "stderr", hidden)
    pipe.set_progress_bar_config(disable=True)
    pipe("fox", seed=1)
    assert hidden.getvalue() == ""


def test_progress_bar_takes_options_of_tqdm(pipe: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    pipe.set_progress_bar_config(disable=False, desc="drawing")
    pipe("fox", seed=1)
    assert "drawing" in capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"unknown option of the progress bar 'dessc'\. Did you mean 'desc'"):
        pipe.set_progress_bar_config(dessc="drawing")
    with pytest.raises(ConfigError, match="total"):  # the pipeline's own
        pipe.set_progress_bar_config(total=5)
