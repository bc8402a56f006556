"""What the tiny family's decoder is trained by: the loss of pictures given captions, and of codes further ahead."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from underdraw.layout import Layout
from underdraw.nn.transformer import Transformer, causal_attention


class Scorer(nn.Module):
    """Loss of whole pictures given captions: the decoder under a causal mask."""

    rotation: Tensor

    def __init__(self, net: Transformer, layout: Layout, prefix: int) -> None:
        super().__init__()
        self.net, self.prefix = net, prefix
        steps = torch.arange(layout.cells - 1)[None]
        rope = net.arch.rope
        raster = rope.image_rotation(layout, steps, torch.tensor([prefix]))
        table = torch.cat([rope.prompt_rotation(prefix, torch.device("cpu"))[None], raster], dim=1)
        self.register_buffer("rotation", table, persistent=False)

    def features(self, text: Tensor, codes: Tensor) -> Tensor:
        """text (B, P) ids, codes (B, cells) -> what every code is told from (B, cells, dim)."""
        outputs = self.net.arch.outputs
        assert outputs is not None
        tokens = torch.cat([text, codes[:, :-1] + outputs.start], dim=1)
        x = self.net.embed(tokens)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return self.net(x, self.rotation.expand(len(x), -1, -1, -1), causal_attention)[:, self.prefix - 1 :]

    def told(self, features: Tensor, codes: Tensor) -> Tensor:
        """Cross-entropy of codes (B, cells) given features (B, cells, dim)."""
        logits = self.net.logits(features)
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none").view_as(codes)

    def forward(self, text: Tensor, codes: Tensor) -> Tensor:
        """text (B, P) ids, codes (B, cells) -> cross-entropy of every code (B, cells)."""
        return self.told(self.features(text, codes), codes)


class Foresight(nn.Module):
    """Loss of whole pictures, and of codes further ahead, each told from a feature by a matrix of its own."""

    def __init__(self, scorer: Scorer, codes: int) -> None:
        super().__init__()
        self.scorer = scorer
        dim = scorer.net.arch.dim
        self.ahead = nn.Parameter(torch.zeros(codes, dim, dim))

    def forward(self, text: Tensor, codes: Tensor, further: Tensor) -> tuple[Tensor, Tensor]:
        """text (B, P), codes (B, cells), `further` (F,) numbers of codes to skip -> two mean losses."""
        features = self.scorer.features(text, codes)
        cells = codes.shape[1]
        total = features.new_zeros((), dtype=torch.float32)
        for skipped, matrix in zip(further, self.ahead.index_select(0, further - 1), strict=True):
            to = torch.arange(cells, device=codes.device) + skipped
            seen = features + features @ matrix.to(features.dtype)
            losses = self.scorer.told(seen, codes[:, to.clamp(max=cells - 1)])
            total = total + (losses * (to < cells)).sum() / (to < cells).sum() / len(codes)
        return self.scorer.told(features, codes).mean(), total / max(1, len(further))
