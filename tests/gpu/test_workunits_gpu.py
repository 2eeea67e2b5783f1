"""The work-unit packer on a GPU, compared with NumPy and HostPacker, with guard bytes around every target."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing.host import HostPacker
from tests.support import require
from tests.unit.datatype_strategies import scattered

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.errors import DeviceError  # noqa: E402
from halox.packing import workunits, workunits_lists  # noqa: E402
from halox.packing.workunits import WorkUnitsCopy, WorkUnitsPacker  # noqa: E402
from halox.packing.workunits_lists import ListCache  # noqa: E402
from tests.gpu.guarded import (  # noqa: E402
    DEVICE,
    GUARD,
    Guarded,
    coded,
    on_device,
    stall,
)


@pytest.fixture
def empty_cache(monkeypatch):
    made = ListCache(workunits_lists.CACHE_BYTES)
    monkeypatch.setattr(workunits_lists, "cache", made)
    return made


def there_and_back(host, datatype, count=1, *, at=0, to=0, origin=0, **options):
    """Compare packing and unpacking with HostPacker; displacement 0 is byte ``origin`` of ``host``."""
    stream = cp.cuda.get_current_stream().ptr
    packer = WorkUnitsPacker(datatype, count, DEVICE, **options)
    expected = np.zeros(packer.nbytes, np.uint8)
    HostPacker(host[origin:], datatype, count).pack(expected)
    source, packed = on_device(host, at), Guarded(packer.nbytes, to)
    packer.pack(source.pointer + origin, packed.pointer, stream)
    assert packed.get().tobytes() == expected.tobytes()

    target = Guarded(host.nbytes, at)
    packer.unpack(packed.pointer, target.pointer + origin, stream)
    wanted = np.full(host.nbytes, GUARD, np.uint8)
    HostPacker(wanted[origin:], datatype, count).unpack(expected)
    assert target.get().tobytes() == wanted.tobytes()
    return packer


MIXES = {
    "short of 8": (8, lambda rng: rng.integers(1, 40, 20_000) * 8),
    "short of 4": (4, lambda rng: rng.integers(1, 60, 20_000) * 4),
    "odd": (1, lambda rng: rng.integers(1, 300, 20_000)),
    "long and short": (
        4,
        lambda rng: np.where(rng.random(2000) < 0.3, rng.integers(1, 40_000, 2000), 7),
    ),
    "long of 16": (16, lambda rng: rng.integers(30, 3000, 500) * 16),
    "granules": (4, lambda rng: rng.choice([4, 8, 24], 30_000)),
    "bytes": (1, lambda rng: rng.integers(1, 4, 30_000)),
    "alike, 8": (8, lambda rng: np.full(30_000, 8)),
    "alike, 12": (4, lambda rng: np.full(30_000, 12)),
    "alike, 1001": (4, lambda rng: np.full(2000, 1001)),
    "alike, 4096": (16, lambda rng: np.full(1000, 4096)),
    "two lengths": (8, lambda rng: rng.choice([128, 256], 9000)),
    "stretches": (4, lambda rng: np.repeat([24, 8, 4, 100], [5000, 6000, 7000, 500])),
    "few": (8, lambda rng: rng.integers(1, 40, 50) * 8),
}


class TestPacker:
    @pytest.mark.parametrize("places", [(0, 0), (8, 8), (4, 8), (2, 0), (1, 3), (5, 5), (0, 1)])
    @pytest.mark.parametrize("mix", MIXES)
    def test_any_mix_of_lengths_at_any_alignment(self, mix, places):
        word, lengths = MIXES[mix]
        rng = np.random.default_rng(len(mix))
        datatype, span = scattered(rng, lengths(rng), word)
        there_and_back(coded(span), datatype, at=places[0], to=places[1])

    @pytest.mark.parametrize("mix", MIXES)
    def test_items(self, mix):
        word, lengths = MIXES[mix]
        rng = np.random.default_rng(len(mix))
        datatype, span = scattered(rng, lengths(rng)[:300], word)
        datatype = dt.resized(datatype, 0, -(-span // 16) * 16 + 16)
        there_and_back(coded(datatype.extent * 30), datatype, 30)

    @pytest.mark.parametrize("max_blocks", [1, 3, 16, 100_000])
    @pytest.mark.parametrize("mix", ["short of 8", "long and short", "granules", "few"])
    def test_any_number_of_blocks(self, mix, max_blocks):
        word, lengths = MIXES[mix]
        rng = np.random.default_rng(1)
        datatype, span = scattered(rng, lengths(rng), word)
        there_and_back(coded(span), datatype, max_blocks=max_blocks)

    @pytest.mark.parametrize("unit_bytes", [512, 1024, 2048, 4096])
    def test_any_length_of_units(self, unit_bytes):
        n = 500
        datatype = dt.indexed(n - np.arange(n), np.arange(n) * (n + 1), "f8")
        there_and_back(coded(8 * n * n), datatype, unit_bytes=unit_bytes)

    def test_strided_types(self):
        array = coded(8 * 33 * 34 * 35)
        for subsizes, starts in (((33, 34, 1), (0, 0, 34)), ((31, 1, 35), (1, 33, 0))):
            there_and_back(array, dt.subarray((33, 34, 35), subsizes, starts, "f8"))
        there_and_back(array, dt.hvector(30, 1, -8, "f8"), origin=29 * 8)

    def test_random_elements_many_times(self):
        """Each item has 1024 elements of 8 bytes; the list must not grow with the number of items."""
        rng = np.random.default_rng(2)
        datatype = dt.resized(dt.indexed_block(1, rng.permutation(4096)[:1024], "f8"), 0, 4096 * 8)
        packer = there_and_back(coded(300 * datatype.extent), datatype, 300)
        assert packer._list.n_words <= 1024

    def test_past_2_gib(self):
        """Indices in a segment have 31 bits, so larger messages need several segments."""
        if cp.cuda.runtime.memGetInfo()[0] < 12 << 30:
            pytest.skip("less than 12 GiB of device memory are free")
        datatype = dt.resized(dt.indexed_block(256, [0, 1, 257, 300], "f8"), 0, 8 * 1024)
        count = (5 << 29) // datatype.extent
        source = cp.arange(count * 1024, dtype="f8")
        packed = cp.zeros(datatype.size * count, np.uint8)
        WorkUnitsPacker(datatype, count, DEVICE).pack(
            int(source.data.ptr), int(packed.data.ptr), cp.cuda.get_current_stream().ptr
        )
        rows = source.reshape(-1, 1024)
        found = packed.view("f8").reshape(-1, 1024)
        for place, start in enumerate((0, 1, 257, 300)):
            part = found[:, 256 * place : 256 * (place + 1)]
            assert bool((part == rows[:, start : start + 256]).all())
        del source, packed, rows, found, part
        cp.get_default_memory_pool().free_all_blocks()

    def test_captured_after_its_first_use_only(self, empty_cache):
        rng = np.random.default_rng(4)
        datatype = dt.indexed_block(1, rng.permutation(2000)[:1000], "f8")
        source, packed = cp.zeros(2000), Guarded(8000)
        packer = WorkUnitsPacker(datatype, 1, DEVICE)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
        with stream:
            stream.begin_capture()
            with pytest.raises(DeviceError):
                packer.pack(int(source.data.ptr), packed.pointer, stream.ptr)
            stream.end_capture()
            packer.pack(int(source.data.ptr), packed.pointer, stream.ptr)
            stream.begin_capture()
            packer.pack(int(source.data.ptr), packed.pointer, stream.ptr)
            graph = stream.end_capture()
            for value in (3.0, 4.0):
                source[:] = value
                graph.launch(stream)
                stream.synchronize()
                assert (packed.get().view("f8") == value).all()


class TestLists:
    @pytest.mark.parametrize("unpacking", [False, True])
    @pytest.mark.parametrize("count", [1, 2])
    def test_a_pipelined_first_use(self, empty_cache, count, unpacking):
        rng = np.random.default_rng(6)
        n = 3 * workunits.PIPELINED_BLOCKS
        lengths = rng.integers(1, 30, n) * 4
        datatype = dt.hindexed(lengths, np.cumsum(lengths + 8) - lengths, "u1")
        host = coded(count * datatype.extent + 8)
        expected = np.zeros(datatype.size * count, np.uint8)
        HostPacker(host, datatype, count).pack(expected)
        packer = WorkUnitsPacker(datatype, count, DEVICE)
        source, packed = on_device(host), Guarded(packer.nbytes)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
        if unpacking:
            packed.array[:] = cp.asarray(expected)
            target = Guarded(host.nbytes)
            cp.cuda.runtime.deviceSynchronize()
            packer.unpack(packed.pointer, target.pointer, stream.ptr)
            stream.synchronize()
            wanted = np.full(host.nbytes, GUARD, np.uint8)
            HostPacker(wanted, datatype, count).unpack(expected)
            assert target.get().tobytes() == wanted.tobytes()
        else:
            packer.pack(source.pointer, packed.pointer, stream.ptr)
            stream.synchronize()
            assert packed.get().tobytes() == expected.tobytes()
        again = Guarded(packer.nbytes, 3)
        cp.cuda.runtime.deviceSynchronize()  # another stream fills it with guard bytes
        packer.pack(source.pointer, again.pointer, stream.ptr)
        stream.synchronize()
        assert again.get().tobytes() == expected.tobytes()
        assert empty_cache.nbytes(DEVICE) > 4 * n

    def test_equal_layouts_share_a_list(self, empty_cache):
        starts = np.random.default_rng(7).permutation(5000)[:2000] * 2
        one = dt.indexed_block(1, starts, "f8")
        two = dt.resized(dt.hindexed_block(8, starts * 8, "u1"), 0, 80_000)
        host = coded(160_000)
        a, b = there_and_back(host, one), there_and_back(host, two, 2)
        assert a._list is b._list
        before = empty_cache.nbytes(DEVICE)
        there_and_back(host, dt.indexed_block(2, starts, "f4"))
        assert empty_cache.nbytes(DEVICE) > before

    def test_lists_are_dropped_while_launches_run(self, monkeypatch):
        """The cache holds one list: each packer evicts the previous list, which a running launch may still read."""
        monkeypatch.setattr(workunits_lists, "cache", ListCache(200_000))
        host = coded(1 << 20)
        source, results = on_device(host), []
        for seed in range(12):
            starts = np.random.default_rng(seed).permutation(1 << 17)[:30_000]
            datatype = dt.indexed_block(1, starts, "f8")
            packed = Guarded(datatype.size)
            stall()
            packer = WorkUnitsPacker(datatype, 1, DEVICE)
            packer.pack(source.pointer, packed.pointer, cp.cuda.get_current_stream().ptr)
            results.append((packed, host.view("f8")[starts].tobytes()))
            del packer
            gc.collect()
        assert workunits_lists.cache.nbytes(DEVICE) <= 200_000
        for packed, expected in results:
            assert packed.get().tobytes() == expected


class TestCopy:
    @pytest.mark.parametrize("sizes", [(5, 9), (5, 700, 3000), (30,) * 40, ()])
    @pytest.mark.parametrize("unpack", [False, True])
    def test_several_messages_in_one_launch(self, sizes, unpack):
        rng = np.random.default_rng(8)
        parts, checks = [], []
        for i, n in enumerate(sizes):
            datatype, span = scattered(rng, rng.integers(1, 60, n) * 8, 8)
            datatype = dt.resized(datatype, 0, span)
            count = 1 + i % 2
            host = coded(span * count)
            expected = np.zeros(datatype.size * count, np.uint8)
            HostPacker(host, datatype, count).pack(expected)
            if unpack:
                array, packed = Guarded(host.nbytes, i % 16), on_device(expected, i % 5)
                wanted = np.full(host.nbytes, GUARD, np.uint8)
                HostPacker(wanted, datatype, count).unpack(expected)
                checks.append((array, wanted, packed))
            else:
                array, packed = on_device(host, i % 16), Guarded(expected.size, i % 5)
                checks.append((packed, expected, array))
            parts.append((datatype, count, array.pointer, packed.pointer))
        copy = WorkUnitsCopy(parts, unpack=unpack, device=DEVICE)
        copy.launch()
        for target, wanted, _ in checks:
            assert target.get().tobytes() == wanted.tobytes()
