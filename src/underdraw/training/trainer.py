"""The training loop: steps within a budget of seconds, EMA weights, reports, checkpoints, one process or many.

A training is a subclass of `Trainer` that computes a loss and evaluates the EMA weights. Its folder holds the weights
and, in state.pt, everything else that the same command needs to continue exactly where it stopped.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from underdraw.errors import (
    CheckpointError,
    ConfigError,
    DivergedError,
    UnderdrawError,
    UnsupportedError,
    check_counts,
    first_line,
)
from underdraw.io import atomic_write, check_regular, remove_unfinished
from underdraw.nn.weights import check_finite, load_weights

log = logging.getLogger(__name__)
MAX_COUNT = 10**6
STATE, WEIGHTS = "state.pt", "model-0.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """Options of every training. `seconds` counts training steps, not loading, compiling or evaluating."""

    seconds: float = 300.0
    pause: float = math.inf  # stop after this many seconds; the learning rate still follows `seconds`
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 100  # steps
    decay: float = 0.5  # last share of the budget, in which the learning rate falls
    ema: float = 0.998
    weight_decay: float = 0.02
    report_every: float = 15.0  # seconds
    evaluate_every: float = 60.0  # seconds
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "pause", "learning_rate", "decay", "report_every", "evaluate_every"):
            value = getattr(self, name)
            if not value > 0 or (math.isinf(value) and name in ("seconds", "learning_rate")):  # also refuses nan
                raise ConfigError(f"--{name.replace('_', '-')} {value:g} is not allowed; use a number above 0.")
        check_counts("a training", MAX_COUNT, batch=self.batch, warmup=self.warmup)


class TrainingProcesses:
    """This process among those of `accelerate launch`; without it there is one process."""

    def __init__(self) -> None:
        self._accelerator: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import Accelerator
            except ImportError:
                raise UnsupportedError(
                    "training in several processes needs accelerate; pip install 'underdraw[train]'."
                ) from None
            self._accelerator = Accelerator()

    @property
    def rank(self) -> int:
        return self._accelerator.process_index if self._accelerator else 0

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    @property
    def device(self) -> str | None:
        """The device of this process, or None if it is the only one."""
        return str(self._accelerator.device) if self._accelerator else None

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with gradients averaged over all processes."""
        return self._accelerator.prepare(module) if self._accelerator else module

    def no_sync(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Inside, backward passes accumulate gradients without exchanging them."""
        return self._accelerator.no_sync(module) if self._accelerator else contextlib.nullcontext()

    def backward(self, loss: Tensor) -> None:
        if self._accelerator:
            self._accelerator.backward(loss)
        else:
            loss.backward()

    def broadcast(self, flag: bool) -> bool:
        """The flag of the main process, so that all processes take the same branch."""
        if self._accelerator is None:
            return flag
        from accelerate.utils import broadcast_object_list

        return bool(broadcast_object_list([flag])[0])

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()


class Trainer(ABC):
    """Optimises `parameters` and keeps an exponential moving average (EMA) of them in `ema_parameters`."""

    options: TrainingOptions
    accumulate = 1  # batches per optimiser step

    def __init__(
        self,
        options: TrainingOptions,
        parameters: Mapping[str, nn.Parameter],
        ema_parameters: Mapping[str, Tensor],
        optimizers: list[torch.optim.Optimizer],
        processes: TrainingProcesses | None = None,
    ) -> None:
        self.options, self.parameters, self.ema_parameters = options, parameters, ema_parameters
        self.optimizers = optimizers
        self.processes = processes or TrainingProcesses()
        self.generator = torch.Generator().manual_seed((options.seed * 1009 + self.processes.rank) % 2**63)
        self.steps = 0
        self.warm_steps = 0  # steps since the optimisers' moments were empty
        self.seconds = 0.0

    @abstractmethod
    def compute_loss(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one batch, and the losses to report; all of them stay on the device."""

    @abstractmethod
    def evaluate(self, out: Path) -> dict[str, str]:
        """Write the EMA weights to `out`, measure them, and return what the progress bar shows."""

    def synchronise(self, is_last: bool) -> AbstractContextManager[Any]:
        """The context of `compute_loss`; only the last batch of a step exchanges gradients."""
        return contextlib.nullcontext()

    def learning_rate(self, progress: float) -> float:
        """The learning rate after a share `progress` of the budget: warm-up, constant, linear decay."""
        options = self.options
        decay = max(0.01, min(1.0, (1 - progress) / options.decay))
        return options.learning_rate * decay * min(1.0, (self.warm_steps + 1) / options.warmup)

    def step(self, progress: float) -> dict[str, Tensor]:
        """One optimiser step; returns the reported losses, averaged over the accumulated batches."""
        rate = self.learning_rate(progress)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        totals: dict[str, Tensor] = {}
        for part in range(self.accumulate):
            with self.synchronise(part == self.accumulate - 1):
                loss, reported = self.compute_loss()
            self.processes.backward(loss / self.accumulate)
            for name, value in reported.items():
                share = value.detach() / self.accumulate
                totals[name] = totals[name] + share if name in totals else share
        norm = nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        if not math.isfinite(norm):  # waits for the device; the same on all processes
            raise DivergedError(f"the gradients of step {self.steps + 1} are not finite")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.warm_steps += 1
        # The average of the first steps must forget the initial weights faster.
        decay = min(self.options.ema, self.steps / (self.steps + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.ema_parameters.values()), list(self.parameters.values()), 1 - decay)
        return totals

    def train(self, out: Path) -> None:
        """Train until the budget or `pause` is reached; saves the state before each evaluation and at the end."""
        options, processes = self.options, self.processes
        end = min(options.seconds, options.pause)
        if self.seconds >= end:
            return
        total = None if math.isinf(end) else round(end)
        bar = tqdm(total=total, initial=round(self.seconds), unit="s", disable=None if processes.is_main else True)
        try:
            self._run(end, bar, out)
            self._check_finite()
        except DivergedError as error:
            kept = (
                f"the weights in {out} are those before it" if (out / WEIGHTS).exists() else "no weights were written"
            )
            raise DivergedError(f"{error}; {kept}: start again with a lower --learning-rate.") from None
        except OSError:  # a full disk: what was saved before is still complete
            raise
        except BaseException:
            if processes.is_main:
                self.save(out)
            raise
        finally:
            bar.close()
        if processes.is_main:
            self.save(out)
        processes.wait()

    def _run(self, end: float, bar: Any, out: Path) -> None:
        """Train until `end` seconds."""
        options, processes = self.options, self.processes
        _to_floats(self.step(self.seconds / options.seconds))  # compiles, so it is not counted
        began = time.perf_counter() - self.seconds
        reported_at, reported_steps, evaluated_at = self.seconds, self.steps, self.seconds
        while not processes.broadcast(self.seconds >= end):
            losses = self.step(self.seconds / options.seconds)
            self.seconds = time.perf_counter() - began
            if self.seconds - reported_at >= options.report_every:
                values = _to_floats(losses)  # waits for the device
                self.seconds = time.perf_counter() - began
                per_second = (self.steps - reported_steps) * options.batch / (self.seconds - reported_at)
                reported_at, reported_steps = self.seconds, self.steps
                self._report(values, per_second * self.accumulate, bar)
            bar.update(round(self.seconds) - bar.n)
            is_due = self.seconds - evaluated_at >= options.evaluate_every and self.seconds < end
            if processes.is_main and is_due:
                self.save(out)
                bar.set_postfix(self.evaluate(out))
                evaluated_at = self.seconds
                began = time.perf_counter() - evaluated_at

    def _report(self, values: Mapping[str, float], images_per_second: float, bar: Any) -> None:
        shown = {name: f"{value:.4f}" for name, value in values.items()}
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        log.info("%6.0f s  step %d  %.0f images/s  %s", self.seconds, self.steps, images_per_second, text)
        bar.set_postfix(shown)

    def state(self) -> dict[str, Any]:
        """Everything that a later run needs to continue exactly."""
        return {
            "parameters": {name: value.detach() for name, value in self.parameters.items()},
            "ema": {name: value.detach() for name, value in self.ema_parameters.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "steps": self.steps,
            "warm_steps": self.warm_steps,
            "seconds": self.seconds,
            "about": self.fixed_options(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._copy(state["parameters"], state["ema"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.steps, self.warm_steps, self.seconds = state["steps"], state["warm_steps"], state["seconds"]
        if self.processes.is_main:
            self.generator.set_state(state["generator"])
        else:  # the saved state is the main process's; the others must not draw the same batches
            self.generator.manual_seed((self.options.seed * 1009 + self.processes.rank + (self.steps << 20)) % 2**63)

    def _check_finite(self) -> None:
        try:
            check_finite(self.ema_parameters, "the training")
        except CheckpointError as error:
            raise DivergedError(f"after step {self.steps}, {str(error).partition(';')[0]}") from None

    def fixed_options(self) -> dict[str, Any]:
        """What must be the same for a training to be continued, by name."""
        return {}

    def save(self, out: Path) -> None:
        """Write the state; weights that are not finite never replace those that are."""
        self._check_finite()
        out.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()  # torch.save turns the error of a full disk into one of its own
        torch.save(self.state(), buffer)
        with atomic_write(out / STATE) as file:
            file.write(buffer.getbuffer())

    def resume(self, out: Path) -> None:
        """Continue the run in `out`, if there is one: exactly, or from its weights with new optimiser moments."""
        if self.processes.is_main and out.is_dir():
            remove_unfinished(out)
        state = load_state(out)
        try:
            if state is not None:
                self._check_options(state.get("about", {}), out)
                self.restore(state)
            elif (out / WEIGHTS).exists():
                weights, metadata = load_weights(out)
                self._check_options(self.saved_options(metadata), out)
                self._copy(weights, weights)
                self.steps, self.seconds = int(metadata["progress"]["steps"]), float(metadata["progress"]["seconds"])
        except (KeyError, ValueError, RuntimeError, TypeError, AttributeError) as error:
            if isinstance(error, UnderdrawError):
                raise
            raise ConfigError(
                f"the training in {out} was started with other options ({first_line(error)}); use the same ones or a "
                "new --out folder."
            ) from error
        if self.steps:
            log.info("continuing %s at step %d, %.0f s", out, self.steps, self.seconds)

    def saved_options(self, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `fixed_options` in the metadata of written weights, for a folder without a state."""
        return {}

    def _check_options(self, saved: Mapping[str, Any], out: Path) -> None:
        for name, value in self.fixed_options().items():
            if name in saved and saved[name] != value:
                difference = f"{name} {saved[name]!r}, not {value!r}"
                raise ConfigError(
                    f"the training in {out} was started with other options ({difference}); use the same ones or a new "
                    "--out folder."
                )

    def progress(self) -> dict[str, int]:
        """The progress of the training, for the metadata of written weights."""
        return {"steps": self.steps, "seconds": round(self.seconds)}

    @torch.no_grad()
    def _copy(self, weights: Mapping[str, Tensor], ema: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])
            self.ema_parameters[name].copy_(ema[name])


def load_state(folder: Path) -> dict[str, Any] | None:
    """The training state in a folder, or None if there is none."""
    path = folder / STATE
    if not path.exists():
        return None
    check_regular(path, "the state of a training", CheckpointError)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not state:
            raise ValueError("it holds no state")
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
    ) as error:
        raise CheckpointError(
            f"{path} is damaged ({first_line(error)}); delete it to continue from the saved weights alone."
        ) from error
    return state


def muon_and_adamw(
    matrices: Iterable[nn.Parameter], parameters: Iterable[nn.Parameter], weight_decay: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the other parameters; `Trainer` sets their learning rates."""
    if not hasattr(torch.optim, "Muon"):
        raise UnsupportedError(
            f"training needs torch.optim.Muon, which torch {torch.__version__} lacks; use 2.9 or newer."
        )
    matrices = list(matrices)
    in_muon = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in parameters if id(parameter) not in in_muon]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].device.type == "cuda"),
    ]


def autocast(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> torch.autocast:
    """Mixed precision on a GPU; float32 on a CPU."""
    return torch.autocast(device.type, dtype, enabled=device.type == "cuda")


def _to_floats(losses: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: value.item() for name, value in losses.items()}
