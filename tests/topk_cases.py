"""Cases of the top-k kernels, compared with torch.topk."""

from __future__ import annotations

import torch

CASES = ((1, 8192, 2000), (3, 1000, 5), (2, 41, 40))  # rows, columns, k


def check_topk(rows: int, columns: int, k: int, device: torch.device) -> None:
    """Compare on rows with equal values, with both zeros and with -inf."""
    from underdraw.kernels.topk import topk, topk_filter

    scores = torch.randn(2, rows, columns, generator=torch.Generator().manual_seed(1)).to(device)
    scores[..., ::7] = scores[..., :1]
    scores[0, 0, 3:9] = -torch.inf
    scores[1, 0, : 2 * k : 2], scores[1, 0, 1 : 2 * k : 2] = 0.0, -0.0
    kth = scores.topk(k).values[..., -1:]
    assert torch.equal(topk_filter(scores, k), scores.masked_fill(scores < kth, -torch.inf))
    ks = torch.tensor([k, columns], device=device)  # all values of the second half are kept
    assert torch.equal(topk_filter(scores, ks), torch.stack([topk_filter(scores[0], k), scores[1]]))
    count = min(10, columns)
    values, indices = topk(scores, count)
    assert torch.equal(values, scores.topk(count).values)
    assert torch.equal(scores.gather(-1, indices), values)
    assert all(len(set(row)) == count for row in indices.flatten(0, 1).tolist())
    values, indices = topk(scores[0, 0, 2:10].contiguous(), 4)  # only two of these are not -inf
    assert values[2:].tolist() == [-torch.inf] * 2 and bool((indices < 8).all())
