"""Optimisers, schedule and averages that the trainers share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from underdraw.errors import UnsupportedError


def optimizers(
    matrices: Iterable[nn.Parameter], others: Iterable[nn.Parameter], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside blocks, AdamW for the rest. Rates are set before every step."""
    if not hasattr(torch.optim, "Muon"):
        raise UnsupportedError(
            f"training needs torch.optim.Muon, which torch {torch.__version__} lacks; use 2.9 or newer."
        )
    rest = list(others)
    return [
        torch.optim.Muon(
            list(matrices), lr=1.0, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].device.type == "cuda"),
    ]


def set_rate(own: Sequence[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in own:
        for group in optimizer.param_groups:
            group["lr"] = rate


def step_all(own: Sequence[torch.optim.Optimizer]) -> None:
    for optimizer in own:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


@torch.no_grad()
def follow(average: Iterable[Tensor], current: Iterable[Tensor], keep: float, steps: int) -> None:
    """Move an exponential average; young averages forget faster."""
    keep = min(keep, steps / (steps + 10))
    torch._foreach_lerp_(list(average), list(current), 1 - keep)
