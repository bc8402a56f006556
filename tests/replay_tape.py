"""A CPU's stand-in for a CUDA graph: records the operations of a pass and replays them on the same memory.

Like a CUDA graph, a tape repeats the device's work and none of the host's: values that the host has read, shapes that
it has chosen and tensors that it has reassigned stay those of the capture. So a pass that replays correctly from a tape
handles the host's part as a CUDA graph needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

# Operations that make the host wait for the device, which a capture does not allow.
SYNCHRONISING = (
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "equal",
    "allclose",
)


def storage_addresses(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)}


class Tape(TorchDispatchMode):
    """Runs a pass once and records its operations."""

    def __init__(self, work: Callable[[], Tensor]) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []  # function, arguments, and results to overwrite
        with self:
            self.out = work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if name in SYNCHRONISING:
            raise AssertionError(f"{func.name()} waits for the device inside a captured pass")
        result = func(*args, **(kwargs or {}))
        inputs = storage_addresses((args, kwargs))
        # Views need no replay, and in-place operations are replayed by calling them again.
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        allocates = any(leaf.untyped_storage().data_ptr() not in inputs for leaf in outputs)
        writes = any(
            argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments
        )
        if allocates or writes:
            self.calls.append((func, args, kwargs or {}, outputs if allocates and not writes else []))
        return result

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls:
            results = [leaf for leaf in tree_flatten(func(*args, **kwargs))[0] if isinstance(leaf, Tensor)]
            for old, new in zip(outputs, results, strict=False):
                assert old.shape == new.shape, f"{func.name()} gave {new.shape} where {old.shape} was captured"
                old.copy_(new)
