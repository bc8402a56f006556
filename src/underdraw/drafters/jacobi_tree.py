"""Jacobi trees: draft trees over the target's own logits of earlier passes; no training, no weights, any model.

Every pass leaves logits at the nodes after the accepted path. Their context was partly wrong, but with the shared noise
their best tokens are good candidates for the same steps in the next pass (see `jacobi`, which drafts a chain of them).
Here each step keeps its best few candidates. The tree is a trunk of first candidates, long because guesses far ahead
become right by being verified in several passes, and branches where the acceptance probabilities are highest. A plan
without branches makes it the chain of `jacobi`, at the chain's cost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from underdraw.constants import arange_cached, constant
from underdraw.drafters.jacobi import Jacobi, JacobiSession
from underdraw.drafters.online_calibration import MAX_RANKS, OnlineCalibration
from underdraw.drafters.trunk_tree import grow_trunk_tree
from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.plan import MAX_NODES, TreePlan, TreeShape
from underdraw.protocols import CapturableDraft, DraftRequest, Guidance, PrefillOutput, Prompt, VerifiedStep
from underdraw.sampling import fast_topk
from underdraw.tree import DraftTree, ancestor_mask, chain, root_only

_LARGE = 1e30  # stands for infinite logits; sums of a few stay finite
_IMPOSSIBLE = 1e20  # a gap that only infinite logits leave
_ROWS_UP = 3  # rows of the picture above a step that are searched for its first candidate, where sizes differ


@dataclass(frozen=True, slots=True)
class JacobiTree:
    """The best `ranks` candidates of every step are kept; a plan's depth is the length of the trunk.

    Trees need the shared noise of the `coupled` proposal. For the other proposals, chains are drafted as by `jacobi`.
    """

    proposes: ClassVar[Literal["trunk"]] = "trunk"
    mixes_sizes: ClassVar[bool] = True

    ranks: int = MAX_RANKS

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"jacobi-tree:ranks={self.ranks} is impossible; use 1 to {MAX_RANKS}.")

    def open(
        self, prompts: Sequence[Prompt], layout: Layout, prefill: PrefillOutput, *, guidance: Guidance
    ) -> JacobiTreeSession:
        return JacobiTreeSession(min(self.ranks, layout.vocab_size), layout, len(prompts), prefill.logits.device)


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The candidates that the last trees were grown from."""

    rows: Tensor  # (B, D + 2) rows of the tables: the steps of depths 0 (the root) to D + 1
    tokens: Tensor  # (B, D + 2, k)
    stays: Tensor  # (B, D + 2) passes for which the first candidate has stayed the same
    is_forced: Tensor | None  # (B, D + 1) row ends, in layouts that have them
    prior: Tensor | None = None  # (B, D + 1, k + 1) of the calibration, depths 0 to D; None for chains
    buckets: Tensor | None = None  # (B, D + 1) of the calibration


class JacobiTreeSession(CapturableDraft):
    """Candidates of every step of B images, in tables that are never reallocated.

    Tables have a row for each step of each image, and a row of picture cells more before the first step: what is above
    the first row of the picture.
    """

    def __init__(self, ranks: int, layout: Layout, batch: int, device: torch.device) -> None:
        self.ranks, self.layout = ranks, layout
        # Trees, and the rows of the picture that they end in, may reach past the last step.
        self._room = room = 2 * layout.max_stride + layout.steps + MAX_NODES
        count = batch * room
        # Best first, -1 where there is no candidate; the first one of a committed step is its token. The last column
        # is the number of passes for which the first one has stayed the same, 0 if the step was never verified.
        self.candidates = torch.empty(count + 1, ranks + 1, dtype=torch.int64, device=device)
        # How far each candidate's score is behind the best one's; inf where there is none, and 0 in the last column.
        self.gaps = torch.empty(count + 1, ranks + 1, device=device)
        self.calibration = OnlineCalibration(ranks, device)
        # (B, 1) row of step 0 of each image.
        self._first_rows = torch.arange(layout.max_stride, count, room, device=device)[:, None]
        self._drafted: _Drafted | None = None  # None: the last pass had no draft
        self._other_proposals: JacobiSession | None = None
        self._clear()

    def _clear(self) -> None:
        self.candidates.fill_(-1)
        self.candidates[:, -1] = 0
        self.gaps.fill_(torch.inf)
        self.gaps[:, [0, -1]] = 0.0
        self.calibration.restart()

    def restart(self, prompts: Sequence[Prompt], prefill: PrefillOutput) -> bool:
        if len(prompts) != len(self._first_rows):
            return False
        self._clear()
        return self._other_proposals is None or self._other_proposals.restart(prompts, prefill)

    def copy_slots(self, source: JacobiTreeSession, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        # Images of a batch may be of another size; the tables of the smaller one end sooner.
        first, source_first = self.layout.max_stride, source.layout.max_stride
        count = min(self._room - first, source._room - source_first)
        for mine, theirs in ((self.candidates, source.candidates), (self.gaps, source.gaps)):
            table, source_table = mine[:-1].unflatten(0, (-1, self._room)), theirs[:-1].unflatten(0, (-1, source._room))
            table[list(slots), :first] = source_table[0, :1]  # above the picture, where there are no candidates
            table[list(slots), first + count :] = source_table[0, :1]
            copied = source_table[list(source_slots), source_first : source_first + count]
            table[list(slots), first : first + count] = copied
        self.calibration.merge(source.calibration)
        if source._other_proposals is not None:
            self._chains(len(self._first_rows)).copy_slots(source._other_proposals, source_slots, slots)

    def _chains(self, batch: int) -> JacobiSession:
        """What drafts for other proposals than `coupled`."""
        if self._other_proposals is None:
            drafter = Jacobi(window=MAX_NODES - 1)
            self._other_proposals = JacobiSession(drafter, self.layout, batch, self.gaps.device)
        return self._other_proposals

    def draft(self, request: DraftRequest) -> DraftTree:
        if request.proposal != "coupled":
            return self._chains(len(request.root)).draft(request)
        plan, limits, device = request.plan, request.limits, request.root.device
        root_rows = request.steps[:, None] + self._first_rows
        self.candidates[:, 0].scatter_(0, root_rows[:, 0], request.root)
        if plan.depth == 0:  # nothing to keep: the next token is the next root
            self._drafted = None
            return root_only(request.root)
        self._drafted = drafted = self._look_up(request, root_rows)
        tokens = drafted.tokens[:, :-1]
        if _is_chain(plan):
            return chain(tokens[..., 0], None if limits is None else limits.depth)
        if plan.shape is not None:
            return self._fill_shape(request, plan.shape, tokens)
        branch = min(plan.branch, self.ranks)
        assert drafted.prior is not None and drafted.buckets is not None
        log_probs = self.calibration.log_probs(drafted.prior, drafted.buckets)[..., :branch]
        if limits is None:
            trunk, nodes = (constant((count,), torch.int64, device) for count in (plan.depth, plan.nodes))
        else:
            trunk, nodes = limits.depth, limits.nodes
            is_beyond = arange_cached(branch, device) >= limits.branch[:, None].clamp(min=1)
            log_probs = log_probs.masked_fill(is_beyond[:, None], -torch.inf)
        return grow_trunk_tree(
            tokens[..., :branch], log_probs, plan.nodes, trunk=trunk, nodes=nodes, min_probability=plan.min_probability
        )

    def _look_up(self, request: DraftRequest, root_rows: Tensor) -> _Drafted:
        """The candidates of a tree's steps with their prior probabilities; `root_rows` (B, 1) are those of its root."""
        depth, root, layout = request.plan.depth, request.root[:, None], self.layout
        depths = arange_cached(depth + 2, root.device)
        rows = root_rows + depths
        candidates = self.candidates.index_select(0, rows.flatten()).view(*rows.shape, -1)
        tokens, stays, is_forced = candidates[..., :-1], candidates[..., -1], None
        first = self._first_candidates(root_rows, root, depth + 1)
        if layout.row_end is not None:
            is_forced = layout.is_row_end(request.steps[:, None] + depths) & (depths > 0)
            first, is_forced = torch.where(is_forced, layout.row_end, first), is_forced[:, :-1]
        tokens[..., 0] = first
        if _is_chain(request.plan):
            return _Drafted(rows, tokens, stays, is_forced)
        gaps = self.gaps.index_select(0, rows[:, :-1].flatten()).view(len(rows), depth + 1, -1)
        buckets = self.calibration.buckets(stays[:, :-1])
        return _Drafted(rows, tokens, stays, is_forced, self.calibration.prior(gaps, buckets, is_forced), buckets)

    def _first_candidates(self, root_rows: Tensor, root: Tensor, depth: int) -> Tensor:
        """The first candidates of depths 0 to `depth` (B, depth + 1): verified, else those above, else the root."""
        stride = self.layout.strides
        if isinstance(stride, Tensor):
            return self._first_candidates_by_size(root_rows, root, depth, stride[:, None, None])
        height = 1 + -(-depth // stride)
        # From one row of the picture above the tree's first step on, as (height, stride): columns are the picture's.
        window = root_rows + 1 - stride + arange_cached(height * stride, root.device)
        tokens = self.candidates[:, 0].take(window).view(len(root), height, stride)
        source = torch.where(tokens >= 0, arange_cached(height, root.device)[:, None], 0).cummax(1).values
        tokens = tokens.gather(1, source).flatten(1)[:, stride - 1 : stride + depth]
        return torch.where(tokens >= 0, tokens, root)

    def _first_candidates_by_size(self, root_rows: Tensor, root: Tensor, depth: int, strides: Tensor) -> Tensor:
        """`_first_candidates` of images with `strides` (B, 1, 1) of their own; looks at most a few rows up."""
        above = strides * arange_cached(_ROWS_UP + 1, root.device)
        rows = (root_rows + arange_cached(depth + 1, root.device))[..., None] - above  # (B, depth + 1, rows up)
        is_inside = rows > root_rows[..., None] - strides
        tokens = self.candidates[:, 0].take(torch.where(is_inside, rows, 0)).where(is_inside, -1)
        nearest = (tokens >= 0).int().argmax(-1, keepdim=True)
        tokens = tokens.gather(-1, nearest)[..., 0]
        return torch.where(tokens >= 0, tokens, root)

    def _fill_shape(self, request: DraftRequest, parents: tuple[int, ...], tokens: Tensor) -> DraftTree:
        """Trees of a fixed shape; nodes that have no candidate are padding, and so are their descendants."""
        shape, (batch, _, _), device = TreeShape.from_parents(parents), tokens.shape, tokens.device
        depths, ranks, ups = (constant(v, torch.int64, device) for v in (shape.depths, shape.ranks, parents))
        drafted = tokens.flatten(1)[:, depths * self.ranks + ranks.clamp(max=self.ranks - 1)]
        is_dead = (drafted < 0) | (ranks >= self.ranks)
        if request.limits is not None:
            limits, order = request.limits, arange_cached(len(parents), device)
            is_dead = is_dead | (depths > limits.depth[:, None]) | (order >= limits.nodes[:, None])
            is_dead = is_dead | (ranks >= limits.branch[:, None].clamp(min=1))
        ancestors = _shape_ancestors(parents, device)
        is_dead = (ancestors[..., 1:] & is_dead[:, None, 1:]).any(-1)
        return DraftTree(
            torch.where(is_dead, request.root[:, None], drafted),
            torch.where(is_dead, 0, ups),
            torch.where(is_dead, -1, depths),
            ancestors.expand(batch, -1, -1),
            ranks.expand(batch, -1),
            max(shape.ranks) + 1,
        )

    def commit(self, verified: VerifiedStep) -> None:
        """Keep the target's best tokens at the nodes of each depth as the candidates of the step after them."""
        if self._other_proposals is not None:
            self._other_proposals.commit(verified)
            return
        if self._drafted is None:  # plain decoding
            return
        drafted, counts = self._drafted, verified.counts[:, None]
        depths = arange_cached(drafted.rows.shape[1] - 1, counts.device)  # 0 to D
        if drafted.prior is None:
            tokens, gaps, has_node = self._chain_candidates(verified, len(depths))
        else:
            chosen, is_accepted = _chosen_tokens(verified, len(depths)), depths < counts
            self._observe(drafted, chosen[:, :-1], is_accepted[:, :-1])
            indices, gaps, has_node = _candidates_by_depth(verified, len(depths), self.ranks)
            tokens = self.layout.token_ids(indices).masked_fill(gaps == torch.inf, -1)
            tokens[..., 0] = torch.where(is_accepted, chosen, tokens[..., 0])
        stays = torch.where(tokens[..., 0] == drafted.tokens[:, 1:, 0], drafted.stays[:, 1:] + 1, 1)
        # Steps after depths without nodes keep their candidates: theirs go to the last row, which is not used.
        rows = torch.where(has_node, drafted.rows[:, 1:], self.candidates.shape[0] - 1).flatten()
        self.candidates.index_copy_(0, rows, torch.cat([tokens, stays[..., None]], dim=-1).flatten(0, 1))
        self.gaps[:, :-1].index_copy_(0, rows, gaps.flatten(0, 1))

    def _observe(self, drafted: _Drafted, chosen: Tensor, is_observed: Tensor) -> None:
        """Let the calibration count which candidates of depths 1 to D the target chose: `chosen` (B, D)."""
        assert drafted.prior is not None and drafted.buckets is not None
        is_chosen = drafted.tokens[:, 1:-1] == chosen[..., None]
        if drafted.is_forced is not None:
            is_observed = is_observed & ~drafted.is_forced[:, 1:]
        self.calibration.observe(drafted.prior[:, 1:], drafted.buckets[:, 1:], is_chosen, is_observed)

    def _chain_candidates(self, verified: VerifiedStep, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The target's choice after each node of a chain as the only candidate; see `_candidates_by_depth`."""
        depths, chosen = verified.tree.depths[:, :count], verified.accepted_path.chosen
        if chosen is None:
            logits = verified.output.logits[:, :count]
            chosen = self.layout.token_ids(verified.noise_window.sample(logits, depths + 1))
        tokens = chosen[:, :count, None].expand(-1, -1, self.ranks).clone()
        tokens[..., 1:] = -1
        gaps = torch.zeros(tokens.shape, device=tokens.device)
        gaps[..., 1:] = torch.inf
        return tokens, gaps, depths >= 0


def _is_chain(plan: TreePlan) -> bool:
    return plan.branch == 1 and plan.shape is None


@functools.cache  # unbounded: CUDA graphs keep reading these tensors
def _shape_ancestors(parents: tuple[int, ...], device: torch.device) -> Tensor:
    """The ancestor mask (1, N, N) of a fixed shape."""
    depth = len(TreeShape.from_parents(parents).levels) - 1
    return ancestor_mask(constant(parents, torch.int64, device)[None], depth)


def _chosen_tokens(verified: VerifiedStep, count: int) -> Tensor:
    """The target's tokens at the nodes of the accepted path, by depth (B, count); past its end the next token."""
    path, length = verified.accepted_path.path, verified.accepted_path.length[:, None]
    accepted = verified.tree.tokens.gather(1, path)[:, 1:]
    accepted = functional.pad(accepted, (0, count - accepted.shape[1]))
    return torch.where(arange_cached(count, path.device) < length, accepted, verified.accepted_path.next_token[:, None])


def _candidates_by_depth(verified: VerifiedStep, count: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best vocabulary indices after the nodes of each depth (B, count, k), their gaps, and which depths have nodes.

    Of the nodes of a depth, those count that share the longest path with the accepted tokens. The mean of their logits
    is up to a constant the mean of their log probabilities, and better than the logits of any one of them.
    """
    tree, path, noise_window = verified.tree, verified.accepted_path.path, verified.noise_window
    depths = arange_cached(count, path.device)
    on_path = torch.zeros_like(tree.depths, dtype=torch.bool).scatter_(1, path, True)
    shared = (tree.ancestors & on_path[:, None]).sum(-1)  # (B, N), at least 1: the root
    shared = torch.where(tree.depths[:, None] == depths[:, None], shared[:, None], 0)  # (B, count, N)
    is_averaged = shared == shared.amax(-1, keepdim=True).clamp(min=1)
    logits = _average(verified.output.logits, is_averaged)
    scores = noise_window.filtered_logits(logits, (depths + 1).expand(len(path), -1))
    if noise_window.noise is not None:
        scores = scores + noise_window.noise[:, :count]
    values, indices = fast_topk(scores, ranks)
    gaps = values[..., :1] - values
    return indices, gaps.masked_fill(gaps > _IMPOSSIBLE, torch.inf), is_averaged.any(-1)


def _average(logits: Tensor, is_averaged: Tensor) -> Tensor:
    """The mean logits (B, D, K) of the nodes that `is_averaged` (B, D, N) marks, a node at most once; all finite."""
    batch, depth, _ = is_averaged.shape
    counts = is_averaged.sum(-1, keepdim=True).clamp(min=1)
    if not logits.is_cpu:
        return torch.bmm(is_averaged / counts, _finite(logits))  # finite before the product: 0 * inf is NaN
    # A CPU adds N rows faster than it multiplies D * N of them.
    index = 1 + arange_cached(batch * depth, logits.device).view(batch, depth, 1)
    target_rows = (is_averaged * index).sum(1).flatten()  # (B * N,); row 0 is for nodes that do not count
    total = logits.new_zeros(1 + batch * depth, logits.shape[-1]).index_add_(0, target_rows, logits.flatten(0, 1))
    return _finite(total[1:].view(batch, depth, -1) / counts)


def _finite(logits: Tensor) -> Tensor:
    """Large numbers for infinite ones; NaN becomes the least."""
    return logits.nan_to_num(nan=-_LARGE, posinf=_LARGE, neginf=-_LARGE)
