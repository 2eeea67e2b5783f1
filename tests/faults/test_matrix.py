"""Every collective call of NumPy arrays while something happens to a rank; tests/gpu has the paths of GPUs.

The others get an error that names the rank and the call, soon after HALOX_TIMEOUT and not before; they can end; nothing
stays in shared memory. Where a rank is only late, all values are right. Where it makes another call, all ranks say so.
"""

from __future__ import annotations

import pytest

from tests.faults.matrix import Theatre, check
from tests.faults.table import Row, rows

OF_THREE = [row for row in rows() if row.is_quick]


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=row.name, marks=() if row.is_quick else pytest.mark.exhaustive)
        for row in rows()
    ],
)
def test_a_rank(row: Row, theatre: Theatre) -> None:
    check(row, theatre[row])


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", OF_THREE, ids=lambda row: row.name)
def test_a_rank_of_three(row: Row, theatre_of_three: Theatre) -> None:
    check(row, theatre_of_three[row])
