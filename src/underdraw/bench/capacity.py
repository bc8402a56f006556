"""Images per hour of some GPUs, and the GPU hours of a million: from measured times and tokens per pass. No torch.

An image takes a prefill, `tokens / tokens per pass` passes and the decoding of its codes to pixels. PNG files are
compressed by a thread while the next passes run, so they count only if they take longer than the rest. Images that are
drawn together share passes: a batch of b trees of n nodes is a pass over b * n nodes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from underdraw.errors import ConfigError, unknown
from underdraw.io import read_json_object

PACKAGED = "costs/h200.json"


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Measured times of one model on one GPU, in milliseconds."""

    device: str
    tokens: int  # of an image, drawn by passes
    pass_ms: Mapping[int, float]  # by nodes
    prefill_ms: Mapping[int, float] = field(default_factory=lambda: {1: 0.0})  # of so many prompts together
    pixels_ms: float = 0.0
    png_ms: float = 0.0
    png_bytes: int = 0
    unmeasured: tuple[str, ...] = ()  # parts that the file has no times of; they count as nothing

    def pass_time(self, nodes: float) -> float:
        """Milliseconds of a pass over `nodes` nodes, between the measured sizes on a line."""
        if nodes > max(self.pass_ms):
            raise ConfigError(
                f"passes were measured up to {max(self.pass_ms)} nodes and this asks for {nodes:g}; use a smaller "
                "--batch or --nodes."
            )
        return _interpolate(self.pass_ms, nodes)

    def prefill_time(self, batch: int) -> float:
        """Milliseconds per prompt if `batch` of them are prefilled together."""
        together = min(batch, max(self.prefill_ms))
        return _interpolate(self.prefill_ms, together) / together


def _interpolate(curve: Mapping[int, float], position: float) -> float:
    """The value of a measured curve, on a line between its points."""
    sizes = sorted(curve)
    return float(np.interp(position, sizes, [curve[size] for size in sizes]))


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """What is drawn, and with what."""

    images: float
    gpus: int
    tokens_per_pass: float
    nodes: int  # of a draft tree; 1 without one
    batch: int  # images that a GPU draws together


@dataclass(frozen=True, slots=True)
class Capacity:
    """Throughput, and where the time of an image goes."""

    tokens_per_pass: float
    images_per_hour: float  # of all GPUs
    hours: float  # for all images
    gpu_hours_per_million: float
    shares: dict[str, float]  # of the time of an image: prefill, passes, pixels, PNG
    bytes_per_second: float  # written by all GPUs


def read_costs(model: str, path: Path | None = None) -> ModelCosts:
    """The costs of a model from a file of `benchmarks/scale.py`, or those that come with the package."""
    if path is None:
        record: dict[str, Any] = json.loads(files("underdraw.assets").joinpath(PACKAGED).read_text())
    else:
        record = read_json_object(path, "measured costs")
    try:
        models = {row["model"]: row for row in record["results"]}
        if model not in models:
            raise unknown("measured model", model, models)
        return _parse_costs(str(record["machine"]["device"]), models[model])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path} has no times of benchmarks/scale.py ({reason}); measure them again.") from None


def _parse_costs(device: str, row: Mapping[str, Any]) -> ModelCosts:
    pass_ms = {int(nodes): _time(spent) for nodes, spent in row["pass_ms"].items()}
    prefill_ms = {int(batch): _time(spent) for batch, spent in row.get("prefill_ms", {1: 0.0}).items()}
    if not pass_ms or not prefill_ms or min(*pass_ms, *prefill_ms) < 1 or min(pass_ms.values()) == 0:
        raise ValueError("there are no times of passes")
    parts = {"prefill": "prefill_ms", "pixels": "pixels_ms", "PNG": "png_ms"}
    unmeasured = tuple(name for name, key in parts.items() if key not in row)
    return ModelCosts(
        device,
        int(_time(row["tokens"])),
        pass_ms,
        prefill_ms,
        pixels_ms=_time(row.get("pixels_ms", 0.0)),
        png_ms=_time(row["png_ms"]["noise"]) if "png_ms" in row else 0.0,
        png_bytes=int(_time(row["png_bytes"]["noise"])) if "png_bytes" in row else 0,
        unmeasured=unmeasured,
    )


def _time(value: Any) -> float:
    """A measured number; a ValueError unless it is finite and not negative."""
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{value!r} is not a time")
    return number


def estimate(costs: ModelCosts, work: CapacityPlan) -> Capacity:
    """Throughput of a workload."""
    passes = costs.tokens / work.tokens_per_pass
    times = {
        "prefill": costs.prefill_time(work.batch),
        "passes": passes * costs.pass_time(work.batch * work.nodes) / work.batch,
        "pixels": costs.pixels_ms,
    }
    busy = sum(times.values())
    times["PNG"] = max(0.0, costs.png_ms - busy)  # what the other work does not hide
    seconds = sum(times.values()) / 1000
    per_hour = work.gpus * 3600 / seconds
    return Capacity(
        tokens_per_pass=work.tokens_per_pass,
        images_per_hour=per_hour,
        hours=work.images / per_hour,
        gpu_hours_per_million=1e6 * seconds / 3600,
        shares={name: spent / (1000 * seconds) for name, spent in times.items()},
        bytes_per_second=costs.png_bytes * per_hour / 3600,
    )
