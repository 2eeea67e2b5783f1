"""Every collective call on NumPy arrays with a fault on one rank; tests/gpu covers the paths of GPU arrays.

The other ranks raise an error that names the rank and the call, soon after HALOX_TIMEOUT and not before. They can
exit, and no file stays in shared memory. If the rank is only late, all values are right. If it makes a different call,
all ranks raise an error that names both calls.
"""

from __future__ import annotations

import pytest

from tests.faults.matrix import Theatre, check
from tests.faults.table import Row, rows


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=[pytest.mark.full] if row.is_rare else [])
        for row in rows()
    ],
)
def test_a_rank(row: Row, theatre: Theatre) -> None:
    check(row, theatre[row])
