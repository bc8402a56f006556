"""A very small model and a function that draws the run of `planned_runs` with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import small_checkpoint
from planned_runs import PROMPTS, SEED, SHARD, DrawRun

from underdraw.distributed.planned_images import WorkerOptions, Workers
from underdraw.distributed.run import RunResult, RunSpec, draw_run
from underdraw.run_folder import RunFolder
from underdraw.shards import Format


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that draws 3 x 3 codes, so that many images take little time."""
    return small_checkpoint.write(tmp_path_factory.mktemp("models") / "smallest", side=3, drafter=False)


@pytest.fixture(scope="session")
def options(tiny_model: Path) -> WorkerOptions:
    loading = {"model": str(tiny_model), "drafter": "jacobi", "tree": "chain:depth=2", "device": "cpu"}
    return WorkerOptions(loading, {}, slots=5, quiet=True)


@pytest.fixture(scope="session")
def spec() -> RunSpec:
    return RunSpec(PROMPTS, repeats=1, seed=SEED, shard_size=SHARD)


@pytest.fixture(scope="session")
def run_into(spec: RunSpec) -> DrawRun:
    """Draw the missing images of the 60 prompts into a folder."""

    def draw(workers: Workers, folder: Path, image_format: Format) -> RunResult:
        run = RunFolder(folder)
        run.lock()
        try:
            return draw_run(run, workers, replace(spec, format=image_format))
        finally:
            run.close()

    return draw
