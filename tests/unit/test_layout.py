"""Layouts: steps, cells, vocabulary indices and token ids, for Python ints, numpy arrays and torch tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from underdraw.errors import ConfigError
from underdraw.layout import Layout

FAST = settings(max_examples=150, deadline=None, derandomize=True)
LUMINA = Layout(48, 48, range(4, 8196), prologue=(8197, 8828, 8828), row_end=8803, epilogue=(8196,))


@st.composite
def layouts(draw: Any) -> Layout:
    """Any layout; forced ids are below or above the codes."""
    first, count = draw(st.integers(10, 50)), draw(st.integers(2, 20))
    outside = st.one_of(st.integers(0, first - 1), st.integers(first + count, first + count + 30))
    forced = st.lists(outside, max_size=4).map(tuple)
    return Layout(
        draw(st.integers(1, 7)), draw(st.integers(1, 7)), range(first, first + count),
        draw(forced), draw(st.none() | outside), draw(forced),
    )  # fmt: skip


def to_tokens(layout: Layout, codes: list[list[int]]) -> list[int]:
    """The token sequence of a code grid, built one token at a time."""
    tokens = list(layout.prologue)
    for row in codes:
        tokens += [layout.codes[code] for code in row]
        if layout.row_end is not None:
            tokens.append(layout.row_end)
    return tokens + list(layout.epilogue)


def example_grid(layout: Layout) -> list[list[int]]:
    return [[(row * 7 + col * 3) % len(layout.codes) for col in range(layout.width)] for row in range(layout.height)]


@FAST
@given(layouts())
def test_lengths(layout: Layout) -> None:
    tokens = to_tokens(layout, example_grid(layout))
    assert layout.steps == len(tokens)
    assert layout.cells == sum(token in layout.codes for token in tokens)
    code_steps = [step for step, token in enumerate(tokens) if token in layout.codes]
    assert (layout.start, layout.stop) == (code_steps[0], code_steps[-1] + 1)
    assert layout.vocab_size == len(layout.codes) + (layout.row_end is not None)


@FAST
@given(layouts())
def test_cell_and_step_are_inverse(layout: Layout) -> None:
    tokens = to_tokens(layout, example_grid(layout))
    cells = []
    for step in range(-3, layout.steps + 3):
        cell = layout.cell(step)
        inside = 0 <= step < layout.steps and tokens[step] in layout.codes
        assert (cell is not None) == inside
        if cell is not None:
            assert layout.step(*cell) == step
            cells.append(cell)
    assert cells == [(row, col) for row in range(layout.height) for col in range(layout.width)], "row by row"


@FAST
@given(layouts())
def test_is_row_end(layout: Layout) -> None:
    tokens = to_tokens(layout, example_grid(layout))
    for step in range(layout.start, layout.start + layout.row_stride * layout.height):
        assert bool(layout.is_row_end(step)) == (tokens[step] not in layout.codes)
        row, col = layout.rows_cols(step)
        assert layout.cell(step) == (None if layout.is_row_end(step) else (row, col))
        if layout.is_row_end(step):
            assert col == layout.width


@FAST
@given(layouts())
def test_token_ids_and_vocab_indices_are_inverse(layout: Layout) -> None:
    ids = [layout.token_ids(index) for index in range(layout.vocab_size)]
    assert ids[: len(layout.codes)] == list(layout.codes)
    assert ids[len(layout.codes) :] == ([] if layout.row_end is None else [layout.row_end])
    assert [layout.vocab_indices(token) for token in ids] == list(range(layout.vocab_size))


@FAST
@given(layouts(), st.integers(-3, 3), st.integers(-3, 3))
def test_neighbour(layout: Layout, rows: int, cols: int) -> None:
    for row in range(layout.height):
        for col in range(layout.width):
            step, inside = layout.neighbour(layout.step(row, col), rows, cols)
            expected = (row + rows, col + cols)
            exists = 0 <= expected[0] < layout.height and 0 <= expected[1] < layout.width
            assert bool(inside) == exists
            if exists:
                assert layout.cell(int(step)) == expected


@FAST
@given(layouts())
def test_grid_is_the_inverse_of_the_token_sequence(layout: Layout) -> None:
    codes = example_grid(layout)
    tokens = to_tokens(layout, codes)
    assert layout.grid(np.array(tokens)).tolist() == codes
    assert layout.grid(torch.tensor([tokens, tokens])).tolist() == [codes, codes]
    assert layout.grid(np.array([[tokens]])).shape == (1, 1, layout.height, layout.width)


@FAST
@given(layouts())
def test_ints_numpy_and_torch_agree(layout: Layout) -> None:
    steps = list(range(layout.start, layout.start + layout.row_stride * layout.height))
    indices = list(range(layout.vocab_size))
    ids = [layout.token_ids(index) for index in indices]
    for make in (np.array, torch.tensor):
        assert layout.is_row_end(make(steps)).tolist() == [bool(layout.is_row_end(step)) for step in steps]
        assert layout.token_ids(make(indices)).tolist() == ids
        assert layout.vocab_indices(make(ids)).tolist() == indices
        rows, cols = layout.rows_cols(make(steps))
        assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == [layout.rows_cols(step) for step in steps]
        neighbours, inside = layout.neighbour(make(steps), -1, 1)
        pairs = [layout.neighbour(step, -1, 1) for step in steps]
        assert neighbours.tolist() == [p for p, _ in pairs]
        assert inside.tolist() == [bool(i) for _, i in pairs]


def test_lumina_lengths() -> None:
    """768 x 768: 2352 raster tokens, 2353 with the end token, 2356 with the header."""
    raster = LUMINA.row_stride * LUMINA.height
    assert (raster, raster + len(LUMINA.epilogue), LUMINA.steps) == (2352, 2353, 2356)
    assert (LUMINA.start, LUMINA.stop, LUMINA.cells, LUMINA.vocab_size) == (3, 2354, 2304, 8193)


def test_lumina_row_ends() -> None:
    """Every 49th raster token is the row end; no other raster token is forced."""
    steps = np.arange(LUMINA.start, LUMINA.start + 2352)
    assert (np.flatnonzero(LUMINA.is_row_end(steps)) + 1).tolist() == list(range(49, 2353, 49))
    assert LUMINA.cell(LUMINA.start + 48) is None
    assert LUMINA.cell(LUMINA.start + 49) == (1, 0)


def test_lumina_ids() -> None:
    assert [LUMINA.token_ids(index) for index in (0, 8191, 8192)] == [4, 8195, 8803]
    assert [LUMINA.vocab_indices(token) for token in (4, 8195, 8803)] == [0, 8191, 8192]


def test_lumina_grid() -> None:
    codes = np.random.default_rng(0).integers(0, 8192, (48, 48))
    tokens = np.array(to_tokens(LUMINA, codes.tolist()))
    assert np.array_equal(LUMINA.grid(tokens), codes)
    assert torch.equal(LUMINA.grid(torch.from_numpy(tokens)), torch.from_numpy(codes))


@pytest.mark.parametrize("row_end", [2, 8196, 9000])
def test_row_end_below_or_above_the_codes(row_end: int) -> None:
    layout = Layout(2, 3, range(4, 8196), row_end=row_end)
    assert layout.vocab_indices(row_end) == 8192
    assert layout.token_ids(torch.tensor([0, 8192, 5])).tolist() == [4, row_end, 9]


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 9), (9, 1), (3, 7), (7, 3)])
def test_non_square_grids(height: int, width: int) -> None:
    layout = Layout(height, width, range(10), row_end=10)
    assert layout.cell(layout.stop - 1) == (height - 1, width - 1)
    assert layout.steps == height * (width + 1)
    assert layout.stop == layout.steps - 1


def test_layouts_are_hashable() -> None:
    assert Layout(2, 3, range(4, 8)) == Layout(2, 3, range(4, 8))
    assert len({Layout(2, 3, range(4, 8)), Layout(2, 3, range(4, 8)), Layout(3, 2, range(4, 8))}) == 2


PREVIEW = Layout(3, 4, range(64), preview=(2, 3), epilogue=(70,))


def test_preview_comes_before_the_grid() -> None:
    """6 cells of the preview, 12 of the grid, the end; only the grid is the image."""
    assert (PREVIEW.start, PREVIEW.grid_start, PREVIEW.stop, PREVIEW.steps) == (0, 6, 18, 19)
    tokens = np.arange(19)
    assert np.array_equal(PREVIEW.grid(tokens), np.arange(6, 18).reshape(3, 4))
    assert PREVIEW.cell(5) is None and PREVIEW.cell(6) == (0, 0) and PREVIEW.step(2, 3) == 17


@pytest.mark.parametrize("kind", ["int", "numpy", "torch"])
def test_neighbours_stay_in_their_grid(kind: str) -> None:
    expected: list[tuple[int, int]] = [*((row, col) for row in range(2) for col in range(3))]
    expected += [(row, col) for row in range(3) for col in range(4)]
    steps: Any = {"int": None, "numpy": np.arange(18), "torch": torch.arange(18)}[kind]
    if steps is None:
        above = [PREVIEW.neighbour(step, -1, 0) for step in range(18)]
        cells = [PREVIEW.rows_cols(step) for step in range(18)]
    else:
        above = list(zip(*(part.tolist() for part in PREVIEW.neighbour(steps, -1, 0)), strict=True))
        cells = list(zip(*(part.tolist() for part in PREVIEW.rows_cols(steps)), strict=True))
    assert cells == expected
    assert [is_inside for _, is_inside in above] == [row > 0 for row, _ in expected]
    assert [step for step, is_inside in above if is_inside] == [0, 1, 2, *range(6, 14)]


def test_grids_take_up_their_longer_side_in_positions() -> None:
    """As M-RoPE counts: the preview of 2 x 3 cells takes 3 positions."""
    assert PREVIEW.grid_origin(np.arange(18)).tolist() == [0] * 6 + [3] * 12
    assert LUMINA.grid_origin(np.arange(5)).tolist() == [0, 1, 2, 3, 3]


def test_preview_excludes_row_ends() -> None:
    with pytest.raises(ConfigError, match="has no row ends"):
        Layout(2, 2, range(8), row_end=9, preview=(1, 1))
