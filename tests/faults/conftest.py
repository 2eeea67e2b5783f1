"""Fixtures of the fault tests."""

from __future__ import annotations

import pytest

from tests.faults.matrix import Theatre
from tests.faults.table import Row
from tests.support import require


@pytest.fixture(scope="module")
def theatre(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Theatre:
    """Stories on two ranks: a survivor and the victim of the fault."""
    require("mpi")
    return Theatre(selected(request, "theatre"), tmp_path_factory.mktemp("faults"))


def selected(request: pytest.FixtureRequest, fixture: str) -> list[Row]:
    """Rows of this module's selected tests that use a fixture."""
    return [
        item.callspec.params["row"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and fixture in item.fixturenames
    ]
