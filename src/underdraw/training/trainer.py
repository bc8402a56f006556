"""The loop that all trainings share: steps until the time is spent, and what is reported, shown and saved meanwhile."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from tqdm import tqdm

from underdraw.errors import UnderdrawError
from underdraw.training.checkpoint import save_state
from underdraw.training.command import Options
from underdraw.training.devices import Devices

log = logging.getLogger(__name__)


class Trainer(Protocol):
    """What is trained, and how far it has come; `seconds` counts neither compiling nor measuring."""

    steps: int
    seconds: float

    def state(self) -> dict[str, Any]: ...


def spend(
    trainer: Trainer,
    options: Options,
    out: Path,
    step: Callable[[float], Mapping[str, Tensor]],
    show: Callable[[], Mapping[str, str]],
    *,
    every: float,
    batch: int,
    devices: Devices | None = None,
) -> None:
    """Train until the time is spent, or until it is time to pause.

    `step` is told which share of the time is spent and returns losses, still on the device; `show` measures and returns
    what is worth a look, off the clock, `every` so many seconds. A state to go on from is saved before that and at the
    end, whatever ends it.
    """
    devices = devices or Devices(alone=True)
    end = min(options.seconds, options.pause)
    if trainer.seconds >= end:
        return
    _values(step(trainer.seconds / options.seconds))  # compiles, so it is not on the clock
    began, counted = time.perf_counter() - trainer.seconds, trainer.steps
    reported = shown = trainer.seconds
    bar = tqdm(total=round(end), initial=round(trainer.seconds), unit="s", disable=None if devices.main else True)
    said: dict[str, str] = {}
    try:
        while not devices.agreed(trainer.seconds >= end):
            losses = step(trainer.seconds / options.seconds)
            trainer.seconds = time.perf_counter() - began
            if trainer.seconds - reported >= options.report_every:
                values = _values(losses)
                trainer.seconds = time.perf_counter() - began
                speed = (trainer.steps - counted) * batch / (trainer.seconds - reported)
                reported, counted = trainer.seconds, trainer.steps
                said.update({name: f"{value:.4f}" for name, value in values.items()})
                text = "  ".join(f"{name} {said[name]}" for name in values)
                log.info("%6.0f s  step %d  %.0f images/s  %s", trainer.seconds, trainer.steps, speed, text)
                bar.set_postfix(said)
                if not all(math.isfinite(value) for value in values.values()):
                    raise UnderdrawError(f"the loss is no number; delete {out} and start with a lower --learning-rate")
            bar.update(round(trainer.seconds) - bar.n)
            if devices.main and trainer.seconds - shown >= every and trainer.seconds < end:
                save_state(out, trainer.state())
                said.update(show())
                bar.set_postfix(said)
                shown = trainer.seconds
                began = time.perf_counter() - shown
    finally:
        bar.close()
        if devices.main:
            save_state(out, trainer.state())
    devices.wait()


def _values(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in losses.items()}
