"""Copies from one block list to another, executed by NumPy and by a stand-in driver in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.datatypes import Datatype
from halox.packing.copy_boxes import Blocks, CopyBox, PreparedCopies, boxes_of, common_blocks
from halox.packing.host import HostPacker
from halox.runtime.gpu.copies import MAX_PITCH
from tests.support import require, trials
from tests.unit.datatype_strategies import MOST_SPAN, build, recipes
from tests.unit.fake_driver import CAPTURED, STREAM, fake_driver

ORIGIN = 4 * MOST_SPAN
GUARD = 0xA5


def listed(datatype: Datatype, count: int, origin: int, parts: int = 1) -> tuple[Any, Any, Any]:
    """List the blocks of a datatype, as if each of ``parts`` equal parts of the list had a separate allocation."""
    blocks = datatype.blocks(count)
    numbers = np.arange(blocks.lengths.size) * parts // blocks.lengths.size
    return blocks.offsets + origin, blocks.lengths, numbers


def perform(boxes: list[CopyBox], rest: Blocks, source: np.ndarray, target: np.ndarray) -> None:
    """Execute a plan, after a check that the driver accepts its copies."""
    for box in boxes:
        for pitch, step in (
            (box.source_pitch, box.source_slice),
            (box.target_pitch, box.target_slice),
        ):
            assert box.height == 1 or box.width <= pitch <= MAX_PITCH
            assert box.depth == 1 or (step % pitch == 0 and step >= box.height * pitch)
        to, at = (
            np.ndarray((box.depth, box.height, box.width), "u1", memory.data, start, (*steps, 1))
            for memory, start, steps in (
                (target, box.target, (box.target_slice, box.target_pitch)),
                (source, box.source, (box.source_slice, box.source_pitch)),
            )
        )
        to[...] = at
    for at, to, n in zip(*map(np.ndarray.tolist, rest[:3]), strict=True):
        target[to : to + n] = source[at : at + n]


def pair_of(one: Datatype, other: Datatype, count: int) -> tuple[int, int, Datatype]:
    """Return the bytes of ``count`` items of ``one``, the number n of whole items of ``other`` in them, and a type.

    The type has as many bytes: n items of ``other``, followed by single bytes.
    """
    nbytes = one.size * count
    times, rest = divmod(nbytes, other.size)
    return (
        nbytes,
        times,
        dt.struct(
            [1, 1], [0, 2 * MOST_SPAN], [dt.contiguous(times, other), dt.contiguous(rest, "u1")]
        ),
    )


@given(recipe=recipes(), other=recipes(), count=st.integers(1, 3), most=st.integers(0, 5))
@settings(max_examples=trials(400), deadline=None, suppress_health_check=list(HealthCheck))
def test_random_pairs(recipe: Any, other: Any, count: int, most: int) -> None:
    """Copy between any two layouts; the oracle packs and unpacks with the host packer."""
    one, two = build(recipe), build(other)
    assume(one.size and two.size and one.size * count // two.size <= 8)
    nbytes, _, into = pair_of(one, two, count)
    assume(not into.overlaps(1))
    source = np.random.default_rng(1).integers(0, GUARD, 2 * ORIGIN, np.uint8)
    packed = np.zeros(nbytes, np.uint8)
    HostPacker(source[ORIGIN:], one, count).pack(packed)
    wanted = np.full(2 * ORIGIN, GUARD, np.uint8)
    HostPacker(wanted[ORIGIN:], into, 1).unpack(packed)

    blocks = common_blocks(listed(one, count, ORIGIN), listed(into, 1, ORIGIN))
    assert int(blocks.lengths.sum()) == nbytes and (blocks.lengths > 0).all()
    for boxes, rest in (boxes_of(blocks), boxes_of(blocks, most)):
        found = np.full(2 * ORIGIN, GUARD, np.uint8)
        perform(boxes, rest, source, found)
        np.testing.assert_array_equal(found, wanted)
    assert len([box for box in boxes_of(blocks, most)[0] if box.height > 1]) <= most


FACE = dt.subarray((6, 7, 8), (4, 5, 1), (1, 1, 0), "f8")
OTHER_FACE = dt.subarray((6, 7, 8), (4, 5, 1), (1, 1, 7), "f8")


@pytest.mark.parametrize(
    ("source", "target", "copies"),
    [
        (FACE, OTHER_FACE, (1, 0)),
        (FACE, dt.contiguous(20, "f8"), (1, 0)),
        (dt.contiguous(20, "f8"), dt.contiguous(20, "f8"), (1, 0)),
        (dt.subarray((6, 7, 8), (4, 1, 6), (1, 0, 1), "f8"), dt.vector(4, 6, 100, "f8"), (1, 0)),
        # Rows of six against rows of four: 4, 2, 2, 4, 4, 2, 2, 4.
        (dt.vector(4, 6, 9, "f8"), dt.vector(6, 4, 9, "f8"), (3, 2)),
        (dt.indexed([1, 3, 1], [0, 4, 9], "f8"), dt.contiguous(5, "f8"), (0, 3)),
        # Rows, and a separate block.
        (
            dt.struct([1, 3], [0, 4000], [dt.vector(9, 1, 2, "f8"), "i2"]),
            dt.contiguous(78, "u1"),
            (2, 0),
        ),
        # More slices than the limit on boxes, in one box.
        (dt.hvector(200, 1, 640, dt.vector(5, 1, 2, "f8")), dt.contiguous(1000, "f8"), (1, 0)),
        # Backwards.
        (dt.hvector(10, 1, -16, "f8"), dt.contiguous(10, "f8"), (0, 10)),
    ],
)
def test_number_of_copies(source: Datatype, target: Datatype, copies: tuple[int, int]) -> None:
    blocks = common_blocks(listed(source, 1, 0), listed(target, 1, 0))
    boxes, rest = boxes_of(blocks)
    assert (len(boxes), rest.lengths.size) == copies


@pytest.mark.parametrize(
    ("datatype", "parts", "copies"),
    [
        (dt.vector(10, 1, 2, "f8"), 2, (2, 0)),  # rows
        (dt.hvector(6, 1, 640, dt.vector(5, 1, 2, "f8")), 3, (3, 0)),  # slices
        (dt.contiguous(20, "f8"), 1, (1, 0)),
    ],
)
@pytest.mark.parametrize("at_source", [True, False])
def test_no_copy_reaches_from_one_allocation_to_another(
    datatype: Datatype, parts: int, copies: tuple[int, int], at_source: bool
) -> None:
    sides = [listed(datatype, 1, 0, parts), listed(dt.contiguous(datatype.size, "u1"), 1, 0)]
    boxes, rest = boxes_of(common_blocks(*(sides if at_source else reversed(sides))))
    assert (len(boxes), rest.lengths.size) == copies


@pytest.mark.parametrize("gap", [0, 1])
def test_the_widest_pitch(gap: int) -> None:
    source = np.arange(3) * (MAX_PITCH + gap)
    blocks = Blocks(source, np.arange(3) * 8, np.full(3, 8), np.zeros(3, np.int64))
    boxes, rest = boxes_of(blocks)
    assert (len(boxes), rest.lengths.size) == ((0, 3) if gap else (1, 0))


@pytest.mark.parametrize("version", [13000, 12020])
@pytest.mark.parametrize("stream", [STREAM, CAPTURED])
def test_calls_of_the_driver(version: int, stream: int) -> None:
    require("cxx")
    require("nvrtc")  # the bindings belong to the same package
    with fake_driver(version) as fake:
        batches = version >= 12080 and stream == STREAM
        for source, target, counts in [
            (FACE, OTHER_FACE, (0, 0, 1, 0)),
            (dt.vector(10, 1, 2, "f8"), dt.vector(10, 1, 3, "f8"), (0, 1, 0, 0)),
            (dt.contiguous(9, "f8"), dt.contiguous(9, "f8"), (1, 0, 0, 0)),
            (
                dt.indexed([1, 3, 1], [0, 4, 9], "f8"),
                dt.contiguous(5, "f8"),
                (0, 0, 0, 1) if batches else (3, 0, 0, 0),
            ),
        ]:
            a, b = np.arange(4000, dtype="u1"), np.zeros(4000, np.uint8)
            blocks = common_blocks(
                listed(source, 1, a.ctypes.data), listed(target, 1, b.ctypes.data)
            )
            copies = PreparedCopies(blocks, 0)
            copies.launch(stream)
            assert fake.counts() == counts and copies.calls == 1
            packed, wanted = np.zeros(source.size, np.uint8), np.zeros(4000, np.uint8)
            HostPacker(a, source, 1).pack(packed)
            HostPacker(wanted, target, 1).unpack(packed)
            np.testing.assert_array_equal(b, wanted)
