"""Halos wider than blocks: exchanges and accumulations over one to four ranks."""

from __future__ import annotations

import os

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import DecompositionError
from tests.mpi import checkerboards
from tests.mpi.conftest import agree
from tests.mpi.reference import (
    DTYPES,
    NUMERIC,
    check_adjoint,
    check_exchanges,
    make_fields,
    random_case,
)
from tests.support import trials

SEED = int(os.environ.get("HALOX_SEED", "20261124"))
CASES = int(os.environ.get("HALOX_GRIDS", trials(40)))

CASES_OF = {"cells": random_case, "checkerboard": checkerboards.random_case}


@pytest.mark.parametrize("kind", CASES_OF)
@pytest.mark.parametrize("number", range(CASES // 2))
def test_random_grid(
    kind: str, number: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are packed in shared memory, read in place, or sent by MPI, in turns."""
    if number % 3 == 1:
        monkeypatch.setattr("halox.paths.host.DIRECT_BYTES", 1)
    if number % 3 == 2:
        monkeypatch.setenv("HALOX_NODE", "rank")
    rng = np.random.default_rng([SEED, comm.size, number])
    case = CASES_OF[kind](rng, comm.size, DTYPES, wide=True)
    with case.grid(comm) as grid:
        wanted = case.expected(grid.coords)
        fields = make_fields(grid, case, [w.before for w in wanted])
        check_exchanges(grid, fields, wanted, (SEED, case), rounds=2)
        plan = grid.plan(*fields)

        def in_two_halves() -> None:
            plan.start()
            plan.finish()

        check_exchanges(grid, fields, wanted, (SEED, case), in_two_halves, rounds=2)
        peers = [row.peer for row in plan.explain().rows if row.direction == "receive"]
        assert agree(len(peers) == len(set(peers)), comm)  # one message per peer


@pytest.mark.parametrize("kind", CASES_OF)
@pytest.mark.parametrize("number", range(CASES // 4))
def test_accumulate_is_the_transpose(kind: str, number: int, comm: MPI.Intracomm) -> None:
    """<E u, v> = <u, E^T v> over all stored cells of all ranks, exactly, since all values are small integers."""
    rng = np.random.default_rng([SEED, 7, comm.size, number])
    case = CASES_OF[kind](rng, comm.size, NUMERIC, wide=True)
    with case.grid(comm) as grid:
        check_adjoint(
            grid, case, np.random.default_rng([SEED, number, comm.rank]), (SEED, number, case)
        )


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("staggered", [(), (0,)])
def test_every_rank_has_the_whole_grid(
    periodic: bool, staggered: tuple[int, ...], comm: MPI.Intracomm
) -> None:
    """Each rank owns one row, and its halo holds all rows, on both sides."""
    n = comm.size
    options = {"periodic": (periodic, True), "proc_shape": (n, 1), "comm": comm, "device": "cpu"}
    with halox.Grid((n, 3), halo=((n, n), (3, 3)), **options) as grid:
        u = grid.full(-1.0, staggered=staggered)
        extra = len(staggered)
        shape = (n + (extra if not periodic else 0), 3)
        whole = np.arange(float(np.prod(shape))).reshape(shape)
        grid.interior(u)[...] = whole[grid.layout(u).owned]
        before = u.copy()
        rows = (n, n + (extra if periodic else 0))
        along = {"mode": "wrap"} if periodic else {"constant_values": -1.0}
        padded = np.pad(np.pad(whole, (rows, (0, 0)), **along), ((0, 0), (3, 3)), mode="wrap")
        row = grid.owned[0].start
        for array in (u, before.copy(), before.copy(), u):  # also arrays that share one plan
            array[...] = before
            grid.exchange(array)
            assert agree(np.array_equal(array, padded[row : row + len(array)]), comm)


def test_sums_of_an_accumulation_count_every_copy(comm: MPI.Intracomm) -> None:
    """With halos of the whole grid, each cell is on 2 n + 1 places: its own, and two halos of each of n blocks."""
    n = comm.size
    with halox.Grid(n, halo=n, periodic=True, comm=comm, device="cpu") as grid:
        u = grid.full(1, "i8")
        grid.accumulate(u)
        halo = np.delete(u, n)
        assert agree(bool(u[n] == 2 * n + 1 and not halo.any()), comm)


def test_a_halo_of_a_field_beyond_the_period_is_an_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    with halox.Grid((comm.size, 2), periodic=True, comm=comm, device="cpu") as grid:
        text = rf"widths of {comm.size} or less along axis 0, the extent of this periodic axis"
        with pytest.raises(DecompositionError, match=text):
            grid.zeros(halo=((comm.size + 1, 0), (2, 2)))
        u = grid.zeros(halo=((comm.size, 0), (2, 2)))
        grid.exchange(u)
