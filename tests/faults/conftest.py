"""What the tests of faults share."""

from __future__ import annotations

import pytest

from tests.faults.matrix import Theatre
from tests.faults.table import Row
from tests.support import require


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    require("mpi")
    return Theatre(selected(request), tmp_path_factory.mktemp("faults"))


def selected(request: pytest.FixtureRequest) -> list[Row]:
    """Rows of the tests that are to run."""
    found = (getattr(item, "callspec", None) for item in request.session.items)
    return [spec.params["row"] for spec in found if spec is not None and "row" in spec.params]
