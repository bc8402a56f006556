"""Bodies of requests: OpenAI's image parameters and underdraw's. Values that cannot be honoured are refused."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from underdraw.ranges import MAX_SEED

MAX_PROMPT = 32_000  # characters, as in OpenAI's API
MAX_IMAGES, MAX_PARTIAL_IMAGES = 10, 3

Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
Text = Annotated[str, Field(max_length=MAX_PROMPT)]
Number = Annotated[float, Field(ge=0, le=1000)]


class DrawingOptions(BaseModel):
    """What an image depends on. None is the model's default."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    prompt: Prompt
    negative_prompt: Text | None = None
    size: Annotated[str, Field(max_length=20)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    temperature: Number | None = None
    guidance_scale: Number | None = None
    top_k: Annotated[int, Field(ge=0, le=10**6)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    tree: Annotated[str, Field(max_length=200)] | None = None

    @field_validator("prompt")
    @classmethod
    def check_not_blank(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("describe the image in a few words.")
        return text

    @field_validator("size")
    @classmethod
    def check_size(cls, size: str | None) -> str | None:
        if size not in (None, "auto") and not re.fullmatch(r"[1-9]\d{0,4}x[1-9]\d{0,4}", size or ""):
            raise ValueError("write WIDTHxHEIGHT in pixels, or auto.")
        return size

    @property
    def tree_policy(self) -> str:
        """The tree policy by name; the server's own without one."""
        return "auto" if self.tree is None else self.tree.strip()

    def height_width(self) -> tuple[int | None, int | None]:
        """Height and width of `size`; None and None for the model's default."""
        if self.size in (None, "auto"):
            return None, None
        width, height = str(self.size).split("x")
        return int(height), int(width)


class ImageRequest(DrawingOptions):
    """Body of POST /v1/images/generations; `user`, `style` and the like are accepted and change nothing."""

    model: Annotated[str, Field(max_length=300)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=MAX_PARTIAL_IMAGES)] | None = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    background: Literal["auto", "opaque"] | None = None
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = None
    moderation: Literal["auto", "low"] | None = None
    complexity: Literal["low", "medium", "high"] | None = None
    style: Literal["vivid", "natural"] | None = None
    user: Annotated[str, Field(max_length=1000)] | None = None
    safety_identifier: Annotated[str, Field(max_length=1000)] | None = None

    @property
    def images(self) -> int:
        return self.n or 1

    @property
    def partials(self) -> int:
        """Partial images to send; only a stream has them."""
        return (self.partial_images or 0) if self.stream else 0

    def echo(self, size: str) -> dict[str, Any]:
        """The settings that every answer repeats."""
        quality = {"standard": "medium", "hd": "high", "auto": "medium", None: "medium"}.get(self.quality, self.quality)
        return {
            "size": size,
            "quality": quality,
            "background": "opaque",
            "output_format": self.output_format or "png",
        }
