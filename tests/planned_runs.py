"""The run that `tests/distributed` draws in many ways, and what must be equal about its folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from underdraw.distributed.planned_images import Workers
from underdraw.distributed.run import RunResult
from underdraw.prompts import PromptRow
from underdraw.run_folder import TIMINGS_FILE
from underdraw.shards import Format

PROMPTS = [PromptRow(f"p{number}", f"a red fox {number}", columns={"kind": number % 3}) for number in range(60)]
FORMATS: tuple[Format, ...] = ("folder", "webdataset", "parquet")
SHARD, SEED = 16, 7
DrawRun = Callable[[Workers, Path, Format], RunResult]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run by name, but for the one that differs from run to run."""
    paths = [path for path in folder.rglob("*") if path.name != TIMINGS_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"" for path in paths}
