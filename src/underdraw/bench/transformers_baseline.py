"""Time of one token in transformers with a model of the same shape, run eagerly as its users do."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from underdraw.extras import require_package
from underdraw.models.config import Placement
from underdraw.models.random_weights import ModelShape

CONTEXT, WARMUP, TIMED = 600, 5, 20  # tokens in the KV cache, untimed and timed forwards
MODEL_CLASSES = {"anole-7b": "Chameleon", "lumina-7b": "Chameleon", "emu3-8b": "Emu3"}


def time_transformers(name: str, shape: ModelShape, placement: Placement, batch: int) -> dict[str, Any]:
    """Milliseconds of one token, conditional and unconditional rows together."""
    library = require_package("transformers", "families", "the comparison with transformers")
    model = _random_model(library, name, shape, placement)
    tokens = torch.full((2 * batch, CONTEXT), 5, device=placement.device)
    output = model(input_ids=tokens, use_cache=True)
    times = []
    for _ in range(WARMUP + TIMED):
        if placement.device.type == "cuda":
            torch.cuda.synchronize(placement.device)
        start = time.perf_counter()
        output = model(input_ids=tokens[:, :1], past_key_values=output.past_key_values, use_cache=True)
        output.logits[:, -1].argmax(-1).tolist()
        times.append(1000 * (time.perf_counter() - start))
    return {
        "ms_per_token": statistics.median(times[WARMUP:]),
        "class": type(model).__name__,
        "version": library.__version__,
        "context": CONTEXT,
        "note": "forward and argmax; without guidance, filters and noise",
    }


def _random_model(library: Any, name: str, shape: ModelShape, placement: Placement) -> Any:
    """transformers has no LlamaGen and no decoder of Janus alone; a Llama of the same size stands in for both."""
    arch = shape.arch
    sizes = {
        "hidden_size": arch.dim,
        "intermediate_size": arch.ffn,
        "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads,
        "num_key_value_heads": arch.num_kv_heads,
        "vocab_size": arch.vocab,
        "max_position_embeddings": 9216,
    }
    family = MODEL_CLASSES.get(name, "Llama")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with torch.device(placement.device):
            if family == "Chameleon":
                vocabulary = {"<image>": 8711, "IMGIMGAZ": 4}  # Chameleon finds its image tokens by name
                config = library.ChameleonConfig(**sizes, vocabulary_map=vocabulary)
                model = library.ChameleonForConditionalGeneration(config)
            elif family == "Emu3":
                model = library.Emu3ForCausalLM(library.Emu3TextConfig(**sizes))
            else:
                model = library.LlamaForCausalLM(library.LlamaConfig(**sizes))
    finally:
        torch.set_default_dtype(dtype)
    return model.eval().requires_grad_(False)
