"""Halos wider than blocks: exchanges and accumulations over one to four ranks."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import DecompositionError
from tests.mpi.conftest import agree


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
