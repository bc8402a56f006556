"""Images as they come from packages, and how they are rendered for the training pack."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from recipes.tiny.data import Picture
from underdraw.errors import UnsupportedError

if TYPE_CHECKING:
    from PIL import Image


Form = Literal["svg", "raster", "crop"]


@dataclass(frozen=True, slots=True)
class RawPicture:
    """A description and the bytes to render: an SVG, an image, or a crop of a photograph."""

    picture: Picture
    form: Form
    payload: bytes
    position: float = 0.5  # of a crop along the longer side, from 0 to 1


def render(raw: RawPicture, px: int) -> Image.Image | None:
    """A square image of `px` pixels, RGB for photographs and RGBA for the rest; None if nothing is visible."""
    from PIL import Image

    if raw.form == "svg":
        image = Image.open(io.BytesIO(_rasterise(raw.payload, px))).convert("RGBA")
    else:
        image = Image.open(io.BytesIO(raw.payload))
        image = image.convert("RGB" if raw.form == "crop" else "RGBA")
    if raw.form == "crop":
        side = min(image.size)
        left = int((image.width - side) * raw.position)
        top = (image.height - side) // 2
        return image.crop((left, top, left + side, top + side)).resize((px, px), Image.Resampling.LANCZOS)
    if image.getchannel("A").getextrema()[1] == 0:
        return None
    scale = px / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    image = image.resize(size, Image.Resampling.LANCZOS)
    canvas = Image.new("RGBA", (px, px), (255, 255, 255, 0))
    canvas.paste(image, ((px - size[0]) // 2, (px - size[1]) // 2))
    return canvas


def _rasterise(svg: bytes, px: int) -> bytes:
    """PNG bytes of an SVG at twice the size, because the anti-aliasing of the rasteriser is coarse."""
    try:
        import resvg_py
    except ImportError as error:
        raise UnsupportedError("rendering SVG files needs resvg-py; pip install 'underdraw[data]'.") from error
    return bytes(resvg_py.svg_to_bytes(svg_string=svg.decode(), width=2 * px, skip_system_fonts=True))
