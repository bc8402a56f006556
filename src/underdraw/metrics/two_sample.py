"""Do two sets of pictures come from one law? A kernel two-sample test on their codes, with a permutation p-value.

Three views of a picture: how often each code occurs, how often each pair of neighbours occurs (hashed), and a few
shares of local patterns (a cell equals its left, its upper neighbour, both; different codes). Each view has a Gaussian
kernel of its median distance; the statistic is the unbiased maximum mean discrepancy of their sum. Numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError

BINS = 4096  # of hashed pairs
PERMUTATIONS = 1999
LEAST = 4  # pictures a side


@dataclass(frozen=True, slots=True)
class TwoSample:
    """The statistic, and the share of permutations of the labels that give at least as much."""

    statistic: float
    p_value: float


def two_sample(
    ours: NDArray[np.int32], theirs: NDArray[np.int32], *, paired: bool, seed: int = 0, permutations: int = PERMUTATIONS
) -> TwoSample:
    """Test codes (N, rows, cols) against codes (M, rows, cols).

    `paired`: picture i of both sides has the same prompt; only labels within pairs are then exchanged.
    """
    if paired and len(ours) != len(theirs):
        raise ConfigError(f"{len(ours)} and {len(theirs)} pictures are no pairs; give as many of both.")
    if ours.shape[1:] != theirs.shape[1:]:
        raise ConfigError(f"pictures of {ours.shape[1:]} and of {theirs.shape[1:]} codes cannot be compared.")
    if min(len(ours), len(theirs)) < LEAST:
        raise ConfigError(f"{min(len(ours), len(theirs))} pictures are too few for a test; use at least {LEAST}.")
    count = len(ours)
    kernel = _kernel(np.concatenate([ours, theirs]))
    own = np.concatenate([np.ones(count), np.zeros(len(theirs))])
    random = np.random.default_rng(seed)
    labels = [own]
    for _ in range(permutations):
        if paired:
            swap = random.random(count) < 0.5
            labels.append(np.concatenate([~swap, swap]).astype(np.float64))
        else:
            labels.append(random.permutation(own))
    if paired:  # pictures of one prompt and maybe one seed are not independent of each other
        index = np.arange(count)
        kernel[index, count + index] = kernel[count + index, index] = 0
    values = _mmd(kernel, np.stack(labels), paired)
    # Equal labellings must count as equal whatever order their sums were rounded in.
    at_least = values[1:] >= values[0] - 1e-9
    return TwoSample(float(values[0]), float((1 + at_least.sum()) / (1 + permutations)))


def _mmd(kernel: NDArray[np.float64], labels: NDArray[np.float64], paired: bool) -> NDArray[np.float64]:
    """The unbiased statistic for each labelling (P, N + M), 1 on the first side; what is not counted is 0 already."""
    other = 1 - labels
    n, m = labels[0].sum(), other[0].sum()
    ours, theirs = labels @ kernel, other @ kernel
    within = (ours * labels).sum(1) / (n * (n - 1)) + (theirs * other).sum(1) / (m * (m - 1))
    return within - 2 * (ours * other).sum(1) / (n * (m - paired))


def _kernel(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """The sum of three kernels (N, N) without its diagonal."""
    total = np.zeros((len(codes), len(codes)))
    for view in (counts(codes), pairs(codes), patterns(codes)):
        square = (view**2).sum(1)
        distance = np.maximum(square[:, None] + square - 2 * view @ view.T, 0)
        apart = distance[np.triu_indices(len(codes), 1)]
        scale = np.median(apart[apart > 0]) if (apart > 0).any() else 1.0
        total += np.exp(-distance / scale)
    np.fill_diagonal(total, 0)
    return total


def counts(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Square roots of the shares of each code: (N, rows, cols) -> (N, K)."""
    return _shares(codes.reshape(len(codes), -1), int(codes.max()) + 1)


def pairs(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """The same for pairs of neighbours, right and below, hashed."""
    wide = codes.astype(np.uint64)
    found = []
    for first, second in ((wide[:, :, :-1], wide[:, :, 1:]), (wide[:, :-1], wide[:, 1:])):
        mixed = (first * np.uint64(0x9E3779B97F4A7C15)) ^ (second * np.uint64(0xC2B2AE3D27D4EB4F))
        found.append(_shares((mixed >> np.uint64(40)).astype(np.int64).reshape(len(codes), -1) % BINS, BINS))
    return np.concatenate(found, axis=1)


def patterns(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Shares of local patterns, each in units of its spread over all pictures: (N, 4)."""
    left, above = codes[:, 1:, 1:] == codes[:, 1:, :-1], codes[:, 1:, 1:] == codes[:, :-1, 1:]
    shares = [pattern.reshape(len(codes), -1).mean(1) for pattern in (left, above, left & above)]
    shares.append(np.array([len(np.unique(one)) / one.size for one in codes]))
    table = np.stack(shares, axis=1)
    spread = table.std(0)
    return (table - table.mean(0)) / np.where(spread > 0, spread, 1.0)


def _shares(values: NDArray[np.int64] | NDArray[np.int32], size: int) -> NDArray[np.float64]:
    table = np.stack([np.bincount(row, minlength=size) for row in values]).astype(np.float64)
    return np.sqrt(table / values.shape[1])
