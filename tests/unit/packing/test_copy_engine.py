"""Boxes of the copy engine: how many copies move a datatype, and one block list to another; NumPy executes the copies.

The suite compares the bytes that the packer's calls move.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.datatypes import Datatype
from halox.errors import DatatypeError
from halox.packing.common_blocks import BlockColumns, common_blocks
from halox.packing.copy_boxes import CopyBox, PreparedCopies, boxes_of
from halox.packing.copy_engine import MOST_COPIES, CopyEnginePacker, plan
from halox.runtime.gpu.copies import MAX_PITCH
from tests.datatype_strategies import MOST_SPAN, build, recipes
from tests.fakes.fake_driver import CAPTURED, STREAM, fake_driver
from tests.packers import GUARD, coded, displacements
from tests.support import require, trials

ORIGIN = 4 * MOST_SPAN
"""Index of displacement 0 in the memory of random types."""


def perform(boxes: list[CopyBox], source: np.ndarray, target: np.ndarray, origin: int) -> int:
    """Execute copies from ``source``, after a check that the driver accepts them; returns the bytes moved."""
    moved = 0
    for box in boxes:
        sides = (box.source_pitch, box.source_slice), (box.target_pitch, box.target_slice)
        for pitch, step in sides:
            assert box.height == 1 or box.width <= pitch <= MAX_PITCH
            assert box.depth == 1 or (step % pitch == 0 and step >= box.height * pitch)
        shape = box.depth, box.height, box.width
        assert min(shape) > 0
        at, to = (
            np.ndarray(shape, "u1", memory.data, start, (step, pitch, 1))
            for memory, start, (pitch, step) in zip(
                (source, target), (origin + box.source, box.target), sides, strict=True
            )
        )
        to[...] = at
        moved += to.size
    return moved


def check(datatype: Datatype, count: int = 1) -> tuple[int, int]:
    """Pack by a plan and compare with NumPy's indexing; return the numbers of boxes and of contiguous copies."""
    boxes = plan(datatype, count)
    array, nbytes = coded(2 * ORIGIN), datatype.size * count
    packed = np.full(nbytes, GUARD, np.uint8)
    assert perform(boxes, array, packed, ORIGIN) == nbytes
    np.testing.assert_array_equal(packed, array[ORIGIN + displacements(datatype, count)])
    return numbers(boxes)


def numbers(boxes: list[CopyBox]) -> tuple[int, int]:
    rows = sum(box.height > 1 for box in boxes)
    return rows, len(boxes) - rows


ROWS = dt.vector(9, 1, 2, "f8")


@pytest.mark.parametrize(
    ("datatype", "copies"),
    [
        (dt.contiguous(100, "f8"), (0, 1)),
        (dt.contiguous(0, "f8"), (0, 0)),
        (dt.vector(10, 2, 5, "f8"), (1, 0)),
        (dt.subarray((5, 6, 7), (3, 4, 5), (1, 1, 1), "f4"), (1, 0)),
        (dt.subarray((5, 6, 7), (3, 4, 5), (1, 1, 1), "f4", "F"), (1, 0)),
        # Items are a level more.
        (dt.contiguous(7, dt.resized(dt.vector(4, 1, 2, "f8"), 0, 640)), (1, 0)),
        # Four levels: the outermost level becomes separate copies.
        (dt.subarray((3, 9, 6, 7), (2, 8, 4, 5), (0, 0, 1, 1), "f4"), (2, 0)),
        # The distance of slices is not a multiple of the row pitch.
        (dt.hvector(3, 1, 101, dt.vector(4, 1, 2, "f8")), (3, 0)),
        (dt.hvector(9, 1, 8, dt.vector(4, 1, 9, "f8")), (9, 0)),
        # Negative, zero and overlapping strides.
        (dt.hvector(10, 1, -16, "f8"), (0, 10)),
        (dt.hvector(10, 1, 0, "f8"), (0, 10)),
        (dt.hvector(4, 1, -200, dt.vector(10, 1, 2, "f8")), (4, 0)),
        # Lists.
        (dt.indexed([1, 3, 1], [0, 4, 9], "f8"), (0, 3)),
        (dt.struct([1, 3], [0, 4000], [ROWS, "i2"]), (1, 1)),
        # Adjacent in memory, but not in the packed bytes.
        (dt.hindexed([1, 1, 1], [0, 1, 0], "i1"), (0, 2)),
    ],
    ids=lambda value: value.describe()[:50] if isinstance(value, Datatype) else None,
)
def test_number_of_copies(datatype, copies):
    assert check(datatype) == copies


def test_bounds():
    widest = [plan(dt.hvector(3, 1, pitch, "f8")) for pitch in (MAX_PITCH, MAX_PITCH + 1)]
    assert [*map(numbers, widest)] == [(1, 0), (0, 3)]
    # The distance of slices may exceed the largest pitch.
    (box,) = plan(dt.hvector(3, 1, 2**33, dt.hvector(2, 1, 2**30, "u1")))
    assert (box.height, box.depth, box.source_slice // box.source_pitch) == (2, 3, 8)
    places, lengths = np.arange(MOST_COPIES + 1) * 5, np.arange(MOST_COPIES + 1) % 2 + 1
    for taken, refused in (
        (dt.hvector(MOST_COPIES, 1, -2, "u1"), dt.hvector(MOST_COPIES + 1, 1, -2, "u1")),
        (dt.hindexed(lengths[1:], places[1:], "u1"), dt.hindexed(lengths, places, "u1")),
    ):
        assert len(plan(taken)) == MOST_COPIES and CopyEnginePacker.why_not(taken, 1) is None
        assert f"{MOST_COPIES + 1} blocks" in str(CopyEnginePacker.why_not(refused, 1))
        with pytest.raises(DatatypeError):
            CopyEnginePacker(refused, 1, 0)
    assert "blocks" in str(CopyEnginePacker.why_not(dt.vector(10**9, 1, 2, "f8"), 64))


def listed(datatype: Datatype, origin: int, count: int = 1, parts: int = 1) -> Any:
    """List the blocks of a datatype, as if each of ``parts`` equal parts of the list were in a separate array."""
    blocks = datatype.blocks(count)
    arrays = np.arange(blocks.lengths.size) * parts // blocks.lengths.size
    return BlockColumns(blocks.offsets + origin, blocks.lengths, arrays)


@given(recipe=recipes(), other=recipes(), count=st.integers(1, 3), cut=st.floats(0, 0.999))
@settings(max_examples=trials(200), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_pairs(recipe: Any, other: Any, count: int, cut: float) -> None:
    """Copy from any layout to any other one of as many bytes: items of a second type, then single bytes."""
    one, two = build(recipe), build(other)
    assume(one.size and two.size and one.size * count // two.size <= 8)
    times, rest = divmod(one.size * count, two.size)
    parts = [dt.contiguous(times, two), dt.contiguous(rest, "u1")]
    into = dt.struct([1, 1], [0, 2 * MOST_SPAN], parts)
    assume(not into.overlaps(1))
    source, wanted = coded(2 * ORIGIN), np.full(2 * ORIGIN, GUARD, np.uint8)
    wanted[ORIGIN + displacements(into)] = source[ORIGIN + displacements(one, count)]
    half = int(into.size * cut)
    blocks = common_blocks(listed(one, ORIGIN, count), listed(into, ORIGIN), half)
    ends = np.cumsum(blocks.lengths)
    assert not half or half in ends
    first = int(np.searchsorted(ends, half, "right"))
    found = np.full(2 * ORIGIN, GUARD, np.uint8)
    for which, nbytes in ((slice(first), half), (slice(first, None), into.size - half)):
        boxes = boxes_of(blocks.some(which))
        assert perform(boxes, source, found, 0) == nbytes
    np.testing.assert_array_equal(found, wanted)


FACE = dt.subarray((6, 7, 8), (4, 5, 1), (1, 1, 0), "f8")
OTHER_FACE = dt.subarray((6, 7, 8), (4, 5, 1), (1, 1, 7), "f8")


BOX = dt.subarray((5, 6, 7), (3, 4, 5), (1, 1, 1), "f4")


@pytest.mark.parametrize("stream", [STREAM, CAPTURED, 0])
def test_calls_of_the_driver(stream):
    require("cxx")
    require("nvrtc")  # the bindings belong to the same package
    with fake_driver() as fake:
        for source, target, counts in [
            (FACE, OTHER_FACE, (0, 0, 1)),
            (BOX, dt.contiguous(60, "f4"), (0, 0, 1)),
            (dt.vector(10, 1, 2, "f8"), dt.vector(10, 1, 3, "f8"), (0, 1, 0)),
            (dt.contiguous(9, "f8"), dt.contiguous(9, "f8"), (1, 0, 0)),
            (dt.indexed([1, 3, 1], [0, 4, 9], "f8"), dt.contiguous(5, "f8"), (3, 0, 0)),
        ]:
            a, b, out = coded(4000), np.zeros(4000, np.uint8), np.zeros(source.size, np.uint8)
            blocks = common_blocks(listed(source, a.ctypes.data), listed(target, b.ctypes.data))
            PreparedCopies(boxes_of(blocks), 0).launch(stream)
            assert fake.counts() == counts
            packed, wanted = a[displacements(source)], np.zeros(4000, np.uint8)
            wanted[displacements(target)] = packed
            np.testing.assert_array_equal(b, wanted)
            packer = CopyEnginePacker(source, 1, 0)
            packer.pack(a.ctypes.data, out.ctypes.data, stream)
            assert fake.counts() == counts and packer.calls == sum(counts)
            assert fake["last_stream"] == stream
            np.testing.assert_array_equal(out, packed)
