"""Layouts inferred from the shapes of arrays, beside all readings of a shape."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

import halox
from halox.decomposition import Decomposition, decompose
from halox.domain.layouts import FieldLayouts
from halox.errors import FieldError
from tests.oracle import Case
from tests.strategies import cells
from tests.support import trials
from tests.unit.plans.by_regions import layouts


def places(shape: tuple[int, ...], grid: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the component axes in front, for each place of the grid axes in a shape."""
    ends = range(len(shape) - len(grid) + 1)
    return [shape[:n] for n in ends if shape[n : n + len(grid)] == grid]


@settings(max_examples=trials(200), print_blob=True)
@given(st.integers(1, 8).flatmap(cells), st.booleans())
def test_a_shape_has_one_reading_or_an_error_says_that_it_cannot_tell(
    case: Case, bare: bool
) -> None:
    f = replace(case.fields[0], offsets=())
    layout = layouts(case, f)[0]
    own = layout.decomposition.rank_shape(0)
    padded = tuple(sum(halo) + n for halo, n in zip(f.halo, own, strict=True))
    cut = np.empty(layout.padded_shape, "u1")[layout.interior].shape
    shape = cut if bare else layout.padded_shape
    with_halo, without = places(shape, padded), places(shape, own)
    fitting = with_halo if own == padded else with_halo + without
    event(f"{min(len(fitting), 2)} readings")
    of_grid = FieldLayouts(layout.decomposition, 0, layout.spec.halo, None)
    array = np.empty(shape, "u1")
    if len(fitting) == 1:
        found = of_grid.find(array).spec
        assert found.components_before == fitting[0] and not any(found.staggered)
        assert bool(with_halo) == (found.halo == f.halo) or own == padded
        if not with_halo:
            with pytest.raises(FieldError, match="without their halo"):
                of_grid.find(array, halo=True)
        elif not any(f.staggered) and not bare:
            assert found == layout.spec
    else:
        none = "does not fit the grid|of a staggered field without|is the whole grid's shape"
        text = f"can be read in {len(fitting)} ways" if fitting else none
        with pytest.raises(FieldError, match=text):
            of_grid.find(array)
        if len(with_halo) == 1:
            assert of_grid.find(array, halo=True).spec.components_before == with_halo[0]


def test_the_points_of_a_staggered_field_are_not_read_as_cells_and_halo() -> None:
    with halox.Grid(8, halo=((0, 1),), device="cpu") as grid:
        w, u = grid.ones(staggered=0), grid.ones()
        assert grid.interior(w).shape == u.shape and grid.sum(w) == 9
        with pytest.raises(FieldError, match="give the field itself"):
            grid.sum(grid.interior(w))
        assert grid.sum(u.copy()) == grid.sum(grid.interior(u)) == 8


def test_shapes_without_a_reading_are_refused() -> None:
    domain: Decomposition = decompose((10, 8), 4, periodic=True, proc_shape=(2, 2))
    of_grid = FieldLayouts(domain, 0, ((1, 1), (1, 1)), None)
    # (8, 6) is one cell longer along axis 0, like a staggered field; staggered fields must be declared.
    for shape in [(9, 9), (7,), (), (6, 4), (7, 6, 0), (6, 7), (8, 6), (7, 6, 7, 6)]:
        with pytest.raises(FieldError):
            of_grid.find(np.empty(shape))
    for shape in [(5, 4), (3, 5, 4)]:
        with pytest.raises(FieldError):
            of_grid.find(np.empty(shape), halo=True)
