"""LANTERN's relaxed acceptance: a drafted code also gets the probability of codes that look like it. Not exact.

For a drafted code x with nearest neighbours n_1, n_2, ... in the codebook and target probs p, the probability of the
longest prefix n_1..n_i with p(n_1) + ... + p(n_i) <= bound moves to x; the result is p'. `delta` is an absolute bound
(LANTERN), `ratio` bounds it by (ratio - 1) p(x) as well (LANTERN++; set delta=1 to use it alone).

One residual rule serves trees with and without q: p' replaces p in acceptance and residual alike, so the residual after
a rejection is norm(max(p' - q, 0)). The published code has three other rules. It zeroes one neighbour more than it
counted, whether or not their probability had moved (dynamic trees), or removes the neighbours from q instead of p
(static trees), or both; these lose probability or count it twice. With delta=0 nothing moves and p' is p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.rejection_sampling import child_indices, first_accepted, rejection_walk
from underdraw.verifiers.tree_walk import gather_nodes, walk_tree

_DISTANCE_CHUNK = 1024  # codes whose distances to all others are computed at once


@dataclass(frozen=True, slots=True)
class Lantern:
    """Relaxes over the `k` nearest codes; `neighbours` (K, >= k) are those of each code, nearest first."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("topk", "sampled")

    delta: float = 0.1
    ratio: float | None = None
    k: int = 1000
    neighbours: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ConfigError(f"delta {self.delta} is a probability and must lie in [0, 1].")
        if self.ratio is not None and not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio {self.ratio} multiplies a probability and must be at least 1.")
        if self.k < 1:
            raise ConfigError(f"k {self.k} must be at least 1 neighbour.")

    def bind(self, codebook: Tensor) -> Lantern:
        """This verifier with the nearest neighbours of a codebook (K, D)."""
        return replace(self, neighbours=nearest_neighbours(codebook, self.k))

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        if self.neighbours is None:
            raise ConfigError("lantern needs the image tokenizer's codebook; bind it first: Lantern().bind(codebook).")
        codes = len(noise_window.sampler.layout.codes)
        if self.neighbours.shape[0] != codes:
            raise ConfigError(
                f"lantern was bound to a codebook of {self.neighbours.shape[0]} codes and the layout has {codes}; "
                "bind the codebook of this model's image tokenizer."
            )
        if noise_window.sampler.is_greedy:
            return self._verify_greedy(tree, logits, noise_window)
        return rejection_walk(tree, logits, noise_window, self.relax)

    def relax(self, probs: Tensor, x: Tensor) -> Tensor:
        """Move the probability of x's neighbours to x, as far as the bounds allow: (M, V), (M,) -> (M, V)."""
        assert self.neighbours is not None
        codes, index = self.neighbours.shape[0], x[:, None]
        has_row_end = probs.shape[1] > codes  # the last vocabulary index, which has no neighbours
        rows = x.clamp(max=codes - 1) if has_row_end else x
        neighbours = self.neighbours[:, : self.k].index_select(0, rows)  # (M, k)
        neighbour_probs = probs.gather(1, neighbours)
        bound: Tensor | float = self.delta
        if self.ratio is not None:
            bound = (probs.gather(1, index) * (self.ratio - 1)).clamp_(max=self.delta)
        is_moved = neighbour_probs.cumsum(1) <= bound
        if has_row_end:
            is_moved = is_moved & (index < codes)
        moved = neighbour_probs * is_moved
        relaxed = probs.scatter(1, neighbours, neighbour_probs - moved)
        return relaxed.scatter_add_(1, index, moved.sum(1, keepdim=True))

    def _verify_greedy(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        """Accept the first child that is the most likely code after relaxation."""
        layout, branch = noise_window.sampler.layout, tree.branch

        def is_most_likely(probs: Tensor, x: Tensor) -> Tensor:  # (B, W, V), (B, W) -> (B, W)
            return self.relax(probs.flatten(0, 1), x.flatten()).argmax(-1).view_as(x) == x

        def choose_child(nodes: Tensor | None) -> tuple[Tensor, Tensor]:
            depths = gather_nodes(tree.depths, nodes)
            filtered = noise_window.filtered_logits(gather_nodes(logits, nodes), depths + 1)  # (B, W, V)
            probs = filtered.double().softmax(-1)
            if nodes is not None:
                x = gather_nodes(child_indices(tree, layout), nodes)[:, 0]  # (B, branch)
                is_accepted = (x >= 0) & is_most_likely(probs.expand(-1, branch, -1), x.clamp(min=0))
                return first_accepted(is_accepted)[:, None], filtered
            # All nodes: test every node under its parent's probs, then find each parent's lowest accepted rank.
            parents = tree.parents.clamp(min=0)
            x = layout.vocab_indices(tree.tokens).clamp(0, layout.vocab_size - 1)
            is_accepted = (tree.depths > 0) & is_most_likely(gather_nodes(probs, parents), x)
            rank = torch.where(is_accepted, tree.ranks, branch)
            return torch.full_like(parents, branch).scatter_reduce_(1, parents, rank, "amin"), filtered

        path, length, filtered = walk_tree(tree, noise_window.steps.shape[1], choose_child)
        return AcceptedPath(path, length, layout.token_ids(filtered.argmax(-1)))


def nearest_neighbours(codebook: Tensor, k: int) -> Tensor:
    """The k nearest other codes of each, by L2 distance: (K, D) -> (K, min(k, K - 1)) int64, nearest first."""
    codes = codebook.float()
    k = min(k, codes.shape[0] - 1)
    chunks = []
    for start in range(0, codes.shape[0], _DISTANCE_CHUNK):
        queries = codes[start : start + _DISTANCE_CHUNK]
        distance = torch.cdist(queries, codes, compute_mode="donot_use_mm_for_euclid_dist")
        row = torch.arange(len(queries), device=codes.device)
        distance[row, row + start] = torch.inf
        chunks.append(distance.topk(k, dim=-1, largest=False).indices)
    return torch.cat(chunks)
