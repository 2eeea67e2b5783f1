"""The work-unit packer's algorithm: forms of segments, launches, lists and their cache, and pipelined first use.

The suite compares the bytes of a call. Here, `segments_of` reaches limits that a packer's call does not.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

from halox import datatypes as dt
from halox.datatypes import BlockList
from halox.errors import DeviceError
from halox.packing import workunits, workunits_lists
from halox.packing import workunits_plan as wp
from halox.packing.workunits import WorkUnitsCopy, WorkUnitsPacker
from halox.packing.workunits_lists import ListCache
from tests.datatype_strategies import scattered
from tests.fakes.cpu_kernels import aligned
from tests.fakes.cpu_packers import cpu_backend
from tests.fakes.fake_driver import STREAM
from tests.packers import HALF, MIXES, TYPES, check, coded, displacements


@pytest.fixture
def backend():
    with cpu_backend("workunits") as made:
        yield made


def kinds(backend, kind):
    return [event[1:] for event in backend.events if event[0] == kind]


def irregular(n, seed=0, longest=60):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest, n)
    return dt.indexed(lengths, np.cumsum(lengths + 2) - lengths, "f8")


def packed_by_numpy(array, datatype, count=1):
    return array[displacements(datatype, count)]


def pack(packer, array):
    out = aligned(packer.nbytes)
    packer.pack(array.ctypes.data, out.ctypes.data, STREAM)
    return out


def segments_of(datatype, count=1, unit_bytes=512):
    part = wp.joined(wp.converted(datatype.blocks(), unit_bytes))
    return wp.repeated(part.rows, count, datatype.extent, datatype.size), part.words


class TestSegments:
    """Tables of segments; no kernel runs."""

    def test_regular_blocks_take_no_list_and_blocks_alike_four_bytes_each(self):
        segments, words = segments_of(dt.vector(200_000, 1, 3, "f8"))
        assert segments["form"].tolist() == [wp.REGULAR] and words.size == 0
        segments, words = segments_of(dt.indexed_block(3, [0, 5, 70, 30, 10], "f8"))
        assert segments["form"].tolist() == [wp.LISTED] and words.size == 8  # padded
        lengths = np.random.default_rng(0).choice([1, 2, 6], 1000)
        datatype = dt.indexed(lengths, np.cumsum(lengths + 3) - lengths, "f4")
        segments, words = segments_of(datatype)
        assert segments["form"].tolist() == [wp.LISTED], "short multiples of a granule"
        assert segments["block_bytes"].tolist() == [4] and words.size <= int(lengths.sum()) + 3

    @pytest.mark.parametrize(
        ("datatype", "count", "nbytes"),
        [
            (dt.contiguous(3 << 40, "u1"), 1, 3 << 40),
            (
                dt.resized(dt.indexed_block(1, [0, 5, 7, 31, 40], "f8"), 0, 1 << 20),
                1 << 28,
                40 << 28,
            ),
        ],
        ids=["a block of terabytes", "many items"],
    )
    def test_no_segment_exceeds_31_bits(self, datatype, count, nbytes):
        segments, _ = segments_of(datatype, count)
        sizes = segments["units"].astype(np.int64) * segments["items"] * segments["block_bytes"]
        assert sizes.sum() == nbytes and sizes.max() < 1 << 31
        launch = wp.launch_of(segments, sms=132)
        assert launch.blocks == launch.tiles < 1 << 31

    @pytest.mark.parametrize("kind", ["alike", "mixed", "granules", "odd"])
    def test_the_list_fits_the_memory_that_is_allocated_for_it(self, kind):
        rng, n = np.random.default_rng(4), 100_000
        lengths = {
            "alike": np.full(n, 8),
            "mixed": rng.integers(1, 60, n) * 8,
            "granules": rng.choice([4, 8, 24], n),
            "odd": rng.integers(1, 60, n),
        }[kind]
        blocks = BlockList((np.cumsum(lengths + 8) - lengths)[rng.permutation(n)], lengths)
        parts = list(wp.converted(blocks, 4096))
        assert sum(part.words.size for part in parts) <= wp.most_words(blocks, 4096)


class TestKernel:
    @pytest.mark.parametrize("unit_bytes", [512, 1024, 2048, 4096])
    def test_any_length_of_units(self, backend, unit_bytes, monkeypatch):
        monkeypatch.setattr(workunits, "unit_bytes_of", lambda nbytes: unit_bytes)
        lengths = [1, 511, 512, 513, 4095, 4096, 4097, 9000, 3, 1024, 2048, 7, 5]
        datatype, span = scattered(np.random.default_rng(1), lengths)
        array = coded(span)
        packer = WorkUnitsPacker(datatype, 1, 0)
        assert pack(packer, array).tobytes() == packed_by_numpy(array, datatype).tobytes()

    @pytest.mark.parametrize(("name", "value"), [("_WINDOW_BYTES", 100), ("_MOST_BYTES", 64)])
    def test_many_segments(self, backend, monkeypatch, name, value):
        """Segments in device memory."""
        monkeypatch.setattr(wp, name, value)
        rng = np.random.default_rng(9)
        datatype, span = scattered(rng, rng.integers(1, 40, 30) * 8, 8)
        check(backend, dt.resized(datatype, 0, -(-span // 8) * 8), HALF // span - 1)
        check(backend, dt.hvector(9, 1500, 2000, "u1"))
        check(backend, dt.hindexed_block(1500, [0, 4000, 2000, 8000, 6000], "u1"))


class TestLists:
    def test_equal_layouts_share_a_list(self, backend):
        lengths, starts = [3, 1, 7, 2] * 200, np.arange(800) * 11
        first = dt.indexed(lengths, starts, "f8")
        second = dt.hindexed(np.array(lengths) * 8, starts * 8, "u1")
        array = coded(200_000)
        for datatype, count in ((first, 1), (dt.resized(second, 0, 80_000), 2)):
            found = pack(WorkUnitsPacker(datatype, count, 0), array)
            assert found.tobytes() == packed_by_numpy(array, datatype, count).tobytes()
        assert len(kinds(backend, "upload")) == 1

    def test_a_first_use_while_capturing_is_refused(self, backend):
        packer = WorkUnitsPacker(irregular(10), 1, 0)
        backend.capturing = True
        with pytest.raises(DeviceError):
            packer.pack(1, 1, STREAM)
        backend.capturing = False
        array = coded(packer.datatype.true_ub)
        assert pack(packer, array).tobytes() == packed_by_numpy(array, packer.datatype).tobytes()

    def test_a_list_in_use_outlives_the_cache(self, backend, monkeypatch):
        datatype = irregular(700)
        array, packer = coded(datatype.true_ub), WorkUnitsPacker(datatype, 1, 0)
        pack(packer, array)
        monkeypatch.setattr(workunits_lists, "cache", ListCache(0))
        gc.collect()
        assert pack(packer, array).tobytes() == packed_by_numpy(array, datatype).tobytes()


class TestPipeline:
    """First uses of long lists: a part is packed while the next part is converted (Wu et al. 2016)."""

    @pytest.fixture
    def part_blocks(self, request, monkeypatch):
        monkeypatch.setattr(workunits_lists, "PIPELINED_BLOCKS", 8)
        monkeypatch.setattr("halox.packing.workunits_plan._PART_BLOCKS", request.param)
        return request.param

    @pytest.mark.parametrize("part_blocks", [500], indirect=True)
    @pytest.mark.parametrize("unpacking", [False, True])
    @pytest.mark.parametrize("count", [1, 2])
    def test_each_part_is_launched_once_it_is_ordered(self, backend, part_blocks, count, unpacking):
        datatype = irregular(3210, longest=30)
        array = coded(datatype.reach(count)[1])
        packer = WorkUnitsPacker(datatype, count, 0)
        expected = packed_by_numpy(array, datatype, count)
        if unpacking:
            target, wanted = np.zeros_like(array), np.zeros_like(array)
            wanted[displacements(datatype, count)] = expected
            packer.unpack(expected.ctypes.data, target.ctypes.data, STREAM)
            assert target.tobytes() == wanted.tobytes()
        else:
            assert pack(packer, array).tobytes() == expected.tobytes()
        moves = [event[0] for event in backend.events if event[0] in ("order", "launch")]
        assert moves == ["order", "launch"] * -(-3210 // part_blocks)
        backend.events.clear()
        assert pack(packer, array).tobytes() == expected.tobytes()
        assert not kinds(backend, "upload")[1:], "the whole list is there now; at most the segments"

    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("part_blocks", [90], indirect=True)
    def test_a_list_made_in_parts_fits_its_memory(self, backend, part_blocks, mix):
        check(backend, TYPES[mix], to=4)


@pytest.mark.parametrize("sizes", [(5, 9), (5, 700, 30), (3,) * 40, ()])
@pytest.mark.parametrize("unpack", [False, True])
def test_several_messages_in_one_launch(backend, sizes, unpack):
    parts, checks = [], []
    for i, n in enumerate(sizes):
        datatype, count = irregular(n, seed=i), 1 + i % 2
        array = coded(datatype.reach(count)[1], i)
        packed = packed_by_numpy(array, datatype, count)
        target = np.zeros_like(array if unpack else packed)
        wanted = packed
        if unpack:
            wanted = np.zeros_like(array)
            wanted[displacements(datatype, count)] = packed
        both = (target, packed) if unpack else (array, target)
        parts.append((datatype, count, *(one.ctypes.data for one in both)))
        checks.append((target, wanted, both))
    copy = WorkUnitsCopy(parts, unpack=unpack, device=0)
    assert copy.nbytes == sum(datatype.size * count for datatype, count, _, _ in parts)
    copy.at(STREAM)
    assert len(kinds(backend, "launch")) == (1 if sizes else 0)
    for target, wanted, _ in checks:
        assert target.tobytes() == wanted.tobytes()
