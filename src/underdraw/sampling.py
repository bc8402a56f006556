"""The sampler, the only source of randomness.

A token is sampled as `argmax(filtered logits / temperature + g)` with Gumbel noise g that a counter-based hash computes
from (seed, step, code). There is no generator state to store or advance: every node of every tree, in any batch row,
on any device, sees the noise that plain autoregressive decoding would see at that step. At temperature 0 there is no
noise.

`Sampler` holds the sampling settings of a batch; `NoiseWindow` holds the noise of the steps that one pass can reach,
shared by drafting and verification.

Shapes: B images, S steps, N nodes, W nodes of one tree level, K image codes, V vocabulary indices (K, and one for the
row end).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from underdraw.constants import arange_cached
from underdraw.errors import ConfigError
from underdraw.layout import Layout
from underdraw.ranges import check_sampling, check_seeds

NoiseStream = Literal["target", "draft", "accept"]
_STREAM_IDS: dict[NoiseStream, int] = {"target": 0, "draft": 1, "accept": 2}
MAX_TABLE_BYTES = 2**29  # of precomputed noise per stream
_TABLE_CHUNK = 2**22  # noise values computed at once for such a table
_TABLE_UNIFORMS = 32  # uniform numbers per step in such a table
_WINDOW_CHUNK = 16  # steps by which a noise window grows at least
_SAMPLE_CHUNK = 16  # nodes whose scores fit into a CPU core's cache
_FOLD_ROWS = 32  # rows that `fast_topk` folds a row of scores into; a power of 2
_ARGMAX_BLOCK = 64  # scores per block in `argmax_first`
_KERNEL_MAX_VOCAB = 2**14  # longest row that the Triton kernels hold in one program
_PROBABILITY_PARTS = 2**40  # whole parts of a probability of 1, so that sums of up to 2**22 of them are exact
_KERNEL_MAX_K = 16  # most values that the Triton top-k kernel selects
# Increment and multipliers of the splitmix64 generator, as signed 64-bit integers.
_GAMMA, _MULTIPLIER_1, _MULTIPLIER_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def _mix(state: Tensor) -> Tensor:
    """Mix 64-bit states in place. The masks clear the copies of the sign bit, which makes the shifts logical."""
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= _MULTIPLIER_1
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= _MULTIPLIER_2
    return state


def _uniform(seeds: Tensor, steps: Tensor, count: int, stream: NoiseStream) -> Tensor:
    """Uniform numbers in (0, 1) with 32 random bits, float64: (B,), (B, S) -> (B, S, count)."""
    key = _mix(seeds * 3 + _STREAM_IDS[stream] + _GAMMA)[:, None]  # (B, 1)
    key = _mix((key ^ ((key >> 31) & 0x1FFFFFFFF)) + (steps + 1) * _GAMMA)  # (B, S)
    key = key ^ ((key >> 31) & 0x1FFFFFFFF)
    codes = torch.arange(1, count + 1, device=steps.device) * _GAMMA  # (count,)
    state = _mix(key[..., None] + codes)  # (B, S, count)
    bits = state.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    return bits.double().add_(0.5).mul_(2.0**-32)


def gumbel(seeds: Tensor, steps: Tensor, count: int, stream: NoiseStream = "target") -> Tensor:
    """Standard Gumbel noise of codes 0..count-1 at each step, float32: (B,), (B, S) -> (B, S, count).

    Logarithms are taken in float64: both tails keep full precision and every device gets the same float32 value.
    """
    exponential = _uniform(seeds, steps, count, stream).neg_().log1p_().neg_()
    return exponential.log_().neg_().float()


class Sampler:
    """Temperature, filters and seeds of a batch of B images with one layout."""

    def __init__(
        self,
        layout: Layout,
        seeds: Sequence[int],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        device: str | torch.device = "cpu",
    ) -> None:
        check_sampling(temperature, top_k, top_p)
        seeds = check_seeds(seeds)
        if not seeds:
            raise ConfigError("there are no seeds; a batch needs one seed per image.")
        self.layout = layout
        self.temperature = float(temperature)
        self.top_k = top_k if top_k < len(layout.codes) else 0
        self.top_p = float(top_p)
        self.seeds = torch.tensor(seeds, dtype=torch.int64, device=device)  # (B,)
        self.noise_tables: dict[NoiseStream, Tensor] = {}  # (B, steps, V or uniform numbers), see `precompute_noise`

    def copy(self) -> Sampler:
        """A sampler with the same settings, a copy of the seeds and no precomputed noise."""
        other = copy.copy(self)
        other.seeds, other.noise_tables = self.seeds.clone(), {}
        return other

    def precompute_noise(self, seeds: Tensor, streams: Sequence[NoiseStream] = ("target",)) -> None:
        """Switch to other seeds and compute the noise of all their steps, where the tables are not too large.

        Computing noise takes dozens of kernel launches, a table lookup takes one. The tables keep their memory, so
        CUDA graphs may read them.
        """
        self.seeds.copy_(seeds)
        self.allocate_noise(streams)
        self.compute_noise(range(len(self)))

    def allocate_noise(self, streams: Sequence[NoiseStream], max_bytes: int | None = None) -> None:
        """Allocate the noise tables that are not too large."""
        max_bytes = MAX_TABLE_BYTES if max_bytes is None else max_bytes
        for stream in streams:
            width = _TABLE_UNIFORMS if stream == "accept" else self.layout.vocab_size
            shape = len(self), self.layout.steps, width
            if (self.is_greedy and stream != "accept") or 4 * math.prod(shape) > max_bytes:
                continue
            if stream not in self.noise_tables:
                dtype = torch.float64 if stream == "accept" else torch.float32
                # Zeros, since idle slots read noise that was never computed: NaN would accept padding nodes.
                self.noise_tables[stream] = torch.zeros(shape, dtype=dtype, device=self.device)

    def compute_noise(self, images: Sequence[int]) -> None:
        """Compute the noise tables of some images."""
        index = torch.tensor(list(images), device=self.device)
        all_steps = torch.arange(self.layout.steps, device=self.device).expand(len(index), -1)
        for stream, table in self.noise_tables.items():
            width = table.shape[-1]
            compute = _uniform if stream == "accept" else gumbel
            for steps in all_steps.split(max(1, _TABLE_CHUNK // (len(index) * width)), dim=1):
                table[index[:, None], steps] = compute(self.seeds[index], steps, width, stream)

    def lookup_noise(self, stream: NoiseStream, steps: Tensor) -> Tensor:
        """Precomputed noise of steps (B, S): (B, S, V). Steps after the last one get its noise; nothing reads it."""
        table = self.noise_tables[stream]
        row = steps.clamp(0, self.layout.steps - 1)
        row = row + _row_starts(*table.shape[:2], steps.device)
        return table.flatten(0, 1).index_select(0, row.flatten()).view(*steps.shape, -1)

    @property
    def graph_key(self) -> Hashable:
        """What a captured pass depends on besides the values of tensors."""
        return ()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def device(self) -> torch.device:
        return self.seeds.device

    def __len__(self) -> int:
        return self.seeds.shape[0]

    def noise_window(
        self, roots: Tensor, reach: int, previous: NoiseWindow | None = None, advanced: int | None = None
    ) -> NoiseWindow:
        """The noise of the `reach` steps after each root (B,).

        If every root is `advanced` steps after the roots of the window `previous`, the noise that both share is reused.
        """
        steps = roots[:, None] + arange_cached(reach + 1, roots.device)[1:]  # (B, reach)
        if self.is_greedy:
            return NoiseWindow(self, steps, None)
        if "target" in self.noise_tables:
            return NoiseWindow(self, steps, self.lookup_noise("target", steps))
        if previous is None or previous.noise is None or advanced is None:
            return NoiseWindow(self, steps, gumbel(self.seeds, steps, self.layout.vocab_size))
        noise = previous.noise[:, advanced:]
        missing = reach - noise.shape[1]
        if missing > 0:  # more than is missing: another step costs less than another call
            added = steps[:, -missing, None] + torch.arange(max(missing, _WINDOW_CHUNK), device=roots.device)
            noise = torch.cat([noise, gumbel(self.seeds, added, self.layout.vocab_size)], dim=1)
        return NoiseWindow(self, steps, noise.contiguous())

    def random_tokens(self, steps: Tensor) -> Tensor:
        """Token ids of uniformly random codes for steps (B, S): (B, S)."""
        code = _uniform(self.seeds, steps, 1, "draft")[..., 0] * len(self.layout.codes)
        return self.layout.token_ids(code.long())

    def filter_logits(self, logits: Tensor) -> Tensor:
        """Logits (..., K) divided by the temperature, with -inf where top-k, then top-p, cuts.

        Top-k keeps all ties with the k-th value.
        """
        if self.is_greedy:
            return logits
        scaled = logits if self.temperature == 1 else logits * (1 / self.temperature)
        if self.top_k:
            scaled = topk_filter(scaled, self.top_k)
        return top_p_filter(scaled, self.top_p) if self.top_p < 1 else scaled

    def append_row_end(self, logits: Tensor, is_row_end: Tensor) -> Tensor:
        """Add the row end to the vocabulary, certain where it is forced and impossible elsewhere.

        (..., K), (...) -> (..., V)
        """
        row_end = torch.where(is_row_end, 0.0, -torch.inf)[..., None].to(logits.dtype)
        return torch.cat([logits.masked_fill(is_row_end[..., None], -torch.inf), row_end], dim=-1)


@dataclass(frozen=True, slots=True)
class NoiseWindow:
    """The target's noise for the steps that one tree can reach; entry d - 1 belongs to depth d."""

    sampler: Sampler
    steps: Tensor  # (B, reach)
    noise: Tensor | None  # (B, >= reach, V); None when greedy

    def scores(self, logits: Tensor, depths: Tensor) -> Tensor:
        """Filtered logits plus noise, whose argmax is the sample: (B, N, K) -> (B, N, V).

        `depths` (B, N) are the depths of the sampled tokens; rows outside the reach are padding.
        """
        filtered = self.filtered_logits(logits, depths)
        if self.noise is None:
            return filtered
        batch, length, vocab = self.noise.shape
        row = (depths - 1).clamp(0, length - 1) + _row_starts(batch, length, depths.device)
        return self.noise.view(-1, vocab).index_select(0, row.flatten()).view_as(filtered).add_(filtered)

    def sample(self, logits: Tensor, depths: Tensor) -> Tensor:
        """Sampled vocabulary indices, the argmax of `scores`: (B, N, K), (B, N) -> (B, N)."""
        size = _SAMPLE_CHUNK if logits.device.type == "cpu" else logits.shape[1]
        chunks = zip(logits.split(size, dim=1), depths.split(size, dim=1), strict=True)
        samples = [argmax_first(self.scores(*chunk)) for chunk in chunks]
        return samples[0] if len(samples) == 1 else torch.cat(samples, dim=1)

    def filtered_logits(self, logits: Tensor, depths: Tensor) -> Tensor:
        """`scores` without noise: log-probabilities up to a constant, (B, N, K), (B, N) -> (B, N, V)."""
        layout = self.sampler.layout
        filtered = self.sampler.filter_logits(logits)
        if layout.row_end is None:
            return filtered
        index = (depths - 1).clamp(0, self.steps.shape[1] - 1)
        return self.sampler.append_row_end(filtered, layout.is_row_end(self.steps.gather(1, index)))

    def level_scores(self, logits: Tensor, depth: int) -> Tensor:
        """`scores` for tokens of one depth: (B, W, K) -> (B, W, V)."""
        filtered = self.level_filtered_logits(logits, depth)
        return filtered if self.noise is None else filtered + self.noise[:, depth - 1, None]

    def level_filtered_logits(self, logits: Tensor, depth: int) -> Tensor:
        """`filtered_logits` for tokens of one depth: (B, W, K) -> (B, W, V)."""
        layout = self.sampler.layout
        filtered = self.sampler.filter_logits(logits)
        if layout.row_end is None:
            return filtered
        is_row_end = layout.is_row_end(self.steps[:, depth - 1, None]).expand(logits.shape[:2])
        return self.sampler.append_row_end(filtered, is_row_end)

    def gumbel(self, stream: NoiseStream, redraw: int | Tensor = 0) -> Tensor:
        """Noise of another stream for the same steps: (B, reach, V). Each `redraw` gives new noise."""
        sampler = self.sampler
        if stream in sampler.noise_tables and isinstance(redraw, int) and not redraw:
            return sampler.lookup_noise(stream, self.steps)
        steps = self.steps + redraw * sampler.layout.steps
        return gumbel(sampler.seeds, steps, sampler.layout.vocab_size, stream)

    def uniform(self, count: int) -> Tensor:
        """`count` uniform numbers in (0, 1) per step for acceptance tests: (B, reach, count) float64."""
        if "accept" in self.sampler.noise_tables and count <= _TABLE_UNIFORMS:
            return self.sampler.lookup_noise("accept", self.steps)[..., :count]
        return _uniform(self.sampler.seeds, self.steps, count, "accept")


@functools.cache  # kept forever: CUDA graphs read these tensors
def _row_starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Where the rows (B, 1) of each image start in a flat table of B * length rows."""
    with torch.inference_mode(False):
        return torch.arange(0, batch * length, length, device=device)[:, None]


def argmax_first(scores: Tensor) -> Tensor:
    """`argmax` over the last dimension, the first of ties; faster than torch's on long rows on a CPU."""
    if not scores.is_cpu or scores.shape[-1] % _ARGMAX_BLOCK or scores.shape[-1] < 8 * _ARGMAX_BLOCK:
        return scores.argmax(-1)
    blocks = scores.unflatten(-1, (-1, _ARGMAX_BLOCK))
    block_index = blocks.amax(-1).argmax(-1, keepdim=True)  # (..., 1)
    block = blocks.gather(-2, block_index[..., None].expand(*block_index.shape, _ARGMAX_BLOCK))[..., 0, :]
    return block_index[..., 0] * _ARGMAX_BLOCK + block.argmax(-1)


@functools.cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _fits_kernel(values: Tensor) -> bool:
    """Whether the Triton top-k kernels can take these rows."""
    return values.dtype == torch.float32 and has_topk_kernel(values.shape[-1], values.device)


def has_topk_kernel(columns: int, device: torch.device) -> bool:
    """Whether the Triton top-k kernels run on a device and can take rows of so many values."""
    return columns <= _KERNEL_MAX_VOCAB and device.type == "cuda" and _has_triton()


def topk_filter(values: Tensor, k: int | Tensor, max_k: int | None = None) -> Tensor:
    """Values (..., K) with -inf in place of everything below the k-th largest of the row.

    A tensor k (B,) has one number for each of the B first indices, K to keep all; those below K are at most `max_k`.
    """
    if _fits_kernel(values):
        from underdraw.kernels.topk import topk_filter as topk_filter_kernel

        return topk_filter_kernel(values, k)
    if isinstance(k, Tensor):
        size = min(max_k or values.shape[-1], values.shape[-1])
        index = (k - 1).clamp(0, size - 1).view(-1, *[1] * (values.dim() - 1)).expand(*values.shape[:-1], 1)
        kth = values.topk(size, dim=-1).values.gather(-1, index)
        kth = torch.where((k < values.shape[-1]).view(-1, *[1] * (values.dim() - 1)), kth, -torch.inf)
    else:
        kth = values.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return values.masked_fill(values < kth, -torch.inf)


# An operator of its own, because what records passes (replay tapes, torch.compile) sees operators of torch alone.
_OPERATORS = torch.library.Library("underdraw", "FRAGMENT")
_OPERATORS.define("sort_descending(Tensor values) -> Tensor")


@torch.library.impl(_OPERATORS, "sort_descending", "CompositeExplicitAutograd")
def _sort_values(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True).values


@torch.library.impl(_OPERATORS, "sort_descending", "CPU")
def _sort_by_numpy(values: Tensor) -> Tensor:
    """Thirty times as fast as torch on a CPU, which sorts indices too."""
    if values.dtype != torch.float32:
        return _sort_values(values)
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)[..., ::-1].copy())


def top_p_filter(values: Tensor, top_p: float | Tensor) -> Tensor:
    """Values (..., K) with -inf in place of those behind the most probable ones that sum up to `top_p`.

    All ties with the last one are kept. Probabilities are added as whole numbers, so that the sums are the same however
    a kernel divides a row: which values are cut must not depend on the number of rows.
    """
    descending = torch.ops.underdraw.sort_descending(values)
    parts = descending.softmax(-1).double().mul_(_PROBABILITY_PARTS).long()
    if isinstance(top_p, Tensor):  # of float64: as a float32, 0.7 would cut other values than the number does
        most: int | Tensor = (top_p.clamp(max=2.0) * _PROBABILITY_PARTS).long().clamp_(min=1)
    else:
        most = max(int(top_p * _PROBABILITY_PARTS), 1)  # the most probable value always stays
    is_cut = parts.cumsum(-1) - parts >= most
    least = descending.masked_fill(is_cut, torch.inf).amin(-1, keepdim=True)
    return values.masked_fill(values < least, -torch.inf)


def fast_topk(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest scores of each row and their indices, as `topk` but several times faster on long rows.

    Folds a row into `_FOLD_ROWS` rows and takes the columns with the largest maxima: the largest scores are all in
    these. The index of a score of -inf is arbitrary.
    """
    if count <= _KERNEL_MAX_K and _fits_kernel(scores):
        from underdraw.kernels.topk import topk

        return topk(scores, count)
    columns, rest = divmod(scores.shape[-1], _FOLD_ROWS)
    if rest or columns < 4 * count:
        return scores.topk(count, dim=-1)
    folded = scores.reshape(*scores.shape[:-1], _FOLD_ROWS, columns)
    chosen = folded.amax(-2).topk(count, dim=-1).indices  # (..., count) columns
    index = chosen[..., None].expand(*chosen.shape, _FOLD_ROWS)
    values, flat = folded.transpose(-1, -2).gather(-2, index).flatten(-2).topk(count, dim=-1)
    row, column = flat & (_FOLD_ROWS - 1), chosen.gather(-1, flat >> _FOLD_ROWS.bit_length() - 1)
    return values, row * columns + column
