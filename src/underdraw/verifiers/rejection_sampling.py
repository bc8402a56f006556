"""The recursive accept-or-reject walk down a tree that the rejection and LANTERN verifiers share.

At a node with law p the children are tried in order. A child x drawn from q is accepted with chance p(x) / q(x);
after a rejection p becomes norm(max(p - q, 0)) and q loses x. A child that was not drawn but picked (q is None) is
the case q = 1 at x: accepted with chance p(x), and p loses x. If no child is left, the next token is drawn from what
is left of p. With the true p this draws exactly from p. A relaxation replaces p by a law p' that depends on x.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from underdraw.layout import Layout
from underdraw.sampling import NoiseWindow
from underdraw.tree import AcceptedPath, DraftTree
from underdraw.verifiers.tree_walk import at, descend

Relax = Callable[[Tensor, Tensor], Tensor]
"""(p (M, columns), x (M,) columns) -> p' (M, columns)."""


def walk(tree: DraftTree, logits: Tensor, noise_window: NoiseWindow, relax: Relax) -> AcceptedPath:
    """Walk down B trees at once; logits (B, N, K) are the target's at every node."""
    reach = noise_window.steps.shape[1]
    children = child_columns(tree, noise_window.sampler.layout)  # (B, N, branch)
    uniform = noise_window.uniform(tree.branch)  # (B, reach, branch)

    def judge(nodes: Tensor | None) -> tuple[Tensor, Tensor]:
        depths = at(tree.depths, nodes)
        token_stats, x = target_laws(at(logits, nodes), depths, noise_window), at(children, nodes)
        q = None if tree.q is None else at(tree.q, nodes).flatten(0, 1)
        chances = at(uniform, depths.clamp(0, reach - 1)).flatten(0, 1)
        rank, left = attempt(token_stats.flatten(0, 1), q, x.flatten(0, 1), chances, relax)
        return rank.view_as(depths), left.view_as(token_stats)

    path, length, law = descend(tree, reach, judge)
    score = law.log()
    if noise_window.noise is not None:  # what is left of the law is drawn from with the noise of the step it is for
        score = score + at(noise_window.noise, length[:, None])[:, 0]
    return AcceptedPath(path, length, noise_window.sampler.layout.token_ids(score.argmax(-1)))


def attempt(law: Tensor, q: Tensor | None, x: Tensor, uniform: Tensor, relax: Relax) -> tuple[Tensor, Tensor]:
    """Try the children x (M, branch) of M nodes in order, -1 being none; laws and q are (M, columns).

    Returns the rank of the one that is accepted (M,), `branch` where none is, and what is left of the law there.
    """
    none, x = x < 0, x.clamp(min=0)
    if q is not None:
        none |= q.gather(1, x) <= 0  # a child whose chance was too small for a float is neither tried nor subtracted
    uniform = uniform.masked_fill(none, torch.nan)  # no number is below or above it
    rest = None if q is None else q.clone()
    bars, gains = [], []
    for child, chance in zip(x.split(1, dim=1), uniform.split(1, dim=1), strict=True):  # (M, 1)
        wanted = relax(law, child[:, 0])
        gain = wanted.gather(1, child)
        if rest is None:
            bar, left = chance, wanted.scatter(1, child, 0.0)
        else:
            bar, left = chance * rest.gather(1, child), (wanted - rest).clamp_(min=0)
            rest.scatter_(1, child, 0.0)
            rest.div_(rest.sum(1, keepdim=True).clamp_(min=torch.finfo(rest.dtype).tiny))
        total = left.sum(1, keepdim=True)
        # Nothing left means that the child had to be accepted; only rounding can lead here.
        law = torch.where(torch.logical_and(bar >= gain, total), left / total, law)
        bars.append(bar)
        gains.append(gain)
    return first(torch.cat(bars, dim=1) < torch.cat(gains, dim=1)), law


def first(accepted: Tensor) -> Tensor:
    """The first rank that was accepted, or how many there are: (..., branch) -> (...)."""
    return (accepted.cumsum(-1) == 0).sum(-1)


def child_columns(tree: DraftTree, layout: Layout) -> Tensor:
    """(B, N, branch): the column of the child of each node at each rank, -1 where there is none."""
    (batch, size), branch = tree.tokens.shape, tree.branch
    place = torch.where(tree.depths > 0, tree.parents * branch + tree.ranks, size * branch)
    table = tree.tokens.new_full((batch, size * branch + 1), -1).scatter_(1, place, layout.vocab_indices(tree.tokens))
    return table[:, :-1].unflatten(1, (size, branch))


def target_laws(logits: Tensor, depths: Tensor, noise_window: NoiseWindow) -> Tensor:
    """The law that plain autoregression draws from at nodes of these depths: (B, W, K) -> (B, W, columns) float64."""
    scaled = noise_window.scaled(logits, depths + 1)
    if noise_window.noise is None:
        return torch.zeros_like(scaled, dtype=torch.float64).scatter_(-1, scaled.argmax(-1, keepdim=True), 1.0)
    return scaled.double().softmax(-1)
