"""`custom_generate` against transformers' own `generate`, on a Janus with random weights.

    python benchmarks/custom_generate.py [--size small|7b] [--side CODES] [--dtype bfloat16] [--device cuda]

No files are needed: the model is made on the device. `small` is for a CPU; `7b` has the sizes of Janus-Pro-7B's decoder
and takes about 30 GB of memory in bfloat16. Both draw one image with guidance, after a first one that is not timed.

The tree `none` compares passes alone. `auto` adds drafts, but its factor is not that of a trained model: the logits of
random weights are nearly flat, so shared noise makes drafts right far more often.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

from underdraw.integrations.transformers import custom_generate

# width, MLP, layers, heads, vocabulary, codes per side, codes in the codebook
SIZES = {"small": (256, 704, 4, 4, 2048, 12, 1024), "7b": (4096, 11008, 30, 32, 102400, 24, 16384)}
START, PAD, END, IMAGE_START, IMAGE = 1, 2, 3, 4, 5


def make_janus(size: str, side: int | None, device: str, dtype: torch.dtype) -> Any:
    """A Janus with random weights, and a vision encoder as small as it can be: drawing does not use it."""
    width, mlp, layers, heads, vocabulary, default_side, codes = SIZES[size]
    side = side or default_side
    config = JanusConfig(
        text_config={
            "model_type": "llama", "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": vocabulary,
            "max_position_embeddings": 2048, "bos_token_id": START, "pad_token_id": PAD, "eos_token_id": END,
        },
        vision_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16 * side,
            "patch_size": 16, "projection_dim": width, "num_image_tokens": side * side,
        },
        vq_config={
            "embed_dim": 8, "num_embeddings": codes, "latent_channels": 32, "base_channels": 32,
            "channel_multiplier": [1, 1, 2], "num_patches": side, "projection_dim": width,
            "image_token_embed_dim": width,
        },
        image_token_id=IMAGE,
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        with torch.device(device):
            model = JanusForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(default)
    model.generation_config = GenerationConfig(
        bos_token_id=START, pad_token_id=PAD, eos_token_id=END, guidance_scale=5,
        generation_kwargs={"boi_token_id": IMAGE_START},
    )  # fmt: skip
    return model


def time_images(model: Any, inputs: dict[str, torch.Tensor], **options: Any) -> tuple[float, torch.Tensor]:
    """Seconds of the second image, and its codes."""
    seconds = []
    for _ in range(2):
        torch.manual_seed(1)
        start = time.perf_counter()
        codes = model.generate(**inputs, max_new_tokens=1, **options).cpu()  # images have their own length
        seconds.append(time.perf_counter() - start)
    return seconds[-1], codes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--side", type=int, help="codes per side; default: 12 (small) or 24 (7b)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    model = make_janus(options.size, options.side, options.device, getattr(torch, options.dtype))
    ids = torch.tensor([[START, *range(20, 44), IMAGE_START]], device=options.device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    machine = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    result: dict[str, Any] = {"size": options.size, "machine": machine, "dtype": options.dtype, "versions": versions}
    print(f"Janus, {options.size}, {machine}, {options.dtype}, {versions}")
    for name, sampling in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "top_k": 0}}.items():
        base, reference = time_images(model, inputs, generation_mode="image", **sampling)
        result[name] = {"transformers": base}
        print(f"{name}: transformers {base:.2f} s")
        for tree in ("none", "auto"):
            seconds, codes = time_images(model, inputs, custom_generate=custom_generate, tree=tree, **sampling)
            same = float((codes == reference).float().mean())
            result[name][tree] = {"seconds": seconds, "speedup": base / seconds, "same_codes": same}
            print(f"{name}: tree {tree} {seconds:.2f} s, {base / seconds:.2f} times as fast, {same:.0%} same codes")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
