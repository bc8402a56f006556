"""PNG files, heat maps of a decode, side-by-side comparisons and contact sheets. Pillow and numpy, no model code."""

from __future__ import annotations

import io
import struct
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError
from PIL.PngImagePlugin import PngInfo

from underdraw.errors import ConfigError
from underdraw.history import History
from underdraw.io import atomic_write, check_regular

if TYPE_CHECKING:
    from torch import Tensor

PANEL = 288  # pixels of the longer side of an image on a sheet
MARGIN = 16
LINE = 18  # height of a text line in pixels
TITLE_SIZE, TEXT_SIZE = 16, 13
INK, PAPER, NO_VALUE = (30, 30, 30), (255, 255, 255), (150, 150, 150)
HEATMAP_OPACITY = 0.72  # of a heat map over the grey image
# Dark blue, teal, green, yellow: lightness grows evenly, so it reads in greyscale print and with colour blindness.
COLORMAP = np.array([(48, 18, 90), (52, 96, 141), (33, 145, 140), (94, 201, 98), (253, 231, 37)], dtype=np.float64)
CAPTION_LINE, CAPTION_CHAR = 11, 6  # pixels of a line and of a character of Pillow's default font
SHEET_GAP = 4  # pixels between the images of a contact sheet
JPEG_QUALITY = 80  # of a contact sheet
IMAGE_QUALITY = 95  # of an image in a lossy format
SHEET_COMMENT = "contact sheet of underdraw"  # in the file, so that a resumed run recognises its own


@dataclass(frozen=True, slots=True)
class HeatmapPanel:
    """How one field of a `History` is drawn as a heat map."""

    field: str
    title: str
    legend: tuple[str, ...]  # short lines below the colour bar
    low: float | None = None  # ends of the colour bar; None: the smallest and largest value
    high: float | None = None
    digits: int = 0


HEATMAP_PANELS = (
    HeatmapPanel(
        "accepted",
        "accepted tokens",
        ("drafted tokens accepted in the", "pass that produced this cell;", "bright is fast"),
        low=0,
    ),
    HeatmapPanel("depth", "tree depth", ("how many tokens ahead the tree", "of this cell's pass drafted"), low=0),
    HeatmapPanel("entropy", "entropy (nats)", ("uncertainty of the model here;", "dark is certain"), low=0, digits=1),
    HeatmapPanel(
        "top1",
        "top-1 probability",
        ("probability of the model's most", "likely token; bright is certain"),
        low=0,
        high=1,
        digits=1,
    ),
)


def apply_colormap(values: NDArray[Any]) -> NDArray[np.uint8]:
    """RGB colours of values in [0, 1]: (...) -> (..., 3)."""
    stops = np.linspace(0, 1, len(COLORMAP))
    channels = [np.interp(values, stops, COLORMAP[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def pixels_to_images(pixels: Tensor) -> list[Image.Image]:
    """PIL images of pixels (N, 3, H, W) in [-1, 1]."""
    arrays = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().movedim(1, -1).cpu().numpy()
    return [Image.fromarray(array) for array in arrays]


def read_image(path: Path, content: bytes | None = None) -> Image.Image:
    """An image file as RGB, with its metadata; everything that is wrong with it is one sentence.

    `content` has the bytes of an image that is part of another file.
    """
    if content is None:
        check_regular(path, "an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)  # more pixels than any model draws
            with Image.open(path if content is None else io.BytesIO(content)) as image:
                converted = image.convert("RGB")
                converted.info = dict(image.info)
                return converted
    except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError, Warning) as error:
        reason = "it is none" if isinstance(error, UnidentifiedImageError) else error
        raise ConfigError(f"{path} cannot be read as an image ({reason}); generate or copy it again.") from None


def encode_png(image: Image.Image, metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a PNG file with `metadata` as text chunks; the same image has the same bytes."""
    file = io.BytesIO()
    image.save(file, format="PNG", pnginfo=png_metadata(metadata or {}))
    return file.getvalue()


def save_png(image: Image.Image, path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Write a PNG atomically, with `metadata` as text chunks."""
    with atomic_write(path) as file:
        file.write(encode_png(image, metadata))


def image_format(path: Path) -> str:
    """Pillow's name of the format that the suffix of a path stands for; raises where Pillow cannot write it."""
    name = Image.registered_extensions().get(path.suffix.lower(), "")
    if name not in Image.SAVE:  # .avif needs a library
        raise ConfigError(f"{path} names a format that this Pillow cannot write; pass a name that ends in .png.")
    return name


def save_image(image: Image.Image, path: Path, metadata: Mapping[str, str]) -> None:
    """Write an image atomically in the format of the path's suffix; only PNG files hold the metadata."""
    name = image_format(path)
    if name == "PNG":
        save_png(image, path, metadata)
        return
    with atomic_write(path) as file:
        image.save(file, format=name, quality=IMAGE_QUALITY)


def png_metadata(metadata: Mapping[str, str]) -> PngInfo:
    """The text chunks of a PNG."""
    chunks = PngInfo()
    for key, value in metadata.items():
        chunks.add_text(key, value)
    return chunks


def heatmap(
    history: History, image: Image.Image | None = None, panels: Sequence[HeatmapPanel] = HEATMAP_PANELS
) -> Image.Image:
    """A sheet with the image and one heat map per panel, drawn over the image if there is one.

    Panels without any value are left out: entropy and top-1 probability are recorded only on request.
    """
    if not isinstance(image, Image.Image | None):
        raise ConfigError(f"{type(image).__name__} is no image to draw over; pass a PIL image such as out.images[0].")
    shown = [panel for panel in panels if _has_value(history, panel).any()]
    if not shown:
        raise ConfigError("this history holds nothing to show yet; decode at least one pass first.")
    sheet_panels = [] if image is None else [_with_title(_fit(image), "image")]
    sheet_panels += [_draw_panel(history, panel, image) for panel in shown]
    tokens = int((history.pass_index >= 0).sum())
    heading = f"{tokens} tokens in {history.passes} target passes: {history.tokens_per_pass:.2f} tokens per pass"
    return _sheet(sheet_panels, heading + " (grey: sampled from the prefill)")


def side_by_side(titled_images: Sequence[tuple[Image.Image, str]], heading: str) -> Image.Image:
    """Images in a row, each below its title."""
    return _sheet([_with_title(_fit(image), title) for image, title in titled_images], heading)


def contact_sheet(
    images: Sequence[Image.Image],
    path: str | Path,
    *,
    captions: Sequence[str] = (),
    per_row: int = 8,
    caption_lines: int = 4,
    width: int | None = None,
) -> Path:
    """Write a PNG or JPEG file with all images, row by row, each scaled to `width` and above its caption."""
    if width is not None:
        images = [image.resize((width, round(image.height * width / image.width))) for image in images]
    width, height = images[0].size
    step_x = width + SHEET_GAP
    step_y = height + SHEET_GAP + (caption_lines * CAPTION_LINE + SHEET_GAP if captions else 0)
    sheet = Image.new("RGB", (per_row * step_x, -(-len(images) // per_row) * step_y), PAPER)
    pen = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        row, col = divmod(index, per_row)
        sheet.paste(image, (col * step_x, row * step_y))
        caption = captions[index] if index < len(captions) else ""
        for line, words in enumerate(textwrap.wrap(caption, max(1, width // CAPTION_CHAR))[:caption_lines]):
            pen.text((col * step_x, row * step_y + height + line * CAPTION_LINE), words, fill="black")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = PngInfo()
    mark.add_text("comment", SHEET_COMMENT)
    with atomic_write(path) as file:
        if path.suffix.lower() == ".png":
            sheet.save(file, format="PNG", pnginfo=mark)
        else:
            sheet.save(file, format="JPEG", quality=JPEG_QUALITY, comment=SHEET_COMMENT)
    return path


def is_contact_sheet(path: Path) -> bool:
    """Whether `contact_sheet` wrote a file."""
    try:
        comment = read_image(path).info.get("comment", b"")
    except ConfigError:
        return False
    return comment in (SHEET_COMMENT, SHEET_COMMENT.encode())


def _has_value(history: History, panel: HeatmapPanel) -> NDArray[np.bool_]:
    """(height, width): cells that were drafted, or whose token statistics were recorded."""
    values = history.grid(panel.field)
    return np.isfinite(values) if values.dtype.kind == "f" else history.grid("pass_index") >= 0


def _draw_panel(history: History, panel: HeatmapPanel, image: Image.Image | None) -> Image.Image:
    values, has_value = history.grid(panel.field).astype(np.float64), _has_value(history, panel)
    low = float(values[has_value].min()) if panel.low is None else panel.low
    high = float(values[has_value].max()) if panel.high is None else panel.high
    high = high if high > low else low + 1
    scaled = np.where(has_value, (values - low) / (high - low), 0.0).clip(0, 1)
    cells = np.where(has_value[..., None], apply_colormap(scaled), np.array(NO_VALUE, dtype=np.uint8))
    size = _panel_size(image.size if image is not None else (values.shape[1], values.shape[0]))
    painted = Image.fromarray(cells.astype(np.uint8)).resize(size, Image.Resampling.NEAREST)
    if image is not None:
        painted = Image.blend(_fit(image).convert("L").convert("RGB"), painted, HEATMAP_OPACITY)
    ends = (f"{low:.{panel.digits}f}", f"{high:.{panel.digits}f}")
    return _with_title(painted, panel.title, panel.legend, ends)


def _panel_size(size: tuple[int, int]) -> tuple[int, int]:
    """Width and height scaled so that the longer side is `PANEL`."""
    scale = PANEL / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _fit(image: Image.Image) -> Image.Image:
    return image.convert("RGB").resize(_panel_size(image.size), Image.Resampling.BICUBIC)


def _with_title(
    image: Image.Image, title: str, legend: Sequence[str] = (), scale_ends: tuple[str, str] | None = None
) -> Image.Image:
    """The image below its title; below it a colour bar between the texts `scale_ends`, then the legend's lines."""
    top, below = LINE + 8, (0 if scale_ends is None else LINE + 12) + LINE * len(legend)
    panel = Image.new("RGB", (PANEL, top + image.height + below), PAPER)
    pen = ImageDraw.Draw(panel)
    pen.text((0, 0), title, INK, font=_font(TITLE_SIZE))
    panel.paste(image, (0, top))
    y = top + image.height + 8
    if scale_ends is not None:
        low, high = scale_ends
        font = _font(TEXT_SIZE)
        left = round(font.getlength(low)) + 8
        right = PANEL - round(font.getlength(high)) - 8
        bar = apply_colormap(np.linspace(0, 1, right - left))[None].repeat(12, axis=0)
        panel.paste(Image.fromarray(bar), (left, y + 1))
        pen.text((0, y), low, INK, font=font)
        pen.text((right + 8, y), high, INK, font=font)
        y += LINE + 4
    for line in legend:
        pen.text((0, y), line, INK, font=_font(TEXT_SIZE))
        y += LINE
    return panel


def _sheet(panels: Sequence[Image.Image], heading: str) -> Image.Image:
    """Panels in a row below a heading."""
    top = MARGIN + LINE + 12
    width = MARGIN + len(panels) * (PANEL + MARGIN)
    sheet = Image.new("RGB", (width, top + max(panel.height for panel in panels) + MARGIN), PAPER)
    ImageDraw.Draw(sheet).text((MARGIN, MARGIN), heading, INK, font=_font(TITLE_SIZE))
    for index, panel in enumerate(panels):
        sheet.paste(panel, (MARGIN + index * (PANEL + MARGIN), top))
    return sheet


def _font(size: int) -> Any:
    return ImageFont.load_default(size)
