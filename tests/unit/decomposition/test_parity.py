"""Boxes of cells of one parity, against a check of every cell; grids cut only between pairs of cells."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox.decomposition import AxisPartition, FieldLayout, FieldSpec, decompose
from halox.decomposition.field_regions import exchange_regions
from halox.decomposition.parity import parity_boxes
from halox.errors import DecompositionError
from tests.support import trials


def cells_of(box, parity: str) -> list[tuple[int, ...]]:
    steps = box.steps or (1,) * len(box.starts)
    axes = [
        range(start, start + step * size, step)
        for start, size, step in zip(box.starts, box.subsizes, steps, strict=True)
    ]
    found = []
    for *others, pair in product(*axes):
        last = 2 * pair + (sum(others) + (parity == "odd")) % 2
        found.append((*others, last))
    return found


@st.composite
def boxes_of_cells(draw):
    """First cells, extents, and an even shift of a box, with up to four axes."""
    axes = draw(st.lists(st.tuples(st.integers(-6, 6), st.integers(0, 5)), min_size=1, max_size=4))
    return *zip(*axes, strict=True), tuple(2 * draw(st.integers(-5, 5)) for _ in axes)


@settings(max_examples=trials(200), print_blob=True)
@given(boxes_of_cells(), st.sampled_from(["even", "odd"]))
def test_boxes_hold_each_cell_once(box, parity: str) -> None:
    starts, sizes, away = box
    boxes = list(parity_boxes(parity, starts, sizes))
    held = [cell for box in boxes for cell in cells_of(box, parity)]
    axes = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    wanted = [cell for cell in product(*axes) if sum(cell) % 2 == (parity == "odd")]
    assert sorted(held) == sorted(wanted)
    assert len(boxes) <= 1 + 2 * 2 ** max(len(starts) - 2, 0)
    # The peer's box is shifted by even numbers of cells: it has the same boxes in the same order.
    other = list(parity_boxes(parity, [a + b for a, b in zip(starts, away, strict=True)], sizes))
    shift = (*away[:-1], away[-1] // 2)
    assert [replace(b, starts=tuple(np.subtract(b.starts, shift))) for b in other] == boxes


@pytest.mark.parametrize("parts", range(1, 7))
def test_axes_are_cut_between_units(parts: int) -> None:
    axis = AxisPartition.even(26, parts, periodic=True, unit=2)
    assert all(bound % 2 == 0 for bound in axis.bounds)
    assert max(axis.sizes) - min(axis.sizes) in (0, 2)


def test_process_grid_of_a_checkerboard() -> None:
    """An axis of two pairs has two blocks at most."""
    assert decompose((64, 4), 4, checkerboard=True).rank_shape(0) == (16, 4)
    with pytest.raises(DecompositionError):
        decompose((64, 4), 4, proc_shape=(1, 4), checkerboard=True)
    assert decompose((64, 4), 4, proc_shape=(1, 4)).rank_shape(0) == (64, 1)
    with pytest.raises(DecompositionError):
        decompose((4, 8), 2, blocks=[None, (3, 5)], checkerboard=True)


def test_the_face_of_the_documentation() -> None:
    """A low halo of three layers: one packed index in all rows, and one more in every second row."""
    domain = decompose((4, 8), 1, periodic=True, checkerboard=True)
    layout = FieldLayout(domain, 0, FieldSpec(((0, 0), (3, 3)), parity="even"))
    assert layout.padded_shape == (4, 8)
    low = [region for region in exchange_regions(layout) if region.direction == (0, -1)]
    boxes = [region.recv for region in low]
    assert [box.slices for box in boxes if box is not None] == [
        (slice(0, 4, 1), slice(1, 2, 1)),
        (slice(1, 4, 2), slice(0, 1, 1)),
    ]
