"""EAGLE heads for text features of a fixed number: LlamaGen's, published by LANTERN.

These heads were trained on prompts padded on the left with zero features, and nothing hides the padding from them. The
target leaves padding out, so it is put back for the head. For the conditional row that is exactly what the head has
seen; the unconditional row's padding was never zero in training, and is taken as zero here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from underdraw.drafters.eagle import Eagle
from underdraw.protocols import Opening


@dataclass(frozen=True, slots=True)
class PaddedEagle(Eagle):
    """An EAGLE head whose prompts have `prefix` places."""

    prefix: int = 120

    def opening(self, first: Opening) -> Opening:
        return padded(first, self.prefix)


def padded(first: Opening, prefix: int) -> Opening:
    """The opening with every prompt padded on the left to `prefix` places; longer prompts are left as they are."""
    if max(first.known) >= prefix:
        return first
    place = torch.arange(prefix, device=first.features.device) - (prefix - first.lengths[:, None])  # (R, prefix)
    index = place.clamp(min=0)
    features = first.features.gather(1, index[..., None].expand(-1, -1, first.features.shape[-1]))
    return replace(
        first,
        features=features.masked_fill((place < 0)[..., None], 0),
        prefix=first.prefix.gather(1, index).masked_fill(place < 0, -1),
        lengths=torch.full_like(first.lengths, prefix),
        known=(prefix,) * len(first.known),
    )
