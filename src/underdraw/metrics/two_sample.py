"""Kernel two-sample test on the codes of images: do two sets have the same distribution? With a permutation p-value.

An image has three views: frequencies of codes, frequencies of pairs of neighbours (hashed), and shares of local
patterns (a cell equals its left neighbour, its upper one, both; number of different codes). Each view has a Gaussian
kernel with the median distance as its bandwidth; the statistic is the unbiased maximum mean discrepancy (MMD) of the
sum of the kernels. numpy only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from underdraw.errors import ConfigError

HASH_BINS = 4096  # of pairs of neighbours
PERMUTATIONS = 1999
MIN_IMAGES = 4  # per side


@dataclass(frozen=True, slots=True)
class TwoSample:
    """The MMD, and the share of permutations of the labels with at least the same MMD."""

    statistic: float
    p_value: float


def two_sample(
    ours: NDArray[np.int32], theirs: NDArray[np.int32], *, paired: bool, seed: int = 0, permutations: int = PERMUTATIONS
) -> TwoSample:
    """Test codes (N, rows, cols) against codes (M, rows, cols).

    `paired`: image i of both sides has the same prompt; labels are then only exchanged within pairs.
    """
    if paired and len(ours) != len(theirs):
        raise ConfigError(f"{len(ours)} and {len(theirs)} images are no pairs; use the same number on both sides.")
    if ours.shape[1:] != theirs.shape[1:]:
        raise ConfigError(f"images of {ours.shape[1:]} and of {theirs.shape[1:]} codes cannot be compared.")
    if (smaller := min(len(ours), len(theirs))) < MIN_IMAGES:
        raise ConfigError(f"{smaller} images are too few for a two-sample test; use at least {MIN_IMAGES}.")
    count = len(ours)
    kernel = _kernel(np.concatenate([ours, theirs]))
    true_labels = np.concatenate([np.ones(count), np.zeros(len(theirs))])
    random = np.random.default_rng(seed)
    labels = [true_labels]
    for _ in range(permutations):
        if paired:
            swap = random.random(count) < 0.5
            labels.append(np.concatenate([~swap, swap]).astype(np.float64))
        else:
            labels.append(random.permutation(true_labels))
    if paired:  # images of one prompt, and maybe one seed, are not independent of each other
        index = np.arange(count)
        kernel[index, count + index] = kernel[count + index, index] = 0
    values = _mmd(kernel, np.stack(labels), paired)
    # The tolerance makes equal labellings count as equal whatever the rounding of their sums.
    at_least = values[1:] >= values[0] - 1e-9
    return TwoSample(float(values[0]), float((1 + at_least.sum()) / (1 + permutations)))


def _mmd(kernel: NDArray[np.float64], labels: NDArray[np.float64], paired: bool) -> NDArray[np.float64]:
    """Unbiased MMD of each labelling (P, N + M), 1 on the first side; excluded kernel entries are 0 already."""
    other = 1 - labels
    n, m = labels[0].sum(), other[0].sum()
    ours, theirs = labels @ kernel, other @ kernel
    within = (ours * labels).sum(1) / (n * (n - 1)) + (theirs * other).sum(1) / (m * (m - 1))
    return within - 2 * (ours * other).sum(1) / (n * (m - paired))


def _kernel(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """The sum of the three kernels (N, N), with a zero diagonal."""
    total = np.zeros((len(codes), len(codes)))
    for view in (code_frequencies(codes), pair_frequencies(codes), pattern_shares(codes)):
        square = (view**2).sum(1)
        distance = np.maximum(square[:, None] + square - 2 * view @ view.T, 0)
        distances = distance[np.triu_indices(len(codes), 1)]
        scale = np.median(distances[distances > 0]) if (distances > 0).any() else 1.0
        total += np.exp(-distance / scale)
    np.fill_diagonal(total, 0)
    return total


def code_frequencies(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Square roots of the frequency of each code: (N, rows, cols) -> (N, K)."""
    return _root_frequencies(codes.reshape(len(codes), -1), int(codes.max()) + 1)


def pair_frequencies(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Square roots of the frequency of each hashed pair of neighbours, to the right and below: (N, 2 * HASH_BINS)."""
    wide = codes.astype(np.uint64)
    frequencies = []
    for first, second in ((wide[:, :, :-1], wide[:, :, 1:]), (wide[:, :-1], wide[:, 1:])):
        mixed = (first * np.uint64(0x9E3779B97F4A7C15)) ^ (second * np.uint64(0xC2B2AE3D27D4EB4F))
        frequencies.append(
            _root_frequencies((mixed >> np.uint64(40)).astype(np.int64).reshape(len(codes), -1) % HASH_BINS, HASH_BINS)
        )
    return np.concatenate(frequencies, axis=1)


def pattern_shares(codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Shares of local patterns, standardised over all images: (N, 4)."""
    left, above = codes[:, 1:, 1:] == codes[:, 1:, :-1], codes[:, 1:, 1:] == codes[:, :-1, 1:]
    shares = [pattern.reshape(len(codes), -1).mean(1) for pattern in (left, above, left & above)]
    shares.append(np.array([len(np.unique(image)) / image.size for image in codes]))
    table = np.stack(shares, axis=1)
    spread = table.std(0)
    return (table - table.mean(0)) / np.where(spread > 0, spread, 1.0)


def _root_frequencies(values: NDArray[np.int64] | NDArray[np.int32], size: int) -> NDArray[np.float64]:
    table = np.stack([np.bincount(row, minlength=size) for row in values]).astype(np.float64)
    return np.sqrt(table / values.shape[1])
