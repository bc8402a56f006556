"""Session shared by drafters with a network: a KV cache that follows the target, and level-by-level drafting.

After every pass the accepted tokens are pending. The next draft appends them to the drafter's KV cache, the new root
last, grows the tree on top of them and drops the nodes again. Subclasses define the network's inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.constants import arange_cached
from underdraw.layout import Layout
from underdraw.nn.cached_decoder import CachedDecoder
from underdraw.nn.layer_functions import EAGER
from underdraw.nn.rope import RopeTable
from underdraw.nn.target import GuidedRows, apply_guidance, guidance_copies, guidance_scales
from underdraw.nn.transformer import Transformer
from underdraw.plan import MAX_NODES, bucket_size
from underdraw.protocols import CapturableDraft, DraftRequest, Guidance, PassConfig, VerifiedStep
from underdraw.tree import DraftTree, ExpandFn, Frontier, grow_tree

Rows = list[int] | slice
ALL = slice(None)
_MIN_PENDING = 16  # smallest bucket of pending tokens: a wider pass costs less than capturing one more


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that the drafter's KV cache does not hold yet. Those of a row are left-aligned; the next root is last."""

    tokens: Tensor  # (R, N) token ids; the root is filled in when the draft is requested
    features: Tensor | None  # (R, N, D) the target's features one position before each token
    steps: Tensor  # (R, N) of the tokens; negative inside a prompt
    counts: Tensor  # (R,)
    host_counts: tuple[int, ...]  # the same on the host

    def view(self, width: int, host_counts: tuple[int, ...]) -> PendingTokens:
        """The first `width` columns of buffers."""
        features = None if self.features is None else self.features[:, :width]
        return PendingTokens(self.tokens[:, :width], features, self.steps[:, :width], self.counts, host_counts)

    def copy_rows(self, other: PendingTokens, other_rows: Rows = ALL, rows: Rows = ALL) -> None:
        """Overwrite `rows` of these buffers, in the first columns, by rows of other pending tokens."""
        width = other.tokens.shape[1]
        self.tokens[rows, :width] = other.tokens[other_rows]
        self.steps[rows, :width] = other.steps[other_rows]
        self.counts[rows] = other.counts[other_rows]
        if self.features is not None and other.features is not None:
            self.features[rows, :width] = other.features[other_rows]


class NetworkDraftSession(GuidedRows, CapturableDraft):
    """Drafts for one batch. `offset` (R,) is the sequence position of step 0, as in the target."""

    def __init__(
        self,
        net: Transformer,
        layout: Layout,
        guidance: Guidance,
        calibration: Calibration | None,
        decoder: CachedDecoder,
        offset: Tensor,
    ) -> None:
        self.net, self.layout, self.calibration = net, layout, calibration
        self.copies = guidance_copies(guidance)  # rows of an image
        self.guidance = guidance_scales(guidance, offset.shape[0] // self.copies, offset.device)  # (B, 1, 1), or 1
        self.decoder, self.cache, self.offset = decoder, decoder.cache, offset
        self.rope_table = RopeTable(net.arch.rope, layout, offset, net.embedding.weight.dtype)
        batch, device = offset.shape[0] // self.copies, offset.device
        self.committed = torch.full((batch, layout.steps), -1, dtype=torch.int64, device=device)  # token ids
        self.roots = torch.zeros(batch, dtype=torch.int64, device=device)  # (B,) step of the last root
        self.pending: PendingTokens | None = None
        self.is_prompt_pending = True
        self.root_output = torch.empty(0)  # (R, 1, D) the network's output at the root
        # Captured passes hand pending tokens to each other in buffers of MAX_NODES columns.
        self.buffers: PendingTokens | None = None
        self.pending_width: int | None = None  # columns of the buffers in use; None before the first captured pass
        self.next_pending_width = 0
        self.host_pending_counts: tuple[int, ...] = ()  # (R,) tokens that the next pass appends to the KV cache

    def embed_inputs(self, tokens: Tensor, features: Tensor | None, position_inputs: Tensor | None) -> Tensor:
        """Embeddings (R, N, dim) of tokens, the features one position before them, and their position inputs."""
        raise NotImplementedError

    def position_inputs(self, steps: Tensor) -> Tensor | None:
        """Inputs that depend on `steps` (R, N) only and not on the node, (R, N, ...), if the network has any."""
        return None

    def cos_sin(self, steps: Tensor) -> Tensor:
        """RoPE factors of tokens at `steps` (R, N): (R, N, 2, width)."""
        return self.rope_table(steps)

    @torch.no_grad()
    def draft(self, request: DraftRequest) -> DraftTree:
        request = self.fit_request(request)
        return grow_tree(
            self.begin_tree(request),
            request.root,
            request.plan,
            request.noise_window,
            proposal=request.proposal,
            calibration=self.calibration,
            limits=request.limits,
        )

    def fit_request(self, request: DraftRequest) -> DraftRequest:
        """The request, with its plan truncated to what this drafter can draft."""
        return request

    @torch.no_grad()
    def begin_tree(self, request: DraftRequest) -> ExpandFn:
        """Append the pending tokens, the root included; returns the function that expands the tree's levels."""
        self.roots = request.steps
        self.committed.scatter_(1, request.steps[:, None], request.root[:, None])
        self.append_pending(request)
        return self.make_expand_fn(request)

    def append_pending(self, request: DraftRequest) -> None:
        """Run the pending tokens through the network and keep its output at the root."""
        pending = self.pending
        assert pending is not None, "a session drafts after prefill or commit"
        x = self.pending_inputs(request.root)
        out = self.decoder.append(x, self.cos_sin(pending.steps), pending.counts, pending.host_counts)
        last = (pending.counts - 1).clamp(min=0)[:, None, None]
        self.root_output = out.gather(1, last.expand(-1, -1, out.shape[-1]))

    def pending_inputs(self, root: Tensor) -> Tensor:
        """Inputs (R, N, dim) of the pending tokens, with the roots (B,) filled in."""
        pending = self.pending
        assert pending is not None
        last = (pending.counts - 1).clamp(min=0)[:, None]
        tokens = pending.tokens.scatter(1, last, root.repeat(self.copies)[:, None])
        return self.embed_inputs(tokens, pending.features, self.position_inputs(pending.steps))

    def make_expand_fn(self, request: DraftRequest) -> ExpandFn:
        """The function that returns the logits of a tree's frontier."""
        return LevelExpander(self, request.steps.repeat(self.copies), request.plan.depth).expand

    def reset(self, pending: PendingTokens) -> None:
        """Start a new batch with the tokens of its prompts pending."""
        self.rope_table.update()
        self.committed.fill_(-1)
        for step, token in enumerate(self.layout.prologue):
            self.committed[:, step] = token
        self.pending, self.pending_width, self.host_pending_counts = pending, None, pending.host_counts
        self.is_prompt_pending = True

    @torch.no_grad()
    def copy_slots(self, source: NetworkDraftSession, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        source.append_prompt()
        source_rows, rows = self.copy_rows(source, source_slots, slots)
        self.committed[list(slots)] = source.committed[list(source_slots)]
        assert self.pending is not None and source.pending is not None
        buffers, counts = self._pending_buffers(source.pending), [0] * len(self.cache.host_lengths)
        width = source.pending.tokens.shape[1]
        if not self.is_prompt_pending:
            counts, width = list(self.host_pending_counts), max(width, self.pending.tokens.shape[1])
            if self.pending_width is None:
                buffers.copy_rows(self.pending)  # of an eager pass
        buffers.copy_rows(source.pending, source_rows, rows)
        for row, source_row in zip(rows, source_rows, strict=True):
            counts[row] = source.host_pending_counts[source_row]
        self.is_prompt_pending, self.pending_width, self.host_pending_counts = False, None, tuple(counts)
        self.pending = buffers.view(width, self.host_pending_counts)

    def append_prompt(self) -> None:
        """Append the pending tokens of the prompts to the KV cache, so that only the roots are pending."""
        pending = self.pending
        if not self.is_prompt_pending or pending is None:
            return
        x = self.embed_inputs(pending.tokens, pending.features, self.position_inputs(pending.steps))
        host_counts = tuple(count - 1 for count in pending.host_counts)
        self.decoder.append(x, self.cos_sin(pending.steps), pending.counts - 1, host_counts)
        last = (pending.counts - 1)[:, None]
        features = pending.features
        if features is not None:
            features = features.gather(1, last[..., None].expand(-1, -1, features.shape[-1]))
        ones = (1,) * len(host_counts)
        tokens, steps = pending.tokens.gather(1, last), pending.steps.gather(1, last)
        self.pending = PendingTokens(tokens, features, steps, torch.ones_like(pending.counts), ones)
        self.is_prompt_pending, self.host_pending_counts = False, ones

    def _pending_buffers(self, like: PendingTokens) -> PendingTokens:
        """The buffers of pending tokens, allocated when they are first used."""
        if self.buffers is None:
            rows, features = self.offset.shape[0], like.features
            zeros = torch.zeros(rows, MAX_NODES, dtype=torch.int64, device=self.offset.device)
            features = None if features is None else features.new_zeros(rows, MAX_NODES, features.shape[-1])
            self.buffers = PendingTokens(zeros, features, zeros.clone(), zeros[:, 0].clone(), ())
        return self.buffers

    def prepare(self, config: PassConfig) -> Hashable | None:
        pending, plan, is_prompt = self.pending, config.plan, self.is_prompt_pending
        assert pending is not None
        buffers = self._pending_buffers(pending)
        if self.pending_width is None and not is_prompt:  # after `copy_slots`
            self.pending_width = bucket_size(max(pending.tokens.shape[1], _MIN_PENDING))
            self.pending = pending = buffers.view(self.pending_width, self.host_pending_counts)
        self.next_pending_width = bucket_size(max(plan.depth + 1, _MIN_PENDING))
        # Prompts have all lengths: run them eagerly and do not compile them.
        self.decoder.layer_functions = EAGER if is_prompt else config.layer_functions
        self.decoder.attention_backend = config.attention_backend
        span = self.decoder.fix_span(pending.tokens.shape[1] + max(plan.depth * plan.width, 1), config.span_multiple)
        return None if is_prompt else (self.pending_width, span)

    def sync(self, counts: tuple[int, ...]) -> None:
        assert self.buffers is not None
        self.cache.sync_lengths(self.host_pending_counts)
        self.pending_width, self.host_pending_counts = self.next_pending_width, counts * self.copies
        self.is_prompt_pending = False
        self.pending = self.buffers.view(self.pending_width, self.host_pending_counts)

    def commit(self, verified: VerifiedStep) -> None:
        """Make the accepted tokens, and the target's features before them, pending."""
        path, copies = verified.accepted_path.path, self.copies
        tokens = verified.tree.tokens.gather(1, path)  # (B, D) of the path, the old root first
        index = arange_cached(path.shape[1], path.device)
        steps = self.roots[:, None] + index
        is_accepted = (index < verified.counts[:, None]) & (index > 0)
        # Entries past the accepted ones write the old root once more.
        committed_steps = torch.where(is_accepted, steps, steps[:, :1])
        self.committed.scatter_(1, committed_steps, torch.where(is_accepted, tokens, tokens[:, :1]))
        next_tokens = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1).repeat(copies, 1)
        width = verified.output.features.shape[-1]
        features = verified.output.features.gather(1, path.repeat(copies, 1)[..., None].expand(-1, -1, width))
        pending = PendingTokens(
            next_tokens,
            features,
            (steps + 1).repeat(copies, 1),
            verified.counts.repeat(copies),
            verified.host_counts * copies,
        )
        if self.cache.span is None:  # eager
            self.pending, self.pending_width, self.is_prompt_pending = pending, None, False
            self.host_pending_counts = pending.host_counts
        else:
            assert self.buffers is not None
            self.buffers.copy_rows(pending)

    def logits(self, features: Tensor) -> Tensor:
        """(R, W, D) -> (B, W, K) with guidance applied."""
        return apply_guidance(self.net.logits(features), self.guidance)


@functools.cache  # kept forever, since CUDA graphs read it
def _identity_mask(width: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.eye(width, dtype=torch.bool, device=device)


class LevelExpander:
    """Runs the levels of one tree: each node attends to the committed tokens and to its ancestors.

    Every node of a level has the same step, `steps` (R,) of the root plus its depth, so RoPE factors and position
    inputs are precomputed for all levels.
    """

    def __init__(self, session: NetworkDraftSession, steps: Tensor, depth: int) -> None:
        self.session = session
        self.outputs = session.root_output  # (R, W, D) of the previous level
        self.cos_sin, self.position_inputs = torch.empty(0), None  # (R, depth - 1, ...) of the levels below the root
        if depth > 1:
            level_steps = steps[:, None] + arange_cached(depth, steps.device)[1:]
            self.cos_sin, self.position_inputs = session.cos_sin(level_steps), session.position_inputs(level_steps)
        self.ancestors: Tensor | None = None  # (B, W, M) bool: of the previous level, over all nodes so far

    def expand(self, level: Frontier) -> Tensor:
        """Logits (B, W, K) of the children of the frontier's nodes."""
        session, copies = self.session, self.session.copies
        if level.depth == 0:
            return session.logits(self.outputs)
        tokens = level.tokens if copies == 1 else level.tokens.repeat(copies, 1)  # (R, W)
        batch, width = level.tokens.shape
        parents = level.parents[..., None]  # (B, W, 1)
        outputs = self.outputs.unflatten(0, (copies, batch))
        features = outputs.gather(2, parents.expand(copies, -1, -1, outputs.shape[-1])).flatten(0, 1)
        this_level = slice(level.depth - 1, level.depth)
        cos_sin = self.cos_sin[:, this_level].expand(-1, width, -1, -1)
        position_inputs = None
        if self.position_inputs is not None:
            position_inputs = self.position_inputs[:, this_level].expand(-1, width, -1)
        itself = _identity_mask(width, tokens.device).expand(batch, width, width)
        if self.ancestors is None:
            self.ancestors = itself
        else:
            above = self.ancestors.gather(1, parents.expand(-1, -1, self.ancestors.shape[-1]))
            self.ancestors = torch.cat([above, itself], dim=-1)
        x = session.embed_inputs(tokens, features, position_inputs)
        # The root is committed in this cache, so a child of the root has depth 0 here.
        depths = arange_cached(level.depth, tokens.device)[-1].expand(batch, width)
        self.outputs = session.decoder.append_nodes(x, cos_sin, depths, self.ancestors)
        return session.logits(self.outputs)
