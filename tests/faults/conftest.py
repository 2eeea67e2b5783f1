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
    # Stories mostly wait, so that three jobs at once keep two cores busy.
    rows, folder = selected(request, "theatre"), tmp_path_factory.mktemp("faults")
    return Theatre(rows, folder, at_once=3, most=15)


def selected(request: pytest.FixtureRequest, fixture: str) -> list[Row]:
    """Rows of this module's selected tests that use a fixture."""
    return [
        item.callspec.params["row"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and fixture in item.fixturenames
    ]
