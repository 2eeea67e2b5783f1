"""Partitions of an axis: bounds, owners and limits on halo widths."""

from __future__ import annotations

import pytest

from halox.decomposition import AxisPartition


@pytest.mark.parametrize("n", [1, 2, 7, 12, 13])
def test_parts_cover_the_axis_once_in_order_and_evenly(n: int) -> None:
    for parts in range(1, n + 1):
        axis = AxisPartition.even(n, parts, periodic=False)
        ranges = [range(*axis.owned(part)) for part in range(parts)]
        assert [cell for cells in ranges for cell in cells] == list(range(n))
        sizes = [len(cells) for cells in ranges]
        assert sizes == sorted(sizes, reverse=True)
        assert max(sizes) - min(sizes) <= 1
        assert axis.sizes == tuple(sizes) and axis.parts == parts


def test_an_axis_that_does_not_exchange_has_no_limits() -> None:
    assert AxisPartition.even(3, 1, periodic=False).width_limits() == (None, None)
