"""Pixels of GLM-Image: its diffusion transformer, run by diffusers on the codes of the large grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from underdraw.errors import CheckpointError, UnsupportedError, first_line
from underdraw.extras import require_package
from underdraw.models.checkpoint import Checkpoint
from underdraw.models.config import Placement
from underdraw.models.pretrained import reading_folder

_CODEBOOK = "model.vqmodel.quantize.embedding.weight"


def check_diffusers() -> None:
    """Raise an UnsupportedError unless a diffusers with GLM-Image's pipeline is installed."""
    purpose = "decoding GLM-Image's codes to pixels (output_type='codes' does without)"
    diffusers = require_package("diffusers", "glm-image", purpose)
    try:
        _ = diffusers.GlmImagePipeline  # imported now, with whatever it needs
    except Exception as error:
        raise UnsupportedError(
            f"diffusers {diffusers.__version__} has no usable GlmImagePipeline ({first_line(error)}); install a newer "
            "one, or ask for output_type='codes'."
        ) from None


class DiffusionDecoder:
    """Decodes codes by `GlmImagePipeline`, which is loaded at the first image; it needs the prompt for text in images.

    `folder` is that of the whole diffusers pipeline, None if only the autoregressive part is there.
    """

    downsample = 32

    def __init__(self, folder: Path | None, decoder: Checkpoint, placement: Placement) -> None:
        self.folder, self.decoder, self.placement = folder, decoder, placement
        self._pipeline: Any = None

    @property
    def codebook(self) -> Tensor:
        """The vectors of the codes at length 1, as they are compared: (K, D)."""
        for _, tensor in self.decoder.tensors({_CODEBOOK}):
            return F.normalize(tensor.float(), dim=-1).to(self.placement.device)
        raise CheckpointError(f"{self.decoder.name} has no {_CODEBOOK}; it is incomplete.")

    def check_available(self) -> None:
        """Raise an error, before anything is drawn, if the parts that make pixels are missing."""
        if self.folder is None:
            raise UnsupportedError(
                f"{self.decoder.name} holds the autoregressive part only; give the folder of the whole pipeline, "
                "or ask for output_type='codes'."
            )
        check_diffusers()

    def decode_prompted(self, codes: Tensor, prompt: str, seed: int) -> Tensor:
        """Pixels (1, 3, H, W) in [-1, 1] of codes (1, rows, cols); `seed` is that of the diffusion's noise."""
        self.check_available()
        rows, cols = codes.shape[1:]
        generator = torch.Generator("cpu").manual_seed(seed)
        image = self._load()(
            prompt=prompt,
            height=rows * self.downsample,
            width=cols * self.downsample,
            prior_token_ids=prior_token_ids(codes),
            generator=generator,
            output_type="pt",
        ).images
        return image.float() * 2 - 1

    def decode(self, codes: Tensor) -> Tensor:
        """`decode_prompted` without the prompt, image by image."""
        return torch.cat([self.decode_prompted(image, "", 0) for image in codes.split(1)])

    def encode(self, pixels: Tensor) -> Tensor:
        raise UnsupportedError("GLM-Image's image encoder is not supported; draw images from texts.")

    def _load(self) -> Any:
        if self._pipeline is None:
            diffusers = require_package("diffusers", "glm-image")
            assert self.folder is not None  # see `check_available`
            with reading_folder(self.folder, "the diffusion part of GLM-Image"):
                pipeline = diffusers.GlmImagePipeline.from_pretrained(
                    self.folder, vision_language_encoder=None, processor=None, dtype=self.placement.dtype
                )
            pipeline.set_progress_bar_config(disable=True)
            self._pipeline = pipeline.to(self.placement.device)
        return self._pipeline


def prior_token_ids(codes: Tensor) -> Tensor:
    """What `GlmImagePipeline` takes as `prior_token_ids`: each code twice along both sides, (B, 4 * rows * cols)."""
    return codes.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2).flatten(1)
