"""Inputs of `generate` of transformers for small random models, and a small Chameleon."""

from __future__ import annotations

from typing import Any

import checkpoint_writers
import torch
from torch import Tensor

START, PAD, IMAGE_START = 1, 2, 4  # of the small Janus


def chameleon_model(vocabulary: dict[str, int]) -> Any:
    """Chameleon with 4 x 4 codes and a small image tokenizer."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    images = {"base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1, "latent_channels": 8}
    config = ChameleonConfig(
        **checkpoint_writers.CHAMELEON,
        vq_config={**images, "embed_dim": 8, "resolution": 64},
        vocabulary_map=vocabulary,
    )
    model = ChameleonForConditionalGeneration(config).eval()
    checkpoint_writers.randomise(model, 3)
    return model


def janus_inputs() -> dict[str, Tensor]:
    ids = torch.tensor([[START, 20, 21, 22, IMAGE_START], [START, 23, 20, 25, IMAGE_START]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def glm_inputs() -> dict[str, Any]:
    """A prompt for 2 x 3 codes after 13 x 19; transformers is kept from tokens that are no codes."""
    ids = torch.tensor([[64, 80, 81, 73, 102, 103, 74, 64]])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "image_grid_thw": torch.tensor([[1, 2, 3], [1, 13, 19]]),
        "images_per_sample": torch.tensor([2]),
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 76,
        "suppress_tokens": list(range(64, 72)),
        "max_new_tokens": 2 * 3 + 13 * 19,
    }


def emu3_inputs() -> dict[str, Any]:
    """A prompt for 4 x 4 codes, and what transformers' documentation passes to `generate`."""
    ids = torch.tensor([[1, 20, 21, 22, 3, 46, 39, 46, 5]])
    codes = list(range(240, 304))

    def allowed(_: int, row: Tensor) -> list[int]:
        """Rows of four codes with a row end (6), then frame end (7), image end (4) and end (2)."""
        step = len(row) - ids.shape[1]
        return codes if step < 20 and step % 5 != 4 else [6] if step < 20 else [[7, 4, 2][min(step - 20, 2)]]

    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "negative_prompt_ids": torch.tensor([[1, 27, 28, 3, 46, 39, 46, 5]]),
        "negative_prompt_attention_mask": torch.ones(1, 8, dtype=torch.long),
        "guidance_scale": 3.0,
        "prefix_allowed_tokens_fn": allowed,
        "max_new_tokens": 23,
    }
