"""SlotLayout: the layouts of a running batch whose images have different sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from underdraw.layout import Layout


def layout_kind(layout: Layout) -> Hashable:
    """What layouts have in common whose images can share a batch: all but the size of the grid.

    The prologue may name the size, so only its length counts. A layout with a preview is alone.
    """
    if layout.preview is not None:
        return layout
    return layout.codes, layout.row_end, layout.start, layout.epilogue


@dataclass(frozen=True, slots=True, eq=False)
class SlotLayout(Layout):
    """The largest of some layouts, for buffers, with the size of each slot's image in tensors, which passes read.

    Elementwise methods take steps of all slots, (B,) or (B, S).
    """

    sizes: Tensor = field(default_factory=lambda: torch.empty(3, 0))  # (3, B) height, width and stop of each slot
    slot_stops: list[int] = field(default_factory=list)  # the latter on the host
    widest_stride: int = 0

    @classmethod
    def covering(cls, layouts: Sequence[Layout], slots: int, device: torch.device) -> SlotLayout:
        """A layout for images of any size that is not longer and not wider than all of some layouts of one kind."""
        largest = max(layouts, key=lambda layout: layout.steps)
        values = {name.name: getattr(largest, name.name) for name in dataclasses.fields(Layout)}
        layout = cls(
            **values,
            sizes=torch.zeros(3, slots, dtype=torch.int64, device=device),
            slot_stops=[0] * slots,
            widest_stride=max(layout.max_stride for layout in layouts),
        )
        layout.copy_slots(largest, range(slots), range(slots))
        return layout

    def copy_slots(self, source: Layout, source_slots: Sequence[int], slots: Sequence[int]) -> None:
        """Overwrite the sizes of some slots by those of slots of another layout."""
        stops = source.host_stops(max(source_slots) + 1)
        if isinstance(source, SlotLayout):
            self.sizes[:, list(slots)] = source.sizes[:, list(source_slots)]
        else:
            size = torch.tensor([source.height, source.width, source.stop], device=self.sizes.device)
            self.sizes[:, list(slots)] = size[:, None]
        for slot, source_slot in zip(slots, source_slots, strict=True):
            self.slot_stops[slot] = stops[source_slot]

    @property
    def stops(self) -> Any:
        return self.sizes[2]

    def host_stops(self, images: int) -> list[int]:
        return self.slot_stops[:images]

    @property
    def strides(self) -> Any:
        return self.sizes[1] + (self.row_end is not None)

    @property
    def max_stride(self) -> int:
        return self.widest_stride

    def _grid_of(self, steps: Any) -> tuple[Any, Any, Any, Any]:
        height, width, _ = (numbers.view(-1, *[1] * (steps.dim() - 1)) for numbers in self.sizes)
        return self.start, height, width, width + (self.row_end is not None)
