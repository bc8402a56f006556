"""LANTERN's relaxed acceptance: a drafted code also gets the probability of codes that look like it. Not exact.

For a drafted code x with nearest neighbours n_1, n_2, ... in the codebook and target probs p, the probability of the
longest prefix n_1..n_i with p(n_1) + ... + p(n_i) <= bound moves to x; the result is p'. `delta` is an absolute bound
(LANTERN), `ratio` bounds it by (ratio - 1) p(x) as well (LANTERN++; set delta=1 to use it alone).

There are two rules for the rest; results name the one that ran.

`consistent`, the default: p' replaces p in acceptance and residual alike, so the residual after a rejection is
norm(max(p' - q, 0)), and with delta=0 the distribution is the target's. At temperature 0 the first child that is the
most likely code under p' is accepted.

`published`: what the authors' code for Anole and LlamaGen does. p' only decides about x. If any neighbour was within
the bound, a rejection removes the first k + 1 neighbours from p, moved or not (trees without q), or from q before it is
subtracted from p (trees with q). At temperature 0 a node is accepted if raising x alone to p'(x) makes it the most
likely code, and the longest accepted path is kept. An empty residual becomes uniform, here over the codes only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree, Proposal
from underdraw.verifiers.rejection_sampling import child_indices, exact_rule, first_accepted, rejection_walk
from underdraw.verifiers.tree_walk import gather_nodes, walk_tree

_DISTANCE_CHUNK = 1024  # codes whose distances to all others are computed at once


@dataclass(frozen=True, slots=True)
class Lantern:
    """Relaxes over the `k` nearest codes; `neighbours` (K, >= k) are those of each code, nearest first."""

    proposals: ClassVar[tuple[Proposal, ...]] = ("topk", "sampled")

    delta: float = 0.1
    ratio: float | None = None
    k: int = 1000
    rule: Literal["consistent", "published"] = "consistent"
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
        return replace(self, neighbours=nearest_neighbours(codebook, self.neighbours_needed))

    @property
    def neighbours_needed(self) -> int:
        """How many neighbours of a code the rule looks at."""
        return self.k + (self.rule == "published")

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
            verify = self._verify_longest if self.rule == "published" else self._verify_greedy
            return verify(tree, logits, noise_window)
        return rejection_walk(
            tree, logits, noise_window, self._published_rule if self.rule == "published" else self._consistent_rule
        )

    def relax(self, probs: Tensor, x: Tensor) -> Tensor:
        """Move the probability of x's neighbours to x, as far as the bounds allow: (M, V), (M,) -> (M, V)."""
        neighbours, neighbour_probs, is_moved = self._bounded_neighbours(probs, x)
        moved = neighbour_probs * is_moved
        relaxed = probs.scatter(1, neighbours, neighbour_probs - moved)
        return relaxed.scatter_add_(1, x[:, None], moved.sum(1, keepdim=True))

    def _bounded_neighbours(self, probs: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The k neighbours of x (M, k), their probs, and which of them are within the bounds: (M, V), (M,) -> ..."""
        assert self.neighbours is not None
        codes, index = self.neighbours.shape[0], x[:, None]
        has_row_end = probs.shape[1] > codes  # the last vocabulary index, which has no neighbours
        neighbours = self.neighbours[:, : self.k].index_select(0, x.clamp(max=codes - 1) if has_row_end else x)
        neighbour_probs = probs.gather(1, neighbours)
        bound: Tensor | float = self.delta
        if self.ratio is not None:
            bound = (probs.gather(1, index) * (self.ratio - 1)).clamp_(max=self.delta)
        is_moved = neighbour_probs.cumsum(1) <= bound
        if has_row_end:
            is_moved = is_moved & (index < codes)
        return neighbours, neighbour_probs, is_moved

    def _consistent_rule(self, probs: Tensor, q: Tensor | None, child: Tensor) -> tuple[Tensor, Tensor]:
        return exact_rule(self.relax(probs, child[:, 0]), q, child)

    def _raised_prob(self, probs: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """p'(x), and whether any neighbour was within the bound: (M, V), (M,) -> (M, 1), (M, 1)."""
        _, neighbour_probs, is_moved = self._bounded_neighbours(probs, x)
        raised = probs.gather(1, x[:, None]) + (neighbour_probs * is_moved).sum(1, keepdim=True)
        return raised, is_moved[:, :1]

    def _published_rule(self, probs: Tensor, q: Tensor | None, child: Tensor) -> tuple[Tensor, Tensor]:
        assert self.neighbours is not None
        codes = self.neighbours.shape[0]
        child_prob, is_relaxed = self._raised_prob(probs, child[:, 0])
        removed = self.neighbours[:, : self.k + 1].index_select(0, child[:, 0].clamp(max=codes - 1))  # (M, k + 1)
        source = probs if q is None else q
        source = source.scatter(1, removed, source.gather(1, removed).masked_fill(is_relaxed, 0.0))
        residual = source.scatter(1, child, 0.0) if q is None else (probs - source).clamp_(min=0)
        is_empty = residual.sum(1, keepdim=True) == 0
        residual[:, :codes].masked_fill_(is_empty, 1.0)
        return child_prob, residual

    def _verify_longest(self, tree: DraftTree, logits: Tensor, noise_window: NoiseWindow) -> AcceptedPath:
        """Accept the longest path of nodes that are the most likely code if they alone are raised to p'."""
        layout, parents = noise_window.sampler.layout, tree.parents.clamp(min=0)
        filtered = noise_window.filtered_logits(logits, tree.depths + 1)  # (B, N, V)
        probs = gather_nodes(filtered.double().softmax(-1), parents).flatten(
            0, 1
        )  # (B * N, V) that a node is judged by
        x = layout.vocab_indices(tree.tokens).clamp(0, layout.vocab_size - 1).flatten()
        raised = probs.scatter(1, x[:, None], self._raised_prob(probs, x)[0])
        is_accepted = (raised.argmax(1) == x).view_as(parents) & (tree.depths > 0)
        is_accepted[:, 0] = True
        is_reached = ~(tree.ancestors & ~is_accepted[:, None]).any(-1)  # (B, N)
        length, end = torch.where(is_reached, tree.depths, -1).max(1)  # the first of equally long paths
        on_path = tree.ancestors.gather(1, end[:, None, None].expand(-1, 1, tree.size))  # (B, 1, N)
        level, index = (torch.arange(n, device=end.device) for n in (noise_window.steps.shape[1], tree.size))
        path = ((on_path & (tree.depths[:, None] == level[:, None])) * index).amax(-1)  # (B, reach)
        return AcceptedPath(path, length, layout.token_ids(gather_nodes(filtered, end[:, None])[:, 0].argmax(-1)))

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
