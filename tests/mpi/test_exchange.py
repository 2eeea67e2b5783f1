"""Random fields: every halo cell holds the value of its point, and nothing else has changed."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from tests.limits import read_in_place
from tests.mpi.conftest import PART, agree
from tests.oracle import (
    NUMERIC,
    Case,
    Field,
    check_adjoint,
    check_exchanges,
    check_overlap,
    check_stale_halos,
)
from tests.strategies import cells, checkerboards, folds, on_ranks, some_axes, walls
from tests.support import trials

pytestmark = [pytest.mark.geometry, pytest.mark.filterwarnings("ignore:boundary:UserWarning")]

random_cases = partial(on_ranks, part=PART)
WIDE = pytest.mark.usually(1, 2, 3)
CHECKERBOARDS = pytest.mark.usually(1, 3, 4)


@random_cases(cells, trials(75))
def test_cells(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm)


@random_cases(partial(cells, dtypes=NUMERIC), trials(30) // 2)
def test_cells_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


@WIDE
@random_cases(partial(cells, wide=True), trials(40) // 2)
def test_wide_halos(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm)


@WIDE
@random_cases(partial(cells, dtypes=NUMERIC, wide=True), trials(40) // 4)
def test_wide_halos_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


@CHECKERBOARDS
@random_cases(checkerboards, trials(32))
def test_checkerboards(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm)


@CHECKERBOARDS
@random_cases(partial(checkerboards, dtypes=NUMERIC), trials(32) // 2)
def test_checkerboards_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


@WIDE
@random_cases(partial(checkerboards, wide=True), trials(40) // 2)
def test_wide_checkerboards(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm)


@WIDE
@random_cases(partial(checkerboards, dtypes=NUMERIC, wide=True), trials(40) // 4)
def test_wide_checkerboards_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


@random_cases(partial(walls, whole=False), trials(60))
def test_walls(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm)


@random_cases(partial(walls, linear=True, whole=False), trials(60))
def test_walls_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


@random_cases(folds, trials(60) * 2 // 3)
def test_folds(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(case, comm)


@random_cases(folds, trials(30) // 2)
def test_folds_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


def any_fields(ranks: int) -> st.SearchStrategy[Case]:
    return st.one_of(cells(ranks), walls(ranks, whole=False), folds(ranks), checkerboards(ranks))


def along_some_axes(ranks: int) -> st.SearchStrategy[Case]:
    return some_axes(st.one_of(any_fields(ranks), cells(ranks, wide=True)))


@random_cases(along_some_axes, trials(120))
def test_some_axes(case: Case, comm: MPI.Intracomm) -> None:
    """Only the halos along these axes are filled, with the corners in these halos alone."""
    check_exchanges(case, comm)


def test_axes_by_name_and_number_are_one_plan(comm: MPI.Intracomm) -> None:
    """A rank may give the name, and another the number; other axes on other ranks are an error."""
    with halox.Grid((4, 4 * comm.size), proc_shape=(1, comm.size), comm=comm, device="cpu") as grid:
        u = grid.ones()
        for turn in range(3):
            grid.exchange(u, axes=1 if (comm.rank + turn) % 2 else ["y"])
        assert len(grid._plans.cache) == 1
        with pytest.raises(MismatchError if comm.size > 1 else FieldError, match="axes"):
            grid.exchange(u, axes=(0, 1) if comm.rank else 0 if comm.size > 1 else "z")
        u = grid.zeros()
        grid.interior(u)[...] = 1
        grid.exchange(u, axes="y")
        ends = [grid.at_end("y", "low"), False, grid.at_end("y", "high")]
        assert agree(u[2, [0, 1, -1]].tolist() == [float(not end) for end in ends], comm)


@random_cases(
    lambda ranks: some_axes(
        st.one_of(
            cells(ranks, NUMERIC),
            walls(ranks, linear=True, whole=False),
            folds(ranks),
            checkerboards(ranks, NUMERIC),
        )
    ),
    trials(60),
)
def test_some_axes_accumulated(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(case, comm)


@random_cases(
    lambda ranks: st.tuples(
        any_fields(ranks) | some_axes(any_fields(ranks)), st.sampled_from([None, 0, 1, 2, 3])
    ),
    trials(120),
)
def test_overlap(case: tuple[Case, int | None], comm: MPI.Intracomm) -> None:
    """Regions of an overlapped exchange: also beside walls, folds, and halos of other fields."""
    check_overlap(*case, comm)


@pytest.mark.usually(1, 2, 4)
@random_cases(
    lambda ranks: st.one_of(cells(ranks), walls(ranks, whole=False), checkerboards(ranks)),
    trials(60),
    part=2,
)
def test_stale_halos(case: Case, comm: MPI.Intracomm) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALOX_DEBUG_HALO", "1")
        check_stale_halos(case, comm)


def test_some_are_read_in_place(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The low limit of the tests with random grids does make plans read messages in place."""
    read_in_place(monkeypatch)
    with halox.Grid((4 * comm.size, 6), proc_shape=(comm.size, 1), comm=comm, device="cpu") as grid:
        rows = grid.explain(grid.zeros("f4")).rows
        assert {row.protocol for row in rows if row.peer != comm.rank} == (
            {"direct"} if comm.size > 1 else set()
        )


@pytest.mark.usually(3)
@pytest.mark.parametrize("corners", [False, True])
def test_large_faces_of_short_runs(corners: bool, comm: MPI.Intracomm) -> None:
    """Faces of 40 000 runs of 8 bytes: halox cuts their copies into blocks, and interleaves the blocks."""
    f = Field(np.dtype("f8"), ((1, 1), (1, 1), (2, 1)))
    blocks = ((200,), (203,), (6,) * comm.size)
    check_exchanges(Case(blocks, (True, False, True), [f], corners), comm)


@WIDE
@pytest.mark.parametrize("staggered", [False, True])
def test_every_rank_has_the_whole_grid(staggered: bool, comm: MPI.Intracomm) -> None:
    """Each rank owns one row, and its halo holds all rows, on both sides."""
    n = comm.size
    f = Field(np.dtype("f8"), ((n, n), (3, 3)), staggered=(staggered, False))
    check_exchanges(Case(((1,) * n, (3,)), (True, True), [f]), comm)
    with halox.Grid((n, 3), halo=(n, 3), periodic=True, comm=comm, device="cpu") as grid:
        ones = grid.full(1, "i8")
        grid.accumulate(ones)
        # A cell has copies in both halos of each block along both axes, and its own place.
        assert agree(bool((grid.interior(ones) == (2 * n + 1) * 3).all()), comm)
        assert grid.sum(ones) == ones.size * n


@pytest.mark.usually(2)
@pytest.mark.parametrize("call", ["exchange", "accumulate", "plan"])
def test_fields_that_share_memory_are_refused(call: str, comm: MPI.Intracomm) -> None:
    """A phase or a sign would come into their common halo twice."""
    options: Any = {"periodic": True, "boundary": (("phase", -1), None)}
    with halox.Grid((4 * comm.size, 6), comm=comm, device="cpu", **options) as grid:
        u, v = grid.ones(), grid.ones()
        more = np.zeros((2 * len(u), u.shape[1]))
        halves, shifted = (more[::2], more[1::2]), more[1 : 1 + len(u)]
        exchange = getattr(grid, call)
        exchange(*halves)
        for fields in ((u, u), (u, v, u[:]), (u, u.view()), (halves[0], shifted), (v, u, v)):
            with pytest.raises(FieldError, match="share memory"):
                exchange(*fields)
        assert (grid.interior(u) == 1).all()


def test_interleaved_fields_are_exchanged(comm: MPI.Intracomm) -> None:
    """Views of a larger array that have no element in common, at first and by a plan of other arrays."""
    with halox.Grid((4 * comm.size, 6), periodic=True, comm=comm, device="cpu") as grid:
        whole = (np.arange(4 * comm.size)[:, None] + 10 * np.arange(6))[..., None] + [100, 200, 300]
        padded = np.pad(whole, ((1, 1), (1, 1), (0, 0)), mode="wrap")
        mine = padded[tuple(slice(cut.start, cut.stop + 2) for cut in grid.owned)]
        right = []
        for turn in range(3):
            w = np.zeros((*grid.padded_shape, 3))
            w[1:-1, 1:-1] = mine[1:-1, 1:-1]
            if turn == 2:
                plan = grid.plan(w[..., 2], w[..., 0])
                plan(w[..., 1], w[..., 0])
            grid.exchange(w[..., 0], w[..., 1], w[..., 2])
            right.append(np.array_equal(w, mine))
        assert agree(all(right), comm)
