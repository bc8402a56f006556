"""EAGLE heads for text features of a fixed length: LlamaGen's, published by LANTERN.

These heads were trained on prompts padded on the left with zero features that no attention mask hides. The target
omits the padding, so it is added again for the head. For the conditional row that is what the head was trained on; the
padding of the unconditional row was never zero in training and is taken as zero here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from underdraw.drafters.eagle import Eagle
from underdraw.protocols import PrefillOutput


@dataclass(frozen=True, slots=True)
class PaddedEagle(Eagle):
    """An EAGLE head whose prompts have `prefix` positions."""

    prefix: int = 120

    def adapt_prefill(self, prefill: PrefillOutput) -> PrefillOutput:
        return pad_prefill(prefill, self.prefix)


def pad_prefill(prefill: PrefillOutput, length: int) -> PrefillOutput:
    """Every prompt padded on the left to `length` positions; unchanged if one of them is as long."""
    if max(prefill.host_lengths) >= length:
        return prefill
    position = torch.arange(length, device=prefill.features.device) - (length - prefill.lengths[:, None])  # (R, length)
    index = position.clamp(min=0)
    features = prefill.features.gather(1, index[..., None].expand(-1, -1, prefill.features.shape[-1]))
    return replace(
        prefill,
        features=features.masked_fill((position < 0)[..., None], 0),
        prefix=prefill.prefix.gather(1, index).masked_fill(position < 0, -1),
        lengths=torch.full_like(prefill.lengths, length),
        host_lengths=(length,) * len(prefill.host_lengths),
    )
