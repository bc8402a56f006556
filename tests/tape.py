"""A CPU's stand-in for a CUDA graph: work is recorded as the operations it made and replayed on the same memory.

Like a graph, a tape repeats what the device did and nothing that the host did: a value that the host has read, a shape
that it has chosen or a tensor that it has put in another's place stay as they were. So what holds for tapes on a CPU
holds for graphs, as far as the host is concerned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

WAITING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "_unique2", "equal", "allclose")


def storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)}


class Tape(TorchDispatchMode):
    """Does the work once and remembers how."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        with self:
            self.out = work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in WAITING:
            raise AssertionError(f"{func.name()} waits for the device inside a captured pass")
        result = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        # A view needs no second look, and work in place is done again by calling it again.
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        fresh = [leaf for leaf in made if leaf.untyped_storage().data_ptr() not in given]
        writes = any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        )
        if fresh or writes:
            self.calls.append((func, args, kwargs or {}, made if fresh and not writes else []))
        return result

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = [leaf for leaf in tree_flatten(func(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
            for old, new in zip(made, again, strict=False):
                assert old.shape == new.shape, f"{func.name()} gave {new.shape} where {old.shape} was captured"
                old.copy_(new)
