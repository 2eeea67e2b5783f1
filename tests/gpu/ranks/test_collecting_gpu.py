"""Garbage collection of plans, fields and grids on GPUs in the middle of calls, on every path."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

import halox
from tests.gpu.ranks.paths import COPIES, WAYS, along
from tests.mpi.test_collecting import few_are_kept, go_on
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

__all__ = ["few_are_kept"]

pytestmark = pytest.mark.gpu


def copy(grid: halox.Grid, field: Any) -> Any:
    """A copy in memory that halox allocated, which every path can use."""
    found = grid.empty_like(field)
    found[...] = field
    return found


@pytest.mark.ranks(2)
@along([*WAYS, *COPIES])
def test_ranks_go_on(way: Way, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_PATH", way.path)
    go_on(comm, "gpu", copy)


@pytest.mark.ranks(2)
def test_ranks_go_on_with_arrays_of_their_own(comm: MPI.Intracomm) -> None:
    go_on(comm, "gpu")
