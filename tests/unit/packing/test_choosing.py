"""The packers that ``method="auto"`` chooses, and their reasons."""

from __future__ import annotations

import numpy as np
import pytest

from halox import datatypes as dt
from halox.errors import DatatypeError
from halox.packing.choosing import choose, device_packer


def scattered(n: int) -> dt.Datatype:
    places = np.cumsum(np.random.default_rng(1).integers(2, 9, n))
    return dt.indexed_block(1, places, "f8")


def test_regular_types_are_strided():
    assert choose(dt.subarray((9, 9, 9), (7, 7, 1), (1, 1, 8), "f8"), 1).method == "strided"
    item = dt.struct([1, 1], [0, 1000], [dt.vector(5, 1, 2, "f4"), dt.vector(7, 2, 3, "f8")])
    assert choose(item, 100).method == "strided"


def test_lists_are_listed():
    assert choose(scattered(500), 3).method == "workunits"
    triangle = dt.indexed(range(8192, 0, -1), range(0, 8192 * 8193, 8193), "f8")
    assert triangle.elements > 1 << 24 and choose(triangle, 1).method == "workunits"


def test_lists_that_would_outgrow_the_data_are_walked():
    nested = dt.hvector(1 << 10, 1, 1 << 30, dt.hvector(1 << 6, 1, 1 << 20, scattered(500)))
    choice = choose(nested, 1)
    assert choice.method == "traversal" and str(500 << 16) in choice.reason


@pytest.mark.parametrize(
    ("rows", "row", "method"), [(32, 1 << 16, "copy_engine"), (32, 1 << 12, "strided")]
)
def test_long_blocks_go_to_host_memory_by_the_copy_engine(rows, row, method):
    datatype = dt.hvector(rows, 1, 2 * row, dt.contiguous(row, "u1"))
    assert choose(datatype, 8, to_host=True).method == method
    assert choose(datatype, 8).method == "strided"


@pytest.mark.parametrize("method", ["cuda", "strided"])
def test_methods_that_do_not_exist_or_do_not_take_the_type(method):
    with pytest.raises(DatatypeError):
        device_packer(method, scattered(500), 1, 0)
