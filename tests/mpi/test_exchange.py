"""Random grids: every halo cell holds the neighbour's value, and nothing else has changed."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError
from tests.limits import read_in_place
from tests.mpi.conftest import agree
from tests.mpi.reference import (
    DTYPES,
    NUMERIC,
    Case,
    Field,
    check_adjoint,
    check_exchanges,
    make_fields,
    random_case,
    same_bytes,
)
from tests.support import trials

pytestmark = pytest.mark.geometry

SEED = int(os.environ.get("HALOX_SEED", "20261120"))
CASES = int(os.environ.get("HALOX_GRIDS", trials(60)))


@pytest.mark.parametrize("number", range(CASES))
def test_random_grid(number: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if number % 2:  # read in place, as on large grids
        read_in_place(monkeypatch)
    rng = np.random.default_rng([SEED, comm.size, number])
    case = random_case(rng, comm.size, DTYPES)
    with case.grid(comm) as grid:
        wanted = case.expected(grid.coords)
        fields = make_fields(grid, case, [w.before for w in wanted])
        poisoned = [not w.filled.any() or not same_bytes(w.before, w.after) for w in wanted]
        assert agree(all(poisoned), comm), (SEED, case, poisoned)
        assert agree(
            all(u.shape == w.before.shape for u, w in zip(fields, wanted, strict=True)), comm
        )
        check_exchanges(grid, fields, wanted, (SEED, case))


def test_some_are_read_in_place(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The low limit of the tests with random grids does make plans read messages in place."""
    read_in_place(monkeypatch)
    with halox.Grid((4 * comm.size, 6), proc_shape=(comm.size, 1), comm=comm, device="cpu") as grid:
        rows = grid.explain(grid.zeros("f4")).rows
        assert {row.protocol for row in rows if row.peer != comm.rank} == (
            {"direct"} if comm.size > 1 else set()
        )


@pytest.mark.parametrize("number", range(CASES // 2))
def test_accumulate_is_the_transpose(number: int, comm: MPI.Intracomm) -> None:
    """<E u, v> = <u, E^T v> over all stored cells of all ranks, exactly, since all values are small integers."""
    rng = np.random.default_rng([SEED, 7, comm.size, number])
    case = random_case(rng, comm.size, NUMERIC)
    mine = np.random.default_rng([SEED, number, comm.rank])
    with case.grid(comm) as grid:
        check_adjoint(grid, case, mine, (SEED, case))


@pytest.mark.parametrize("number", range(CASES // 4))
def test_without_shared_memory(
    number: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each rank as a separate node, all messages use MPI requests."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    rng = np.random.default_rng([SEED, 11, comm.size, number])
    case = random_case(rng, comm.size, DTYPES)
    with case.grid(comm) as grid:
        wanted = case.expected(grid.coords)
        fields = make_fields(grid, case, [w.before for w in wanted])
        ways = {row.protocol for row in grid.explain(*fields).rows}
        assert ways <= {"copy", "mpi"}
        check_exchanges(grid, fields, wanted, (SEED, case), rounds=2)


@pytest.mark.parametrize("corners", [False, True])
def test_large_faces_of_short_runs(corners: bool, comm: MPI.Intracomm) -> None:
    """Faces of 40 000 runs of 8 bytes: halox cuts their copies into blocks, and interleaves the blocks."""
    ones = ((1, 1), (1, 1), (2, 1))
    shape, procs = (200, 203, 6 * comm.size), (1, 1, comm.size)
    f = Field(np.dtype("f8"), ones, (), (), (False,) * 3, False)
    case = Case(shape, procs, (True, False, True), ones, corners, [f])
    with case.grid(comm) as grid:
        wanted = case.expected(grid.coords)
        check_exchanges(grid, make_fields(grid, case, [wanted[0].before]), wanted, case)


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
