"""The decoder's losses: next-token prediction of images given captions, and multi-token prediction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from underdraw.layout import Layout
from underdraw.nn.transformer import Transformer, causal_attention


class NextTokenLoss(nn.Module):
    """Cross-entropy of the codes of whole images given captions, under a causal mask."""

    rotation: Tensor

    def __init__(self, net: Transformer, layout: Layout, prompt_length: int) -> None:
        super().__init__()
        self.net, self.prompt_length = net, prompt_length
        steps = torch.arange(layout.cells - 1)[None]
        rope = net.arch.rope
        image = rope.image_rotation(layout, steps, torch.tensor([prompt_length]))
        table = torch.cat([rope.prompt_rotation(prompt_length, torch.device("cpu"))[None], image], dim=1)
        self.register_buffer("rotation", table, persistent=False)

    def features(self, text: Tensor, codes: Tensor) -> Tensor:
        """text (B, P) ids, codes (B, cells) -> the feature that predicts each code (B, cells, dim)."""
        outputs = self.net.arch.outputs
        assert outputs is not None
        tokens = torch.cat([text, codes[:, :-1] + outputs.start], dim=1)
        x = self.net.embed(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.net(x, self.rotation.expand(len(x), -1, -1, -1), causal_attention)[:, self.prompt_length - 1 :]

    def cross_entropy(self, features: Tensor, codes: Tensor) -> Tensor:
        """features (B, cells, dim), codes (B, cells) -> (B, cells)."""
        logits = self.net.logits(features)
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").view_as(codes)

    def forward(self, text: Tensor, codes: Tensor) -> Tensor:
        """text (B, P) ids, codes (B, cells) -> cross-entropy of every code (B, cells)."""
        return self.cross_entropy(self.features(text, codes), codes)


class MultiTokenLoss(nn.Module):
    """Next-token loss, and the loss of later codes, each predicted from a projection of the same feature.

    The projections are not part of the trained model. They make its features carry what a drafter can read.
    """

    def __init__(self, next_token: NextTokenLoss, future_tokens: int) -> None:
        super().__init__()
        self.next_token = next_token
        dim = next_token.net.arch.dim
        self.projections = nn.Parameter(torch.zeros(future_tokens, dim, dim))

    def forward(self, text: Tensor, codes: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """text (B, P), codes (B, cells), offsets (F,) of later codes behind the next one -> two mean losses."""
        features = self.next_token.features(text, codes)
        cells = codes.shape[1]
        total = features.new_zeros((), dtype=torch.float32)
        for offset, projection in zip(offsets, self.projections.index_select(0, offsets - 1), strict=True):
            index = torch.arange(cells, device=codes.device) + offset
            projected = features + features @ projection.to(features.dtype)
            losses = self.next_token.cross_entropy(projected, codes[:, index.clamp(max=cells - 1)])
            total = total + (losses * (index < cells)).sum() / (index < cells).sum() / len(codes)
        return self.next_token.cross_entropy(features, codes).mean(), total / max(1, len(offsets))
