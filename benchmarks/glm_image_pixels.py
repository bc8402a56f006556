"""The parts of GLM-Image that make pixels, very small and with random weights; its decoder is written elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def write_glm_image_pixels(folder: Path, codes: int = 64) -> Any:
    """Write all folders of a `GlmImagePipeline` but the decoder's and its processor's; returns the pipeline."""
    import diffusers
    import transformers

    torch.manual_seed(9)
    pipeline = diffusers.GlmImagePipeline(
        tokenizer=transformers.ByT5Tokenizer(),
        processor=None,
        text_encoder=transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=384, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ).eval(),
        vision_language_encoder=None,
        vae=diffusers.AutoencoderKL(
            latent_channels=4, norm_num_groups=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            use_quant_conv=False, use_post_quant_conv=False, latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ).eval(),
        transformer=diffusers.GlmImageTransformer2DModel(
            in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8, num_attention_heads=2,
            text_embed_dim=16, time_embed_dim=16, condition_dim=8, prior_vq_quantizer_codebook_size=codes,
        ).eval(),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, time_shift_type="linear"),
    )  # fmt: skip
    pipeline.save_pretrained(folder)
    index = json.loads((folder / "model_index.json").read_text())
    index["vision_language_encoder"] = ["transformers", "GlmImageForConditionalGeneration"]
    index["processor"] = ["transformers", "GlmImageProcessor"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return pipeline
