"""The Fourier mini-app on any division of its grid: the official checksums, and the result of one rank."""

from __future__ import annotations

from argparse import Namespace

import numpy as np
import pytest
from mpi4py import MPI

import halox
from apps import memory
from apps.nas_ft import benchmark, options
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.solver import Solver
from tests.mpi.conftest import agree
from tests.support import full

pytestmark = [pytest.mark.geometry, pytest.mark.ranks(2, 3, 4, 6, 8)]


def settings(name: str, decomposition: str, ranks: int) -> options.Settings:
    words = Namespace(
        problem=name, decomposition=decomposition, passes=1, graph=False, device="cpu"
    )
    return options.settings(words, ranks)


def solved(
    name: str, decomposition: str, comm: MPI.Intracomm
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Solve a class; return its checksums, and on rank 0 the whole initial field and the whole final field."""
    found = settings(name, decomposition, comm.size)
    with (
        benchmark.problem_grid(found, comm) as grid,
        Solver(grid, found.problem) as solver,
    ):
        solver.start()
        first = grid.gather(solver.u)
        solver.forward()
        for _ in range(found.problem.iterations):
            solver.iterate()
        return solver.checksums(), first, grid.gather(solver.u)


@pytest.mark.parametrize("decomposition", ["1d", "2d"])
@pytest.mark.parametrize("name", ["S", *full("W", "A")])
def test_official_checksums_however_divided(
    name: str, decomposition: str, comm: MPI.Intracomm
) -> None:
    found, first, last = solved(name, decomposition, comm)
    problem = CLASSES[name]
    assert max(problem.errors(found)) < 3e-13 and problem.is_verified(found)
    assert agree(np.array_equal(found, comm.bcast(found)), comm)
    same = (first is None) == (comm.rank != 0)
    if first is not None and name == "S":
        _, first_alone, last_alone = solved(name, decomposition, MPI.COMM_SELF)
        same &= np.array_equal(first, first_alone)
        same &= np.allclose(last, last_alone, rtol=1e-12, atol=1e-12)
    assert agree(same, comm)


@pytest.mark.parametrize("decomposition", ["1d", "2d"])
def test_figures(decomposition: str, comm: MPI.Intracomm) -> None:
    found = benchmark.run_benchmark(settings("S", decomposition, comm.size), comm, lambda *_: None)
    assert (found is not None) == (comm.rank == 0)
    ok = found is None or (
        found["verified"] is True
        and found["ranks"] == np.prod(found["process_grid"]) == comm.size
        and (decomposition == "2d" or found["process_grid"][1] == 1)
        and len(found["checksums"]) == 6
    )
    assert agree(ok, comm)


@pytest.mark.ranks(2, 3)
def test_missing_memory_of_one_rank_is_an_error_on_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 1 << 20 if comm.rank == comm.size - 1 else 1 << 40
    monkeypatch.setattr(memory, "host_free_bytes", lambda: free)
    with pytest.raises(halox.HaloxError, match="--class"):
        benchmark.run_benchmark(settings("C", "auto", comm.size), comm, lambda *_: None)
