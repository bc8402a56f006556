"""LANTERN's relaxed acceptance: a drafted code may take over the mass of the codes that look like it. Not exact.

For a drafted code x with nearest neighbours n_1, n_2, ... in the codebook and law p, the mass of the longest prefix
n_1..n_i with p(n_1) + ... + p(n_i) <= bound moves onto x; the result is p'. `delta` bounds that mass absolutely
(LANTERN), `ratio` also by (ratio - 1) p(x) (LANTERN++; set delta=1 to have it alone).

One residual rule serves trees with and without q: p' takes p's place in acceptance and residual alike, so after a
rejection the law is norm(max(p' - q, 0)). The published code has three others. It zeroes one neighbour more than it
counted, whether or not their mass had moved (dynamic trees), or takes the neighbours out of q instead of p (static
trees), or both; with those, mass is lost or counted twice. With delta 0 nothing moves and the law is the exact one.
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
from underdraw.verifiers.rejection_sampling import child_columns, first, walk
from underdraw.verifiers.tree_walk import at, descend


@dataclass(frozen=True, slots=True)
class Lantern:
    """`k` neighbours are looked at; `neighbours` (K, >= k) lists them for each code, nearest first, itself left out."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("topk", "sampled")

    delta: float = 0.1
    ratio: float | None = None
    k: int = 1000
    neighbours: Tensor | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delta <= 1:
            raise ConfigError(f"delta {self.delta} is a share of probability and must lie in [0, 1].")
        if self.ratio is not None and not (math.isfinite(self.ratio) and self.ratio >= 1):
            raise ConfigError(f"ratio {self.ratio} multiplies a probability and must be at least 1.")
        if self.k < 1:
            raise ConfigError(f"k {self.k} must be at least 1 neighbour.")

    def bind(self, codebook: Tensor) -> Lantern:
        """This verifier with the neighbours of a codebook (K, D)."""
        return replace(self, neighbours=nearest(codebook, self.k))

    def verify(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        if self.neighbours is None:
            raise ConfigError("lantern needs the image tokenizer's codebook; bind it first: Lantern().bind(codebook).")
        codes = len(noise_window.sampler.layout.codes)
        if self.neighbours.shape[0] != codes:
            raise ConfigError(
                f"lantern was bound to a codebook of {self.neighbours.shape[0]} codes and the layout has {codes}; "
                "bind the codebook of this model's image tokenizer."
            )
        if noise_window.sampler.greedy:
            return self._greedy(tree, logits, noise_window)
        return walk(tree, logits, noise_window, self.relax)

    def relax(self, law: Tensor, x: Tensor) -> Tensor:
        """p (M, columns) with the mass of x's neighbours moved onto x (M,), as far as the bounds allow."""
        assert self.neighbours is not None
        codes, own = self.neighbours.shape[0], x[:, None]
        forcing = law.shape[1] > codes  # a forced token has a column and no neighbours
        near = self.neighbours[:, : self.k].index_select(0, x.clamp(max=codes - 1) if forcing else x)  # (M, k)
        mass = law.gather(1, near)
        bound: Tensor | float = self.delta
        if self.ratio is not None:
            bound = (law.gather(1, own) * (self.ratio - 1)).clamp_(max=self.delta)
        within = mass.cumsum(1) <= bound
        if forcing:
            within = within & (own < codes)
        moved = mass * within
        return law.scatter(1, near, mass - moved).scatter_add_(1, own, moved.sum(1, keepdim=True))

    def _greedy(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        """Accept the first child that is the most likely code once its neighbours' mass is its own."""
        layout, branch = noise_window.sampler.layout, tree.branch

        def likeliest(law: Tensor, x: Tensor) -> Tensor:  # (B, W, columns), (B, W) -> (B, W)
            return self.relax(law.flatten(0, 1), x.flatten()).argmax(-1).view_as(x) == x

        def judge(nodes: Tensor | None) -> tuple[Tensor, Tensor]:
            scaled = noise_window.scaled(at(logits, nodes), at(tree.depths, nodes) + 1)  # (B, W, columns)
            law = scaled.double().softmax(-1)
            if nodes is not None:
                x = at(child_columns(tree, layout), nodes)[:, 0]  # (B, branch)
                return first((x >= 0) & likeliest(law.expand(-1, branch, -1), x.clamp(min=0)))[:, None], scaled
            up = tree.parents.clamp(min=0)  # the law is the parent's
            x = layout.vocab_indices(tree.tokens).clamp(0, layout.vocab_size - 1)
            rank = torch.where((tree.depths > 0) & likeliest(at(law, up), x), tree.ranks, branch)
            return torch.full_like(up, branch).scatter_reduce_(1, up, rank, "amin"), scaled

        path, length, left = descend(tree, noise_window.steps.shape[1], judge)
        return AcceptedPath(path, length, layout.token_ids(left.argmax(-1)))


def nearest(codebook: Tensor, k: int) -> Tensor:
    """The k nearest other codes of each, by L2 distance: (K, D) -> (K, min(k, K - 1)) int64, nearest first."""
    codes = codebook.float()
    k = min(k, codes.shape[0] - 1)
    parts = []
    for start in range(0, codes.shape[0], 1024):
        distance = torch.cdist(codes[start : start + 1024], codes, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(start, start + distance.shape[0], device=codes.device)
        distance[torch.arange(distance.shape[0], device=codes.device), own] = torch.inf
        parts.append(distance.topk(k, dim=-1, largest=False).indices)
    return torch.cat(parts)
