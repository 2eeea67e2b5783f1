"""Arrays of other libraries through DLPack and the CUDA array interface, with small classes as stand-ins."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from halox import Exchange, Grid, Recv, Send, pack, packing_method, unpack
from halox import datatypes as dt
from halox.errors import FieldError
from halox.packing import device_arrays
from halox.packing.device_arrays import device_array, packed_bytes
from halox.runtime import arrays
from halox.runtime.arrays import as_ndarray, describe
from tests.support import require

HOST, CUDA, METAL, MANAGED = 1, 2, 8, 13
LAYOUTS = {
    "whole": lambda a: a,
    "every other": lambda a: a[::2, 1::2],
    "transposed": lambda a: a.T,
    "backwards": lambda a: a[::-1],
    "one element": lambda a: a[1:2, 3:4],
    "a number": lambda a: np.array(3.0),
    "bool": lambda a: a > 3,
    "complex": lambda a: a.astype("c8"),
}


class Tensor:
    """Another library's array on NumPy's memory; it may claim another device."""

    def __init__(self, array, device=(HOST, 0)):
        self.array, self.device = array, device
        self.shape, self.dtype = array.shape, array.dtype
        self.streams = []

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        assert dl_device is None and copy is not True
        assert stream is None or self.device[0] != HOST
        self.streams.append(stream)
        return self.array.__dlpack__(max_version=max_version)


class OldTensor(Tensor):
    """An array of DLPack before 1.0, which has no flag for read-only arrays."""

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        return self.array.__dlpack__()


class Narrow(OldTensor):
    """Ignores the dtype argument of sums and sums in its own dtype, like JAX's arrays."""

    __array_ufunc__ = None

    def __getitem__(self, index):
        return type(self)(self.array[index])

    def sum(self, axis=None, dtype=None, out=None):
        return self.array.sum(dtype=self.dtype)


class InterfaceTensor(Tensor):
    """Supports both protocols on a GPU and DLPack on the host, like the arrays of PyTorch and JAX."""

    read_only = False

    @property
    def __cuda_array_interface__(self):
        if self.device[0] == HOST:
            raise AttributeError("not on a GPU")
        interface = dict(self.array.__array_interface__, version=2)
        return interface | {"data": (interface["data"][0], self.read_only)}


class Immutable(InterfaceTensor, OldTensor):
    """A read-only array, like JAX's."""

    read_only = True


class InterfaceOnly:
    """Supports the CUDA array interface only, like Numba's arrays."""

    def __init__(self, array, stream=None):
        self.__cuda_array_interface__ = dict(array.__array_interface__, version=3, stream=stream)


class Differentiated:
    """A tensor that requires a gradient: access to its memory raises, but not AttributeError, as in PyTorch."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device, 0

    def __dlpack__(self, **options):
        raise BufferError("use tensor.detach()")

    @property
    def __cuda_array_interface__(self):
        raise (AttributeError if self.device == HOST else RuntimeError)("use var.detach()")


def numbers():
    return np.arange(48.0).reshape(6, 8)


def place(found):
    # The stride of an axis with one element is arbitrary.
    steps = [step for n, step in zip(found.shape, found.strides, strict=True) if n > 1]
    return found.pointer, found.shape, steps, found.dtype, found.device


class TestOnTheHost:
    @pytest.mark.parametrize("kind", [Tensor, OldTensor])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_described_as_numpy_would_be(self, kind, layout):
        array = LAYOUTS[layout](numbers())
        found = describe(kind(array))
        assert place(found) == place(describe(array))
        assert found.writable == (kind is Tensor)
        view = as_ndarray(kind(array))
        assert np.array_equal(view, array)
        assert np.shares_memory(view, array)

    def test_a_read_only_one(self):
        array = numbers()
        array.flags.writeable = False
        assert not describe(Tensor(array)).writable
        assert not as_ndarray(Tensor(array)).flags.writeable

    def test_the_view_keeps_the_array(self):
        tensor = Tensor(numbers())
        gone = weakref.ref(tensor.array)
        view = as_ndarray(tensor)
        del tensor
        gc.collect()
        assert gone() is not None
        del view
        gc.collect()
        assert gone() is None

    def test_packed_and_unpacked_in_place(self):
        column = dt.subarray((6, 8), (6, 1), (0, 7), "f8")
        array, out = numbers(), np.zeros(48, np.uint8)
        packed = pack(Tensor(array), column)
        assert packed.view("f8").tolist() == array[:, 7].tolist()
        into = Tensor(out)
        into.__class__ = type("Sliced", (Tensor,), {"__getitem__": lambda s, at: s.array[at]})
        assert pack(OldTensor(array), column, out=into).tolist() == packed.tolist()
        target = np.zeros((6, 8))
        unpack(Tensor(packed), column, Tensor(target))
        assert target[:, 7].tolist() == array[:, 7].tolist()
        assert not target[:, :7].any()
        assert packing_method(Tensor(array), column).method == "host"

    def test_nothing_is_received_into_a_read_only_one(self):
        packed = np.zeros(8, np.uint8)
        with pytest.raises(FieldError):
            unpack(packed, "f8", OldTensor(numbers()))
        with pytest.raises(FieldError):
            pack(numbers(), "f8", out=OldTensor(packed))

    def test_libraries_that_refuse_and_unknown_devices(self):
        refusing, unknown = Differentiated(HOST), Tensor(numbers(), (METAL, 0))
        for use, several in (
            (describe, (refusing, unknown)),
            (as_ndarray, (refusing,)),
            (lambda a: pack(a, "f8"), (refusing, unknown, Sharded(numbers()))),
        ):
            for array in several:
                with pytest.raises(FieldError):
                    use(array)


class Sharded(Tensor):
    """An array on several devices."""

    def __dlpack_device__(self):
        raise BufferError("only for unsharded arrays")


def from_dlpack(tensor):
    """Return the memory of an array, as CuPy does: from its capsule, without its read-only flag."""
    try:
        tensor.__dlpack__(max_version=(1, 0))
    except TypeError:
        tensor.__dlpack__()
    return tensor.array


class Gpu:
    """The parts of CuPy and of the driver that the engine uses."""

    def __init__(self, stream):
        self.capturing, self.waits, self.devices = False, [], []
        self.module = ModuleType("cupy")
        self.module.from_dlpack = from_dlpack
        recorded = {}
        self.module.cuda = SimpleNamespace(
            Device=lambda number: nullcontext(self.devices.append(number)),
            Event=lambda **_: SimpleNamespace(ptr=5),
            get_current_stream=lambda: SimpleNamespace(ptr=stream),
            runtime=SimpleNamespace(
                streamIsCapturing=lambda stream: self.capturing,
                pointerGetAttributes=lambda pointer: SimpleNamespace(device=2),
                eventRecord=lambda event, on: recorded.update({event: on}),
                streamWaitEvent=lambda by, event: self.waits.append((by, recorded[event])),
            ),
        )


@pytest.fixture(params=[0, 77], ids=["legacy stream", "a stream"])
def gpu(request, monkeypatch):
    made = Gpu(request.param)
    made.stream = request.param
    for module in (arrays, device_arrays):
        monkeypatch.setattr(module, "cupy", lambda: made.module)
    return made


class TestOnAGpu:
    @pytest.mark.parametrize("kind", [Tensor, OldTensor, InterfaceTensor, Immutable])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_described(self, kind, layout, gpu):
        array = LAYOUTS[layout](numbers())
        found = describe(kind(array, (CUDA, 3)))
        *expected, _ = place(describe(array))
        assert place(found) == (*expected, 3)
        assert found.writable == (kind in (Tensor, InterfaceTensor))

    @pytest.mark.parametrize("kind", [InterfaceOnly, lambda a: Tensor(a, (MANAGED, 0))])
    def test_the_driver_knows_whose_memory_it_is(self, gpu, kind):
        assert describe(kind(numbers())).device == 2

    @pytest.mark.parametrize("kind", [Tensor, OldTensor, InterfaceTensor, Immutable])
    def test_the_library_orders_its_work_before_ours(self, gpu, kind):
        tensor = kind(numbers(), (CUDA, 3))
        device_array(tensor, "source")
        # Queries of the description alone pass None; 1 is DLPack's number of the legacy default stream.
        assert [s for s in tensor.streams if s is not None] == [gpu.stream or 1]
        assert gpu.devices == [3], "the stream is the current one of the array's GPU"
        assert not gpu.waits

    @pytest.mark.parametrize("stream", [None, 0, 77, 99])
    def test_the_stream_that_an_interface_names_comes_first(self, gpu, stream):
        device_array(InterfaceOnly(numbers(), stream), "source")
        expected = [] if stream in (None, gpu.stream) else [(gpu.stream, stream)]
        assert gpu.waits == expected

    @pytest.mark.parametrize(
        "kind", [lambda a: InterfaceTensor(a, (CUDA, 0)), lambda a: InterfaceOnly(a, 9)]
    )
    def test_a_capture_is_left_alone(self, gpu, kind):
        gpu.capturing = True
        tensor = kind(numbers())
        device_array(tensor, "source")
        assert not gpu.waits
        assert not any(getattr(tensor, "streams", []))

    @pytest.mark.parametrize("kind", [Tensor, OldTensor, Immutable])
    def test_nothing_is_received_into_a_read_only_one(self, gpu, kind):
        tensor = kind(np.zeros(8, np.uint8), (CUDA, 0))
        if kind is Tensor:
            tensor.array.flags.writeable = False  # its capsule has the flag
        device_array(tensor, "source")
        with pytest.raises(FieldError):
            device_array(tensor, "target", writable=True)
        assert packed_bytes(tensor, "packed", 8, 0) == tensor.array.ctypes.data
        with pytest.raises(FieldError):
            packed_bytes(tensor, "out", 8, 0, writable=True)

    def test_a_library_that_refuses(self, gpu):
        with pytest.raises(FieldError):
            device_array(Differentiated(CUDA), "source")


class TestExchanges:
    """Exchanges of one rank with itself."""

    def test_typed_messages(self):
        require("mpi")
        from mpi4py import MPI

        matrix, column = numbers(), np.zeros(6)
        immutable = OldTensor(matrix)
        sends = [Send(immutable, dt.vector(6, 1, 8, "f8"), 0)]
        with Exchange(
            sends, [Recv(Tensor(column), dt.contiguous(6, "f8"), 0)], comm=MPI.COMM_SELF
        ) as exchange:
            for factor in (1, -1):
                matrix[...] = factor * numbers()
                exchange()
                assert column.tolist() == matrix[:, 0].tolist()
        with pytest.raises(FieldError, match="read-only"):
            receives = [Recv(OldTensor(column), dt.contiguous(6, "f8"), 0)]
            Exchange(sends, receives, comm=MPI.COMM_SELF)

    def test_the_halo_of_a_field(self):
        require("mpi")
        from mpi4py import MPI

        with Grid((4, 6), periodic=True, device="cpu", comm=MPI.COMM_SELF) as grid:
            array = np.full(grid.padded_shape, -1.0)
            array[1:-1, 1:-1] = np.arange(24).reshape(4, 6)
            field = Tensor(array)
            for _ in range(2):
                grid.exchange(field)
                assert np.array_equal(array, np.pad(array[1:-1, 1:-1], 1, mode="wrap"))
                array[1:-1, 1:-1] += 100

    def test_numbers_of_a_field_are_formed_in_64_bits(self):
        require("mpi")
        from mpi4py import MPI

        array = np.full((6, 8), 99, "f4")
        array[1:-1, 1:-1] = 1
        array[1, 1] = large = 2.0**24
        assert array[1:-1, 1:-1].sum() != large + 23, "float32 holds no such number"
        field = Narrow(array)
        with Grid((4, 6), device="cpu", comm=MPI.COMM_SELF) as grid:
            found = grid.sum(field)
            assert isinstance(found, np.float64) and found == large + 23
            assert grid.dot(field, field) == large**2 + 23
            assert grid.norm(field) == np.sqrt(large**2 + 23)
            assert grid.min(field) == 1 and grid.max(field) == large
            out = np.zeros(1)
            result = Tensor(out)
            assert grid.sum(field, out=result) is result and out[0] == found
