"""Pictures about pictures: heat maps of what happened at every cell, two pictures side by side, and PNG files.

Pillow and numpy only. Heat maps read a History and nothing else; nothing here decodes or knows a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.io import atomic_write

PANEL = 288  # pixels along the longer side of a picture on a sheet
MARGIN = 16
LINE = 18  # pixels a line of text
TITLE_SIZE, TEXT_SIZE = 16, 13
INK, PAPER, NOTHING = (30, 30, 30), (255, 255, 255), (150, 150, 150)
# Dark blue, teal, green, yellow: grows evenly in lightness, so it reads in print and for the colour-blind.
STOPS = np.array([(48, 18, 90), (52, 96, 141), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=np.float64)


@dataclass(frozen=True, slots=True)
class HeatmapColumn:
    """One column of a history as a picture, and how to read it."""

    column: str
    title: str
    meaning: tuple[str, ...]  # short lines under the scale
    low: float | None = None  # ends of the scale; None: taken from the values
    high: float | None = None
    digits: int = 0


MAPS = (
    HeatmapColumn(
        "accepted", "drafted codes kept", low=0,
        meaning=("how many guesses in a row the", "model kept in this cell's pass;", "bright is fast"),
    ),
    HeatmapColumn("depth", "depth of the tree", ("how many codes ahead was", "guessed in this cell's pass"), low=0),
    HeatmapColumn("entropy", "entropy (nats)", ("how unsure the model was here;", "dark is sure"), low=0, digits=1),
    HeatmapColumn(
        "top1", "top-1 probability", low=0, high=1, digits=1,
        meaning=("chance of the model's favourite", "code here; bright is sure"),
    ),
)  # fmt: skip


def colours(values: NDArray[Any]) -> NDArray[np.uint8]:
    """RGB of values in [0, 1]: (...) -> (..., 3)."""
    place = np.linspace(0, 1, len(STOPS))
    channels = [np.interp(values, place, STOPS[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def heatmap(history: History, picture: Image.Image | None = None, maps: Sequence[HeatmapColumn] = MAPS) -> Image.Image:
    """A sheet with the picture and one map after the other, each with its scale.

    Maps whose values the history does not hold are left out: entropy and top-1 probability are kept on demand.
    """
    shown = [one for one in maps if _known(history, one).any()]
    if not shown:
        raise ConfigError("this history holds nothing to show yet; decode at least one pass first.")
    panels = [] if picture is None else [_titled(_fit(picture), "the picture", ())]
    panels += [_panel(history, one, picture) for one in shown]
    drawn = int((history.pass_index >= 0).sum())
    head = f"{drawn} codes in {history.passes} passes of the model: {history.tokens_per_pass:.2f} codes a pass"
    head += " (a grey cell came with the prompt's own pass)"
    return _sheet(panels, head)


def side_by_side(pictures: Sequence[tuple[Image.Image, str]], head: str) -> Image.Image:
    """Pictures with a line under each, and a line over all of them."""
    return _sheet([_titled(_fit(picture), text, ()) for picture, text in pictures], head)


def save_png(picture: Image.Image, path: Path, texts: Mapping[str, str] | None = None) -> None:
    """Write a PNG with text chunks. The file appears whole or not at all."""
    about = PngInfo()
    for key, value in (texts or {}).items():
        about.add_text(key, value)
    with atomic_write(path) as file:
        picture.save(file, format="PNG", pnginfo=about)


def _known(history: History, one: HeatmapColumn) -> NDArray[np.bool_]:
    """Cells (height, width) that have a value: those a tree has drawn, or those whose law was kept."""
    values = history.grid(one.column)
    return np.isfinite(values) if values.dtype.kind == "f" else history.grid("pass_index") >= 0


def _panel(history: History, one: HeatmapColumn, picture: Image.Image | None) -> Image.Image:
    values, known = history.grid(one.column).astype(np.float64), _known(history, one)
    low = float(values[known].min()) if one.low is None else one.low
    high = float(values[known].max()) if one.high is None else one.high
    high = high if high > low else low + 1
    share = np.where(known, (values - low) / (high - low), 0.0).clip(0, 1)
    cells = np.where(known[..., None], colours(share), np.array(NOTHING, dtype=np.uint8))
    size = _size(picture.size if picture is not None else (values.shape[1], values.shape[0]))
    painted = Image.fromarray(cells.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
    if picture is not None:
        grey = _fit(picture).convert("L").convert("RGB")
        painted = Image.blend(grey, painted, 0.72)
    return _titled(painted, one.title, one.meaning, (f"{low:.{one.digits}f}", f"{high:.{one.digits}f}"))


def _size(size: tuple[int, int]) -> tuple[int, int]:
    """A picture's size on a sheet: the longer side is a panel's."""
    scale = PANEL / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _fit(picture: Image.Image) -> Image.Image:
    return picture.convert("RGB").resize(_size(picture.size), Image.Resampling.BICUBIC)


def _titled(
    picture: Image.Image, title: str, meaning: Sequence[str], scale: tuple[str, str] | None = None
) -> Image.Image:
    """A picture with its title above it and, with a scale, a colour bar with its ends and its meaning below."""
    top, below = LINE + 8, (0 if scale is None else LINE + 12) + LINE * len(meaning)
    panel = Image.new("RGB", (PANEL, top + picture.height + below), PAPER)
    pen = ImageDraw.Draw(panel)
    pen.text((0, 0), title, INK, font=_font(TITLE_SIZE))
    panel.paste(picture, (0, top))
    y = top + picture.height + 8
    if scale is not None:
        low, high = scale
        font = _font(TEXT_SIZE)
        left = round(font.getlength(low)) + 8
        right = PANEL - round(font.getlength(high)) - 8
        bar = colours(np.linspace(0, 1, right - left))[None].repeat(12, axis=0)
        panel.paste(Image.fromarray(bar), (left, y + 1))
        pen.text((0, y), low, INK, font=font)
        pen.text((right + 8, y), high, INK, font=font)
        y += LINE + 4
    for line in meaning:
        pen.text((0, y), line, INK, font=_font(TEXT_SIZE))
        y += LINE
    return panel


def _sheet(panels: Sequence[Image.Image], head: str) -> Image.Image:
    """Panels in a row under a heading."""
    top = MARGIN + LINE + 12
    width = MARGIN + len(panels) * (PANEL + MARGIN)
    sheet = Image.new("RGB", (width, top + max(panel.height for panel in panels) + MARGIN), PAPER)
    ImageDraw.Draw(sheet).text((MARGIN, MARGIN), head, INK, font=_font(TITLE_SIZE))
    for index, panel in enumerate(panels):
        sheet.paste(panel, (MARGIN + index * (PANEL + MARGIN), top))
    return sheet


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
