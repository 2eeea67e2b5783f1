"""Plans of the copy engine, executed by NumPy and by a stand-in driver in host memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.datatypes import Datatype
from halox.errors import DatatypeError, DeviceError
from halox.packing.copy_boxes import MOST_BOXES, CopyBox
from halox.packing.copy_engine import MOST_RUNS, CopyEnginePacker, CopyEnginePlan, plan
from halox.packing.host import HostPacker
from halox.runtime.gpu.copies import MAX_PITCH
from tests.support import require, trials
from tests.unit.datatype_strategies import MOST_SPAN, build, recipes
from tests.unit.fake_driver import CAPTURED, STREAM, fake_driver

GUARD = 0xA5
ORIGIN = 4 * MOST_SPAN
"""Index of displacement 0 in the memory of random types."""


def memory_of(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, GUARD, nbytes, np.uint8)


def box_view(memory: np.ndarray, offset: int, box: CopyBox, pitch: int, step: int) -> np.ndarray:
    """Return the bytes of one side of a box by the driver's documentation; NumPy checks the bounds."""
    shape, strides = (box.depth, box.height, box.width), (step, pitch, 1)
    return np.ndarray(shape, np.uint8, memory.data, offset, strides)


def perform(
    planned: CopyEnginePlan, array: np.ndarray, origin: int, packed: np.ndarray, *, pack: bool
):
    """Execute a plan, after a check that the driver accepts its copies."""

    def move(mine: np.ndarray, packed: np.ndarray) -> None:
        if pack:
            packed[...] = mine
        else:
            mine[...] = packed

    for box in planned.boxes:
        sides = (box.source_pitch, box.source_slice), (box.target_pitch, box.target_slice)
        for pitch, step in sides:
            assert box.width <= pitch <= MAX_PITCH
            assert box.depth == 1 or (step % pitch == 0 and step >= pitch * box.height)
        assert min(box.width, box.depth) > 0 and box.height > 1
        move(
            box_view(array, origin + box.source, box, *sides[0]),
            box_view(packed, box.target, box, *sides[1]),
        )
    assert (planned.sizes > 0).all()
    runs = (planned.array_offsets, planned.packed_offsets, planned.sizes)
    for at, to, n in zip(*(values.tolist() for values in runs), strict=True):
        assert origin + at >= 0
        move(array[origin + at :][:n], packed[to : to + n])


def moved(planned: CopyEnginePlan) -> int:
    boxes = sum(box.width * box.height * box.depth for box in planned.boxes)
    return boxes + int(planned.sizes.sum())


def check(datatype: Datatype, count: int, planned: CopyEnginePlan, span: int = ORIGIN) -> None:
    """Pack and unpack by a plan, in memory of ``span`` bytes on either side of displacement 0."""
    assert moved(planned) == datatype.size * count
    array = memory_of(2 * span)
    oracle = HostPacker(array[span:], datatype, count)
    expected = np.full(oracle.nbytes, GUARD, np.uint8)
    oracle.pack(expected)
    packed = np.full(oracle.nbytes, GUARD, np.uint8)
    perform(planned, array, span, packed, pack=True)
    np.testing.assert_array_equal(packed, expected)
    if not datatype.overlaps(count):
        target, wanted = (np.full(2 * span, GUARD, np.uint8) for _ in range(2))
        perform(planned, target, span, packed, pack=False)
        HostPacker(wanted[span:], datatype, count).unpack(expected)
        np.testing.assert_array_equal(target, wanted)


class TestPlan:
    # Adjacent in memory, but not in the packed bytes.
    @example(("hindexed", ([1, 1, 1], [0, 1, 0]), (("primitive", ("i1",), ()),)), 2, 1, 3)
    @given(recipes(), st.integers(1, 3), st.integers(1, 4), st.integers(1, 12))
    @settings(max_examples=trials(300))
    def test_random_types_in_few_copies(self, recipe, count, most_boxes, most_runs):
        datatype = build(recipe)
        try:
            planned = plan(datatype, count, most_boxes=most_boxes, most_runs=most_runs)
        except DatatypeError as error:
            assert f"more than {most_runs} contiguous" in str(error)
            assert datatype.size * count > most_runs
            return
        assert len(planned.boxes) <= most_boxes
        assert len(planned.sizes) <= most_runs
        check(datatype, count, planned)

    @pytest.mark.parametrize(
        ("datatype", "copies"),
        [
            (dt.contiguous(100, "f8"), (0, 1)),
            (dt.contiguous(0, "f8"), (0, 0)),
            (dt.vector(10, 2, 5, "f8"), (1, 0)),
            (dt.subarray((5, 6, 7), (3, 4, 5), (1, 1, 1), "f4"), (1, 0)),
            (dt.subarray((5, 6, 7), (3, 4, 5), (1, 1, 1), "f4", "F"), (1, 0)),
            (dt.subarray((5, 6, 7), (3, 1, 5), (1, 1, 1), "f4"), (1, 0)),
            # Four levels: the shortest level becomes separate copies.
            (dt.subarray((9, 3, 6, 7), (8, 2, 4, 5), (0, 0, 1, 1), "f4"), (2, 0)),
            (dt.subarray((3, 9, 6, 7), (2, 8, 4, 5), (0, 0, 1, 1), "f4"), (2, 0)),
            # The distance of slices is not a multiple of the row pitch.
            (dt.hvector(3, 1, 101, dt.vector(4, 1, 2, "f8")), (3, 0)),
            (dt.hvector(4, 1, 101, dt.vector(3, 1, 2, "f8")), (3, 0)),
            # A transposition: rows from the outer level.
            (dt.hvector(9, 1, 8, dt.vector(4, 1, 9, "f8")), (4, 0)),
            (dt.hvector(4, 1, 8, dt.vector(9, 1, 9, "f8")), (4, 0)),
            # Negative, zero and overlapping strides.
            (dt.hvector(10, 1, -16, "f8"), (0, 10)),
            (dt.hvector(10, 1, 0, "f8"), (0, 10)),
            (dt.hvector(10, 3, 16, "f8"), (0, 10)),
            (dt.hvector(4, 1, -200, dt.vector(10, 1, 2, "f8")), (4, 0)),
            # Lists.
            (dt.indexed([1, 3, 1], [0, 4, 9], "f8"), (0, 3)),
            (
                dt.struct([1, 1], [0, 4000], [dt.vector(9, 1, 2, "f8"), dt.vector(9, 3, 5, "f4")]),
                (2, 0),
            ),
            (dt.struct([1, 3], [0, 4000], [dt.vector(9, 1, 2, "f8"), "i2"]), (1, 1)),
            (dt.hvector(20, 1, 128, dt.indexed([1, 2, 3], [0, 2, 7], "f8")), (3, 0)),
        ],
        ids=lambda value: value.describe()[:50] if isinstance(value, Datatype) else None,
    )
    def test_number_of_copies(self, datatype, copies):
        planned = plan(datatype)
        assert (len(planned.boxes), len(planned.sizes)) == copies
        check(datatype, 1, planned)

    def test_items_are_a_level_more(self):
        row = dt.resized(dt.vector(4, 1, 2, "f8"), 0, 640)
        assert len(plan(row, 7).boxes) == 1
        check(row, 7, plan(row, 7))
        assert moved(plan(row, 0)) == 0

    @pytest.mark.parametrize("pitch", [MAX_PITCH, MAX_PITCH + 1])
    def test_the_widest_pitch(self, pitch):
        planned = plan(dt.hvector(3, 1, pitch, "f8"))
        assert (len(planned.boxes), len(planned.sizes)) == (
            (1, 0) if pitch == MAX_PITCH else (0, 3)
        )
        if planned.boxes:
            assert planned.boxes[0][3:6] == (3, 1, pitch)
        else:
            assert planned.array_offsets.tolist() == [0, pitch, 2 * pitch]

    def test_the_widest_pitch_of_slices(self):
        """The distance of slices may exceed the largest pitch."""
        rows = dt.hvector(2, 1, 2**30, "u1")
        (box,) = plan(dt.hvector(3, 1, 2**33, rows)).boxes
        assert (box.height, box.depth, box.source_slice // box.source_pitch) == (2, 3, 8)

    def test_bounds(self):
        rows = [
            dt.hvector(n, 1, 101, dt.vector(200, 1, 3, "u1")) for n in (MOST_BOXES, MOST_BOXES + 1)
        ]
        assert len(plan(rows[0]).boxes) == MOST_BOXES
        assert (len(plan(rows[1]).boxes), len(plan(rows[1]).sizes)) == (0, 200 * (MOST_BOXES + 1))
        backwards = [dt.hvector(n, 1, -2, "u1") for n in (MOST_RUNS, MOST_RUNS + 1)]
        assert len(plan(backwards[0]).sizes) == MOST_RUNS
        with pytest.raises(DatatypeError):
            plan(backwards[1])
        places = np.cumsum(np.arange(MOST_RUNS + 1) % 7 + 2)
        assert len(plan(dt.hindexed_block(1, places[1:], "u1")).sizes) == MOST_RUNS
        assert CopyEnginePacker.why_not(dt.hindexed_block(1, places[1:], "u1"), 1) is None
        reason = CopyEnginePacker.why_not(dt.hindexed_block(1, places, "u1"), 1)
        assert reason is not None and f"{MOST_RUNS + 1} blocks" in reason
        assert CopyEnginePacker.why_not(dt.vector(10**9, 1, 2, "f8"), MOST_BOXES) is None


@pytest.fixture(params=[13000, 12080, 12020], ids=["CUDA 13", "CUDA 12.8", "CUDA 12.2"])
def fake(request):
    require("cxx")
    require("nvrtc")  # the bindings belong to the same package
    with fake_driver(request.param) as found:
        yield found


def transfer(
    datatype: Datatype, count: int, *, at: int = 0, to: int = 0, stream: int = STREAM
) -> CopyEnginePacker:
    """Pack and unpack through the driver and compare with the host packer; guard bytes must stay unchanged."""
    packer = CopyEnginePacker(datatype, count, 0)
    origin = ORIGIN + at
    array = memory_of(2 * ORIGIN)
    oracle = HostPacker(array[origin:], datatype, count)
    expected = np.full(oracle.nbytes, GUARD, np.uint8)
    oracle.pack(expected)
    assert packer.nbytes == oracle.nbytes
    packed = np.full(packer.nbytes + 64, GUARD, np.uint8)
    packer.pack(array.ctypes.data + origin, packed.ctypes.data + 16 + to, stream)
    assert (np.delete(packed, range(16 + to, 16 + to + packer.nbytes)) == GUARD).all()
    np.testing.assert_array_equal(packed[16 + to :][: packer.nbytes], expected)
    if not datatype.overlaps(count):
        target, wanted = (np.full(2 * ORIGIN, GUARD, np.uint8) for _ in range(2))
        packer.unpack(packed.ctypes.data + 16 + to, target.ctypes.data + origin, stream)
        HostPacker(wanted[origin:], datatype, count).unpack(expected)
        np.testing.assert_array_equal(target, wanted)
    return packer


class TestPacker:
    @given(recipes(), st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))
    @settings(max_examples=trials(150))
    def test_random_types(self, recipe, count, at, to):
        require("cxx")
        require("nvrtc")
        with fake_driver():
            transfer(build(recipe), count, at=at, to=to)

    @pytest.mark.parametrize("stream", [STREAM, 0, 1, CAPTURED])
    def test_calls(self, fake, stream):
        batches = fake["version"] >= 12080 and stream == STREAM
        for datatype, in_one, apart in [
            (dt.contiguous(10, "f8"), (2, 0, 0, 0), None),
            (dt.vector(10, 1, 2, "f8"), (0, 2, 0, 0), None),
            (dt.subarray((5, 6, 7), (3, 4, 5), (1, 1, 1), "f4"), (0, 0, 2, 0), None),
            (dt.indexed([1, 3, 1], [0, 4, 9], "f8"), (0, 0, 0, 2), (6, 0, 0, 0)),
            (dt.struct([1, 3], [0, 4000], [dt.vector(9, 1, 2, "f8"), "i2"]), (2, 2, 0, 0), None),
            (dt.contiguous(0, "f8"), (0, 0, 0, 0), None),
        ]:
            packer = transfer(datatype, 1, stream=stream)
            assert fake.counts() == (in_one if batches or apart is None else apart)
            assert packer.calls == sum(in_one) // 2
            if packer.nbytes:
                assert fake["last_stream"] == stream

    def test_addresses_change_from_call_to_call(self, fake):
        packer = CopyEnginePacker(dt.indexed([1, 2, 1], [0, 4, 9], "u1"), 1, 0)
        packed = np.zeros((3, 4), np.uint8)
        arrays = [memory_of(10, seed) for seed in range(3)]
        for array, out in zip(arrays, packed, strict=True):
            packer.pack(array.ctypes.data, out.ctypes.data, STREAM)
        for array, out in zip(arrays, packed, strict=True):
            assert out.tolist() == array[[0, 4, 5, 9]].tolist()

    def test_absolute_addresses(self, fake):
        first, second = memory_of(100, 1), memory_of(100, 2)
        places = [first.ctypes.data + 3, second.ctypes.data + 5]
        packer = CopyEnginePacker(dt.hindexed([10, 20], places, "u1"), 1, 0)
        packed = np.zeros(30, np.uint8)
        packer.pack(0, packed.ctypes.data, STREAM)
        assert packed.tolist() == [*first[3:13], *second[5:25]]

    def test_what_it_cannot_take(self):
        with pytest.raises(DatatypeError):
            CopyEnginePacker(dt.hvector(MOST_RUNS + 1, 1, -2, "u1"), 1, 0)
        with pytest.raises(DeviceError, match="max_blocks"):
            CopyEnginePacker(dt.primitive("f8"), 1, 0, max_blocks=0)
