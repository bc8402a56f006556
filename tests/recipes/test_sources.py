"""Pinned packages and the phrases made from them."""

from __future__ import annotations

import io
import json
import pickle
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run_script

from recipes.tiny import build, vocabulary
from recipes.tiny.collect import portrait_phrase
from recipes.tiny.data import Pack, Picture
from recipes.tiny.emoji import noun_phrase
from recipes.tiny.lpips import ArrayUnpickler
from recipes.tiny.raw import RawPicture, render
from recipes.tiny.sources import PACKAGES, deb_members, fetch
from underdraw.errors import CheckpointError, ConfigError

PICTURE = Picture("noto/1", "sprite", "noto", "objects", "a thing", "emoji thing", True)


@pytest.mark.parametrize(
    ("label", "phrase"),
    [
        ("fox", "a fox"),
        ("octopus", "an octopus"),
        ("butterfly", "a butterfly"),
        ("butter", "butter"),
        ("unicorn", "a unicorn"),
        ("umbrella with rain drops", "an umbrella with rain drops"),
        ("cherries", "cherries"),
        ("cactus", "a cactus"),
        ("automobile", "a car"),
        ("man: bald", "a bald man"),
        ("woman: dark skin tone, curly hair", "a woman with dark skin tone and curly hair"),
        ("man: light skin tone, beard", "a man with light skin tone and a beard"),
    ],
)
def test_emoji_labels_become_phrases(label: str, phrase: str) -> None:
    assert noun_phrase(label) == phrase


def test_portrait_attributes_become_a_phrase() -> None:
    attributes = {
        "baseColor": "#f9c9b6",
        "hair": "fonze",
        "hairColor": "#000000",
        "glasses": "round",
        "shirtColor": "#fc909f",
    }
    assert portrait_phrase("micah", attributes) == "a person with light skin, black quiff, glasses and a pink shirt"


def test_photographs_are_cropped_and_images_padded() -> None:
    from PIL import Image

    def raw(mode: str, form: str, position: float) -> RawPicture:
        image = Image.new(mode, (40, 20))
        image.paste("red", (0, 0, 20, 20))
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        return RawPicture(PICTURE, form, buffer.getvalue(), position)  # type: ignore[arg-type]

    left, right = (render(raw("RGB", "crop", position), 8) for position in (0.0, 1.0))
    assert left is not None and right is not None and left.mode == "RGB"
    assert left.getpixel((4, 4)) == (255, 0, 0) and right.getpixel((4, 4)) == (0, 0, 0)
    wide = render(raw("RGBA", "raster", 0.5), 8)
    assert wide is not None and wide.size == (8, 8) and wide.getpixel((0, 0))[3] == 0 == wide.getpixel((0, 7))[3]
    assert wide.getpixel((1, 4))[:3] == (255, 0, 0) and wide.getpixel((1, 4))[3] > 200
    empty = io.BytesIO()
    Image.new("RGBA", (4, 4)).save(empty, "PNG")
    assert render(RawPicture(PICTURE, "raster", empty.getvalue()), 8) is None


def test_build_renders_a_pack_and_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a few images instead of the packages; an empty one is left out."""
    from PIL import Image

    def collect(config: object, cache: Path) -> Iterator[RawPicture]:
        for number, colour in enumerate(["red", "blue", (0, 0, 0, 0)]):
            buffer = io.BytesIO()
            Image.new("RGBA", (20, 20), colour).save(buffer, "PNG")
            picture = replace(PICTURE, key=f"noto/{number}", phrase=f"a {colour} box", subject=f"emoji {colour}")
            yield RawPicture(picture, "raster", buffer.getvalue())

    monkeypatch.setattr(build, "collect", collect)
    monkeypatch.setattr(vocabulary, "collect", collect)
    done = run_script(build, "--out", tmp_path / "pack.bin", "--cache", tmp_path, "--px", 16)
    assert done.code == 0, done.err
    pack = Pack(tmp_path / "pack.bin")
    assert pack.px == 16 and [picture.phrase for picture in pack.pictures] == ["a red box", "a blue box"]
    assert (abs(pack.pixels([0])[0, 8, 8].astype(int) - (255, 0, 0, 255)) < 16).all()
    assert "in all                2" in done.out and "Apache-2.0" in done.out
    done = run_script(vocabulary, "--cache", tmp_path, "--out", tmp_path / "words.json")
    assert done.code == 0, done.err
    words = json.loads((tmp_path / "words.json").read_text())
    assert {"box", "red", "background"} <= set(words["words"]) and "a red box" in words["subjects"]["objects"]


def test_packages_are_pinned_and_checked(tmp_path: Path) -> None:
    assert len({package.filename for package in PACKAGES.values()}) == len(PACKAGES)
    assert all(len(package.sha256) == 64 for package in PACKAGES.values())
    (tmp_path / PACKAGES["noto"].filename).write_bytes(b"something else")
    with pytest.raises(ConfigError, match="delete the file"):
        fetch("noto", tmp_path)


def test_debian_packages_are_read_without_dpkg(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, content in (("./usr/a.jpg", b"picture"), ("./usr/b.txt", b"words")):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    raw = b"!<arch>\n"
    for name, content in (("debian-binary", b"2.0"), ("data.tar.xz", buffer.getvalue())):  # an odd length first
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(content):<10}`\n".encode()
        raw += header + content + b"\n" * (len(content) % 2)
    (tmp_path / "x.deb").write_bytes(raw)
    assert list(deb_members(tmp_path / "x.deb", lambda name: name.endswith("jpg"))) == [("./usr/a.jpg", b"picture")]
    (tmp_path / "y.deb").write_bytes(b"!<arch>\n")
    with pytest.raises(ConfigError, match="not a Debian package"):
        list(deb_members(tmp_path / "y.deb", bool))


def test_lpips_weights_may_hold_arrays_only() -> None:
    array = {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}
    loaded = ArrayUnpickler(io.BytesIO(pickle.dumps(array, protocol=4))).load()
    assert np.array_equal(loaded["kernel"], array["kernel"])
    with pytest.raises(CheckpointError, match="refused"):
        ArrayUnpickler(io.BytesIO(pickle.dumps(Path("x")))).load()
