"""The copy-engine packer, driver copies and memory queries on a GPU, compared with NumPy.

Guard bytes surround every target.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

from halox import datatypes as dt
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.errors import DeviceError  # noqa: E402
from halox.packing import copy_engine  # noqa: E402
from halox.packing.copy_engine import CopyEnginePacker  # noqa: E402
from halox.packing.host import HostPacker  # noqa: E402
from halox.runtime.gpu.copies import (  # noqa: E402
    MAX_PITCH,
    PreparedBatch,
    PreparedMemcpy,
    batch_function,
)
from halox.runtime.gpu.memory import memory_kind, pinned, register  # noqa: E402
from tests.gpu import guarded  # noqa: E402
from tests.gpu.guarded import DEVICE, GUARD, MARGIN  # noqa: E402

BEFORE = 1 << 16
"""Bytes of every array before displacement 0, for datatypes with negative displacements."""


@pytest.fixture(params=["legacy", "blocking", "non-blocking", "per thread"])
def stream(request):
    """Each kind of stream; the driver refuses batched copies on the legacy stream."""
    made = {
        "legacy": lambda: cp.cuda.Stream.null,
        "blocking": cp.cuda.Stream,
        "non-blocking": lambda: cp.cuda.Stream(non_blocking=True),
        "per thread": lambda: cp.cuda.Stream.ptds,
    }[request.param]()
    cp.cuda.runtime.deviceSynchronize()
    return made


def coded(nbytes: int, seed: int = 0) -> np.ndarray:
    """Random host bytes without the guard byte."""
    return np.random.default_rng(seed).integers(0, GUARD, nbytes, np.uint8)


class Guarded(guarded.Guarded):
    """Synchronizes the whole GPU, since most kinds of streams do not wait for CuPy's stream, which fills the memory."""

    def __init__(self, nbytes: int, offset: int = 0) -> None:
        super().__init__(nbytes, offset)
        cp.cuda.runtime.deviceSynchronize()

    def get(self) -> np.ndarray:
        cp.cuda.runtime.deviceSynchronize()
        return super().get()


def on_device(array: np.ndarray, offset: int = 0) -> Guarded:
    made = Guarded(array.nbytes, offset)
    made.array[:] = cp.asarray(array)
    cp.cuda.runtime.deviceSynchronize()
    return made


TYPES = {
    "contiguous": dt.contiguous(1001, "f4"),
    "one byte": dt.primitive("u1"),
    "rows": dt.vector(100, 2, 5, "f8"),
    "bytes": dt.vector(300, 1, 3, "u1"),
    "slices": dt.subarray((20, 21, 22), (18, 19, 20), (1, 1, 1), "f4"),
    "x-face": dt.subarray((20, 21, 22), (20, 21, 1), (0, 0, 21), "f8"),
    "y-face": dt.subarray((20, 21, 22), (20, 1, 22), (0, 3, 0), "f8"),
    "four levels": dt.subarray((5, 6, 7, 8), (3, 4, 5, 6), (1, 1, 1, 1), "f4"),
    "six levels": dt.subarray((3,) * 6, (2,) * 6, (0,) * 6, "f4"),
    "fortran": dt.subarray((20, 21, 22), (18, 19, 20), (1, 1, 1), "f4", "F"),
    "slices apart": dt.hvector(9, 1, 1001, dt.vector(20, 2, 5, "f8")),
    "transposed": dt.hvector(30, 1, 8, dt.vector(40, 1, 30, "f8")),
    "backwards": dt.hvector(100, 1, -16, "f8"),
    "rows backwards": dt.hvector(10, 1, -400, dt.vector(10, 1, 3, "f8")),
    "overlapping": dt.hvector(100, 3, 16, "f8"),
    "the same again": dt.hvector(10, 1, 0, "f8"),
    "list": dt.indexed([1, 5, 2, 9], [0, 40, -7, 100], "f4"),
    "long list": dt.hindexed_block(3, np.cumsum(np.arange(5000) % 7 + 4), "u1"),
    "struct": dt.struct(
        [1, 3, 2], [0, 9000, -50], [dt.vector(90, 1, 2, "f8"), "i2", dt.vector(7, 1, 2, "u1")]
    ),
    "repeated list": dt.hvector(20, 1, 128, dt.indexed([1, 2, 3], [0, 2, 7], "f8")),
    "empty": dt.contiguous(0, "f8"),
}


def on_a_stream(call, *addresses):
    """Call on a new stream, after all work of CuPy's stream, and wait until it has finished."""
    cp.cuda.get_current_stream().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    call(*addresses, stream.ptr)
    stream.synchronize()


class TestPacker:
    @pytest.mark.parametrize("count", [1, 3])
    @pytest.mark.parametrize("name", TYPES)
    def test_packs_and_unpacks(self, name, count, stream):
        datatype = TYPES[name]
        host = coded(8 * BEFORE)
        oracle = HostPacker(host[BEFORE:], datatype, count)
        expected = np.zeros(oracle.nbytes, np.uint8)
        oracle.pack(expected)
        packer = CopyEnginePacker(datatype, count, DEVICE)
        source, packed = on_device(host), Guarded(packer.nbytes)
        packer.pack(source.pointer + BEFORE, packed.pointer, stream.ptr)
        np.testing.assert_array_equal(packed.get(), expected)
        assert (source.get() == host).all()
        if datatype.overlaps(count):
            return
        target, wanted = Guarded(host.nbytes), np.full(host.nbytes, GUARD, np.uint8)
        packer.unpack(packed.pointer, target.pointer + BEFORE, stream.ptr)
        HostPacker(wanted[BEFORE:], datatype, count).unpack(expected)
        np.testing.assert_array_equal(target.get(), wanted)

    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "x-face", "list", "struct"])
    @pytest.mark.parametrize("to", [0, 1, 2, 7, 8])
    @pytest.mark.parametrize("at", [0, 1, 4, 15])
    def test_any_alignment(self, name, at, to):
        datatype, host = TYPES[name], coded(2 * BEFORE)
        stream = cp.cuda.Stream(non_blocking=True)
        expected = np.zeros(datatype.size, np.uint8)
        HostPacker(host[1024:], datatype).pack(expected)
        packer = CopyEnginePacker(datatype, 1, DEVICE)
        source, packed = on_device(host, at), Guarded(packer.nbytes, to)
        packer.pack(source.pointer + 1024, packed.pointer, stream.ptr)
        np.testing.assert_array_equal(packed.get(), expected)
        target, wanted = Guarded(host.nbytes, at), np.full(host.nbytes, GUARD, np.uint8)
        packer.unpack(packed.pointer, target.pointer + 1024, stream.ptr)
        HostPacker(wanted[1024:], datatype).unpack(expected)
        np.testing.assert_array_equal(target.get(), wanted)

    @pytest.mark.parametrize("kind", ["pinned", "registered"])
    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "four levels", "long list"])
    def test_page_locked_memory(self, name, kind, stream):
        datatype, host = TYPES[name], coded(2 * BEFORE)
        expected = np.zeros(datatype.size, np.uint8)
        HostPacker(host, datatype).pack(expected)
        packer, source = CopyEnginePacker(datatype, 1, DEVICE), on_device(host)
        size = packer.nbytes + 2 * MARGIN
        buffer = pinned(size) if kind == "pinned" else register(np.zeros(size, np.uint8))
        buffer.array[:] = GUARD
        for pointer in {buffer.device_pointer, buffer.array.ctypes.data}:
            packer.pack(source.pointer, pointer + MARGIN + 1, stream.ptr)
            stream.synchronize()
            assert (buffer.array[: MARGIN + 1] == GUARD).all()
            assert (buffer.array[MARGIN + 1 + packer.nbytes :] == GUARD).all()
            np.testing.assert_array_equal(buffer.array[MARGIN + 1 :][: packer.nbytes], expected)
            target, wanted = Guarded(host.nbytes), np.full(host.nbytes, GUARD, np.uint8)
            packer.unpack(pointer + MARGIN + 1, target.pointer, stream.ptr)
            HostPacker(wanted, datatype).unpack(expected)
            np.testing.assert_array_equal(target.get(), wanted)
        buffer.close()

    @pytest.mark.skipif(
        cp.cuda.runtime.getDeviceCount() < 2, reason="a second GPU is needed for a peer's memory"
    )
    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "list"])
    def test_a_peers_memory(self, name):
        datatype, host = TYPES[name], coded(2 * BEFORE)
        expected = np.zeros(datatype.size, np.uint8)
        HostPacker(host[1024:], datatype).pack(expected)
        packer, source = CopyEnginePacker(datatype, 1, DEVICE), on_device(host)
        stream = cp.cuda.Stream(non_blocking=True)
        with cp.cuda.Device(1):
            there = cp.full(packer.nbytes, GUARD, np.uint8)
            cp.cuda.runtime.deviceSynchronize()
        packer.pack(source.pointer + 1024, int(there.data.ptr), stream.ptr)
        stream.synchronize()
        with cp.cuda.Device(1):
            np.testing.assert_array_equal(there.get(), expected)
        target, wanted = Guarded(host.nbytes), np.full(host.nbytes, GUARD, np.uint8)
        packer.unpack(int(there.data.ptr), target.pointer + 1024, stream.ptr)
        HostPacker(wanted[1024:], datatype).unpack(expected)
        np.testing.assert_array_equal(target.get(), wanted)

    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "four levels", "list"])
    def test_captured_in_a_graph(self, name):
        """Lists can be captured too: during a capture the packer replaces a batched copy by single copies."""
        datatype, host = TYPES[name], coded(2 * BEFORE)
        packer = CopyEnginePacker(datatype, 1, DEVICE)
        source, packed = on_device(host), Guarded(packer.nbytes)
        stream = cp.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            packer.pack(source.pointer + 1024, packed.pointer, stream.ptr)
            graph = stream.end_capture()
        assert (packed.get() == GUARD).all()
        for seed in (1, 2):
            host = coded(2 * BEFORE, seed)
            source.array[:] = cp.asarray(host)
            cp.cuda.runtime.deviceSynchronize()
            graph.launch(stream)
            expected = np.zeros(datatype.size, np.uint8)
            HostPacker(host[1024:], datatype).pack(expected)
            np.testing.assert_array_equal(packed.get(), expected)

    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "list"])
    def test_order_follows_the_stream(self, name):
        """The stream is busy when the copy is enqueued; the copy must see the data written before it on the stream."""
        datatype = TYPES[name]
        packer = CopyEnginePacker(datatype, 1, DEVICE)
        source, packed = on_device(np.zeros(2 * BEFORE, np.uint8)), Guarded(packer.nbytes)
        stream, large = cp.cuda.Stream(non_blocking=True), cp.ones(1 << 25)
        cp.cuda.runtime.deviceSynchronize()
        with stream:
            for _ in range(30):
                cp.sqrt(large, out=large)
            source.array[:] = 7
            packer.pack(source.pointer + 1024, packed.pointer, stream.ptr)
        assert (packed.get() == 7).all()

    def test_strides_past_32_bits(self):
        """Rows further apart than the largest pitch are copied one by one."""
        if cp.cuda.runtime.memGetInfo()[0] < 10 << 30:
            pytest.skip("less than 10 GiB of device memory are free")
        stride, rows = 3 << 30, coded(3 * 4096).reshape(3, 4096)
        memory = cp.cuda.alloc(2 * stride + 4096)
        runtime = cp.cuda.runtime
        for i in range(3):
            runtime.memcpy(
                memory.ptr + i * stride, rows[i].ctypes.data, 4096, runtime.memcpyHostToDevice
            )
        stream = cp.cuda.Stream(non_blocking=True)
        packer = CopyEnginePacker(dt.hvector(3, 4096, stride, "u1"), 1, DEVICE)
        packed = Guarded(packer.nbytes)
        packer.pack(int(memory.ptr), packed.pointer, stream.ptr)
        assert packed.get().tobytes() == rows.tobytes()
        # The distance of slices has no such limit if it is a multiple of the row pitch.
        halves = dt.hvector(3, 1, stride, dt.hvector(2, 1024, 2048, "u1"))
        packer = CopyEnginePacker(halves, 1, DEVICE)
        assert packer.calls == 1
        packed = Guarded(packer.nbytes)
        packer.pack(int(memory.ptr), packed.pointer, stream.ptr)
        assert packed.get().tobytes() == rows.reshape(3, 2, 2048)[:, :, :1024].tobytes()
        del memory
        cp.get_default_memory_pool().free_all_blocks()

    @pytest.mark.parametrize("n", [1000, 65535, 65536, 65537, 1_000_000])
    def test_many_rows(self, n):
        host = coded(16 * n)
        packer = CopyEnginePacker(dt.vector(n, 1, 2, "f8"), 1, DEVICE)
        source, packed = on_device(host), Guarded(packer.nbytes)
        on_a_stream(packer.pack, source.pointer, packed.pointer)
        assert packed.get().tobytes() == host.view("f8")[::2].tobytes()

    @pytest.mark.parametrize("n", [65535, 65536, 100_000])
    def test_many_slices(self, n):
        host = coded(16 * n)
        packer = CopyEnginePacker(dt.hvector(n, 1, 16, dt.vector(2, 3, 4, "u1")), 1, DEVICE)
        assert packer.calls == 1
        source, packed = on_device(host), Guarded(packer.nbytes)
        on_a_stream(packer.pack, source.pointer, packed.pointer)
        expected = host.reshape(n, 4, 4)[:, :2, :3]
        assert packed.get().tobytes() == expected.tobytes()

    def test_the_longest_list(self):
        places = np.cumsum(np.arange(65536) % 7 + 9)
        host, index = coded(1 << 20), (places[:, None] + np.arange(8)).ravel()
        packer = CopyEnginePacker(dt.hindexed_block(8, places, "u1"), 1, DEVICE)
        source, packed = on_device(host), Guarded(packer.nbytes)
        on_a_stream(packer.pack, source.pointer, packed.pointer)
        assert (packed.get() == host[index]).all()

    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "list"])
    def test_from_another_thread(self, name):
        """A thread without earlier CUDA calls has no current context."""
        datatype, host, failures = TYPES[name], coded(2 * BEFORE), []
        packer = CopyEnginePacker(datatype, 1, DEVICE)
        source, packed = on_device(host), Guarded(packer.nbytes)

        def work():
            try:
                packer.pack(source.pointer + 1024, packed.pointer, 0)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert not failures
        expected = np.zeros(datatype.size, np.uint8)
        HostPacker(host[1024:], datatype).pack(expected)
        np.testing.assert_array_equal(packed.get(), expected)

    @pytest.mark.parametrize("name", ["contiguous", "rows", "slices", "list"])
    def test_a_recurring_copy_is_prepared_once(self, name, monkeypatch):
        stream = cp.cuda.Stream(non_blocking=True)
        source, packed = Guarded(1 << 16), Guarded(1 << 16)
        source.array[:] = 7
        cp.cuda.get_current_stream().synchronize()
        packer = CopyEnginePacker(TYPES[name], 1, DEVICE)
        monkeypatch.delattr(copy_engine, "PreparedMemcpy")
        monkeypatch.delattr(copy_engine, "PreparedBatch")
        for _ in range(3):
            packer.pack(source.pointer + 1024, packed.pointer, stream.ptr)
        stream.synchronize()
        assert (packed.get()[: packer.nbytes] == 7).all()


class TestDriver:
    def test_copies(self, stream):
        host = coded(6 * 9 * 31)
        source, cube = on_device(host), host.reshape(6, 9, 31)

        target = Guarded(500)
        PreparedMemcpy(500).launch(target.pointer, source.pointer + 1, stream.ptr)
        assert (target.get() == host[1:501]).all()

        target = Guarded(54 * 17)
        rows = PreparedMemcpy(13, 54, target_pitch=17, source_pitch=31)
        rows.launch(target.pointer, source.pointer + 2, stream.ptr)
        expected = np.full((54, 17), GUARD, np.uint8)
        expected[:, :13] = host.reshape(54, 31)[:, 2:15]
        assert (target.get() == expected.ravel()).all()

        target = Guarded(6 * 8 * 17)
        slices = PreparedMemcpy(
            13, 7, 6, target_pitch=17, target_rows=8, source_pitch=31, source_rows=9
        )
        slices.launch(target.pointer, source.pointer + 2, stream.ptr)
        expected = np.full((6, 8, 17), GUARD, np.uint8)
        expected[:, :7, :13] = cube[:, :7, 2:15]
        assert (target.get() == expected.ravel()).all()

    def test_batch(self, stream):
        host = coded(5000)
        source, target = on_device(host), Guarded(5000)
        to, at, sizes = np.array([4000, 0, 50]), np.array([3, 700, 1]), np.array([1000, 7, 33])
        PreparedBatch(to, at, sizes).launch(target.pointer, source.pointer, stream.ptr)
        expected = np.full(5000, GUARD, np.uint8)
        for t, a, n in zip(to, at, sizes, strict=True):
            expected[t : t + n] = host[a : a + n]
        assert (target.get() == expected).all()

    def test_the_batched_copy_is_what_runs(self, monkeypatch):
        """With a new enough driver, and not on the legacy stream, a batch makes no single copies."""
        if batch_function() is None:
            pytest.skip("the driver is older than CUDA 12.8")
        source, target = on_device(coded(100)), Guarded(100)
        batch = PreparedBatch([0, 50], [10, 20], [5, 6])
        monkeypatch.setattr(batch, "_single", None)
        on_a_stream(batch.launch, target.pointer, source.pointer)
        assert (target.get()[:5] == source.get()[10:15]).all()

    def test_pitch_limit(self):
        runtime = cp.cuda.runtime
        limit = runtime.deviceGetAttribute(11, DEVICE)  # cudaDevAttrMaxPitch
        assert limit >= MAX_PITCH
        target = Guarded(64)
        with pytest.raises(DeviceError):
            rows = PreparedMemcpy(8, 2, target_pitch=4, source_pitch=8)
            rows.launch(target.pointer, target.pointer + 32, 0)

    def test_kinds_of_memory(self):
        array = cp.zeros(1000, np.uint8)
        pointer = int(array.data.ptr)
        assert memory_kind(pointer + 999) == ("device", DEVICE, pointer + 999)

        buffer = pinned(1000)
        host = buffer.array.ctypes.data
        assert memory_kind(host + 10) == ("pinned", DEVICE, buffer.device_pointer + 10)
        buffer.close()

        plain = np.zeros(1000, np.uint8)
        assert memory_kind(plain.ctypes.data).kind == "unregistered"
        assert memory_kind(0).kind == "unregistered"

    def test_managed_memory(self):
        managed = cp.cuda.ManagedMemory(8192)
        assert memory_kind(int(managed.ptr) + 1).kind == "managed"

    def test_memory_of_a_pool_of_cuda(self):
        pool = cp.cuda.MemoryAsyncPool()
        memory = pool.malloc(4096)
        cp.cuda.runtime.deviceSynchronize()
        assert memory_kind(int(memory.ptr)).kind == "device"

    def test_kinds_from_another_thread(self):
        pointer, found = int(cp.zeros(10).data.ptr), []
        thread = threading.Thread(target=lambda: found.append(memory_kind(pointer).kind))
        thread.start()
        thread.join()
        assert found == ["device"]

    def test_prepared_copies_keep_their_shape(self):
        rows = PreparedMemcpy(8, 10, target_pitch=8, source_pitch=16, device=DEVICE)
        stream = cp.cuda.Stream(non_blocking=True)
        hosts = [coded(160, seed) for seed in range(3)]
        pairs = [(on_device(host), Guarded(80)) for host in hosts]
        for source, target in pairs:
            rows.launch(target.pointer, source.pointer, stream.ptr)
        for host, (_, target) in zip(hosts, pairs, strict=True):
            assert target.get().tobytes() == host.view("f8")[::2].tobytes()
