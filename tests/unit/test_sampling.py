"""The sampler: filters, sampling by argmax of perturbed logits, forced steps, top-k, precomputed noise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from lookup_models import reference_probs
from scipy import stats
from torch import Tensor

from underdraw import sampling
from underdraw.layout import Layout
from underdraw.sampling import Sampler, fast_topk

P = 1e-4  # smallest p-value that passes; seeds are fixed
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = Layout(4, 4, range(4, 16))
ROW_ENDS = Layout(3, 4, range(4, 16), prologue=(1, 2), row_end=30, epilogue=(3,))


@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_level_scores_equal_scores_of_that_depth(layout: Layout, temperature: float) -> None:
    noise_window = Sampler(layout, [4, 5], temperature=temperature, top_k=4).noise_window(torch.tensor([2, 7]), 5)
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    for depth in range(1, 6):
        depths = torch.full((2, 3), depth)
        assert torch.equal(noise_window.level_scores(logits, depth), noise_window.scores(logits, depths))
        assert torch.equal(
            noise_window.level_filtered_logits(logits, depth), noise_window.filtered_logits(logits, depths)
        )


@pytest.mark.parametrize("vocab", [5, 300, 1024, 1025, 8192])
@pytest.mark.parametrize("count", [1, 2, 10, 64, 100])
@pytest.mark.parametrize("kind", ["distinct", "ties", "few finite"])
def test_fast_topk_is_topk(vocab: int, count: int, kind: str) -> None:
    scores = torch.randn(3, 4, vocab, generator=torch.Generator().manual_seed(vocab))
    if kind == "ties":
        scores = scores.round()
    elif kind == "few finite":
        scores = scores.masked_fill(scores < scores.topk(3, dim=-1).values[..., -1:], -torch.inf)
    count = min(count, vocab)
    values, indices = fast_topk(scores, count)
    expected = scores.topk(count, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(scores.gather(-1, indices), values), "indices belong to the values"
    assert all(len(set(row)) == count for row in indices.flatten(0, 1).tolist()), "no index twice"
    if kind == "distinct":
        assert torch.equal(indices, expected.indices)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.7}])
def test_argmax_of_scores_samples_the_distribution(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 0.0, 1.2, 0.9, -3.0, 1.9, 0.1, -0.4, 0.6, -8.0])
    count = 20000
    sampler = Sampler(PLAIN, list(range(count)), temperature=temperature, **filters)  # type: ignore[arg-type]
    noise_window = sampler.noise_window(torch.zeros(count, dtype=torch.int64), 2)
    samples = noise_window.scores(logits.expand(count, 1, -1), torch.full((count, 1), 2)).argmax(-1)
    expected = reference_probs(logits, temperature, **filters) * count  # type: ignore[arg-type]
    observed = np.bincount(samples[:, 0], minlength=12)
    assert observed[expected == 0].sum() == 0, "a filtered code was sampled"
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > P


def filter_first(sampler: Sampler, logits: Tensor) -> Tensor:
    """Filtered logits (N, K) of the first token of an image."""
    noise_window = sampler.noise_window(torch.zeros_like(sampler.seeds) - 1, 1)
    depths = torch.ones(1, len(logits), dtype=torch.int64, device=logits.device)
    return noise_window.filtered_logits(logits[None], depths)[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 3, 11, 12, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 1e-6])
def test_filters_match_reference(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(40, 12, generator=generator) * 3
    sampler = Sampler(PLAIN, [0], temperature=temperature, top_k=top_k, top_p=top_p)
    probs = filter_first(sampler, logits).double().softmax(-1)
    expected = np.stack([reference_probs(row, temperature, top_k, top_p) for row in logits])
    torch.testing.assert_close(probs, torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("logits", "top_k", "kept"),
    [
        ([3.0, 2.0, 2.0, 2.0, 1.0], 2, [0, 1, 2, 3]),
        ([2.0, 2.0, 2.0, 2.0, 2.0], 1, [0, 1, 2, 3, 4]),
        ([1.0, 5.0, 5.0, 0.0, 4.0], 2, [1, 2]),
        ([1.0, 5.0, 4.0, 4.0, 4.0], 3, [1, 2, 3, 4]),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1, [4]),
    ],
)
def test_top_k_keeps_ties_with_the_kth(logits: list[float], top_k: int, kept: list[int]) -> None:
    sampler = Sampler(Layout(2, 2, range(5)), [0], top_k=top_k)
    assert filter_first(sampler, torch.tensor([logits])).isfinite()[0].nonzero().flatten().tolist() == kept


def test_top_p_keeps_the_fewest_codes_that_reach_it() -> None:
    sampler = Sampler(Layout(2, 2, range(4)), [0], top_p=0.75)
    probs = torch.tensor([[0.1, 0.5, 0.26, 0.14], [0.25, 0.25, 0.25, 0.25], [0.74, 0.02, 0.2, 0.04]])
    kept = filter_first(sampler, probs.log()).isfinite()
    assert kept[0].tolist() == [False, True, True, False]
    assert kept[1].all(), "ties with the last one are kept, as by top-k"
    assert kept[2].tolist() == [True, False, True, False]


def test_temperature_zero_has_no_noise_and_no_filters() -> None:
    logits = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(PLAIN, [1, 2], temperature=0, top_k=2, top_p=0.1)
    noise_window = sampler.noise_window(torch.tensor([0, 3]), 5)
    assert sampler.is_greedy
    assert noise_window.noise is None
    assert torch.equal(noise_window.scores(logits, torch.arange(1, 6).expand(2, 5)), logits)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.3, "temperature": 0.5}])
def test_forced_step_has_exactly_one_finite_score(settings: dict[str, float]) -> None:
    """A row end is certain where the layout forces it and impossible elsewhere."""
    layout = ROW_ENDS
    reach = layout.stop - layout.start
    sampler = Sampler(layout, [3, 4], **settings)  # type: ignore[arg-type]
    noise_window = sampler.noise_window(torch.full((2,), layout.start - 1), reach)
    logits = torch.randn(2, reach, 12, generator=torch.Generator().manual_seed(1))
    finite = noise_window.scores(logits, torch.arange(1, reach + 1).expand(2, -1)).isfinite()
    assert finite.shape == (2, reach, 13)
    for offset in range(reach):
        if layout.cell(layout.start + offset) is None:
            assert finite[:, offset].sum(-1).tolist() == [1, 1]
            assert finite[:, offset, 12].all()
        else:
            assert finite[:, offset, :12].any(-1).all()
            assert not finite[:, offset, 12].any()


def test_random_tokens_are_uniform_codes() -> None:
    sampler = Sampler(ROW_ENDS, list(range(6000)))
    tokens = sampler.random_tokens(torch.full((6000, 1), 9))[:, 0]
    assert set(tokens.tolist()) == set(ROW_ENDS.codes)
    assert stats.chisquare(np.bincount(tokens - 4)).pvalue > P


def scores_with_ties(vocab: int, device: str) -> Tensor:
    """Scores (1, 128, vocab) with many ties, as bfloat16 logits have."""
    return torch.randn(1, 128, vocab, generator=torch.Generator().manual_seed(vocab)).mul(2).round().to(device)


def check_row_invariance(function: Callable[[Tensor], Tensor], scores: Tensor) -> None:
    """The result of a row does not depend on the number of rows: one in plain decoding, a hundred in a tree."""
    expected = function(scores)
    for count in (1, 2, 7, 64):
        parts = [function(scores[:, start : start + count]) for start in range(0, 128, count)]
        assert torch.equal(torch.cat(parts, dim=1), expected), count


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [12, 1000, 8192, 16384])
@pytest.mark.parametrize("count", [1, 10])
def test_topk_ties_are_row_invariant(device: str, vocab: int, count: int) -> None:
    check_row_invariance(lambda scores: fast_topk(scores, count)[1], scores_with_ties(vocab, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [12, 1000, 8192])
def test_top_p_ties_are_row_invariant(device: str, vocab: int) -> None:
    sampler = Sampler(Layout(2, 2, range(vocab)), [0], top_p=0.8, device=device)
    check_row_invariance(
        lambda logits: filter_first(sampler, logits[0])[None].isfinite(), scores_with_ties(vocab, device)
    )


@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
def test_precomputed_noise_equals_computed_noise(layout: Layout) -> None:
    """Also after switching seeds in place; after the last step it is arbitrary."""
    sampler = Sampler(layout, [3, 4])
    for seeds in ([3, 4], [7, 9]):
        fresh = Sampler(layout, seeds)
        sampler.precompute_noise(fresh.seeds, ("target", "draft", "accept"))
        roots = torch.tensor([layout.start, layout.steps - 4])
        from_table, computed = sampler.noise_window(roots, 3), fresh.noise_window(roots, 3)
        assert from_table.noise is not None and computed.noise is not None
        assert torch.equal(from_table.noise, computed.noise)
        assert torch.equal(from_table.gumbel("draft"), computed.gumbel("draft"))
        assert torch.equal(from_table.gumbel("draft", 2), computed.gumbel("draft", 2))
        assert torch.equal(from_table.uniform(5), computed.uniform(5))
        assert torch.equal(from_table.uniform(99), computed.uniform(99))
    beyond = sampler.noise_window(torch.tensor([layout.steps - 2] * 2), 4)
    assert beyond.noise is not None and beyond.noise.shape[:2] == (2, 4)
    assert not sampler.copy().noise_tables


def test_large_noise_tables_are_not_precomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_TABLE_BYTES", 700)
    sampler = Sampler(PLAIN, [3])
    sampler.precompute_noise(sampler.seeds)
    assert not sampler.noise_tables


def test_seeds_may_come_from_a_generator() -> None:
    """Each is drawn once, so that checking them does not use them up."""
    assert Sampler(Layout(2, 2, range(8)), (seed for seed in range(3))).seeds.tolist() == [0, 1, 2]  # type: ignore[arg-type]
