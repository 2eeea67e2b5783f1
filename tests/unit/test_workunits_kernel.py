"""The work-unit kernel, compiled as C++ and run on the CPU, against NumPy and HostPacker."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halox import datatypes as dt
from halox.packing import workunits_plan as wp
from halox.packing.host import HostPacker
from tests.support import require, trials
from tests.unit.cpu_kernels import (
    GUARD,
    aligned,
    before_a_forbidden_page,
    coded,
    run_workunits,
    workunits_library,
)
from tests.unit.datatype_strategies import build, recipes, scattered

require("cxx")

SMS = 4


def move(
    parts,
    *,
    unpack,
    array=0,
    packed=0,
    unit_bytes=512,
    inline=None,
    segments_apart=False,
    sms=SMS,
    max_blocks=None,
    backwards=False,
):
    """Launch the kernel once for parts (datatype, count, array shift, packed shift), as the packer does."""
    segments, words, at = [], [], 0
    for datatype, count, shift, place in parts:
        part = wp.joined(wp.converted(datatype.blocks(), unit_bytes))
        made = wp.repeated(part.rows, count, datatype.extent, datatype.size)
        made["array"] += shift
        made["packed"] += place
        made["list"] += at
        at += part.words.size
        segments.append(made)
        words.append(part.words)
    together = np.concatenate(segments)
    everything = np.concatenate(words)
    if inline is None:
        inline = wp.fits_inline(together, everything.size)
    launch_words, address = everything, 0
    if not inline:
        listed = aligned(everything.nbytes)
        listed.view(np.uint32)[:] = everything
        together["list"] = together["list"] * 4 + np.uint64(listed.ctypes.data)
        launch_words = None
    launch = wp.launch_of(together, sms=sms, max_blocks=max_blocks)
    if not launch.tiles:
        return launch
    if not inline and (segments_apart or launch.segments.size > wp.LISTED_SEGMENTS):
        apart = aligned(launch.segments.nbytes)
        apart[:] = launch.segments.view(np.uint8)
        address = apart.ctypes.data
    name = ("unpack" if unpack else "pack") + ("_inline" if inline else "")
    run_workunits(
        name,
        wp.table(launch, launch_words, address),
        launch.blocks,
        launch.threads,
        array,
        packed,
        backwards=backwards,
    )
    return launch


def there_and_back(array, datatype, count=1, *, offset=0, origin=0, **options):
    """Pack and unpack with the kernel, between guards, and compare with HostPacker.

    ``array`` is an array of bytes; displacements count from its byte ``origin``.
    """
    nbytes = count * datatype.size
    view = array[origin:]
    expected = np.zeros(nbytes, np.uint8)
    HostPacker(view, datatype, count).pack(expected)

    guarded = aligned(nbytes + 64, offset)
    guarded[:] = GUARD
    at = guarded.ctypes.data + 32
    parts = [(datatype, count, 0, 0)]
    launch = move(parts, unpack=False, array=view.ctypes.data, packed=at, **options)
    assert (guarded[:32] == GUARD).all() and (guarded[32 + nbytes :] == GUARD).all()
    assert guarded[32 : 32 + nbytes].tobytes() == expected.tobytes()

    if not datatype.overlaps(count):
        before = array.copy()
        array[:] = GUARD
        wanted = array.copy()
        guarded[32 : 32 + nbytes] ^= 0xFF
        root = wanted[origin:]
        HostPacker(root, datatype, count).unpack(guarded[32 : 32 + nbytes].copy())
        move(parts, unpack=True, array=view.ctypes.data, packed=at, **options)
        assert array.tobytes() == wanted.tobytes()
        array[:] = before
    return launch


MIXES = {
    "short of 8": lambda rng: rng.integers(1, 40, 300) * 8,
    "short of 4": lambda rng: rng.integers(1, 60, 300) * 4,
    "odd": lambda rng: rng.integers(1, 300, 200),
    "long and short": lambda rng: np.where(rng.random(40) < 0.3, rng.integers(1, 20000, 40), 7),
    "long of 16": lambda rng: rng.integers(30, 700, 40) * 16,
    "granules": lambda rng: rng.choice([4, 8, 24], 500),
    "bytes": lambda rng: rng.integers(1, 4, 500),
    "alike, 8": lambda rng: np.full(1024, 8),
    "alike, 12": lambda rng: np.full(500, 12),
    "alike, 7": lambda rng: np.full(500, 7),
    "alike, 1001": lambda rng: np.full(20, 1001),
    "alike, 4096": lambda rng: np.full(10, 4096),
    "two lengths": lambda rng: rng.choice([128, 256], 100),
    "stretches": lambda rng: np.repeat([24, 8, 4, 100], [50, 60, 70, 5]),
}
WORDS = {"short of 8": 8, "short of 4": 4, "long of 16": 16, "granules": 4, "alike, 8": 8}


class TestMixes:
    @pytest.mark.parametrize("offsets", [(0, 0), (8, 8), (4, 8), (2, 0), (1, 3), (5, 5), (0, 1)])
    @pytest.mark.parametrize("mix", MIXES)
    def test_any_mix_of_lengths_at_any_alignment(self, mix, offsets):
        rng = np.random.default_rng(len(mix))
        datatype, span = scattered(rng, MIXES[mix](rng), WORDS.get(mix, 4))
        array = coded(aligned(span + 64, offsets[0]))
        there_and_back(array, datatype, offset=offsets[1])

    @pytest.mark.parametrize("mix", MIXES)
    def test_items_without_a_longer_list(self, mix):
        rng = np.random.default_rng(len(mix))
        datatype, span = scattered(rng, MIXES[mix](rng)[:60], WORDS.get(mix, 4))
        extent = -(-span // 16) * 16 + 16
        datatype = dt.resized(datatype, 0, extent)
        array = coded(aligned(5 * extent))
        launch = there_and_back(array, datatype, 5)
        assert (launch.segments["items"] == 5).all()

    @pytest.mark.parametrize("unit_bytes", wp.UNIT_BYTES)
    def test_any_length_of_units(self, unit_bytes):
        rng = np.random.default_rng(1)
        datatype, span = scattered(
            rng, [1, 511, 512, 513, 4095, 4096, 4097, 9000, 3, 1024, 2048, 7, 5]
        )
        array = coded(aligned(span))
        there_and_back(array, datatype, unit_bytes=unit_bytes)

    @pytest.mark.parametrize("backwards", [False, True])
    @pytest.mark.parametrize("max_blocks", [1, 3, None])
    @pytest.mark.parametrize("mix", ["short of 8", "long and short", "granules", "odd"])
    def test_any_grid_in_any_order(self, mix, max_blocks, backwards):
        rng = np.random.default_rng(3)
        datatype, span = scattered(rng, MIXES[mix](rng), WORDS.get(mix, 4))
        array = coded(aligned(span))
        launch = there_and_back(array, datatype, max_blocks=max_blocks, backwards=backwards)
        assert launch.blocks <= (max_blocks or launch.tiles)

    @pytest.mark.parametrize("mix", MIXES)
    def test_lists_and_segments_in_memory_move_the_same(self, mix):
        rng = np.random.default_rng(4)
        datatype, span = scattered(rng, MIXES[mix](rng)[:30], WORDS.get(mix, 4))
        array = coded(aligned(span))
        for options in (
            {"inline": True},
            {"inline": False},
            {"inline": False, "segments_apart": True},
        ):
            there_and_back(array, datatype, unit_bytes=4096, **options)


class TestForms:
    def test_a_vector_takes_no_list(self):
        array = coded(aligned(64 * 96))
        for stride in (96, -96):
            datatype = dt.hvector(64, 40, stride, "u1")
            launch = there_and_back(array, datatype, origin=0 if stride > 0 else 63 * 96)
            assert launch.segments["form"].tolist() == [wp.REGULAR]

    def test_a_plane_of_a_box(self):
        array = coded(aligned(8 * 20 * 21 * 22)).view("f8").reshape(20, 21, 22)
        datatype = dt.subarray(array.shape, (18, 19, 1), (1, 1, 21), "f8")
        there_and_back(array.reshape(-1).view("u1"), datatype)

    def test_zero_length_blocks_and_empty_types(self):
        array = coded(aligned(400))
        there_and_back(array, dt.hindexed([0, 40, 0, 3], [-64, 0, -8, 300], "u1"))
        assert there_and_back(array, dt.contiguous(0, "f8")).tiles == 0

    @pytest.mark.parametrize("shift", range(16))
    def test_not_a_byte_past_the_end_is_touched(self, shift):
        """Even a read beyond the end would kill the process; the wide reads of odd runs stay in the last word."""
        lengths = np.array([3000, 1, 700 + shift])
        span = int(lengths.sum()) + 5
        source = coded(before_a_forbidden_page(span + shift)[shift:])
        datatype = dt.hindexed(lengths, [0, 3002, 3005 + 0], "u1")
        target = before_a_forbidden_page(datatype.size)
        end = 3005 + int(lengths[2])
        assert end == span - 1 or end <= span
        shifted = source[span - end :]
        expected = np.zeros(datatype.size, np.uint8)
        HostPacker(shifted, datatype).pack(expected)
        parts = [(datatype, 1, 0, 0)]
        move(parts, unpack=False, array=shifted.ctypes.data, packed=target.ctypes.data)
        assert target.tobytes() == expected.tobytes()
        shifted[:] = 0
        move(parts, unpack=True, array=shifted.ctypes.data, packed=target.ctypes.data)
        for at, place, n in zip([0, 3002, 3005], [0, 3000, 3001], lengths, strict=True):
            assert shifted[at : at + n].tobytes() == expected[place : place + n].tobytes()

    @pytest.mark.parametrize("window_bytes", [100, 2000])
    def test_many_windows_of_items(self, monkeypatch, window_bytes):
        """With windows of 2000 bytes, their first tiles fit in the launch's parameter; with 100 bytes, they do not."""
        monkeypatch.setattr(wp, "_WINDOW_BYTES", window_bytes)
        rng = np.random.default_rng(9)
        datatype, span = scattered(rng, rng.integers(1, 40, 30) * 8, 8)
        datatype = dt.resized(datatype, 0, -(-span // 8) * 8)
        array = coded(aligned(datatype.extent * 150))
        launch = there_and_back(array, datatype, 150)
        most = wp.LISTED_SEGMENTS * (24 if window_bytes == 100 else 1)
        assert launch.segments.size > most

    @pytest.mark.parametrize("most_bytes", [64, 1000, 4096])
    def test_rows_cut_for_their_size_are_the_whole(self, monkeypatch, most_bytes):
        monkeypatch.setattr(wp, "_MOST_BYTES", most_bytes)
        array = coded(aligned(20000))
        there_and_back(array, dt.hvector(9, 1500, 2000, "u1"))
        there_and_back(array, dt.hindexed_block(1500, [0, 4000, 2000, 8000, 6000], "u1"))
        there_and_back(array, dt.hindexed_block(8, np.arange(200) ** 2 // 4 * 16 % 9000, "u1"))

    @pytest.mark.parametrize("mix", MIXES)
    def test_conversion_in_parts_moves_the_same(self, monkeypatch, mix):
        monkeypatch.setattr(wp, "_PART_BLOCKS", 17)
        rng = np.random.default_rng(5)
        datatype, span = scattered(rng, MIXES[mix](rng), WORDS.get(mix, 4))
        there_and_back(coded(aligned(span)), datatype)


@settings(max_examples=trials(200))
@given(st.data())
def test_any_datatype(data):
    datatype = build(data.draw(recipes()))
    count = data.draw(st.integers(0, 3))
    items = dt.contiguous(count, datatype)
    origin = max(0, -items.true_lb) if items.size else 0
    span = origin + (max(0, items.true_ub) if items.size else 0) + 1
    array = coded(aligned(span, data.draw(st.integers(0, 15))))
    if not items.size:
        return
    there_and_back(
        array,
        datatype,
        count,
        origin=origin,
        offset=data.draw(st.integers(0, 15)),
        unit_bytes=data.draw(st.sampled_from(wp.UNIT_BYTES)),
        inline=data.draw(st.sampled_from([None, False])),
        max_blocks=data.draw(st.sampled_from([None, 1, 2])),
    )


def test_the_tables_layout_is_the_kernels():
    """Struct sizes and offsets agree between g++ and the table's NumPy dtype."""
    fields = wp.SEGMENT.fields
    expected = [fields[name][1] for name in wp.SEGMENT.names]
    found = list((ctypes.c_ulong * (10 + len(expected))).in_dll(workunits_library(), "layout"))
    listed = wp.table(wp.launch_of(np.zeros(0, wp.SEGMENT), sms=1), None)
    inline = wp.table(wp.launch_of(np.zeros(0, wp.SEGMENT), sms=1), np.zeros(0, np.uint32))
    assert found[:10] == [
        *(len(listed), 16, len(inline), 16, wp.SEGMENT.itemsize, 16, 16, 16),
        *(wp.MAX_THREADS, wp.WORDS_IN_FLIGHT),
    ]
    assert found[10:] == expected
    assert len(listed) <= 4000 and len(inline) <= 4000
