"""A rank dies, stops, raises or makes a different call, on each path between GPUs; tests/faults covers host arrays."""

from __future__ import annotations

import pytest

from tests.faults.calls import GPU_PATHS, PEER_PATHS
from tests.faults.conftest import selected
from tests.faults.matrix import Theatre, check
from tests.faults.table import Row, rows
from tests.support import require

require("gpu")
require("mpi")

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    return Theatre(selected(request, "theatre"), tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("row", rows((*GPU_PATHS, *PEER_PATHS)), ids=lambda row: row.name)
def test_a_rank(row: Row, theatre: Theatre) -> None:
    told = theatre[row]
    reasons = [one["unprepared"] for one in told.ranks if one and "unprepared" in one]
    # Only the staged path runs everywhere. Other paths need one GPU per rank with peer access, or a GPU-aware MPI.
    if reasons and reasons[0].startswith("PathError") and not row.path.startswith("staged"):
        pytest.skip(reasons[0])
    check(row, told)
