"""The training pack: reading and writing, the held-out split, captions."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
import sprite_pack
from PIL import Image

from recipes.tiny.data import Pack, Picture, caption, is_held_out, pair_caption, write_pack
from underdraw.errors import CheckpointError, ConfigError

FOX = Picture("fluent-3d/1f98a", "sprite", "fluent-3d", "animals-nature", "a fox", "emoji fox", True)


def test_pack_returns_what_was_written(pack: Pack) -> None:
    sprites = sprite_pack.SUBJECTS * len(sprite_pack.STYLES) - 1
    assert len(pack) == sprites + 3 * sprite_pack.OTHERS and pack.px == sprite_pack.PX
    row = next(row for row, picture in enumerate(pack.pictures) if picture.key == "noto/005")
    assert pack.pictures[row].subject == "emoji 5" and pack.pictures[row].flippable is False
    expected = sprite_pack.sprite(5, 1)
    assert np.array_equal(pack.pixels([row])[0], expected)
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(pack.webp(row))).convert("RGBA")), expected)


def test_every_nth_image(pack: Pack) -> None:
    part = pack.every_nth(7)
    assert [picture.key for picture in part.pictures] == [picture.key for picture in pack.pictures[::7]]
    assert np.array_equal(part.pixels([3])[0], pack.pixels([21])[0])


def test_files_that_are_not_packs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training pack"):
        Pack(tmp_path / "missing.bin")
    (tmp_path / "junk.bin").write_bytes(b"x" * 100)
    with pytest.raises(CheckpointError, match="not a training pack"):
        Pack(tmp_path / "junk.bin")


def test_keys_are_unique(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two images have the key 'fluent-3d/1f98a'"):
        write_pack(tmp_path / "twice.bin", 64, [(FOX, b"a"), (FOX, b"b")])
    assert list(tmp_path.iterdir()) == []


def test_split_is_by_subject_and_stable(pack: Pack) -> None:
    train, held_out = pack.indices("train"), pack.indices("held-out")
    assert len(held_out) and len(train) + len(held_out) == len(pack)
    subjects = {pack.pictures[row].subject for row in train}
    assert subjects.isdisjoint(pack.pictures[row].subject for row in held_out)
    assert is_held_out("emoji moose") and not is_held_out("emoji fox")  # must never change: weights depend on it
    share = np.mean([is_held_out(f"subject {number}") for number in range(4000)])
    assert 0.015 < share < 0.035


def test_captions_name_subject_style_and_background() -> None:
    owl = dataclasses.replace(FOX, phrase="an owl")
    beach = Picture("landscape/beach0", "landscape", "landscape", "travel-places", "a beach", "landscape beach0", True)
    assert caption(FOX, "on a sky blue background") == "a fox, 3D render, on a sky blue background"
    assert caption(FOX) == "a fox, 3D render"
    assert caption(FOX, "on a red background", style="") == "a fox on a red background"
    assert caption(FOX, style="") == "a fox"
    assert caption(FOX, phrase="a small fox") == "a small fox, 3D render"
    assert caption(beach) == "a photo of a beach"
    assert pair_caption(FOX.phrase, owl.phrase, FOX.style, "on an orange background") == (
        "a fox on the left and an owl on the right, 3D render, on an orange background"
    )
