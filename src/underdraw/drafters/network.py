"""What drafters with a network share: a cache that follows the target and is asked level by level.

After every verdict the newly committed tokens, the new root last, are appended to the drafter's own cache; the tree
grows on top of it and is forgotten. Subclasses say what one input looks like.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.constants import arange_cached
from underdraw.layout import Layout
from underdraw.nn.kv_cache import KVCache
from underdraw.nn.layer_functions import PLAIN
from underdraw.nn.rope import RopeTable
from underdraw.nn.target import apply_guidance
from underdraw.nn.transformer import Transformer
from underdraw.plan import MAX_NODES, bucket_size
from underdraw.protocols import CapturableDraft, DraftRequest, PassConfig, VerifiedStep
from underdraw.tree import DraftTree, ExpandFn, Frontier, grow_tree

_WAITING = 16  # tokens that a captured pass has room for at least: a wide one costs less than one more kind of it


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that the drafter has not seen yet: the root of the next tree comes last, at place counts - 1."""

    tokens: Tensor  # (R, N) the token of each input; the root's place is filled in when it is known
    features: Tensor | None  # (R, N, D) the target's features one place before each token
    steps: Tensor  # (R, N) of the tokens; negative inside a prompt
    counts: Tensor  # (R,)
    host_counts: tuple[int, ...]  # the same on the host

    def view(self, width: int, host_counts: tuple[int, ...]) -> PendingTokens:
        """The first places of buffers."""
        features = None if self.features is None else self.features[:, :width]
        return PendingTokens(self.tokens[:, :width], features, self.steps[:, :width], self.counts, host_counts)

    def fill(self, other: PendingTokens) -> None:
        """Copy what is pending into the first places of these buffers."""
        width = other.tokens.shape[1]
        self.tokens[:, :width].copy_(other.tokens)
        self.steps[:, :width].copy_(other.steps)
        self.counts.copy_(other.counts)
        if self.features is not None and other.features is not None:
            self.features[:, :width].copy_(other.features)


class NetworkDraftSession(CapturableDraft):
    """Follows one batch. `offset` (R,) is the sequence place of step 0, as in the target."""

    def __init__(
        self,
        net: Transformer,
        layout: Layout,
        guidance: float,
        calibration: Calibration | None,
        cache: KVCache,
        offset: Tensor,
    ) -> None:
        self.net, self.layout, self.guidance, self.calibration = net, layout, guidance, calibration
        self.copies = 1 if guidance == 1 else 2
        self.cache, self.offset = cache, offset
        self.raster = RopeTable(net.arch.rope, layout, offset, net.head.weight.dtype)
        batch = offset.shape[0] // self.copies
        self.committed = torch.full(
            (batch, layout.steps), -1, dtype=torch.int64, device=offset.device
        )  # committed tokens
        self.roots = torch.zeros(batch, dtype=torch.int64, device=offset.device)  # (B,) step of the last root
        self.pending: PendingTokens | None = None
        self.top = torch.empty(0)  # (R, 1, D) output at the root
        self.buffers: PendingTokens | None = None  # what captured passes leave to each other, MAX_NODES places wide
        self.width: int | None = None  # how many of those places are pending; None while it is the prompt
        self.next_width = 0
        self.owed: tuple[int, ...] = ()  # tokens that the next pass appends to the cache, a row

    def inputs(self, tokens: Tensor, features: Tensor | None, beside: Tensor | None) -> Tensor:
        """Embeddings (R, N, dim) of tokens, given the features before them and what else is read `beside` them."""
        raise NotImplementedError

    def beside(self, steps: Tensor) -> Tensor | None:
        """What inputs at `steps` (R, N) hold besides token and feature, (R, N, ...): the same for all nodes of one."""
        return None

    def cos_sin(self, steps: Tensor) -> Tensor:
        """What turns tokens at `steps` (R, N): (R, N, 2, width)."""
        return self.raster(steps)

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> DraftTree:
        request = self.fit(request)
        return grow_tree(
            self.start(request), request.root, request.plan, request.noise_window,
            proposal=request.proposal, calibration=self.calibration, limits=request.limits,
        )  # fmt: skip

    @torch.no_grad()
    def start(self, request: DraftRequest) -> ExpandFn:
        """Take up the root of a request that fits; what answers the levels of its tree."""
        self.roots = request.steps
        self.committed.scatter_(1, request.steps[:, None], request.root[:, None])
        self.follow(request)
        return self.expander(request)

    def fit(self, request: DraftRequest) -> DraftRequest:
        """The request as far as this drafter can serve it."""
        return request

    def expander(self, request: DraftRequest) -> ExpandFn:
        """What answers the levels of one tree."""
        return LevelExpander(self, request.steps.repeat(self.copies), request.plan.depth).expand

    def begin(self, pending: PendingTokens) -> None:
        """Start anew with the prompt pending."""
        self.raster.fill()
        self.committed.fill_(-1)
        for step, token in enumerate(self.layout.prologue):
            self.committed[:, step] = token
        self.pending, self.width, self.owed = pending, None, pending.host_counts

    def prepare(self, config: PassConfig) -> Hashable | None:
        pending, plan = self.pending, config.plan
        assert pending is not None
        if self.buffers is None:
            rows, device = self.offset.shape[0], self.offset.device
            spare = torch.zeros(rows, MAX_NODES, dtype=torch.int64, device=device)
            features = pending.features
            wide = None if features is None else features.new_zeros(rows, MAX_NODES, features.shape[-1])
            self.buffers = PendingTokens(spare, wide, spare.clone(), spare[:, 0].clone(), ())
        self.next_width = bucket_size(max(plan.depth + 1, _WAITING))
        prompt = self.width is None
        self.cache.regions, self.cache.kernel = PLAIN if prompt else config.layer_functions, config.kernel
        span = self.cache.fix_span(pending.tokens.shape[1] + max(plan.depth * plan.width, 1), config.span_multiple)
        return None if prompt else (self.width, span)

    def sync(self, counts: tuple[int, ...]) -> None:
        assert self.buffers is not None
        self.cache.sync_lengths(self.owed)
        self.width, self.owed = self.next_width, counts * self.copies
        self.pending = self.buffers.view(self.width, self.owed)

    def follow(self, request: DraftRequest) -> None:
        """Run the pending tokens through the network; its output at the root starts the tree."""
        pending = self.pending
        assert pending is not None, "a session drafts after it was opened or committed to"
        x = self.waiting(request.root)
        out = self.cache.append(x, self.cos_sin(pending.steps), pending.counts, pending.host_counts)
        last = (pending.counts - 1).clamp(min=0)[:, None, None]
        self.top = out.gather(1, last.expand(-1, -1, out.shape[-1]))

    def waiting(self, root: Tensor) -> Tensor:
        """Inputs (R, N, dim) of the pending tokens, now that the root (B,) is known."""
        pending = self.pending
        assert pending is not None
        last = (pending.counts - 1).clamp(min=0)[:, None]
        tokens = pending.tokens.scatter(1, last, root.repeat(self.copies)[:, None])
        return self.inputs(tokens, pending.features, self.beside(pending.steps))

    def commit(self, verified: VerifiedStep) -> None:
        """Take note of the accepted tokens and of the target's features at them."""
        path, copies = verified.accepted_path.path, self.copies
        drafted = verified.tree.tokens.gather(1, path)  # (B, D) tokens of the path, the old root first
        index = arange_cached(path.shape[1], path.device)
        steps = self.roots[:, None] + index  # of the path's tokens
        accepted = (index < verified.counts[:, None]) & (index > 0)
        place = torch.where(accepted, steps, steps[:, :1])
        self.committed.scatter_(1, place, torch.where(accepted, drafted, drafted[:, :1]))
        after = torch.cat([drafted[:, 1:], drafted[:, :1]], dim=1).repeat(copies, 1)
        width = verified.output.features.shape[-1]
        features = verified.output.features.gather(1, path.repeat(copies, 1)[..., None].expand(-1, -1, width))
        pending = PendingTokens(
            after,
            features,
            (steps + 1).repeat(copies, 1),
            verified.counts.repeat(copies),
            verified.host_counts * copies,
        )
        if self.cache.span is None:
            self.pending = pending
        else:
            assert self.buffers is not None
            self.buffers.fill(pending)

    def logits(self, features: Tensor) -> Tensor:
        """(R, W, D) -> guided (B, W, K)."""
        return apply_guidance(self.net.logits(features), self.guidance)


@functools.cache  # never forgotten, since captured passes read it
def _own(width: int, device: torch.device) -> Tensor:
    """Each of so many nodes sees itself."""
    with torch.inference_mode(False):
        return torch.eye(width, dtype=torch.bool, device=device)


class LevelExpander:
    """Answers the levels of a tree of some depth: each node attends to the committed tokens and to its own ancestors.

    All nodes of a level stand at one step, `steps` (R,) of the root plus their depth, so what depends on steps alone is
    found for all levels at once.
    """

    def __init__(self, session: NetworkDraftSession, steps: Tensor, depth: int) -> None:
        self.session = session
        self.outputs = session.top  # (R, W, D) of the level before
        self.cos_sin, self.beside = torch.empty(0), None  # (R, depth - 1, ...) of the levels below the root
        if depth > 1:
            below = steps[:, None] + arange_cached(depth, steps.device)[1:]
            self.cos_sin, self.beside = session.cos_sin(below), session.beside(below)
        self.ancestors: Tensor | None = None  # (B, W, M) of the level before, over all nodes so far

    def expand(self, level: Frontier) -> Tensor:
        session, copies = self.session, self.session.copies
        if level.depth == 0:
            return session.logits(self.outputs)
        tokens = level.tokens if copies == 1 else level.tokens.repeat(copies, 1)  # (R, W)
        batch, width = level.tokens.shape
        parents = level.parents[..., None]  # (B, W, 1)
        outputs = self.outputs.unflatten(0, (copies, batch))
        features = outputs.gather(2, parents.expand(copies, -1, -1, outputs.shape[-1])).flatten(0, 1)
        place = slice(level.depth - 1, level.depth)
        cos_sin = self.cos_sin[:, place].expand(-1, width, -1, -1)
        beside = None if self.beside is None else self.beside[:, place].expand(-1, width, -1)
        own = _own(width, tokens.device).expand(batch, width, width)
        if self.ancestors is None:
            self.ancestors = own
        else:
            above = self.ancestors.gather(1, parents.expand(-1, -1, self.ancestors.shape[-1]))
            self.ancestors = torch.cat([above, own], dim=-1)
        x = session.inputs(tokens, features, beside)
        depths = arange_cached(level.depth, tokens.device)[-1].expand(
            batch, width
        )  # the root is committed in this cache
        self.outputs = session.cache.append_nodes(x, cos_sin, depths, self.ancestors)
        return session.logits(self.outputs)
