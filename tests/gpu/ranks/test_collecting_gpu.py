"""Plans, fields and grids of GPUs that are collected at instructions which differ between ranks, on every path."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from tests.gpu.ranks.paths import COPIES, WAYS, along
from tests.mpi.test_collecting import few_are_kept, go_on
from tests.mpi.ways import Way
from tests.support import require

require("gpu")

import cupy  # noqa: E402

__all__ = ["few_are_kept"]

pytestmark = pytest.mark.gpu


@pytest.mark.ranks(2)
@along([*WAYS, *COPIES])
@pytest.mark.parametrize("modules", ["runtime", ""], ids=["runtime", "all"])
def test_ranks_go_on(
    modules: str, way: Way, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_PATH", way.path)
    go_on(comm, modules, "gpu", cupy)
