"""The token sequence of an image: which tokens are forced, which are codes, and which cell of the grid a step fills.

All knowledge of token ids is here. A *step* counts the tokens of one image from 0: the prologue, then the raster (rows
of cells, each followed by `row_end` in models that have one), then the epilogue. Models that first draw a small version
of the image have its cells, the *preview*, before the raster. A *vocabulary index* numbers what a raster step can be:
the image codes in order and, last, the row end. Everything is integer arithmetic, so it works on Python ints, numpy
arrays and torch tensors alike and imports neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from underdraw.errors import ConfigError, check_counts

MAX_SIDE = 2**10  # cells; far above any model


@dataclass(frozen=True, slots=True)
class Layout:
    """A grid of `height` x `width` codes in raster order."""

    height: int
    width: int
    codes: range
    prologue: tuple[int, ...] = ()
    row_end: int | None = None
    epilogue: tuple[int, ...] = ()
    preview: tuple[int, int] | None = None  # rows and columns of a smaller grid of codes before the raster

    def __post_init__(self) -> None:
        check_counts("a grid of codes", MAX_SIDE, height=self.height, width=self.width)
        if not isinstance(self.codes, range) or self.codes.step != 1 or len(self.codes) < 2 or self.codes.start < 0:
            raise ConfigError(f"codes {self.codes} must be a range of at least 2 consecutive token ids.")
        for name, ids in (("prologue", self.prologue), ("epilogue", self.epilogue)):
            if not isinstance(ids, tuple) or not all(isinstance(i, int) for i in ids):
                raise ConfigError(f"{name} {ids!r} must be a tuple of token ids.")
            if any(i < 0 or i in self.codes for i in ids):
                raise ConfigError(
                    f"{name} {ids} holds a negative id or an image code; forced tokens must lie outside {self.codes}."
                )
        if self.preview is not None:
            is_pair = isinstance(self.preview, tuple) and len(self.preview) == 2
            if not is_pair or self.row_end is not None:
                raise ConfigError(f"a preview of {self.preview!r} codes must be (rows, columns), and has no row ends.")
            check_counts("a preview", MAX_SIDE, rows=self.preview[0], columns=self.preview[1])
        if self.row_end is not None and (
            not isinstance(self.row_end, int) or self.row_end < 0 or self.row_end in self.codes
        ):
            raise ConfigError(f"row_end {self.row_end} must be a token id outside the image codes {self.codes}.")

    @property
    def row_stride(self) -> int:
        """Steps from a cell to the cell below it."""
        return self.width + (self.row_end is not None)

    @property
    def start(self) -> int:
        """Step of the first code, which is the preview's where there is one."""
        return len(self.prologue)

    @property
    def grid_start(self) -> int:
        """Step of the first cell of the grid."""
        return self.start + (0 if self.preview is None else self.preview[0] * self.preview[1])

    @property
    def stop(self) -> int:
        """One past the step of the last cell. All later tokens are forced, so decoding ends here."""
        return self.grid_start + self.row_stride * (self.height - 1) + self.width

    @property
    def steps(self) -> int:
        """Number of tokens of the image, forced ones included."""
        return self.grid_start + self.row_stride * self.height + len(self.epilogue)

    @property
    def stops(self) -> Any:
        """`stop`, for arithmetic with tensors of images: where their sizes differ, one number for each."""
        return self.stop

    def host_stops(self, images: int) -> list[int]:
        """`stop` of each of so many images."""
        return [self.stop] * images

    @property
    def strides(self) -> Any:
        """`row_stride`, in the same way."""
        return self.row_stride

    @property
    def max_stride(self) -> int:
        """The largest `row_stride` of all images."""
        return self.row_stride

    @property
    def cells(self) -> int:
        return self.height * self.width

    @property
    def vocab_size(self) -> int:
        """Number of vocabulary indices: the codes, and the row end if there is one."""
        return len(self.codes) + (self.row_end is not None)

    def cell(self, step: int) -> tuple[int, int] | None:
        """(row, column) of the cell that `step` fills, or None for a forced token or a cell of the preview."""
        row, col = divmod(step - self.grid_start, self.row_stride)
        inside = step >= self.grid_start and row < self.height and col < self.width
        return (row, col) if inside else None

    def step(self, row: int, col: int) -> int:
        """The step that fills cell (row, col)."""
        if not (0 <= row < self.height and 0 <= col < self.width):
            raise ConfigError(f"cell ({row}, {col}) lies outside the {self.height} x {self.width} grid.")
        return self.grid_start + row * self.row_stride + col

    def is_row_end(self, steps: Any) -> Any:
        """True where the token of a raster step is the row end. Elementwise."""
        start, _, width, stride = self._grid_of(steps)
        return (steps - start) % stride >= width

    def rows_cols(self, steps: Any) -> tuple[Any, Any]:
        """Row and column of raster steps, elementwise; a row end is in column `width`, and a preview counts alone."""
        start, _, _, stride = self._grid_of(steps)
        return (steps - start) // stride, (steps - start) % stride

    def _grid_of(self, steps: Any) -> tuple[Any, Any, Any, Any]:
        """First step, height, width and row stride of the grid that each step belongs to, elementwise."""
        if self.preview is None:
            return self.start, self.height, self.width, self.row_stride
        is_preview, (height, width) = steps < self.grid_start, self.preview
        columns = self.width + is_preview * (width - self.width)
        return (
            self.grid_start + is_preview * (self.start - self.grid_start),
            self.height + is_preview * (height - self.height),
            columns,
            columns,
        )

    def grid_origin(self, steps: Any) -> Any:
        """Position of the first cell of each step's grid where a grid takes up only its longer side. Elementwise.

        Counted from step 0, as models with positions on three axes do (M-RoPE).
        """
        origin = self.start + (steps < self.start) * (steps - self.start)  # a prologue token has its own position
        return origin if self.preview is None else origin + (steps >= self.grid_start) * max(self.preview)

    def token_ids(self, indices: Any) -> Any:
        """Token ids of vocabulary indices, elementwise."""
        ids = indices + self.codes.start
        if self.row_end is None:
            return ids
        return ids + (indices == len(self.codes)) * (self.row_end - self.codes.stop)

    def vocab_indices(self, tokens: Any) -> Any:
        """Vocabulary indices of token ids, elementwise: the inverse of `token_ids`."""
        indices = tokens - self.codes.start
        if self.row_end is None:
            return indices
        return indices + (tokens == self.row_end) * (self.codes.stop - self.row_end)

    def neighbour(self, steps: Any, rows: int, cols: int) -> tuple[Any, Any]:
        """Step of the cell `rows` below and `cols` right of each step, and whether the grid has it. Elementwise."""
        start, height, width, stride = self._grid_of(steps)
        row, col = (steps - start) // stride + rows, (steps - start) % stride + cols
        inside = (row >= 0) & (row < height) & (col >= 0) & (col < width)
        return start + row * stride + col, inside

    def grid(self, tokens: Any) -> Any:
        """The code grid (..., height, width) of whole sequences (..., steps) of tokens (numpy or torch)."""
        if tokens.shape[-1] != self.steps:
            raise ConfigError(f"{tokens.shape[-1]} tokens are not one image; this layout has {self.steps}.")
        raster = tokens[..., self.grid_start : self.grid_start + self.row_stride * self.height]
        rows = raster.reshape(*raster.shape[:-1], self.height, self.row_stride)
        return rows[..., : self.width] - self.codes.start
