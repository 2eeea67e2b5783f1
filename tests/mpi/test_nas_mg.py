"""The multigrid mini-app gives the result of one rank, however many of its levels are divided."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
from mpi4py import MPI

from apps.nas_mg import options
from apps.nas_mg.benchmark import Solver, run_benchmark
from apps.nas_mg.classes import CLASSES, FIRST_NORMS
from apps.nas_mg.hierarchy import Hierarchy, finest_grid
from tests.mpi.conftest import agree
from tests.support import full

pytestmark = [pytest.mark.ranks(2, 4, 8), pytest.mark.geometry]


def settings(ranks: int, **others: object) -> options.Settings:
    words = {"problem": "S", "passes": 1, "graph": False, "device": "cpu", "check": "all"}
    words |= {"gather": 4, "reproducible": False, **others}
    return options.settings(Namespace(**words), ranks)


def solved(comm: MPI.Intracomm, gather: int) -> tuple[list[float], np.ndarray | None, list[int]]:
    """Solve class S; return the norm after each iteration, the last residual on rank 0, and the gathered levels."""
    found = settings(comm.size, gather=gather, reproducible=True)
    with (
        finest_grid(found.problem.points, found.proc_shape, comm, "cpu") as grid,
        Hierarchy(grid, gather) as hierarchy,
    ):
        solver = Solver(hierarchy, found)
        solver.start()
        solver.first_residual()
        norms = []
        for _ in range(found.problem.iterations):
            solver.iterate()
            norms.append(solver.norm())
        # All ranks hold the same values of a gathered level.
        whole = [level for level in hierarchy.levels if level.is_whole]
        for level in whole:
            first = comm.bcast(level.u)
            assert agree(np.array_equal(level.u, first), comm)
        residual = grid.gather(hierarchy.levels[-1].r)
        return norms, residual, [level.number for level in whole]


@pytest.mark.parametrize(
    ("gather", "levels"),
    [
        (0, [1]),
        (4, [1, 2]),
        *full((2, [1]), (8, [1, 2, 3]), (1000, [1, 2, 3, 4])),
    ],
)
def test_same_result_however_divided(gather: int, levels: list[int], comm: MPI.Intracomm) -> None:
    norms, residual, gathered = solved(comm, gather)
    assert gathered == levels
    assert norms == pytest.approx(FIRST_NORMS["S"], rel=1e-11)
    assert CLASSES["S"].is_verified(norms[-1])
    same = (residual is not None) == (comm.rank == 0)
    if residual is not None:  # residuals and their reproducible norms have the bits of one rank
        norms_alone, residual_alone, _ = solved(MPI.COMM_SELF, gather)
        same &= norms == norms_alone and np.array_equal(residual, residual_alone)
    assert agree(same, comm)


@pytest.mark.parametrize("name", ["S", *full("W", "A")])
def test_figures(name: str, comm: MPI.Intracomm) -> None:
    found = settings(comm.size, problem=name, gather=options.GATHER)
    figures = comm.bcast(run_benchmark(found, comm, lambda *_: None))
    assert figures["verified"] is True and figures["relative_error"] <= 1e-8
    assert figures["checks"] == {"official_norm": True, "norms_of_first_iterations": True}
    assert figures["norm"] == pytest.approx(figures["norms"][-1], rel=1e-12)
    assert figures["process_grid"] == list(options.process_grid(comm.size))
    assert figures["gathered_levels"] == [1, 2, 3, 4]
    if (name, comm.size) == ("S", 2):
        # Each rank, with 16 x 32 x 32 points of the finest level, sends two planes of 32 x 32 points with their ghosts,
        # since the neighbour sends the corners on. Along y and x, each rank is its own neighbour.
        plane = 34 * 34 * 8
        # The finest level exchanges u once and r twice; level 4 is gathered from blocks of 8 x 16 x 16.
        assert figures["exchanged_bytes_an_iteration"] == 2 * (3 * 2 * plane + 8 * 16 * 16 * 8)


@pytest.mark.usually(4)
def test_the_picture_shows_the_plane_and_the_ranks_that_have_it(comm: MPI.Intracomm) -> None:
    found = settings(comm.size, check="none", png="a.png")
    figures = run_benchmark(found, comm, lambda *_: None)
    picture = comm.bcast(figures and figures["picture"])
    procs = options.process_grid(comm.size)
    assert [len(sizes) for sizes in picture["blocks"]] == [procs[2], procs[1]]
    assert [sum(sizes) for sizes in picture["blocks"]] == [32, 32]
    assert set(picture["ranks"]) == {(i, j) for i in range(procs[2]) for j in range(procs[1])}
    first = comm.size // procs[0] * (procs[0] // 2)  # first rank of the upper half along z
    assert min(picture["ranks"].values()) == first
    # The solution has a peak at each charge in the plane.
    assert picture["values"].shape == (32, 32)
    assert picture["values"][4, 27] > 0.05 and picture["values"][17, 25] < -0.05
