"""The checks of `ways` on the paths of NumPy arrays; tests/gpu/ranks runs them on the paths of GPU arrays."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.mpi import ways
from tests.mpi.ways import Way

pytestmark = pytest.mark.usually(3)

WAYS = [Way("host", "cpu"), Way("host", "cpu", "rank"), Way("scatter_gather", "cpu")]


@pytest.fixture(params=WAYS, ids=lambda way: way.name)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    monkeypatch.setenv("HALOX_NODE", request.param.node)
    found: Way = request.param
    return found


@pytest.mark.ranks(2, 3, 4)
def test_random_grids(way: Way, comm: MPI.Intracomm) -> None:
    ways.random_grids(way, comm, 6)


@pytest.mark.ranks(2, 3)
def test_fields_of_many_kinds(way: Way, comm: MPI.Intracomm) -> None:
    ways.fields_of_many_kinds(way, comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", [0, 2])
def test_large_faces(way: Way, axis: int, comm: MPI.Intracomm) -> None:
    ways.large_faces(way, comm, axis, 200)


@pytest.mark.ranks(2, 3)
def test_two_plans_under_way(way: Way, comm: MPI.Intracomm) -> None:
    ways.work_in_between(way, comm)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
@pytest.mark.parametrize("pair", ways.TYPE_PAIRS)
@pytest.mark.part(2)
def test_typed_messages(way: Way, pair: str, one_way: bool, comm: MPI.Intracomm) -> None:
    ways.typed_messages(way, comm, pair, one_way)


@pytest.mark.ranks(2, 3)
def test_one_way_runs_ahead(way: Way, comm: MPI.Intracomm) -> None:
    ways.one_way_runs_ahead(way, comm, steps=30)
