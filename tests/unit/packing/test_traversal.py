"""The traversal packer's algorithm: trees, words, prefix sums and records; the suite compares the bytes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.packing.strided_plan import divisor
from halox.packing.traversal_plan import NODE, NODES, TABLE
from halox.packing.traversal_tree import simplified
from tests.fakes.cpu_packers import cpu_backend, traversal_library
from tests.packers import HALF, check
from tests.support import trials

LIST = dt.indexed([1, 2], [0, 3], "f8")


@pytest.fixture(scope="module")
def backend():
    with cpu_backend("traversal") as made:
        yield made


@st.composite
def branching(draw):
    """Draw structs of structs and lists, which are rare among random types."""
    types = [
        dt.primitive("i4"),
        dt.vector(3, 2, 5, "i2"),
        dt.indexed([2, 1, 5], [0, 9, 3], "i4"),
    ]
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.lists(st.sampled_from(range(len(types))), min_size=2, max_size=5))
        olds = [types[i] for i in chosen]
        gaps = draw(st.lists(st.sampled_from([0, 4, 20]), min_size=len(olds), max_size=len(olds)))
        starts = np.cumsum([3 * old.extent + gap for old, gap in zip(olds, gaps, strict=True)])
        lengths = [draw(st.integers(0, 3)) for _ in olds]
        made = dt.struct(lengths, starts - starts[0], olds)
        types += [made, dt.vector(2, 1, 2, made)]
    small = [one for one in types if one.size and abs(one.ub) + abs(one.lb) < HALF // 4]
    return small[-1 - draw(st.integers(0, min(2, len(small) - 1)))]


@settings(max_examples=trials(200), deadline=None)
@given(branching(), st.sampled_from([1, 3]), st.sampled_from([0, 1, 2, 4, 8, 12]), st.booleans())
def test_random_branches(backend, datatype, count, at, backwards):
    backend.backwards = backwards
    check(backend, datatype, count, at=at)


def test_repetition_and_shared_parts_are_not_expanded():
    datatype = dt.struct([10**9, 10**8], [0, 10**12], [LIST, dt.vector(3, 1, 2, "f4")])
    _, tree = simplified(dt.contiguous(10**3, datatype), 7)
    assert tree.size == 7000 * datatype.size
    datatype = LIST
    for level in range(30):
        datatype = dt.struct([1, 2], [0, 100 * 3**level], [datatype, datatype])
    _, tree = simplified(datatype)
    assert tree.size == 24 * 3**30


def test_the_tables_layout_is_the_kernels():
    """Struct sizes and offsets agree between g++ and NumPy's dtypes."""
    found = list((ctypes.c_ulong * 5).in_dll(traversal_library(()), "layout"))
    offsets = TABLE.fields["node"][1], NODE.fields["children"][1]
    assert found == [NODES, NODE.itemsize, TABLE.itemsize, *offsets]


@given(st.sampled_from([32, 64]), st.data())
@example(32, None)
@example(64, None)
@settings(max_examples=trials(400))
def test_division_by_multiplying(bits, data):
    top = 2 ** (bits - 1) - 1
    pairs = [(2, top), (top, top), (3, top), (2 ** (bits - 2) + 1, top)]
    if data is not None:
        pairs = [(data.draw(st.integers(2, top)), data.draw(st.integers(0, top)))]
    for count, w in pairs:
        magic, shift = divisor(count, bits)
        assert 0 < magic < 2**bits and 0 <= shift < bits
        for word in (w, w - w % count, max(0, w - w % count - 1), top):
            assert (word * magic >> bits) >> shift == word // count
