"""The sampler: filters do what they say, the argmax of the scores is a draw from the law, forced steps are forced."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from tables import law
from torch import Tensor

from underdraw import sampling
from underdraw.layout import Layout
from underdraw.sampling import Sampler, fast_topk

P = 1e-4  # how unlikely a sample may be before it counts as wrong; seeds are fixed
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
PLAIN = Layout(4, 4, range(4, 16))
ROW_ENDS = Layout(3, 4, range(4, 16), prologue=(1, 2), row_end=30, epilogue=(3,))


@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_scores_of_a_level_are_the_scores_of_its_depth(layout: Layout, temperature: float) -> None:
    noise_window = Sampler(layout, [4, 5], temperature=temperature, top_k=4).noise_window(torch.tensor([2, 7]), 5)
    logits = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    for depth in range(1, 6):
        depths = torch.full((2, 3), depth)
        assert torch.equal(noise_window.level_scores(logits, depth), noise_window.scores(logits, depths))
        assert torch.equal(
            noise_window.level_filtered_logits(logits, depth), noise_window.filtered_logits(logits, depths)
        )


@pytest.mark.parametrize("columns", [5, 300, 1024, 1025, 8192])
@pytest.mark.parametrize("count", [1, 2, 10, 64, 100])
@pytest.mark.parametrize("kind", ["distinct", "ties", "few finite"])
def test_best_is_topk(columns: int, count: int, kind: str) -> None:
    scores = torch.randn(3, 4, columns, generator=torch.Generator().manual_seed(columns))
    if kind == "ties":
        scores = scores.round()
    elif kind == "few finite":
        scores = scores.masked_fill(scores < scores.topk(3, dim=-1).values[..., -1:], -torch.inf)
    count = min(count, columns)
    values, found = fast_topk(scores, count)
    expected = scores.topk(count, dim=-1)
    assert torch.equal(values, expected.values)
    assert torch.equal(scores.gather(-1, found), values), "columns are those of the values"
    assert all(len(set(row)) == count for row in found.flatten(0, 1).tolist()), "no column twice"
    if kind == "distinct":
        assert torch.equal(found, expected.indices)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.7}])
def test_the_argmax_is_a_draw_from_the_law(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.tensor([0.3, 2.0, -1.0, 0.0, 1.2, 0.9, -3.0, 1.9, 0.1, -0.4, 0.6, -8.0])
    count = 20000
    sampler = Sampler(PLAIN, list(range(count)), temperature=temperature, **filters)  # type: ignore[arg-type]
    noise_window = sampler.noise_window(torch.zeros(count, dtype=torch.int64), 2)
    drawn = noise_window.scores(logits.expand(count, 1, -1), torch.full((count, 1), 2)).argmax(-1)
    expected = law(logits, temperature, **filters) * count  # type: ignore[arg-type]
    observed = np.bincount(drawn[:, 0], minlength=12)
    assert observed[expected == 0].sum() == 0, "a filtered code was drawn"
    rare = expected < 5
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue > P


def scaled(sampler: Sampler, logits: Tensor) -> Tensor:
    """Filtered logits (N, K) as the first token of an image sees them."""
    noise_window = sampler.noise_window(torch.zeros_like(sampler.seeds) - 1, 1)
    return noise_window.filtered_logits(
        logits[None], torch.ones(1, len(logits), dtype=torch.int64, device=logits.device)
    )[0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 3, 11, 12, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.6, 1e-6])
def test_filters_match_a_straightforward_reference(temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(top_k)
    logits = torch.randn(40, 12, generator=generator) * 3
    sampler = Sampler(PLAIN, [0], temperature=temperature, top_k=top_k, top_p=top_p)
    found = scaled(sampler, logits).double().softmax(-1)
    expected = np.stack([law(row, temperature, top_k, top_p) for row in logits])
    torch.testing.assert_close(found, torch.from_numpy(expected), atol=1e-5, rtol=1e-5)


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
    assert scaled(sampler, torch.tensor([logits])).isfinite()[0].nonzero().flatten().tolist() == kept


def test_top_p_keeps_the_fewest_codes_that_reach_it() -> None:
    sampler = Sampler(Layout(2, 2, range(4)), [0], top_p=0.75)
    token_stats = torch.tensor([[0.1, 0.5, 0.26, 0.14], [0.25, 0.25, 0.25, 0.25], [0.74, 0.02, 0.2, 0.04]])
    kept = scaled(sampler, token_stats.log()).isfinite()
    assert kept[0].tolist() == [False, True, True, False]
    assert kept[1].sum() == 3
    assert kept[2].tolist() == [True, False, True, False]


def test_temperature_zero_has_no_noise_and_no_filters() -> None:
    logits = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(PLAIN, [1, 2], temperature=0, top_k=2, top_p=0.1)
    noise_window = sampler.noise_window(torch.tensor([0, 3]), 5)
    assert sampler.is_greedy
    assert noise_window.noise is None
    assert torch.equal(noise_window.scores(logits, torch.arange(1, 6).expand(2, 5)), logits)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0}, {"top_k": 2}, {"top_p": 0.3, "temperature": 0.5}])
def test_a_forced_step_has_exactly_one_finite_score(settings: dict[str, float]) -> None:
    """Invariant 5: a row end is the only choice where it is due and no choice elsewhere."""
    layout = ROW_ENDS
    reach = layout.stop - layout.start
    sampler = Sampler(layout, [3, 4], **settings)  # type: ignore[arg-type]
    noise_window = sampler.noise_window(torch.full((2,), layout.start - 1), reach)
    logits = torch.randn(2, reach, 12, generator=torch.Generator().manual_seed(1))
    finite = noise_window.scores(logits, torch.arange(1, reach + 1).expand(2, -1)).isfinite()
    assert finite.shape == (2, reach, 13)
    for ahead in range(reach):
        if layout.cell(layout.start + ahead) is None:
            assert finite[:, ahead].sum(-1).tolist() == [1, 1]
            assert finite[:, ahead, 12].all()
        else:
            assert finite[:, ahead, :12].any(-1).all()
            assert not finite[:, ahead, 12].any()


def test_random_tokens_are_codes_and_even() -> None:
    sampler = Sampler(ROW_ENDS, list(range(6000)))
    tokens = sampler.random_tokens(torch.full((6000, 1), 9))[:, 0]
    assert set(tokens.tolist()) == set(ROW_ENDS.codes)
    assert stats.chisquare(np.bincount(tokens - 4)).pvalue > P


def tied(columns: int, device: str) -> Tensor:
    """Scores (1, 128, columns) with many equal ones, as heads in bfloat16 give."""
    return torch.randn(1, 128, columns, generator=torch.Generator().manual_seed(columns)).mul(2).round().to(device)


def check_rows(function: Callable[[Tensor], Tensor], scores: Tensor) -> None:
    """A row's result does not depend on how many rows there are: one in plain decoding, a hundred in a tree."""
    together = function(scores)
    for count in (1, 2, 7, 64):
        parts = [function(scores[:, start : start + count]) for start in range(0, 128, count)]
        assert torch.equal(torch.cat(parts, dim=1), together), count


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, GPU])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [12, 1000, 8192, 16384])
@pytest.mark.parametrize("count", [1, 10])
def test_ties_are_broken_alike_however_many_rows_there_are(device: str, columns: int, count: int) -> None:
    check_rows(lambda scores: fast_topk(scores, count)[1], tied(columns, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [12, 1000, 8192])
def test_top_p_cuts_ties_alike_however_many_rows_there_are(device: str, columns: int) -> None:
    sampler = Sampler(Layout(2, 2, range(columns)), [0], top_p=0.8, device=device)
    check_rows(lambda logits: scaled(sampler, logits[0])[None].isfinite(), tied(columns, device))


@pytest.mark.parametrize("layout", [PLAIN, ROW_ENDS], ids=["plain", "row-ends"])
def test_noise_drawn_ahead_is_that_of_every_step(layout: Layout) -> None:
    """Also after other seeds have come into the same tensor; past the last step it is anything."""
    sampler = Sampler(layout, [3, 4])
    for seeds in ([3, 4], [7, 9]):
        fresh = Sampler(layout, seeds)
        sampler.precompute_noise(fresh.seeds, ("target", "draft", "accept"))
        roots = torch.tensor([layout.start, layout.steps - 4])
        looked, made = sampler.noise_window(roots, 3), fresh.noise_window(roots, 3)
        assert looked.noise is not None and made.noise is not None and torch.equal(looked.noise, made.noise)
        assert torch.equal(looked.gumbel("draft"), made.gumbel("draft"))
        assert torch.equal(looked.gumbel("draft", 2), made.gumbel("draft", 2))
        assert torch.equal(looked.uniform(5), made.uniform(5)) and torch.equal(looked.uniform(99), made.uniform(99))
    beyond = sampler.noise_window(torch.tensor([layout.steps - 2] * 2), 4)
    assert beyond.noise is not None and beyond.noise.shape[:2] == (2, 4)
    assert not sampler.copy().noise_tables


def test_too_much_noise_is_not_drawn_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MAX_TABLE_BYTES", 700)
    sampler = Sampler(PLAIN, [3])
    sampler.precompute_noise(sampler.seeds)
    assert not sampler.noise_tables
