"""Copies and look-ups by the driver, against a library that does them in host memory."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import numpy as np
import pytest

from halox.errors import DeviceError
from halox.runtime.gpu import cuda, libcuda
from halox.runtime.gpu.addresses import MemoryKind, memory_kind, memory_range
from halox.runtime.gpu.driver import (
    MAX_PITCH,
    UNIFIED,
    Memcpy2D,
    Memcpy3D,
    MemcpyAttributes,
    PreparedBatch,
    PreparedMemcpy,
)
from tests.support import require
from tests.unit.fake_driver import CAPTURED, STREAM, fake_driver, forget

GUARD = 0xA5


@pytest.fixture(params=[2, 1, 0], ids=["CUDA 13", "CUDA 12.8", "CUDA 12.2"])
def fake(request):
    require("cxx")
    with fake_driver(request.param) as found:
        found.form = request.param
        yield found


@pytest.fixture
def newest():
    require("cxx")
    with fake_driver() as found:
        yield found


def bytes_of(n, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, GUARD, n, np.uint8)


def address(array) -> int:
    return array.ctypes.data


class TestStructs:
    """Field by field and byte by byte as NVIDIA's own bindings lay them out."""

    @pytest.mark.parametrize(
        ("ours", "theirs"), [(Memcpy2D, "CUDA_MEMCPY2D"), (Memcpy3D, "CUDA_MEMCPY3D")]
    )
    def test_copies(self, ours, theirs):
        require("nvrtc")  # comes with the bindings
        bindings = pytest.importorskip("cuda.bindings.driver")
        reference, filled = getattr(bindings, theirs)(), ours()
        names = [name for name in dir(reference) if not name.startswith("_") and name != "getPtr"]
        assert set(names) == {name for name, _ in ours._fields_} - {"srcReserved", "dstReserved"}
        skipped = {"srcArray", "dstArray", "srcMemoryType", "dstMemoryType", "srcHost", "dstHost"}
        for number, name in enumerate(sorted(set(names) - skipped)):
            value = (number + 1) * 0x0102030405060708 % 2**63
            setattr(filled, name, value)
            setattr(reference, name, bindings.CUdeviceptr(value) if "Device" in name else value)
        for name in ("srcMemoryType", "dstMemoryType"):
            setattr(filled, name, UNIFIED)
            setattr(reference, name, bindings.CUmemorytype.CU_MEMORYTYPE_UNIFIED)
        for name, value in (("srcHost", 0x1111), ("dstHost", 0x2222)):
            setattr(filled, name, value)
            setattr(reference, name, value)
        for name, value in (("srcArray", 0x3333), ("dstArray", 0x4444)):
            setattr(filled, name, value)
            setattr(reference, name, bindings.CUarray(value))
        size = ctypes.sizeof(ours)
        assert bytes(filled) == ctypes.string_at(reference.getPtr(), size)
        assert size == {"CUDA_MEMCPY2D": 128, "CUDA_MEMCPY3D": 200}[theirs]

    def test_attributes(self):
        require("nvrtc")
        bindings = pytest.importorskip("cuda.bindings.driver")
        reference = bindings.CUmemcpyAttributes()
        order = bindings.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        reference.srcAccessOrder = order
        location = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST_NUMA
        reference.srcLocHint.type, reference.srcLocHint.id = location, 0x11
        reference.dstLocHint.type, reference.dstLocHint.id = location, 0x22
        reference.flags = 0x33
        ours = MemcpyAttributes(int(order), (int(location), 0x11), (int(location), 0x22), 0x33)
        assert int(order) == 1
        assert bytes(ours) == ctypes.string_at(reference.getPtr(), ctypes.sizeof(ours))

    def test_numbers_of_attributes(self):
        require("nvrtc")
        bindings = pytest.importorskip("cuda.bindings.driver")
        from halox.runtime.gpu import addresses

        names = ("MEMORY_TYPE", "IS_MANAGED", "DEVICE_ORDINAL")
        theirs = bindings.CUpointer_attribute
        asked = [int(getattr(theirs, f"CU_POINTER_ATTRIBUTE_{name}")) for name in names]
        assert list(addresses._ATTRIBUTES) == asked
        assert int(theirs.CU_POINTER_ATTRIBUTE_DEVICE_POINTER) == addresses._DEVICE_POINTER
        kinds = bindings.CUmemorytype
        assert int(kinds.CU_MEMORYTYPE_HOST) == addresses._HOST
        assert int(kinds.CU_MEMORYTYPE_DEVICE) == addresses._DEVICE
        assert int(kinds.CU_MEMORYTYPE_UNIFIED) == UNIFIED

    def test_numbers_of_errors(self):
        require("nvrtc")
        results = pytest.importorskip("cuda.bindings.driver").CUresult
        names = {int(result): result.name.removeprefix("CUDA_ERROR_") for result in results}
        assert names[libcuda.INVALID_VALUE] == "INVALID_VALUE"
        assert names[libcuda.NOT_INITIALIZED] == "NOT_INITIALIZED"
        assert names[libcuda.INVALID_CONTEXT] == "INVALID_CONTEXT"
        assert names[libcuda.NOT_FOUND] == "NOT_FOUND"
        assert {code: names[code] for code in libcuda._REMEDIES if code not in (1, 201)} == {
            2: "OUT_OF_MEMORY",
            101: "INVALID_DEVICE",
            400: "INVALID_HANDLE",
            700: "ILLEGAL_ADDRESS",
            900: "STREAM_CAPTURE_UNSUPPORTED",
        }


class TestCopies:
    def test_contiguous(self, newest):
        source, target = bytes_of(1000), np.full(1000, GUARD, np.uint8)
        PreparedMemcpy(900).launch(address(target) + 1, address(source) + 2, STREAM)
        assert (target[1:901] == source[2:902]).all()
        assert (target[[0, *range(901, 1000)]] == GUARD).all()
        assert newest.counts() == (1, 0, 0, 0)
        assert newest["last_stream"] == STREAM

    def test_rows(self, newest):
        source, target = bytes_of(20 * 31), np.full(20 * 17, GUARD, np.uint8)
        rows = PreparedMemcpy(13, 20, target_pitch=17, source_pitch=31)
        rows.launch(address(target) + 1, address(source) + 2, STREAM)
        expected = np.full((20, 17), GUARD, np.uint8)
        expected[:, 1:14] = source.reshape(20, 31)[:, 2:15]
        assert (target.reshape(20, 17) == expected).all()
        assert newest.counts() == (0, 1, 0, 0)

    def test_slices(self, newest):
        source, target = bytes_of(5 * 9 * 31), np.full(5 * 8 * 17, GUARD, np.uint8)
        slices = PreparedMemcpy(
            13, 7, 5, target_pitch=17, target_rows=8, source_pitch=31, source_rows=9
        )
        slices.launch(address(target) + 1, address(source) + 2, STREAM)
        expected = np.full((5, 8, 17), GUARD, np.uint8)
        expected[:, :7, 1:14] = source.reshape(5, 9, 31)[:, :7, 2:15]
        assert (target.reshape(5, 8, 17) == expected).all()
        assert newest.counts() == (0, 0, 1, 0)

    def test_batch(self, fake):
        source, target = bytes_of(1000), np.full(1000, GUARD, np.uint8)
        to, at, sizes = [900, 0, 500], [3, 700, 0], [100, 7, 33]
        expected = target.copy()
        for t, a, n in zip(to, at, sizes, strict=True):
            expected[t : t + n] = source[a : a + n]
        PreparedBatch(to, at, sizes).launch(address(target), address(source), STREAM)
        assert (target == expected).all()
        if fake.form:
            assert fake.counts() == (0, 0, 0, 1)
            assert fake["last_flags"] == 0
        else:
            assert fake.counts() == (3, 0, 0, 0)

    @pytest.mark.parametrize("stream", [0, 1, CAPTURED])
    def test_a_batch_where_none_is_allowed(self, fake, stream):
        source, target = bytes_of(100), np.full(100, GUARD, np.uint8)
        batch = PreparedBatch([-10, 50], [20, -5], [8, 5])
        batch.launch(address(target) + 10, address(source) + 5, stream)
        expected = np.full(100, GUARD, np.uint8)
        expected[:8], expected[60:65] = source[25:33], source[:5]
        assert (target == expected).all()
        assert fake.counts() == (2, 0, 0, 0)
        assert fake["last_stream"] == stream

    def test_nothing(self, newest):
        PreparedMemcpy(0, 5, 5).launch(0, 0, STREAM)
        PreparedMemcpy(8, 0).launch(0, 0, STREAM)
        PreparedBatch([], [], []).launch(0, 0, STREAM)
        assert newest.counts() == (0, 0, 0, 0)

    def test_arrays_of_different_length(self, newest):
        with pytest.raises(DeviceError, match=r"got \[1, 2, 1\] entries"):
            PreparedBatch([0], [0, 1], [4])

    def test_many_threads_share_a_prepared_copy(self, newest):
        rows = PreparedMemcpy(8, 100, target_pitch=8, source_pitch=16)
        batch = PreparedBatch(np.arange(50) * 8, np.arange(50) * 16, np.full(50, 8))
        wrong = []

        def work(number):
            source, target = np.full(200, number, "u8"), np.zeros(100, "u8")
            for _ in range(200):
                for copy, n in ((rows, 100), (batch, 50)):
                    target[:] = 0
                    copy.launch(address(target), address(source), STREAM)
                    if not (target[:n] == number).all() or target[n:].any():
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(number + 1,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestErrors:
    def test_a_pitch_that_is_too_small_or_too_large(self, newest):
        memory = bytes_of(100)
        for pitch in (7, MAX_PITCH + 1):
            with pytest.raises(
                DeviceError,
                match=r"cuMemcpy2DAsync_v2: CUDA_ERROR_INVALID_VALUE; check .*pitches are at least",
            ):
                rows = PreparedMemcpy(8, 2, target_pitch=pitch, source_pitch=8)
                rows.launch(address(memory), address(memory), STREAM)

    def test_an_error_without_a_name(self, newest):
        newest["next_error"] = 12345
        with pytest.raises(DeviceError, match="cuMemcpyAsync: CUDA error 12345; if an earlier"):
            PreparedMemcpy(8).launch(0, 0, STREAM)

    @pytest.mark.parametrize("code", [libcuda.NOT_INITIALIZED, libcuda.INVALID_CONTEXT])
    def test_a_thread_without_a_context_gets_one(self, newest, monkeypatch, code):
        made = []
        monkeypatch.setattr(libcuda, "make_context", made.append)
        source, target = bytes_of(8), np.zeros(8, np.uint8)
        newest["next_error"] = code
        PreparedMemcpy(8, device=3).launch(address(target), address(source), STREAM)
        assert made == [3]
        assert (target == source).all()

    def test_no_driver(self, monkeypatch):
        monkeypatch.setattr(libcuda, "LIBRARY", "libcuda.so.does-not-exist")
        forget()
        try:
            with pytest.raises(DeviceError, match=r"driver's library cannot be loaded .*; install"):
                PreparedMemcpy(8)
        finally:
            forget()

    def test_a_driver_without_the_function(self):
        require("cxx")
        with (
            fake_driver(without=("cuMemcpy3DAsync_v2",)),
            pytest.raises(DeviceError, match=r"has no cuMemcpy3DAsync_v2: it supports CUDA 13\.0"),
        ):
            PreparedMemcpy(8, 2, 2)
        with (
            fake_driver(0),
            pytest.raises(DeviceError, match=r"supports CUDA 12\.2, and .* needs CUDA 12\.8"),
        ):
            libcuda.function("cuMemcpyBatchAsync")

    def test_a_context_needs_a_gpu(self, monkeypatch):
        monkeypatch.setattr(cuda, "why_no_gpu", lambda: "there is none")
        with pytest.raises(DeviceError, match="no GPU can be used: there is none"):
            libcuda.make_context(0)


class TestAddresses:
    @pytest.mark.parametrize(
        ("kind", "managed", "expected"),
        [
            (2, 0, MemoryKind("device", 3, 1000)),
            (2, 1, MemoryKind("managed", 3, 1000)),
            (1, 1, MemoryKind("managed", 3, 1000)),
            (1, 0, MemoryKind("pinned", 3, 1000 + 4096)),
        ],
    )
    def test_kinds(self, newest, kind, managed, expected):
        newest["allocation"], newest["allocation_bytes"] = 992, 100
        newest["kind"], newest["managed"], newest["ordinal"] = kind, managed, 3
        assert memory_kind(1000) == expected
        known = expected.kind != "pinned"
        assert memory_range(1000) == ((992, 100) if known else None)
        assert memory_kind(2000) == MemoryKind("unregistered", None, None)
        assert memory_range(2000) is None

    def test_failure(self, newest):
        newest["next_error"] = 1
        with pytest.raises(DeviceError, match="cuPointerGetAttributes: CUDA_ERROR_INVALID_VALUE"):
            memory_kind(5)


def test_importing_loads_no_driver():
    code = (
        "import halox.runtime.gpu.addresses, halox.packing.copy_engine, halox.runtime.gpu.libcuda as l;"
        "assert not l.library.cache_info().currsize"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=500)
