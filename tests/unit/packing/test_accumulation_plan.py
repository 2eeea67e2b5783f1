"""Additions by an indexed type: one copy per regular run of its list, and every element added once."""

from __future__ import annotations

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing.device import Endpoint, _additions
from halox.runtime.arrays import Described

STEADY = np.concatenate([np.arange(0, 3000, 3), 50_000 - np.arange(0, 4000, 5)])
WALK = np.random.default_rng(1).permutation(5000)[:700]
TRIANGLE = dt.indexed(np.arange(90, 0, -1), np.arange(90) * 91, "f8")
TYPES = {
    "one stretch up, one down": (dt.indexed_block(1, STEADY, "f8"), 1, 2),
    "the same, twice": (dt.resized(dt.indexed_block(1, STEADY, "f8"), 0, 1 << 20), 2, 2),
    "in no order": (dt.indexed_block(1, WALK, "f8"), 1, 700),
    "no two alike": (TRIANGLE, 1, 90),
    "the same place again and again": (dt.indexed_block(1, [7] * 80 + [9, 3], "f8"), 1, 2),
}


def elements(side):
    """Return the addresses of a side's 8-byte elements, in order."""
    blocks = side.strided
    starts = blocks.offsets() + side.pointer
    return (starts[:, None] + np.arange(0, blocks.block_bytes, 8)).reshape(-1)


@pytest.mark.parametrize("name", TYPES)
def test_every_element_once_and_in_few_copies(name):
    datatype, count, most = TYPES[name]
    array = Described(1 << 20, (1,), (8,), np.dtype("f8"), 0, True)
    copies = _additions(Endpoint(array, datatype, count), 64)
    assert len(copies) <= most
    source = np.concatenate([elements(copy.source) for copy in copies])
    target = np.concatenate([elements(copy.target) for copy in copies])
    blocks = datatype.blocks(count)
    expected = (1 << 20) + np.concatenate(
        [np.arange(o, o + n, 8) for o, n in zip(blocks.offsets, blocks.lengths, strict=True)]
    )
    assert sorted(source) == list(range(64, 64 + datatype.size * count, 8))
    assert (target[np.argsort(source)] == expected).all()
    for place in np.unique(target):
        assert (np.diff(source[target == place]) > 0).all(), "added in the order of the message"
