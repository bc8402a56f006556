"""The largest numbers of rows, by kernels of our own: torch's selection is the measure."""

from __future__ import annotations

import torch

CASES = ((1, 8192, 2000), (3, 1000, 5), (2, 41, 40))  # rows, columns and how many are kept


def check(rows: int, columns: int, k: int, device: torch.device) -> None:
    """With equal numbers, with both zeros, and with numbers that are there for nothing."""
    from underdraw.kernels.topk import top, topk_filter

    scores = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(1)).to(device)
    scores[..., ::7] = scores[..., :1]
    scores[0, 0, 3:9] = -torch.inf
    scores[1, 0, : 2 * k : 2], scores[1, 0, 1 : 2 * k : 2] = 0.0, -0.0
    kth = scores.topk(k).values[..., -1:]
    assert torch.equal(topk_filter(scores, k), scores.masked_fill(scores < kth, -torch.inf))
    count = min(10, columns)
    values, places = top(scores, count)
    assert torch.equal(values, scores.topk(count).values)
    assert torch.equal(scores.gather(-1, places), values)
    assert all(len(set(row)) == count for row in places.flatten(0, 1).tolist())
    values, places = top(scores[0, 0, 2:10].contiguous(), 4)  # fewer numbers than are asked for
    assert values[2:].tolist() == [-torch.inf] * 2 and bool((places < 8).all())
