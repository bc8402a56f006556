"""Pictures as bytes: PNG with the metadata that draws them again, JPEG or WebP, and the colours of single cells."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from underdraw.images import png_metadata
from underdraw.models.hub import is_hub_id
from underdraw.output import PipelineOutput, Stats
from underdraw.protocols import PromptedImageTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image

    from underdraw.engine.scheduler import ScheduledImage
    from underdraw.pipeline import Pipeline
    from underdraw.protocols import ImageTokenizer

Format = Literal["png", "jpeg", "webp"]
PREVIEW_QUALITY = 85
PALETTE_GRIDS, PALETTE_SIDE = 2, 24  # random codes that the colours of codes are fitted on


def describe(pipe: Pipeline, image: ScheduledImage, picture: Image) -> PipelineOutput[list[Image]]:
    """A finished image as the pipeline's output: its settings, statistics and metadata."""
    history = image.history
    return PipelineOutput(
        images=[picture],
        prompts=[image.prompt],
        seeds=[image.seed],
        stats=Stats.of([history], history.seconds),
        histories=[history],
        complete=history.done,
        model=pipe.model.name,
        settings={**pipe.settings(image.request), "drafter": public_name(pipe.drafter_name)},
    )


def public_name(name: str) -> str:
    """The name of a model or drafter without the server's folders: an OWNER/NAME of the hub is kept."""
    return name if is_hub_id(name) and not Path(name).exists() else Path(name).name or "model"


def encode(picture: Image, format: Format = "png", quality: int = 100, metadata: dict[str, str] | None = None) -> str:
    """The picture as base64 text; only PNG carries metadata."""
    file = io.BytesIO()
    if format == "png":
        picture.save(file, format="PNG", pnginfo=png_metadata(metadata or {}))
    else:
        picture.save(file, format=format.upper(), quality=quality)
    return base64.b64encode(file.getvalue()).decode()


@torch.inference_mode()
def fit_palette(tokenizer: ImageTokenizer, device: torch.device) -> NDArray[np.uint8]:
    """A colour for every code, (K, 3): shown for a cell until the picture around it is decoded.

    The mean colour of a cell is close to linear in the code's embedding, so a few decodes of random codes suffice.
    """
    codebook = tokenizer.codebook.float().cpu()  # (K, D)
    if isinstance(tokenizer, PromptedImageTokenizer):  # a decode takes a minute
        return _false_colours(codebook)
    shape = (PALETTE_GRIDS, PALETTE_SIDE, PALETTE_SIDE)
    codes = torch.randint(len(codebook), shape, generator=torch.Generator().manual_seed(0))
    codes = codes[:, ::2, ::2].repeat_interleave(2, 1).repeat_interleave(2, 2)  # neighbours resemble each other
    pixels = torch.cat([tokenizer.decode(grid.to(device)).float().cpu() for grid in codes.split(1)])
    colours = torch.nn.functional.avg_pool2d(pixels, tokenizer.downsample).movedim(1, -1).reshape(-1, 3)
    features = torch.cat([codebook, torch.ones(len(codebook), 1)], dim=1)
    solution = torch.linalg.lstsq(features[codes.flatten()], colours, driver="gelsd").solution
    return ((features @ solution).clamp(-1, 1) * 127.5 + 127.5).round().byte().numpy()


def _false_colours(codebook: Tensor) -> NDArray[np.uint8]:
    """Red, green and blue from the three main directions of the codebook: codes that resemble each other look alike."""
    centred = codebook - codebook.mean(0)
    directions = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -3:]
    along = centred @ directions
    return (127.5 + 60 * along / along.std(0).clamp(min=1e-6)).clamp(0, 255).round().byte().numpy()


def cell_colours(palette: NDArray[np.uint8], codes: Sequence[int]) -> str:
    """The colours of codes as hexadecimal text, six characters each."""
    return palette[list(codes)].tobytes().hex()


def statistics(output: PipelineOutput[Any]) -> dict[str, Any]:
    """What drawing the image took: the server's extension of OpenAI's answers."""
    stats = output.stats
    return {
        "seed": output.seeds[0],
        "passes": stats.passes,
        "tokens_per_pass": round(stats.tokens_per_pass, 3),
        "seconds": round(stats.seconds, 4),
    }
