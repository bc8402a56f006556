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
from underdraw.sampling import Draws
from underdraw.tree import DraftTree, Proposal, Verdict
from underdraw.verifiers.trail import Trail
from underdraw.verifiers.walk import child_table, target_laws, walk


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

    def verify(self, tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
        if self.neighbours is None:
            raise ConfigError("lantern needs the image tokenizer's codebook; bind it first: Lantern().bind(codebook).")
        codes = len(draws.sampler.layout.codes)
        if self.neighbours.shape[0] != codes:
            raise ConfigError(
                f"lantern was bound to a codebook of {self.neighbours.shape[0]} codes and the layout has {codes}; "
                "bind the codebook of this model's image tokenizer."
            )
        if draws.sampler.greedy:
            return self._greedy(tree, logits, draws)
        return walk(tree, target_laws(tree, logits, draws), draws, self.relax)

    def relax(self, law: Tensor, x: Tensor) -> Tensor:
        """p (B, columns) with the mass of x's neighbours moved onto x (B,), as far as the bounds allow."""
        assert self.neighbours is not None
        codes = self.neighbours.shape[0]
        near = self.neighbours[x.clamp(max=codes - 1), : self.k]  # (B, k)
        mass = law.gather(1, near)
        bound = torch.full_like(mass[:, :1], self.delta)
        own = law.gather(1, x[:, None])
        if self.ratio is not None:
            bound = torch.minimum(bound, (self.ratio - 1) * own)
        moved = torch.where(mass.cumsum(1) <= bound, mass, 0.0)
        moved = torch.where((x < codes)[:, None], moved, 0.0)  # a forced token has no neighbours
        out = law.scatter_add(1, near, -moved)
        return out.scatter_add(1, x[:, None], moved.sum(1, keepdim=True)).clamp(min=0)

    def _greedy(self, tree: DraftTree, logits: Tensor, draws: Draws) -> Verdict:
        """Accept the first child that is the most likely code once its neighbours' mass is its own."""
        rows = torch.arange(tree.tokens.shape[0], device=logits.device)
        scaled = draws.scaled(logits, tree.depths + 1)
        laws, table = scaled.double().softmax(-1), child_table(tree)
        columns = draws.sampler.layout.columns_of(tree.tokens)
        trail = Trail(tree)
        for _ in range(1, draws.steps.shape[1]):
            here = next_node = trail.node
            moved = torch.zeros_like(trail.walking)
            for rank in range(table.shape[2]):
                child = table[rows, here, rank]
                x = columns[rows, child.clamp(min=0)]
                best = self.relax(laws[rows, here], x).argmax(-1) == x
                accepted = ~moved & (child >= 0) & best
                next_node, moved = torch.where(accepted, child, next_node), moved | accepted
            trail.step(next_node, moved)
            if trail.ended():
                break
        return trail.verdict(draws.sampler.layout.tokens(scaled[rows, trail.node].argmax(-1)))


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
