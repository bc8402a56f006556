"""SlotSampler: the sampler of a running batch, whose images have seeds, temperatures and filters of their own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from underdraw.engine.slot_layout import SlotLayout
from underdraw.layout import Layout
from underdraw.sampling import NoiseStream, Sampler, has_topk_kernel, top_p_filter, topk_filter

MAX_NOISE_BYTES = 2**31  # of precomputed noise per stream


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one image are sampled."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


class SlotSampler(Sampler):
    """Samples as a `Sampler` of each image alone would.

    Settings are tensors, which captured passes read. Images at temperature 0 need no noise, so they are sampled by a
    sampler of their own, which `is_greedy`.
    """

    def __init__(self, layout: Layout, params: Sequence[SamplingParams], device: torch.device) -> None:
        temperature = 0.0 if params[0].temperature == 0 else 1.0
        super().__init__(layout, [p.seed for p in params], temperature=temperature, device=device)
        codes = len(layout.codes)
        # (B,) 0 where the filter is off
        self.host_top_k = [p.top_k if p.top_k < codes and not self.is_greedy else 0 for p in params]
        self.host_top_p = [p.top_p if p.top_p < 1 and not self.is_greedy else 0.0 for p in params]
        inverse = [1 / (p.temperature or 1.0) for p in params]
        self._scale = torch.tensor(inverse, dtype=torch.float32, device=device)[:, None, None]
        self._top_k = torch.tensor([k or codes for k in self.host_top_k], device=device)
        top_p = [p or torch.inf for p in self.host_top_p]
        self._top_p = torch.tensor(top_p, dtype=torch.float64, device=device)[:, None, None]
        self._has_kernel = has_topk_kernel(codes, torch.device(device))

    def precompute_noise(self, seeds: Tensor, streams: Sequence[NoiseStream] = ("target",)) -> None:
        """Allocate tables for the noise of all steps; `copy_slots` computes it for new images."""
        self.allocate_noise(streams, MAX_NOISE_BYTES)

    def copy_slots(self, source: SlotSampler, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite settings and noise of images `slots` by those of images `source_slots` of another sampler."""
        source_index, index = list(source_slots), list(slots)
        if isinstance(self.layout, SlotLayout):
            self.layout.copy_slots(source.layout, source_index, index)
        for name in ("seeds", "_scale", "_top_k", "_top_p"):
            getattr(self, name)[index] = getattr(source, name)[source_index]
        for slot, source_slot in zip(index, source_index, strict=True):
            self.host_top_k[slot] = source.host_top_k[source_slot]
            self.host_top_p[slot] = source.host_top_p[source_slot]
        if not self.noise_tables.keys() <= source.noise_tables.keys() or self.layout.steps != source.layout.steps:
            self.compute_noise(index)
            return
        for stream, table in self.noise_tables.items():
            table[index] = source.noise_tables[stream][source_index]

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Turn the filters of images that ended off: passes without filters are faster."""
        for slot in slots:
            self.host_top_k[slot], self.host_top_p[slot] = 0, 0.0

    @property
    def graph_key(self) -> Hashable:
        return self._max_top_k, any(self.host_top_p)

    @property
    def _max_top_k(self) -> int:
        """Most values that a top-k filter has to sort, 0 without such a filter."""
        largest = max(self.host_top_k)
        if not largest or self._has_kernel:
            return min(largest, 1)
        return min(1 << (largest - 1).bit_length(), len(self.layout.codes))  # few different numbers: each is captured

    def filter_logits(self, logits: Tensor) -> Tensor:
        if self.is_greedy:
            return logits
        scaled = logits * self._scale
        max_top_k = self._max_top_k
        if max_top_k:
            scaled = topk_filter(scaled, self._top_k, max_top_k)
        return top_p_filter(scaled, self._top_p) if any(self.host_top_p) else scaled
