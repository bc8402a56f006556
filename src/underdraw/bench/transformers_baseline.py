"""One token of the same shape in transformers, as it is: what a user of that library gets."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from underdraw.extras import require_package
from underdraw.models.family import Placement
from underdraw.models.random_weights import ModelShape

CONTEXT, WARM, TIMED = 600, 5, 20


def transformers_ms(name: str, shape: ModelShape, placement: Placement, batch: int) -> dict[str, Any]:
    """Milliseconds of one token with a cache of `CONTEXT` tokens, conditional and unconditional rows together.

    transformers has no LlamaGen; a Llama of the same size stands in, as it does for the decoder of Janus.
    """
    library = require_package("transformers", "families", "the comparison with transformers")
    arch = shape.arch
    sizes = {
        "hidden_size": arch.dim, "intermediate_size": arch.ffn, "num_hidden_layers": arch.layers,
        "num_attention_heads": arch.heads, "num_key_value_heads": arch.num_kv_heads, "vocab_size": arch.vocab,
        "max_position_embeddings": 9216,
    }  # fmt: skip
    kinds = {"anole-7b": "Chameleon", "lumina-7b": "Chameleon", "emu3-8b": "Emu3"}
    kind = kinds.get(name, "Llama")
    before = torch.get_default_dtype()
    torch.set_default_dtype(placement.dtype)
    try:
        with torch.device(placement.device):
            if kind == "Chameleon":
                names = {"<image>": 8711, "IMGIMGAZ": 4}  # it reads its image tokens off their names
                config = library.ChameleonConfig(**sizes, vocabulary_map=names)
                model = library.ChameleonForConditionalGeneration(config)
            elif kind == "Emu3":
                model = library.Emu3ForCausalLM(library.Emu3TextConfig(**sizes))
            else:
                model = library.LlamaForCausalLM(library.LlamaConfig(**sizes))
    finally:
        torch.set_default_dtype(before)
    model.eval().requires_grad_(False)
    tokens = torch.full((2 * batch, CONTEXT), 5, device=placement.device)
    out = model(input_ids=tokens, use_cache=True)
    times = []
    for _ in range(WARM + TIMED):
        _wait(placement)
        began = time.perf_counter()
        out = model(input_ids=tokens[:, :1], past_key_values=out.past_key_values, use_cache=True)
        out.logits[:, -1].argmax(-1).tolist()
        times.append(1000 * (time.perf_counter() - began))
    return {
        "ms_per_token": statistics.median(times[WARM:]), "class": type(model).__name__, "version": library.__version__,
        "context": CONTEXT, "note": "forward and argmax; without guidance, filters and noise",
    }  # fmt: skip


def _wait(placement: Placement) -> None:
    if placement.device.type == "cuda":
        torch.cuda.synchronize(placement.device)
