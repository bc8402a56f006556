"""The sampler: the only owner of randomness.

A token is drawn as `argmax(filtered logits / temperature + g)`, where g is Gumbel noise computed from (seed, step,
code) by a counter-based hash. Nothing is stored and nothing advances, so any node of any tree, in any batch row, on
any device, sees the noise that plain autoregression would see at that step. At temperature 0 there is no noise.

`Sampler` holds the settings of one decode; `NoiseWindow` is its share for one target pass: the noise of the next few
steps, which drafting and verification read together.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.layout import Layout

NoiseStream = Literal["target", "draft", "accept"]
_STREAMS: dict[NoiseStream, int] = {"target": 0, "draft": 1, "accept": 2}
_HEIGHT = 32  # rows that `best` folds a row of scores into; a power of 2
_BLOCK = 64  # columns that `argmax_first` looks at together
_AHEAD = 16  # steps whose noise is drawn together
_CHUNK = 16  # nodes whose scores stay in a processor's cache
_SHORT = 2**14  # columns that one processor of a GPU holds at once
_FEW = 16  # best scores that are looked for one after the other
_TOGETHER = 2**22  # numbers of noise that are drawn together when all of it is
_TESTS = 32  # accept tests a step that are drawn ahead
AHEAD = 2**29  # bytes of noise that may be drawn ahead
# The additive constant and multipliers of the splitmix64 generator, as signed 64-bit integers.
_GAMMA, _MULTIPLY_1, _MULTIPLY_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def _mix(state: Tensor) -> Tensor:
    """Scramble 64-bit states in place; shifts are made logical by masking off the sign's copies."""
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= _MULTIPLY_1
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= _MULTIPLY_2
    return state


def _uniform(seeds: Tensor, steps: Tensor, count: int, stream: NoiseStream) -> Tensor:
    """Uniform numbers in (0, 1) with 32 random bits, float64: (B,), (B, S) -> (B, S, count)."""
    key = _mix(seeds * 3 + _STREAMS[stream] + _GAMMA)[:, None]  # (B, 1)
    key = _mix((key ^ ((key >> 31) & 0x1FFFFFFFF)) + (steps + 1) * _GAMMA)  # (B, S)
    key = key ^ ((key >> 31) & 0x1FFFFFFFF)
    codes = torch.arange(1, count + 1, device=steps.device) * _GAMMA  # (count,)
    state = _mix(key[..., None] + codes)  # (B, S, count)
    bits = state.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    return bits.double().add_(0.5).mul_(2.0**-32)


def gumbel(seeds: Tensor, steps: Tensor, count: int, stream: NoiseStream = "target") -> Tensor:
    """Standard Gumbel noise of codes 0..count-1 at each step, float32: (B,), (B, S) -> (B, S, count).

    The logarithms are taken in float64: the result then has full precision in both tails and the same float32 value
    on every device.
    """
    exponential = _uniform(seeds, steps, count, stream).neg_().log1p_().neg_()
    return exponential.log_().neg_().float()


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raise a ConfigError for sampling settings that are out of range."""
    if not math.isfinite(temperature) or temperature < 0:
        raise ConfigError(f"temperature {temperature} must be 0 (greedy) or a positive number.")
    if 0 < temperature < 1e-4:
        raise ConfigError(f"temperature {temperature} is too small to divide by; use 0 for greedy or at least 0.0001.")
    if top_k < 0:
        raise ConfigError(f"top_k {top_k} must be 0 (off) or a positive number of codes.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p {top_p} must lie in (0, 1]; 1 turns it off.")


class Sampler:
    """Temperature, filters and seeds of a batch of B images of one layout."""

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
        if not seeds:
            raise ConfigError("no seeds were given; a batch needs one seed per image.")
        if any(seed != int(seed) or not 0 <= seed < 2**62 for seed in seeds):
            raise ConfigError(f"seeds {list(seeds)} must be whole numbers from 0 to 2**62 - 1.")
        self.layout = layout
        self.temperature = float(temperature)
        self.top_k = top_k if top_k < len(layout.codes) else 0
        self.top_p = float(top_p)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)  # (B,)
        self.ahead: dict[
            NoiseStream, Tensor
        ] = {}  # (B, steps, columns) the noise of every step, see `precompute_noise`

    def copy(self) -> Sampler:
        """The same settings with seeds of its own."""
        other = copy.copy(self)
        other.seeds, other.ahead = self.seeds.clone(), {}
        return other

    def precompute_noise(self, seeds: Tensor, streams: Sequence[NoiseStream] = ("target",)) -> None:
        """Go on with other seeds, and draw all of their noise now, if it is not too much to be kept.

        Drawing takes dozens of operations, and a GPU has to begin each of them; looking it up takes one.
        """
        self.seeds.copy_(seeds)
        layout = self.layout
        order = torch.arange(layout.steps, device=self.device).expand(len(self), -1)
        for stream in streams:
            draw, width = (_uniform, _TESTS) if stream == "accept" else (gumbel, layout.vocab_size)
            if (self.greedy and stream != "accept") or 4 * order.numel() * width > AHEAD:
                continue
            if stream not in self.ahead:
                dtype = torch.float64 if stream == "accept" else torch.float32
                self.ahead[stream] = torch.empty(*order.shape, width, dtype=dtype, device=self.device)
            count = max(1, _TOGETHER // (len(self) * width))
            for part, steps in zip(self.ahead[stream].split(count, dim=1), order.split(count, dim=1), strict=True):
                part.copy_(draw(self.seeds, steps, width, stream))

    def precomputed_noise(self, stream: NoiseStream, steps: Tensor) -> Tensor:
        """What was drawn ahead for steps (B, S), those past the last one as the last: (B, S, columns)."""
        table = self.ahead[stream]
        place = steps.clamp(0, self.layout.steps - 1)  # what lies behind is never chosen
        place = place + torch.arange(0, table.shape[0] * table.shape[1], table.shape[1], device=steps.device)[:, None]
        return table.flatten(0, 1).index_select(0, place.flatten()).view(*steps.shape, -1)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def device(self) -> torch.device:
        return self.seeds.device

    def __len__(self) -> int:
        return self.seeds.shape[0]

    def noise_window(
        self, roots: Tensor, reach: int, before: NoiseWindow | None = None, moved: int | None = None
    ) -> NoiseWindow:
        """The noise for the `reach` steps that follow each root: (B,) steps of the roots.

        If every root stands `moved` steps after the ones of the draws `before`, their common steps are not drawn
        again. It only saves time: noise is a function of the step.
        """
        steps = roots[:, None] + torch.arange(1, reach + 1, device=roots.device)  # (B, reach)
        if self.greedy:
            return NoiseWindow(self, steps, None)
        if "target" in self.ahead:
            return NoiseWindow(self, steps, self.precomputed_noise("target", steps))
        if before is None or before.noise is None or moved is None:
            return NoiseWindow(self, steps, gumbel(self.seeds, steps, self.layout.vocab_size))
        noise = before.noise[:, moved:]
        missing = reach - noise.shape[1]
        if missing > 0:  # some more than needed: drawing a row costs less than asking for it
            ahead = steps[:, -missing, None] + torch.arange(max(missing, _AHEAD), device=roots.device)
            noise = torch.cat([noise, gumbel(self.seeds, ahead, self.layout.vocab_size)], dim=1)
        return NoiseWindow(self, steps, noise.contiguous())

    def random_tokens(self, steps: Tensor) -> Tensor:
        """A uniform random code for each step of each image, as a token: (B, S) steps -> (B, S)."""
        code = _uniform(self.seeds, steps, 1, "draft")[..., 0] * len(self.layout.codes)
        return self.layout.token_ids(code.long())

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits over temperature, with what the filters cut at -inf: (..., K).

        Filters see the logits over temperature, top-k before top-p; top-k keeps ties with the k-th value.
        """
        if self.greedy:
            return logits
        scaled = logits if self.temperature == 1 else logits * (1 / self.temperature)
        if self.top_k:
            scaled = topk_filter(scaled, self.top_k)
        if self.top_p < 1:
            ordered, order = scaled.sort(dim=-1, descending=True)
            chance = ordered.softmax(-1)
            late = chance.cumsum(-1) - chance >= self.top_p
            scaled = scaled.masked_fill(torch.zeros_like(late).scatter(-1, order, late), -torch.inf)
        return scaled

    def forced(self, scaled: Tensor, forced: Tensor) -> Tensor:
        """With a column for the row end, the only finite one at forced steps: (..., K), (...) -> (..., columns)."""
        row_end = torch.where(forced, 0.0, -torch.inf)[..., None].to(scaled.dtype)
        return torch.cat([scaled.masked_fill(forced[..., None], -torch.inf), row_end], dim=-1)


@dataclass(frozen=True, slots=True)
class NoiseWindow:
    """The noise of the steps that one tree can reach, and maybe of some more: row d - 1 belongs to depth d."""

    sampler: Sampler
    steps: Tensor  # (B, reach)
    noise: Tensor | None  # (B, >= reach, columns), None when greedy

    def scores(self, logits: Tensor, depths: Tensor) -> Tensor:
        """Scores whose argmax is the sample: logits (B, N, K) of nodes that choose a token of depth `depths` (B, N).

        Depths outside the reach belong to padding; their rows hold numbers that nobody reads.
        """
        scaled = self.scaled(logits, depths)
        if self.noise is None:
            return scaled
        batch, drawn, columns = self.noise.shape
        row = (depths - 1).clamp(0, drawn - 1) + torch.arange(0, batch * drawn, drawn, device=depths.device)[:, None]
        return self.noise.view(-1, columns).index_select(0, row.flatten()).view_as(scaled).add_(scaled)

    def choose(self, logits: Tensor, depths: Tensor) -> Tensor:
        """The columns that the target chooses: argmax of `scores`, (B, N, K), (B, N) -> (B, N)."""
        size = _CHUNK if logits.device.type == "cpu" else logits.shape[1]
        parts = zip(logits.split(size, dim=1), depths.split(size, dim=1), strict=True)
        return torch.cat([argmax_first(self.scores(*part)) for part in parts], dim=1)

    def scaled(self, logits: Tensor, depths: Tensor) -> Tensor:
        """The same without noise: log-probabilities up to a constant. (B, N, K), (B, N) -> (B, N, columns)."""
        layout = self.sampler.layout
        if layout.row_end is None:
            return self.sampler.filtered(logits)
        row = (depths - 1).clamp(0, self.steps.shape[1] - 1)
        return self.sampler.forced(self.sampler.filtered(logits), layout.is_row_end(self.steps.gather(1, row)))

    def level_scores(self, logits: Tensor, depth: int) -> Tensor:
        """`scores` of nodes that all choose a token of one depth: (B, W, K) -> (B, W, columns)."""
        scaled = self.level_scaled(logits, depth)
        return scaled if self.noise is None else scaled + self.noise[:, depth - 1, None]

    def level_scaled(self, logits: Tensor, depth: int) -> Tensor:
        """`scaled` of nodes that all choose a token of one depth."""
        layout = self.sampler.layout
        if layout.row_end is None:
            return self.sampler.filtered(logits)
        forced = layout.is_row_end(self.steps[:, depth - 1, None]).expand(logits.shape[:2])
        return self.sampler.forced(self.sampler.filtered(logits), forced)

    def gumbel(self, stream: NoiseStream, again: int | Tensor = 0) -> Tensor:
        """Noise of another stream for the same steps: (B, reach, columns); `again` counts draws for one step."""
        layout, own = self.sampler.layout, self.sampler
        if stream in own.ahead and isinstance(again, int) and not again:
            return own.precomputed_noise(stream, self.steps)
        return gumbel(own.seeds, self.steps + again * layout.steps, layout.vocab_size, stream)

    def uniform(self, count: int) -> Tensor:
        """Numbers in (0, 1) for accept tests, `count` a step: (B, reach, count) float64."""
        if "accept" in self.sampler.ahead and count <= _TESTS:
            return self.sampler.precomputed_noise("accept", self.steps)[..., :count]
        return _uniform(self.sampler.seeds, self.steps, count, "accept")


def argmax_first(scores: Tensor) -> Tensor:
    """The column of the best score of each row, the first of equals: `argmax`, on a CPU faster on long rows."""
    if not scores.is_cpu or scores.shape[-1] % _BLOCK or scores.shape[-1] < 8 * _BLOCK:
        return scores.argmax(-1)
    blocks = scores.unflatten(-1, (-1, _BLOCK))
    which = blocks.amax(-1).argmax(-1, keepdim=True)  # (..., 1)
    block = blocks.gather(-2, which[..., None].expand(*which.shape, _BLOCK))[..., 0, :]
    return which[..., 0] * _BLOCK + block.argmax(-1)


@functools.cache
def _triton() -> bool:
    return find_spec("triton") is not None


def _short(values: Tensor) -> bool:
    """True for rows that a kernel of our own looks at as a whole."""
    fits = values.dtype == torch.float32 and values.shape[-1] <= _SHORT
    return fits and values.device.type == "cuda" and _triton()


def topk_filter(values: Tensor, k: int) -> Tensor:
    """Values (..., K) with everything below the k-th largest number of a row at -inf."""
    if _short(values):
        from underdraw.kernels.topk import topk_filter as at_once

        return at_once(values, k)
    kth = values.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return values.masked_fill(values < kth, -torch.inf)


def best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best scores of each row and their columns: as `topk`, several times faster on long rows.

    The best lie in the `count` stripes with the highest maxima; only those are looked at closely. Columns of -inf mean
    nothing.
    """
    if count <= _FEW and _short(scores):
        from underdraw.kernels.topk import top

        return top(scores, count)
    stripes, rest = divmod(scores.shape[-1], _HEIGHT)
    if rest or stripes < 4 * count:
        return scores.topk(count, dim=-1)
    folded = scores.reshape(*scores.shape[:-1], _HEIGHT, stripes)
    chosen = folded.amax(-2).topk(count, dim=-1).indices  # (..., count)
    index = chosen[..., None].expand(*chosen.shape, _HEIGHT)
    values, place = folded.transpose(-1, -2).gather(-2, index).flatten(-2).topk(count, dim=-1)
    return values, (place & (_HEIGHT - 1)) * stripes + chosen.gather(-1, place >> _HEIGHT.bit_length() - 1)
