"""The work-unit packer on a GPU, compared with NumPy and HostPacker, with guard bytes around every target."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from halox import datatypes as dt
from halox.packing.host import HostPacker
from tests.datatype_strategies import scattered
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.errors import DeviceError  # noqa: E402
from halox.packing import workunits_lists  # noqa: E402
from halox.packing.workunits import WorkUnitsCopy, WorkUnitsPacker  # noqa: E402
from halox.packing.workunits_lists import ListCache  # noqa: E402
from halox.runtime.gpu.streams import stream_pointer  # noqa: E402
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


class TestPacker:
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
        n = 3 * workunits_lists.PIPELINED_BLOCKS
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
        assert empty_cache.nbytes > 4 * n

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
        assert workunits_lists.cache.nbytes <= 200_000
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
        copy.at(stream_pointer())
        for target, wanted, _ in checks:
            assert target.get().tobytes() == wanted.tobytes()
