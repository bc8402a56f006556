"""Values that describe a model: image sizes, sampling defaults, device and dtype, published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from underdraw.nn.quantized_weight import WeightFormat

UNKNOWN_LICENCE = "see its page on the hub"


@dataclass(frozen=True, slots=True)
class PublishedCheckpoint:
    """A checkpoint on the Hugging Face hub (or in the package) that the family loads."""

    id: str
    licence: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class PublishedDrafter:
    """A drafter on the Hugging Face hub, with the hidden size and image side of the target it was trained for."""

    id: str
    hidden_size: int
    image_side: int  # pixels


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The sampling parameters of the family's authors; a call may override each of them."""

    guidance: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Height and width of an image in pixels."""

    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}"


@dataclass(frozen=True, slots=True)
class SizeRange:
    """Any height and width that are multiples of a number of pixels, up to a largest side."""

    multiple: int
    largest: int

    def __contains__(self, size: ImageSize) -> bool:
        return all(
            side % self.multiple == 0 and self.multiple <= side <= self.largest for side in (size.height, size.width)
        )

    def __str__(self) -> str:
        return f"multiples of {self.multiple} up to {self.largest}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and dtype of the weights, and whether the decoder's matrices are quantised."""

    device: torch.device
    dtype: torch.dtype
    weights: WeightFormat = "full"
