"""One process or many: the little that a trainer must know about it. Many go through accelerate.

Start many with `accelerate launch -m underdraw.training.drafter ...`; without it there is one process.
"""

from __future__ import annotations

import contextlib
import os
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from underdraw.errors import UnsupportedError


class Devices:
    """This process among its siblings."""

    def __init__(self, *, alone: bool = False) -> None:
        self._accelerator: Any = None
        if not alone and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            try:
                from accelerate import Accelerator
            except ImportError:
                raise UnsupportedError(
                    "training in several processes needs accelerate; pip install 'underdraw[train]'."
                ) from None
            self._accelerator = Accelerator()

    @property
    def index(self) -> int:
        return self._accelerator.process_index if self._accelerator else 0

    @property
    def main(self) -> bool:
        """Is this the process that writes files and shows progress?"""
        return self.index == 0

    @property
    def device(self) -> str | None:
        """The device of this process, where there are many."""
        return str(self._accelerator.device) if self._accelerator else None

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module with its gradients averaged over all processes."""
        return self._accelerator.prepare(module) if self._accelerator else module

    def synchronised(self, module: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """While gradients accumulate, they travel only with the last part of a step."""
        if self._accelerator is None or last:
            return contextlib.nullcontext()
        return self._accelerator.no_sync(module)

    def backward(self, loss: Tensor) -> None:
        if self._accelerator:
            self._accelerator.backward(loss)
        else:
            loss.backward()

    def agreed(self, flag: bool) -> bool:
        """What the main process says; everybody must do the same thing."""
        if self._accelerator is None:
            return flag
        from accelerate.utils import broadcast_object_list

        said: bool = broadcast_object_list([flag])[0]
        return said

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()
