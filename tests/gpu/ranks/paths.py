"""The paths between GPUs for parametrized tests, and the reasons why a path is unavailable on a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox.errors import PathError
from tests.mpi.ways import Way

PEER = [Way("peer/ll"), Way("peer/staging"), Way("peer/direct")]
NCCL = [Way("nccl"), Way("nccl", node="rank")]
BY_HOST = [Way("ipc"), Way("staged"), Way("staged", node="rank"), Way("cuda_aware")]
CAPTURED = PEER + NCCL
WAYS = CAPTURED + BY_HOST
COPIES = [Way("scatter_gather/copy_engine")]

_known: dict[Way, str | None] = {}


def possible_paths(
    grid: halox.Grid, comm: MPI.Intracomm, paths: Sequence[str]
) -> dict[str, str | None]:
    """Return for each path the reason why a field of this grid cannot use it, or None; collective."""
    u = grid.zeros("f8")
    found: dict[str, str | None] = {}
    for path in paths:
        try:
            grid.plan(u, path=path).close()
            found[path] = None
        except PathError as error:
            found[path] = str(error)
    assert comm.allgather(found) == [found] * comm.size, "the ranks differ in what they can have"
    return found


def why_not(way: Way, comm: MPI.Intracomm) -> str | None:
    """Return the reason why these ranks cannot use a way, or None. The caller must have set HALOX_NODE to its node."""
    if way not in _known:
        wanted = [w for w in (*WAYS, *COPIES) if w.node == way.node]
        shape, procs = (8 * comm.size, 8, 8), (comm.size, 1, 1)
        with halox.Grid(shape, periodic=True, proc_shape=procs, comm=comm, device="gpu") as grid:
            found = possible_paths(grid, comm, [w.path for w in wanted])
        _known.update({w: found[w.path] for w in wanted})
    return _known[way]


@pytest.fixture
def way(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Way]:
    """The path of a test. Skips if it is unavailable; test_paths_gpu.py tests which paths must be available."""
    found: Way = request.param
    monkeypatch.setenv("HALOX_NODE", found.node)
    monkeypatch.delenv("HALOX_PATH", raising=False)
    reason = why_not(found, comm)
    if reason is not None:
        pytest.skip(reason)
    yield found


@contextmanager
def mappable_arrays(comm: MPI.Intracomm) -> Iterator[Callable[[int, str], Any]]:
    """Yield a function that allocates arrays that other ranks can map."""
    with halox.Grid((comm.size,), halo=0, comm=comm, device="gpu") as grid:

        def make(n: int, dtype: str) -> Any:
            found: Any = grid.zeros(dtype, components=(n,)).reshape(n)
            return found

        yield make


def along(ways: Sequence[Way]) -> pytest.MarkDecorator:
    """Run a test on each of these paths."""
    return pytest.mark.parametrize("way", ways, ids=lambda way: way.name, indirect=True)
