"""`underdraw generate --sheet`: one picture of all pictures of a folder."""

from __future__ import annotations

from pathlib import Path

from commands import call
from PIL import Image


def test_sheet_shows_all_pictures_of_a_folder(small_model: Path, tmp_path: Path) -> None:
    given = ["generate", "fox", "-m", small_model, "--seed", 1, "--quiet", "--tree", "none"]
    sheet = tmp_path / "sheet.jpg"
    assert call(*given, "--n", 3, "--out", tmp_path / "many", "--sheet", sheet).code == 0
    assert Image.open(sheet).format == "JPEG" and Image.open(sheet).width == 8 * 148
    assert "--sheet shows a folder" in call(*given, "--out", tmp_path / "x.png", "--sheet", sheet).err
    done = call(*given, "--n", 2, "--out", tmp_path / "other", "--sheet", tmp_path / "sheet.gif")
    assert done.code == 2 and ".jpg, .jpeg, .png" in done.err and not (tmp_path / "other").exists()
