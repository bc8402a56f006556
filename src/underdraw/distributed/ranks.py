"""Ranks: processes that torchrun or SLURM started, on one machine or many, with a shared file system. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
