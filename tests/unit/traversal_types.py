"""Datatypes of every constructor, for tests of the traversal packer on the CPU and on a GPU."""

from __future__ import annotations

import numpy as np

from halox import datatypes as dt

HALF = 1 << 17
"""Bytes on either side of displacement 0 in the arrays of the tests."""

RNG = np.random.default_rng(7)
LINE = dt.vector(3, 1, 2, "f4")
LIST = dt.indexed([1, 2, 4], [0, 5, -9], "f8")
TYPES = {
    "primitive": dt.primitive("f8"),
    "contiguous": dt.contiguous(1000, "f8"),
    "contiguous of list": dt.contiguous(50, LIST),
    "vector": dt.vector(200, 3, 5, "f4"),
    "vector backwards": dt.vector(200, 3, -5, "f4"),
    "vector of list": dt.vector(4, 2, 3, LIST),
    "hvector": dt.hvector(200, 3, 13, "f4"),
    "hvector of list": dt.hvector(4, 2, 1000, LIST),
    "subarray": dt.subarray((12, 13, 14), (9, 8, 7), (1, 2, 3), "f8"),
    "subarray F": dt.subarray((12, 13, 14), (9, 8, 7), (1, 2, 3), "f4", order="F"),
    "subarray of list": dt.subarray((4, 5), (2, 3), (1, 1), LIST),
    "subarray of list F": dt.subarray((4, 5), (2, 3), (1, 1), LIST, order="F"),
    "nine axes": dt.subarray((3,) * 9, (2,) * 9, (0,) * 9, "u1"),
    "indexed": dt.indexed(RNG.integers(0, 9, 500), np.arange(500) * 20, "f4"),
    "hindexed": dt.hindexed(RNG.integers(0, 9, 500), np.arange(500) * 37, "f4"),
    "indexed over vector": dt.indexed([3, 1, 5], [0, 7, 20], dt.vector(3, 1, 2, "i2")),
    "indexed_block": dt.indexed_block(3, RNG.permutation(900)[:600] * 4, "f8"),
    "hindexed_block": dt.hindexed_block(3, RNG.integers(-20000, 20000, 1000), "u1"),
    "indexed_block over list": dt.indexed_block(2, [0, 9, 4], LIST),
    "struct": dt.struct([1, 2, 3], [0, 40, 400], [LIST, LINE, "i1"]),
    "struct of structs": dt.struct(
        [2, 1],
        [0, 2000],
        [
            dt.struct([1, 30], [0, 300], [LIST, LINE]),
            dt.struct([20, 3], [0, 9000], [LINE, dt.indexed([9, 70], [1, 50], "f4")]),
        ],
    ),
    "many branches": dt.struct(
        [1] * 500,
        RNG.permutation(500) * 200,
        [dt.vector(2 + i % 40, 1, 2, "u1") for i in range(500)],
    ),
    "more records than fit": dt.struct(
        [1] * 400, RNG.permutation(400) * 300, [dt.hvector(2, 1, 2 + i, "u1") for i in range(400)]
    ),
    "structured dtype": dt.as_datatype(
        np.dtype([("a", "u1"), ("b", "f8", (3,)), ("c", [("x", "f4"), ("y", "i2")])], align=True)
    ),
    "negative extent": dt.contiguous(4, dt.resized(LIST, 0, -160)),
    "zero lengths": dt.indexed([0, 2, 0, 3, 0], [5, 0, 1, 9, 2], "f4"),
    "nothing": dt.indexed([0, 0], [1, 2], "f4"),
    "empty children": dt.struct([1, 1, 2], [0, 8, 64], [dt.contiguous(0, "f8"), LIST, LINE]),
    "overlapping": dt.indexed([4, 4, 3], [0, 2, 1], "f8"),
    "resized": dt.resized(LIST, -8, 24),
    "dup": dt.dup(dt.dup(LIST)),
    "stride 0": dt.hvector(5, 1, 0, LIST),
}


def items(*counts: int) -> list[tuple[str, int]]:
    """Return names of types with numbers of items, without those that the arrays of the tests cannot hold."""
    return [
        (name, count)
        for name, datatype in TYPES.items()
        for count in counts
        if abs(datatype.extent) * count < HALF
    ]
