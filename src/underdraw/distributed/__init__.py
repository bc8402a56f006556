"""Many images with many processes: local workers, ranks of torchrun and SLURM, and Ray.

`Drawer` is the class for your own `ds.map_batches(...)` of Ray Data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from underdraw.distributed.drawer import Drawer

__all__ = ["Drawer"]


def __getattr__(name: str) -> Any:
    if name == "Drawer":  # imports torch
        from underdraw.distributed.drawer import Drawer

        return Drawer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
