"""The sampler's noise is Gumbel distributed and a function of (seed, step, code, stream) only.

Samples are large and seeds are fixed, so a test either always passes or always fails; `P` is the smallest p-value that
passes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from underdraw.layout import Layout
from underdraw.sampling import NoiseStream, Sampler, gumbel

P = 1e-4
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
STREAMS: tuple[NoiseStream, ...] = ("target", "draft", "accept")
PLAIN = Layout(4, 4, range(4, 16))
ROW_ENDS = Layout(3, 4, range(4, 16), prologue=(1, 2), row_end=30, epilogue=(3,))


def noise(seeds: list[int], steps: list[int], count: int, stream: NoiseStream = "target") -> Tensor:
    """(seeds, steps, count)."""
    return gumbel(torch.tensor(seeds), torch.tensor(steps).expand(len(seeds), -1), count, stream)


def to_uniform(values: Tensor) -> np.ndarray:
    """Gumbel values mapped to uniform ones by their distribution function."""
    return np.exp(-np.exp(-values.double().numpy().ravel()))


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("first", [0, 1_000_003, 2**62 - 8])
def test_noise_is_gumbel_distributed(stream: NoiseStream, first: int) -> None:
    values = noise([first + i for i in range(8)], list(range(50)), 500, stream)
    assert values.dtype == torch.float32
    assert values.isfinite().all()
    uniform = to_uniform(values)
    assert stats.kstest(uniform, "uniform").pvalue > P
    assert stats.chisquare(np.histogram(uniform, 100, (0, 1))[0]).pvalue > P
    assert stats.ttest_1samp(values.double().numpy().ravel(), np.euler_gamma).pvalue > P
    assert abs(values.double().var().item() - math.pi**2 / 6) < 0.03


def test_tails_are_finite_and_precise() -> None:
    """Coarse uniforms would leave the tails empty or fill them with few distinct values."""
    values = noise(list(range(100, 164)), list(range(16)), 4096).flatten().double()
    assert values.isfinite().all()
    for tail, probability in (
        (values > 8, -math.expm1(-math.exp(-8))),
        (values > 11, -math.expm1(-math.exp(-11))),
        (values < -2, math.exp(-math.exp(2))),
        (values < -2.4, math.exp(-math.exp(2.4))),
    ):
        count, expected = int(tail.sum()), probability * len(values)
        assert stats.binomtest(count, len(values), probability).pvalue > P, (count, expected)
        distinct = len(values[tail].unique())
        assert count - distinct <= 5 + count // 200, "a tail repeats its values: too few random bits"


def test_uniform_numbers_have_32_random_bits() -> None:
    """Duplicates appear as often as among 2**32 equally likely numbers, and every bit is fair."""
    sampler = Sampler(PLAIN, list(range(200)))
    uniform = sampler.noise_window(torch.arange(200), 4).uniform(1000).flatten()
    assert uniform.dtype == torch.float64
    assert uniform.min() > 0
    assert uniform.max() < 1
    count = len(uniform)
    repeats = count - len(uniform.unique())
    expected = count**2 / 2 / 2**32  # 74.5
    assert stats.poisson.sf(repeats - 1, expected) > P
    assert stats.poisson.cdf(repeats, expected) > P
    bits = (uniform * 2**32).long()
    for bit in range(32):
        assert stats.binomtest(int((bits >> bit & 1).sum()), count, 0.5).pvalue > P / 32, bit
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > P


def check_independence(a: Tensor, b: Tensor) -> None:
    """Uncorrelated, jointly uniform, and equal no more often than by accident."""
    x, y = to_uniform(a), to_uniform(b)
    assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(len(x))
    assert abs(np.corrcoef(np.abs(x - 0.5), np.abs(y - 0.5))[0, 1]) < 5 / math.sqrt(len(x))
    table = np.histogram2d(x, y, 12, ((0, 1), (0, 1)))[0]
    assert stats.chisquare(table.ravel()).pvalue > P
    assert (a == b).float().mean() < 1e-3


@pytest.mark.parametrize("lag", [1, 2, 3, 49, 64, 1024])
def test_steps_are_independent(lag: int) -> None:
    steps = list(range(0, 40))
    check_independence(noise([1, 2, 3], steps, 400), noise([1, 2, 3], [s + lag for s in steps], 400))


@pytest.mark.parametrize("lag", [1, 2, 3, 256, 2**32, 2**61])
def test_seeds_are_independent(lag: int) -> None:
    seeds = list(range(40))
    check_independence(noise(seeds, [0, 7, 1000], 400), noise([s + lag for s in seeds], [0, 7, 1000], 400))


@pytest.mark.parametrize("lag", [1, 2, 3, 64, 1000])
def test_codes_are_independent(lag: int) -> None:
    values = noise(list(range(12)), list(range(12)), 1400)
    check_independence(values[..., :-lag], values[..., lag:])


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize(("one", "other"), [("target", "draft"), ("target", "accept"), ("draft", "accept")])
def test_streams_are_independent(one: NoiseStream, other: NoiseStream, shift: int) -> None:
    """Also of neighbouring seeds: no seed's draft noise is another seed's target noise."""
    seeds = list(range(1, 41))
    check_independence(noise(seeds, [0, 1, 2], 400, one), noise([s + shift for s in seeds], [0, 1, 2], 400, other))


def test_seed_step_and_code_are_not_interchangeable() -> None:
    values = noise(list(range(40)), list(range(40)), 40)
    for one, other in ((0, 1), (0, 2), (1, 2)):
        index = torch.meshgrid(*[torch.arange(40)] * 3, indexing="ij")
        half = index[one] < index[other]  # on the diagonal both are the same number
        check_independence(values[half], values.transpose(one, other)[half])


@pytest.mark.parametrize("stream", STREAMS)
def test_noise_does_not_depend_on_batch_or_root(stream: NoiseStream) -> None:
    """A row of a batch equals the same seed alone; a step's noise does not depend on the root of the tree."""
    seeds, roots = [5, 9, 5, 2**62 - 1], [0, 3, 4, 17]
    batched = Sampler(PLAIN, seeds).noise_window(torch.tensor(roots), 6).gumbel(stream)
    for row, (seed, root) in enumerate(zip(seeds, roots, strict=True)):
        alone = Sampler(PLAIN, [seed])
        assert torch.equal(alone.noise_window(torch.tensor([root]), 6).gumbel(stream)[0], batched[row])
        for offset in range(6):
            shifted = alone.noise_window(torch.tensor([root + offset]), 1).gumbel(stream)
            assert torch.equal(shifted[0, 0], batched[row, offset])
    assert torch.equal(batched[0, 4:], batched[2, :2]), "same seed, same step, another row"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("old_reach", "advanced", "reach"), [(1, 1, 6), (6, 1, 6), (6, 3, 4), (6, 3, 2), (6, 6, 5), (3, 9, 4)]
)
def test_reused_noise_window_equals_a_new_one(old_reach: int, advanced: int, reach: int, temperature: float) -> None:
    sampler = Sampler(ROW_ENDS, [4, 5], temperature=temperature)
    roots = torch.tensor([2, 7])
    reused = sampler.noise_window(roots + advanced, reach, sampler.noise_window(roots, old_reach), advanced)
    fresh = sampler.noise_window(roots + advanced, reach)
    assert torch.equal(reused.steps, fresh.steps)
    assert (reused.noise is None) == (fresh.noise is None) == (temperature == 0)
    if reused.noise is not None and fresh.noise is not None:
        assert torch.equal(reused.noise[:, :reach], fresh.noise)


def test_noise_of_a_code_does_not_depend_on_the_number_of_codes() -> None:
    assert torch.equal(noise([3], [0, 1], 8192)[..., :10], noise([3], [0, 1], 10))


def test_noise_never_changes_between_versions() -> None:
    """The same seed must give the same image in every version."""
    bits = splitmix(seed=42, stream=0, step=7, code=3)
    expected = -math.log(-math.log1p(-(bits + 0.5) * 2.0**-32))
    assert noise([42], [7], 4)[0, 0, 3].item() == pytest.approx(expected, rel=1e-7)
    golden = noise([0, 42], [0, 7], 3)[:, :, 2].flatten().tolist()
    assert golden == pytest.approx(GOLDEN, rel=1e-7)
    assert noise([42], [7], 1, "draft").item() == pytest.approx(GOLDEN_DRAFT, rel=1e-7)


GOLDEN = [1.1223968267440796, 0.7361570596694946, 1.960249423980713, -0.9011839032173157]
GOLDEN_DRAFT = -0.4641769826412201


def splitmix(*, seed: int, stream: int, step: int, code: int) -> int:
    """The upper 32 bits for one (seed, stream, step, code), in Python integers."""
    gamma, word = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(state: int) -> int:
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & word
        return (state ^ state >> 27) * 0x94D049BB133111EB & word

    key = mix(seed * 3 + stream + gamma & word)
    key = mix((key ^ key >> 31) + (step + 1) * gamma & word)
    return mix((key ^ key >> 31) + (code + 1) * gamma & word) >> 32


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("stream", STREAMS)
def test_noise_is_the_same_on_every_device(stream: NoiseStream) -> None:
    seeds, steps = torch.tensor([0, 1, 2**62 - 1]), torch.arange(64).expand(3, -1)
    assert torch.equal(gumbel(seeds, steps, 8193, stream), gumbel(seeds.cuda(), steps.cuda(), 8193, stream).cpu())
