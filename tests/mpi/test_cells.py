"""Cells by global indices, compared with one array of the whole grid."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import FieldError
from tests.mpi.bad_input import raised_by_all
from tests.mpi.conftest import PART, agree
from tests.oracle import Case, allocated
from tests.strategies import cells, folds, on_ranks
from tests.support import trials

pytestmark = pytest.mark.geometry


@st.composite
def ranges(draw: st.DrawFn, ranks: int) -> tuple[Case, tuple[slice, ...]]:
    """A field of integers, and a slice of its points along each axis, with numbers as in Python."""
    case = draw(cells(ranks, ["i8"]) | cells(ranks, ["i8"], wide=True) | folds(ranks, ["i8"]))
    cuts = []
    for n, wraps, is_so in zip(case.shape, case.periodic, case.fields[0].staggered, strict=True):
        points = n + (is_so and not wraps)
        start = draw(st.integers(0, points - 1))
        stop = draw(st.integers(start + 1, points))
        low = draw(st.sampled_from([start, start - points, *([None] if start == 0 else [])]))
        high = draw(st.sampled_from([stop, None, 2 * stop] if stop == points else [stop - points]))
        cuts.append(slice(low, high))
    return case, tuple(cuts)


@on_ranks(ranges, trials(80), part=PART)
def test_random_ranges(drawn: tuple[Case, tuple[slice, ...]], comm: MPI.Intracomm) -> None:
    """Only the points of the range are set, each by its owner, in any field."""
    case, cuts = drawn
    f = case.fields[0]
    with case.grid(comm) as grid:
        u = case.make(grid)[0]
        u[...] = 0
        here = grid.cells.of(u)[cuts]
        u[here] += 1
        whole = grid.gather(u)
        is_inside = bool(u.sum() == u[grid.layout(u).interior].sum())
        size = np.prod(here.shape, dtype=int) * np.prod(f.before + f.after, dtype=int)
    assert is_inside and u.sum() == u[here].size == size
    if whole is not None:
        expected = np.zeros_like(whole)
        expected[(slice(None),) * len(f.before) + cuts] = 1
        assert np.array_equal(whole, expected)


@pytest.mark.parametrize("allocation", ["C", "F", "turned", "backwards", "part"])
def test_differences_of_a_part(allocation: str, comm: MPI.Intracomm) -> None:
    """A staggered scheme on arrays of one shape, each part with its range, as on one array."""
    shape = (2 * comm.size + 1, 9, 4)
    p, q = np.random.default_rng(5).random((2, *shape, 3))
    with halox.Grid(shape, comm=comm, device="cpu") as grid:
        fields = []
        for whole in (p, q):
            like = grid.zeros(components=(..., 3))
            u = grid.declare(allocated(grid, like, allocation), components=(..., 3))
            grid.interior(u)[...] = whole[grid.owned]
            fields.append(u)
        u, v = fields
        for _ in range(3):
            grid.exchange(u)
            here = grid.cells[:-1, 1:, ...]
            v[here] += u[here.shifted(1, 0, 0)] - u[here.shifted(0, -1, 0)]
            grid.exchange(v)
            here = grid.cells[1:, :-1]
            u[here] += v[here] - v[here.shifted(-1, 1, 0)]
            q[:-1, 1:] += p[1:, 1:] - p[:-1, :-1]
            p[1:, :-1] += q[1:, :-1] - q[:-1, 1:]
        right = [
            np.array_equal(grid.interior(one), whole[grid.owned]) for one, whole in ((u, p), (v, q))
        ]
        assert agree(all(right), comm)


def test_a_plane_of_one_rank(comm: MPI.Intracomm) -> None:
    """Other ranks get an empty box, which can be shifted anywhere, and is an argument of kernels."""
    with halox.Grid((2 * comm.size, 6), halo=((0, 1), (1, 0)), comm=comm, device="cpu") as grid:
        first = grid.cells[:1, -1:]
        owns = grid.owned[0].start == 0 and grid.owned[1].stop == 6
        assert all(first.shape) == owns and first.start[0] == 0
        assert all(isinstance(n, np.int32) for n in (*first.start, *first.shape))
        u = grid.zeros()
        u[first.shifted(1, 0)] = 1
        assert grid.sum(u) == 1 and (owns or first.shifted(99, 0) == first)


BAD: dict[str, Any] = {
    "outside the grid": (slice(99, None), slice(None)),
    "empty": (slice(3, 2), slice(None)),
    "a negative step": (slice(None, None, -1), slice(None)),
    "a step": (slice(None, None, 2), slice(None)),
    "a slice too many": (slice(2),) * 3,
    "a slice too many beside an ellipsis": (slice(2), ..., slice(2), slice(2)),
    "a number": (1, slice(None)),
    "floats": (slice(0.5, 2.0), slice(None)),
    "a mask": np.ones((4, 6), bool),
    "two ellipses": (..., ..., slice(2)),
}


@pytest.mark.usually(2)
@pytest.mark.parametrize("name", BAD)
def test_bad_ranges(name: str, comm: MPI.Intracomm) -> None:
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu") as grid:
        error = raised_by_all(comm, FieldError, "grid.cells", lambda: grid.cells[BAD[name]])
        assert "region" in str(error)
        raised_by_all(comm, FieldError, "does not fit", lambda: grid.cells.of(np.zeros(3)))
