"""``halox.pack`` and ``halox.unpack`` of GPU arrays: all methods, all destinations, bad input."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import halox
from halox import datatypes as dt
from halox import pack, unpack
from tests.packers import displacements
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402
import cupyx  # noqa: E402

from halox.errors import DatatypeError, DeviceError, FieldError  # noqa: E402
from tests.gpu.guarded import stall  # noqa: E402

METHODS = ("auto", "strided", "workunits", "traversal", "copy_engine")


class Foreign:
    """An array of another library, of which halox sees only ``__cuda_array_interface__``."""

    def __init__(self, array, *, read_only=False, stream=None):
        interface = dict(array.__cuda_array_interface__)
        interface["data"] = (interface["data"][0], read_only)
        interface["stream"] = stream
        self.__cuda_array_interface__ = interface
        self.kept = array


class TestPackDevice:
    def test_views_negative_strides_and_out(self):
        base = cp.arange(30, dtype="f8")
        out = cp.zeros(100, "u1")
        packed = pack(base[29:], dt.hvector(30, 1, -8, "f8"))
        assert packed.get().view("f8").tolist() == list(range(29, -1, -1))
        for view in (base[::-1], base[::2], base.reshape(5, 6)[:, 1:]):
            with pytest.raises(FieldError, match="source"):
                pack(view, "f8", 2)
            with pytest.raises(FieldError, match="target"):
                unpack(packed, "f8", view, 2)
        packed = pack(base[4:], dt.vector(3, 1, 2, "f8"), 1, out)
        assert packed.shape == (24,)
        assert packed.data.ptr == out.data.ptr
        assert out.get()[:24].view("f8").tolist() == [4, 6, 8]
        assert not out.get()[24:].any()

    def test_repeated_calls_keep_their_tables_apart(self):
        """Each call frees its table before its kernel has run; later calls must not overwrite that memory too early."""
        arrays = [cp.full(5000, i, "f8") for i in range(64)]
        datatype = dt.vector(2500, 1, 2, "f8")
        packed = [pack(array, datatype) for array in arrays]
        for i, one in enumerate(packed):
            assert (one.get().view("f8") == i).all()

    def test_foreign_arrays(self):
        array = cp.arange(100, dtype="f8")
        producer = cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
        with producer:
            stall()
            array[:] = 5
        packed = pack(Foreign(array, stream=producer.ptr), dt.contiguous(100, "f8"))
        assert (packed.get().view("f8") == 5).all()
        with pytest.raises(FieldError):
            pack(Foreign(array), dt.contiguous(101, "f8"))
        with pytest.raises(FieldError):
            unpack(packed, dt.contiguous(100, "f8"), Foreign(array, read_only=True))

    def test_wrong_arguments(self):
        array = cp.zeros(8, "f8")
        with pytest.raises(FieldError):
            pack(array, dt.contiguous(array.data.mem.size // 8 + 1, "f8"))
        for wrong in (cp.zeros(63, "u1"), cp.zeros(128, "u1")[::2], np.zeros(64, "u1")):
            with pytest.raises(FieldError):
                pack(array, dt.contiguous(8, "f8"), 1, wrong)
            with pytest.raises(FieldError):
                unpack(wrong, dt.contiguous(8, "f8"), array)
        with pytest.raises(DatatypeError):
            pack(array, dt.primitive("f8"), -1)
        assert pack(array, dt.primitive("f8"), 0).size == 0


def lower_triangle(n):
    return dt.indexed([n - j for j in range(n)], [j * n + j for j in range(n)], "f8")


class TestMethods:
    @pytest.mark.parametrize("method", METHODS)
    def test_there_and_back(self, method):
        datatype, count = dt.resized(dt.indexed([2, 1, 3], [0, 4, 10], "f4"), 0, 80), 3
        places = displacements(datatype, count)
        host = np.random.default_rng(1).integers(1, 256, datatype.extent * count, np.uint8)
        packed = pack(cp.asarray(host), datatype, count, method=method)
        assert packed.dtype == np.uint8
        np.testing.assert_array_equal(packed.get(), host[places])
        target, expected = cp.zeros(host.size, np.uint8), np.zeros(host.size, np.uint8)
        unpack(packed, datatype, target, count, method=method)
        expected[places] = host[places]
        np.testing.assert_array_equal(target.get(), expected)

    @pytest.mark.parametrize("method", METHODS)
    def test_order_follows_the_stream(self, method):
        """The stream is busy at the first call, which must see the values written before it on the stream."""
        n = 1 << 20
        every_other = dt.vector(n // 2, 1, 2, "f8")
        listed = dt.indexed_block(1, np.arange(n // 2) ** 2 % n, "f8")
        datatype = listed if method in ("workunits", "traversal") else every_other
        array, stream = cp.zeros(n), cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()
        with stream:
            stall()
            array[:] = 7
            packed = pack(array, datatype, method=method)
        stream.synchronize()
        assert (packed.get().view("f8") == 7).all()

    def test_the_choice(self):
        array, host = cp.zeros((32, 2, 1 << 13)), cupyx.empty_pinned(1 << 21, np.uint8)
        rows = dt.vector(32, 1 << 13, 1 << 14, "f8")
        assert halox.packing_method(array, lower_triangle(200)).method == "workunits"
        assert halox.packing_method(array, rows).method == "strided"
        assert halox.packing_method(array, rows, 1, host).method == "copy_engine"

    def test_a_method_that_cannot(self):
        array = cp.zeros((300, 300))
        with pytest.raises(DatatypeError):
            pack(array, lower_triangle(300), method="strided")
        with pytest.raises(DatatypeError):
            pack(array, dt.primitive("f8"), method="magic")
        with pytest.raises(DatatypeError):
            pack(np.zeros(3), dt.primitive("f8"), method="strided")
        with pytest.raises(DeviceError):
            pack(array, dt.primitive("f8"), max_blocks=0)


class TestArraysSeenBefore:
    """Later calls with the same arrays skip the checks; calls with different arrays must not skip them."""

    def test_other_arrays_in_their_place(self):
        column = dt.vector(100, 1, 3, "f8")
        out = cp.zeros(800, np.uint8)
        for i in range(4):
            array = cp.full(300, i, "f8")
            for _ in range(2):
                assert (pack(array, column, 1, out).get().view("f8") == i).all()
            assert (pack(array, column).get().view("f8") == i).all()
            del array
        with pytest.raises(FieldError, match="source: "):
            pack(cp.zeros(1 << 26, "u1")[-80:].view("f8"), column, 1, out)
        with pytest.raises(FieldError):
            pack(cp.zeros(300), column, 1, cp.zeros(799, np.uint8))
        with pytest.raises(FieldError):
            unpack(None, column, cp.zeros(300))

    def test_a_freed_output_is_not_written(self):
        column = dt.vector(100, 1, 3, "f8")
        array = cp.ones(300)
        kept = []
        for _ in range(20):
            pack(array, column)  # the next array reuses the memory of the freed result
            kept.append(cp.zeros(800, np.uint8))
        cp.cuda.runtime.deviceSynchronize()
        assert not any(other.any() for other in kept)


class TestDestinations:
    @pytest.mark.parametrize("method", METHODS)
    def test_page_locked_host_memory(self, method):
        array = cp.random.default_rng(4).random((64, 65))
        column = dt.vector(64, 3, 65, "f8")
        out = cupyx.empty_pinned(column.size + 16, np.uint8)
        out[:] = 0xA5
        packed = pack(array, column, 1, out, method=method)
        cp.cuda.get_current_stream().synchronize()
        assert isinstance(packed, np.ndarray) and packed.size == column.size
        assert packed.tobytes() == array[:, :3].get().tobytes()
        assert (out[column.size :] == 0xA5).all()
        target = cp.zeros_like(array)
        unpack(packed, column, target, method=method)
        assert (target.get()[:, :3] == array.get()[:, :3]).all() and not target.get()[:, 3:].any()

    @pytest.mark.skipif(cp.cuda.runtime.getDeviceCount() < 2, reason="one GPU")
    @pytest.mark.parametrize("method", METHODS)
    def test_another_gpu(self, method):
        array = cp.random.default_rng(5).random((64, 65))
        column = dt.vector(64, 3, 65, "f8")
        with cp.cuda.Device(1):
            out = cp.zeros(column.size, np.uint8)
            cp.cuda.get_current_stream().synchronize()
        packed = pack(array, column, 1, out, method=method)
        cp.cuda.get_current_stream().synchronize()
        assert packed.data.ptr == out.data.ptr
        with cp.cuda.Device(1):
            assert out.get().tobytes() == array[:, :3].get().tobytes()

    @pytest.mark.skipif(cp.cuda.runtime.getDeviceCount() < 2, reason="one GPU")
    def test_an_array_on_a_gpu_that_is_not_the_current_one(self):
        with cp.cuda.Device(1):
            array = cp.arange(100.0)
            cp.cuda.get_current_stream().synchronize()
        packed = pack(array, dt.vector(50, 1, 2, "f8"))
        assert packed.device.id == 1
        with cp.cuda.Device(1):
            assert packed.get().view("f8").tolist() == list(range(0, 100, 2))


class TestBadInput:
    def test_overlapping_types_are_not_received(self):
        array = cp.zeros(20)
        twice = dt.hindexed_block(2, [0, 8], "f8")
        assert pack(array, twice).size == 32, "sending is allowed"
        before = array.get().tobytes()
        with pytest.raises(DatatypeError):
            unpack(cp.ones(32, np.uint8), twice, array)
        with pytest.raises(DatatypeError):
            unpack(np.ones(32, np.uint8), twice, np.zeros(20))
        assert array.get().tobytes() == before

    @pytest.mark.parametrize("method", METHODS)
    def test_nothing_is_written_on_an_error(self, method):
        array, out = cp.zeros(64), cp.full(64, 0xA5, np.uint8)
        small = dt.contiguous(9, "f8")
        with pytest.raises(FieldError):
            pack(array, small, 1, out, method=method)
        outside = dt.hvector(2, 1, array.data.mem.size, "f8")
        with pytest.raises(FieldError):
            pack(array, outside, 1, out, method=method)
        before = dt.hindexed([1], [-(1 << 30)], "f8")
        with pytest.raises(FieldError):
            unpack(out, before, array, method=method)
        cp.cuda.runtime.deviceSynchronize()
        assert (out.get() == 0xA5).all() and not array.get().any()

    def test_a_few_threads_at_once(self):
        """Threads share datatypes, and each packs its own arrays."""
        column, triangle = dt.vector(200, 1, 200, "f8"), lower_triangle(200)
        wrong = []

        def work(seed):
            with cp.cuda.Stream(non_blocking=True):
                array = cp.random.default_rng(seed).random((200, 200))
                host = array.get()
                for _ in range(50):
                    if pack(array, column).get().tobytes() != host[:, 0].tobytes():
                        wrong.append(seed)
                    for method in ("workunits", "traversal"):
                        found = pack(array, triangle, method=method).get()
                        if found.tobytes() != host[np.triu_indices(200)].tobytes():
                            wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not wrong

    @pytest.mark.parametrize("method", METHODS[:-1])
    def test_a_captured_call_can_be_replayed(self, method):
        array = cp.arange(400.0)
        triangle = lower_triangle(20)
        out = cp.zeros(triangle.size, np.uint8)
        if method == "strided":
            triangle, out = dt.vector(20, 1, 20, "f8"), cp.zeros(160, np.uint8)
        stream = cp.cuda.Stream(non_blocking=True)
        cp.cuda.runtime.deviceSynchronize()  # another stream fills the arrays
        with stream:
            expected = pack(array, triangle, method=method).get().view("f8")
            stream.begin_capture()
            pack(array, triangle, 1, out, method=method)
            graph = stream.end_capture()
            for i in range(3):
                array += 1
                graph.launch(stream)
                assert (out.get().view("f8") == expected + i + 1).all()
