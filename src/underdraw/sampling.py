"""The sampler: the only owner of randomness.

A token is drawn as `argmax(filtered logits / temperature + g)`, where g is Gumbel noise computed from (seed, step,
code) by a counter-based hash. Nothing is stored and nothing advances, so any node of any tree, in any batch row, on
any device, sees the noise that plain autoregression would see at that step. At temperature 0 there is no noise.

`Sampler` holds the settings of one decode; `Draws` is its share for one target pass: the noise of the next few steps,
which drafting and verification read together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from underdraw.errors import ConfigError
from underdraw.layout import Layout

Stream = Literal["target", "draft", "accept"]
_STREAMS: dict[Stream, int] = {"target": 0, "draft": 1, "accept": 2}
# The additive constant and multipliers of the splitmix64 generator, as signed 64-bit integers.
_GAMMA, _MULTIPLY_1, _MULTIPLY_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685


def _mix(state: Tensor) -> Tensor:
    """Scramble 64-bit states in place; shifts are made logical by masking off the sign's copies."""
    state ^= (state >> 30) & 0x3FFFFFFFF
    state *= _MULTIPLY_1
    state ^= (state >> 27) & 0x1FFFFFFFFF
    state *= _MULTIPLY_2
    return state


def _uniform(seeds: Tensor, steps: Tensor, count: int, stream: Stream) -> Tensor:
    """Uniform numbers in (0, 1) with 32 random bits, float64: (B,), (B, S) -> (B, S, count)."""
    key = _mix(seeds * 3 + _STREAMS[stream] + _GAMMA)[:, None]  # (B, 1)
    key = _mix((key ^ ((key >> 31) & 0x1FFFFFFFF)) + (steps + 1) * _GAMMA)  # (B, S)
    key = key ^ ((key >> 31) & 0x1FFFFFFFF)
    codes = torch.arange(1, count + 1, device=steps.device) * _GAMMA  # (count,)
    state = _mix(key[..., None] + codes)  # (B, S, count)
    bits = state.bitwise_right_shift_(32).bitwise_and_(0xFFFFFFFF)
    return bits.double().add_(0.5).mul_(2.0**-32)


def gumbel(seeds: Tensor, steps: Tensor, count: int, stream: Stream = "target") -> Tensor:
    """Standard Gumbel noise of codes 0..count-1 at each step, float32: (B,), (B, S) -> (B, S, count).

    The logarithms are taken in float64: the result then has full precision in both tails and the same float32 value
    on every device.
    """
    exponential = _uniform(seeds, steps, count, stream).neg_().log1p_().neg_()
    return exponential.log_().neg_().float()


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
        if not math.isfinite(temperature) or temperature < 0:
            raise ConfigError(f"temperature {temperature} must be 0 (greedy) or a positive number.")
        if 0 < temperature < 1e-4:
            raise ConfigError(
                f"temperature {temperature} is too small to divide by; use 0 for greedy or at least 0.0001."
            )
        if top_k < 0:
            raise ConfigError(f"top_k {top_k} must be 0 (off) or a positive number of codes.")
        if not 0 < top_p <= 1:
            raise ConfigError(f"top_p {top_p} must lie in (0, 1]; 1 turns it off.")
        if not seeds:
            raise ConfigError("no seeds were given; a batch needs one seed per image.")
        if any(not 0 <= seed < 2**62 for seed in seeds):
            raise ConfigError(f"seeds {list(seeds)} must be whole numbers from 0 to 2**62 - 1.")
        self.layout = layout
        self.temperature = float(temperature)
        self.top_k = top_k if top_k < len(layout.codes) else 0
        self.top_p = float(top_p)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)  # (B,)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def device(self) -> torch.device:
        return self.seeds.device

    def __len__(self) -> int:
        return self.seeds.shape[0]

    def draws(self, roots: Tensor, reach: int) -> Draws:
        """The noise for the `reach` steps that follow each root: (B,) steps of the roots."""
        steps = roots[:, None] + torch.arange(1, reach + 1, device=roots.device)  # (B, reach)
        noise = None if self.greedy else gumbel(self.seeds, steps, self.layout.columns)
        return Draws(self, steps, noise)

    def random_tokens(self, steps: Tensor) -> Tensor:
        """A uniform random code for each image, as a token: (B,) steps -> (B,)."""
        code = _uniform(self.seeds, steps[:, None], 1, "draft")[:, 0, 0] * len(self.layout.codes)
        return self.layout.tokens(code.long())

    def scaled(self, logits: Tensor, forced: Tensor) -> Tensor:
        """Filtered logits over temperature, and exactly one finite column at forced steps.

        (..., K), (...) -> (..., columns). Filters see the logits over temperature, top-k before top-p; top-k keeps
        ties with the k-th value.
        """
        scaled = logits if self.greedy or self.temperature == 1 else logits * (1 / self.temperature)
        if not self.greedy and self.top_k:
            kth = scaled.topk(self.top_k, dim=-1).values[..., -1:]
            scaled = scaled.masked_fill(scaled < kth, -torch.inf)
        if not self.greedy and self.top_p < 1:
            ordered, order = scaled.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            cut = (before >= self.top_p).scatter(-1, order, before >= self.top_p)
            scaled = scaled.masked_fill(cut, -torch.inf)
        if self.layout.row_end is None:
            return scaled
        shut = torch.full_like(scaled[..., :1], -torch.inf)
        scaled = torch.cat([scaled, shut], dim=-1)
        row_end = torch.full_like(scaled, -torch.inf)
        row_end[..., -1] = 0
        return torch.where(forced[..., None], row_end, scaled)


@dataclass(frozen=True, slots=True)
class Draws:
    """The noise of the steps that one tree can reach: row d - 1 belongs to the nodes at depth d."""

    sampler: Sampler
    steps: Tensor  # (B, reach)
    noise: Tensor | None  # (B, reach, columns), None when greedy

    def scores(self, logits: Tensor, depths: Tensor) -> Tensor:
        """Scores whose argmax is the sample: logits (B, N, K) of nodes that choose a token of depth `depths` (B, N).

        Depths outside the reach belong to padding; their rows hold numbers that nobody reads.
        """
        row = (depths - 1).clamp(0, self.steps.shape[1] - 1)  # (B, N)
        scaled = self.scaled(logits, depths)
        if self.noise is None:
            return scaled
        batch = torch.arange(row.shape[0], device=row.device)[:, None]
        return scaled + self.noise[batch, row]

    def scaled(self, logits: Tensor, depths: Tensor) -> Tensor:
        """The same without noise: log-probabilities up to a constant. (B, N, K), (B, N) -> (B, N, columns)."""
        row = (depths - 1).clamp(0, self.steps.shape[1] - 1)
        return self.sampler.scaled(logits, self.sampler.layout.forced(self.steps.gather(1, row)))

    def gumbel(self, stream: Stream) -> Tensor:
        """Noise of another stream for the same steps: (B, reach, columns)."""
        return gumbel(self.sampler.seeds, self.steps, self.sampler.layout.columns, stream)

    def uniform(self, count: int) -> Tensor:
        """Numbers in (0, 1) for accept tests, `count` a step: (B, reach, count) float64."""
        return _uniform(self.sampler.seeds, self.steps, count, "accept")
