"""Drafters that return logits which no drafter should: NaN, infinite, huge, constant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from underdraw.calibration import Calibration
from underdraw.drafters import network
from underdraw.drafters.block import BlockSession


def _sprinkle(value: float, share: float) -> Callable[[Tensor], Tensor]:
    """Replace a share of the logits, the same ones in every pass of a shape."""

    def spoil(logits: Tensor) -> Tensor:
        # A fixed pattern without a copy from the host, so that passes with it can be captured.
        codes = torch.arange(logits.shape[-1], device=logits.device)
        mask = codes * 7919 % 1009 < share * 1009
        return logits.masked_fill(mask, value)

    return spoil


def _first_row(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(logits: Tensor) -> Tensor:
        is_first = torch.arange(logits.shape[1], device=logits.device)[:, None] == 0
        return logits.masked_fill(is_first, value)

    return spoil


SPOILED: dict[str, Callable[[Tensor], Tensor]] = {
    "all NaN": lambda logits: torch.full_like(logits, torch.nan),
    "all inf": lambda logits: torch.full_like(logits, torch.inf),
    "all -inf": lambda logits: torch.full_like(logits, -torch.inf),
    "constant": torch.zeros_like,
    "huge": lambda logits: logits * 3e38,
    "tiny": lambda logits: logits * 1e-38,
    "some NaN": _sprinkle(torch.nan, 0.2),
    "some inf": _sprinkle(torch.inf, 0.2),
    "most -inf": _sprinkle(-torch.inf, 0.95),
    "first row NaN": _first_row(torch.nan),
    "first row inf": _first_row(torch.inf),
    "negated": torch.neg,
}


@contextmanager
def spoiled_logits(name: str, monkeypatch: Any) -> Any:
    """Inside, all drafters with a network draft from spoiled logits."""
    spoil = SPOILED[name]
    with monkeypatch.context() as patch:
        for session in (network.NetworkDraftSession, BlockSession):
            make = session.make_expand_fn

            def make_spoiled(self: Any, request: Any, make: Any = make) -> Any:
                expand = make(self, request)
                return lambda frontier: spoil(expand(frontier))

            patch.setattr(session, "make_expand_fn", make_spoiled)
        yield


def broken_calibration(value: float) -> Calibration:
    """A calibration that is not finite, which cannot be created in the usual way."""
    calibration = Calibration()
    object.__setattr__(calibration, "slope", value)
    return calibration
