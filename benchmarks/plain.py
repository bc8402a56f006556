"""Plain decoding against transformers' `generate`, same sizes, same batch: `python benchmarks/plain.py [--tokens N]`.

transformers has no decoder of the tiny family, so a Qwen3 of the same width, depth, heads and vocabulary with random
weights is used: a Llama with norms on queries and keys, as in the tiny family. It has one RoPE axis instead of three,
and neither guidance nor noise. Both decode two rows, as guidance does, greedily, in turns; the better of two turns
counts.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from underdraw import Pipeline
from underdraw.engine.decode import collect_passes
from underdraw.history import History

PROMPT_TOKENS = 32


def make_qwen3(pipe: Pipeline) -> Qwen3ForCausalLM:
    """A Qwen3 of the pipeline's shape with random weights."""
    arch = pipe.model.target.net.arch
    config = Qwen3Config(
        vocab_size=arch.vocab,
        hidden_size=arch.dim,
        intermediate_size=arch.ffn,
        num_hidden_layers=arch.layers,
        num_attention_heads=arch.heads,
        num_key_value_heads=arch.num_kv_heads,
        head_dim=arch.head_width,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def time_underdraw(pipe: Pipeline, tokens: int) -> float:
    """Milliseconds per token of plain decoding, with noise and guidance."""
    request = pipe.request("a ghost", seed=0, temperature=0.0)
    steps = pipe.stream(request, [History(pipe.model.make_layout(request.size))])
    return 1000 * sum(step.seconds for step in collect_passes(steps, tokens)) / tokens


@torch.inference_mode()
def time_transformers(model: Qwen3ForCausalLM, tokens: int) -> float:
    """Milliseconds per token of `generate`, without prefill."""
    prompt = torch.randint(1, 1000, (2, PROMPT_TOKENS))
    seconds = []
    for count in (1, tokens + 1):
        start = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - start)
    return 1000 * (seconds[1] - seconds[0]) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    count = parser.parse_args().tokens
    pipe = Pipeline.from_pretrained("tiny", tree="none", drafter="forced", device="cpu")
    model = make_qwen3(pipe)
    turns = [(time_underdraw(pipe, count), time_transformers(model, count)) for _ in range(2)]
    plain, other = (min(times) for times in zip(*turns, strict=True))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, two rows, {count} tokens")
    print(f"underdraw plain {plain:.1f} ms per token, transformers generate {other:.1f} ms, ratio {other / plain:.2f}")


if __name__ == "__main__":
    main()
