"""Does the number of rows of a GEMM change the bits of a row on this processor? Exact decoding rests on the answer.

    python benchmarks/invariance.py

For float32 and bfloat16: how many of 127 row counts change the first rows of a GEMM, with weights stored output-major
(as torch.nn.Linear does) and input-major, and with underdraw's row-invariant `linear`, which pads rows where this
processor needs it; and how often a weighted sum of values changes when zero-weight values are put between the others,
by length of the sum.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

from underdraw.nn.row_invariant import linear, min_rows, row_multiple, sum_block

SHAPES = ((512, 1024), (512, 512), (512, 2816), (704, 512), (512, 4096))
LENGTHS = (128, 192, 256, 384, 448, 512, 640)


def differing_products(inputs: int, outputs: int, dtype: torch.dtype, order: str) -> int:
    """Row counts from 2 to 128 at which the first two rows of a product differ from those of a two-row product."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) * 0.05).to(dtype)
    if order != "output-major":
        weight = weight.t().contiguous().t()
    product = linear if order == "underdraw" else F.linear
    x = torch.randn(128, inputs, generator=generator).to(dtype)
    expected = product(x[:2], weight)
    return sum(not torch.equal(product(x[:rows], weight)[:2], expected) for rows in range(2, 129))


def differing_sums(length: int, dtype: torch.dtype, trials: int = 40) -> int:
    """Trials in which a sum over contiguous values differs from the same sum with zeros between them."""
    generator = torch.Generator().manual_seed(0)
    differing = 0
    for _ in range(trials):
        count = int(torch.randint(8, length, (1,), generator=generator))
        index = torch.randperm(length, generator=generator)[:count].sort().values
        values = torch.randn(8, length, 65, generator=generator).to(dtype)
        weights = torch.rand(8, count, generator=generator).to(dtype)
        spread = torch.zeros(8, 33, length, dtype=dtype)
        spread[:, 5, index] = weights
        packed = torch.zeros(8, 4, count, dtype=dtype)
        packed[:, 2] = weights
        differing += not torch.equal((spread @ values)[:, 5], (packed @ values[:, index])[:, 2])
    return differing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} thread(s)")
    block = sum_block(2)
    print(f"products have at least {min_rows()} rows, a multiple of {row_multiple()}; sums have {block} positions")
    for dtype in (torch.float32, torch.bfloat16):
        for inputs, outputs in SHAPES:
            counts = (
                f"{order} {differing_products(inputs, outputs, dtype, order):3}"
                for order in ("output-major", "input-major", "underdraw")
            )
            print(f"{dtype}  {inputs:4} -> {outputs:4}  {'  '.join(counts)} of 127")
        sums = "  ".join(f"{length}: {differing_sums(length, dtype)}" for length in LENGTHS)
        print(f"{dtype}  sums that change, of 40, by length  {sums}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
