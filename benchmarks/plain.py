"""Plain decoding beside transformers' `generate`, same sizes, same batch: `python benchmarks/plain.py [--tokens N]`.

transformers has no decoder of this family, so a Qwen3 of the same width, depth, heads and vocabulary stands in, with
random weights: a Llama with norms on queries and keys, as here. It has one rotation axis where this has three, and
neither guidance nor noise. Both decode two rows, as guidance does, greedily, in turns; the better of two turns counts.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from underdraw import Pipeline
from underdraw.history import History

PROMPT = 32  # tokens


def qwen(pipe: Pipeline) -> Qwen3ForCausalLM:
    """The stand-in."""
    arch = pipe.model.target.net.arch
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=arch.vocab, hidden_size=arch.dim, intermediate_size=arch.ffn, num_hidden_layers=arch.layers,
            num_attention_heads=arch.heads, num_key_value_heads=arch.num_kv_heads, head_dim=arch.head_width,
            max_position_embeddings=1024, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def ours(pipe: Pipeline, tokens: int) -> float:
    """Milliseconds a token of the plain loop, noise and guidance included."""
    job = pipe.request("a ghost", seed=0, temperature=0.0)
    steps, seconds = pipe.stream(job, [History(pipe.model.make_layout(job.size))]), []
    for step in steps:
        seconds.append(step.seconds)
        if len(seconds) == tokens:
            break
    return 1000 * sum(seconds) / len(seconds)


@torch.inference_mode()
def theirs(model: Qwen3ForCausalLM, tokens: int) -> float:
    """Milliseconds a token of `generate`, without the prompt's pass."""
    prompt = torch.randint(1, 1000, (2, PROMPT))
    spent = []
    for count in (1, tokens + 1):
        began = time.perf_counter()
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
        spent.append(time.perf_counter() - began)
    return 1000 * (spent[1] - spent[0]) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=200)
    count = parser.parse_args().tokens
    pipe = Pipeline.from_pretrained("tiny", tree="none", drafter="forced", device="cpu")
    model = qwen(pipe)
    times = [(ours(pipe, count), theirs(model, count)) for _ in range(2)]
    plain, other = (min(turn[side] for turn in times) for side in (0, 1))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, two rows, {count} tokens")
    print(f"underdraw plain {plain:.1f} ms a token, transformers generate {other:.1f} ms, ratio {other / plain:.2f}")


if __name__ == "__main__":
    main()
