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

from underdraw.sampling import Draws
from underdraw.tree import DraftTree, Verdict
from underdraw.verifiers.trail import Trail

Relax = Callable[[Tensor, Tensor], Tensor]
"""(p (B, columns), x (B,) columns) -> p' (B, columns)."""


def walk(tree: DraftTree, laws: Tensor, draws: Draws, relax: Relax) -> Verdict:
    """Walk down B trees at once; `laws` (B, N, columns) is the target's law at every node."""
    rows = torch.arange(tree.tokens.shape[0], device=tree.tokens.device)
    table = child_table(tree)  # (B, N, branch)
    uniform = draws.uniform(table.shape[2])  # (B, reach, branch)
    columns = draws.sampler.layout.columns_of(tree.tokens)
    trail, law = Trail(tree), laws[:, 0]
    for depth in range(1, draws.steps.shape[1]):
        here = next_node = trail.node
        moved = torch.zeros_like(trail.walking)
        q = None if tree.q is None else tree.q[rows, here]  # (B, columns)
        for rank in range(table.shape[2]):
            child = table[rows, here, rank]
            x = columns[rows, child.clamp(min=0)]
            draft = torch.zeros_like(law).scatter_(1, x[:, None], 1.0) if q is None else q
            wanted = relax(law, x)
            # A child whose chance was too small for a float is neither tried nor subtracted.
            trying = trail.walking & ~moved & (child >= 0) & (draft[rows, x] > 0)
            accepted = trying & (uniform[:, depth - 1, rank] * draft[rows, x] < wanted[rows, x])
            law = torch.where((trying & ~accepted)[:, None], _residual(wanted, draft), law)
            if q is not None:
                q = _normalised(q.scatter(1, x[:, None], 0.0))
            next_node, moved = torch.where(accepted, child, next_node), moved | accepted
        trail.step(next_node, moved)
        law = torch.where(trail.walking[:, None], laws[rows, trail.node], law)
        if trail.ended():
            break
    score = law.log()
    if draws.noise is not None:  # what is left of the law is drawn from with the noise of the step it is for
        score = score + draws.noise[rows, tree.depths[rows, trail.node]]
    return trail.verdict(draws.sampler.layout.tokens(score.argmax(-1)))


def child_table(tree: DraftTree) -> Tensor:
    """(B, N, branch): the child of each node at each rank, -1 where there is none."""
    (batch, size), branch = tree.tokens.shape, tree.branch
    table = torch.full((batch, size, branch + 1), -1, dtype=torch.int64, device=tree.tokens.device)
    rows = torch.arange(batch, device=tree.tokens.device)[:, None]
    index = torch.arange(size, device=tree.tokens.device).expand(batch, size)
    rank = torch.where(tree.depths > 0, tree.ranks, branch)
    table[rows, tree.parents.clamp(min=0), rank] = index
    return table[..., :branch]


def _residual(law: Tensor, draft: Tensor) -> Tensor:
    left = (law - draft).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    # Nothing left means that the child had to be accepted; only rounding can lead here.
    return torch.where(total > 0, left / total, law)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)


def target_laws(tree: DraftTree, logits: Tensor, draws: Draws) -> Tensor:
    """The law that plain autoregression draws from at every node, float64: (B, N, columns)."""
    scaled = draws.scaled(logits, tree.depths + 1)
    if draws.noise is None:
        return torch.zeros_like(scaled, dtype=torch.float64).scatter_(-1, scaled.argmax(-1, keepdim=True), 1.0)
    return scaled.double().softmax(-1)
