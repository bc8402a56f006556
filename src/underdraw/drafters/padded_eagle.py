"""EAGLE heads for text features of a fixed number: LlamaGen's, published by LANTERN.

These heads were trained on prompts padded on the left with zero features, and nothing hides the padding from them. The
target leaves padding out, so it is put back for the head. For the conditional row that is exactly what the head has
seen; the unconditional row's padding was never zero in training, and is taken as zero here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from underdraw.drafters.eagle import Eagle
from underdraw.protocols import PrefillOutput


@dataclass(frozen=True, slots=True)
class PaddedEagle(Eagle):
    """An EAGLE head whose prompts have `prefix` places."""

    prefix: int = 120

    def adapt_prefill(self, prefill: PrefillOutput) -> PrefillOutput:
        return padded(prefill, self.prefix)


def padded(prefill: PrefillOutput, prefix: int) -> PrefillOutput:
    """The opening with every prompt padded on the left to `prefix` places; longer prompts are left as they are."""
    if max(prefill.host_lengths) >= prefix:
        return prefill
    place = torch.arange(prefix, device=prefill.features.device) - (prefix - prefill.lengths[:, None])  # (R, prefix)
    index = place.clamp(min=0)
    features = prefill.features.gather(1, index[..., None].expand(-1, -1, prefill.features.shape[-1]))
    return replace(
        prefill,
        features=features.masked_fill((place < 0)[..., None], 0),
        prefix=prefill.prefix.gather(1, index).masked_fill(place < 0, -1),
        lengths=torch.full_like(prefill.lengths, prefix),
        host_lengths=(prefix,) * len(prefill.host_lengths),
    )
