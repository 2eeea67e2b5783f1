"""Selection of the cases of the suite of packers."""

from __future__ import annotations

import pytest

SUITE = "tests/unit/packing/test_packers.py::TestPackers"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave about three of five cases of the suite to the whole matrix.

    Each backend meets each alignment and each number of blocks, and each type two to four backends. Cases are numbered
    within a test, and 5 divides none of the numbers of values (2, 4, 7 and 9), so that values mix.
    """
    for item in items:
        if item.nodeid.startswith(SUITE) and len(item.callspec.indices) > 2:
            backend, case, *_ = item.callspec.indices.values()
            if (backend + case) % 5 > 1:
                item.add_marker(pytest.mark.full)
