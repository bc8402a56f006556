"""Ranks: processes that torchrun or SLURM started, on one machine or many, with a shared file system. No torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from underdraw.distributed.local import total_threads
from underdraw.errors import CapacityError
from underdraw.run_folder import Rank

# (rank, number of ranks, rank on this machine). SLURM_STEP_* are set by srun only, not in a batch script itself.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)


def current_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """The rank of this process; rank 0 of 1 if no launcher started it."""
    for rank, world, _ in LAUNCHERS:
        if rank in environment and environment.get(world, "").isdecimal():
            return Rank(int(environment[rank]), int(environment[world]))
    return Rank()


def local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this process on its machine, which decides its GPU."""
    return next((int(environment[name]) for *_, name in LAUNCHERS if environment.get(name, "").isdecimal()), 0)


def run_ranks(arguments: Sequence[str], count: int) -> None:
    """Run `underdraw ARGUMENTS` as `count` ranks on this machine, and wait; an error if one of them fails."""
    threads = str(max(1, total_threads() // count))
    ranks = []
    for rank in range(count):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "OMP_NUM_THREADS": threads}
        environment = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
        command = [sys.executable, "-m", "underdraw", *arguments]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL))
    codes = [process.wait() for process in ranks]
    for rank, code in enumerate(codes):
        if code:
            raise CapacityError(f"worker {rank} ended with code {code}; the same command continues.")
