"""Arrays of PyTorch, Numba and JAX on a GPU: packed, unpacked and exchanged in place."""

from __future__ import annotations

import os

import numpy as np
import pytest

from halox import Exchange, Grid, Recv, Send, pack, unpack
from halox import datatypes as dt
from halox.runtime.arrays import describe
from halox.runtime.gpu.devices import to_host
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy as cp  # noqa: E402

from halox.errors import FieldError  # noqa: E402
from tests.gpu.guarded import stall  # noqa: E402

COLUMN = dt.subarray((6, 8), (6, 1), (0, 7), "f4")
TAIL = dt.subarray((6, 8), (6, 2), (0, 6), "f4")


def numbers() -> np.ndarray:
    return np.arange(48, dtype="f4").reshape(6, 8)


@pytest.fixture
def torch():
    module = pytest.importorskip("torch")
    assert module.cuda.is_available()
    return module


@pytest.fixture
def jax():
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = pytest.importorskip("jax")
    if module.default_backend() != "gpu":
        pytest.skip("this JAX is for the host alone")
    return module


class Library:
    """A library and its function that copies a host array to the GPU."""

    def __init__(self, name: str, request) -> None:
        self.name = name
        if name == "torch":
            torch = request.getfixturevalue("torch")
            self.make = lambda host: torch.tensor(host, device="cuda")
        elif name == "numba":
            self.make = pytest.importorskip("numba.cuda").to_device
        else:
            self.make = request.getfixturevalue("jax").numpy.asarray


@pytest.fixture(params=["torch", "numba", "jax"])
def source(request):
    return Library(request.param, request)


@pytest.fixture(params=["torch", "numba"])
def library(request):
    return Library(request.param, request)


def test_described(source):
    array = source.make(numbers())
    found = describe(array)
    assert (found.shape, found.strides, found.dtype) == ((6, 8), (32, 4), np.dtype("f4"))
    assert found.device == 0
    assert found.writable == (source.name != "jax")
    assert (cp.asarray(array).data.ptr if source.name != "jax" else found.pointer) == found.pointer
    assert (to_host(array) == numbers()).all()


def test_packed(source):
    packed = pack(source.make(numbers()), COLUMN)
    assert packed.get().view("f4").tolist() == numbers()[:, 7].tolist()


def test_unpacked(library):
    target = library.make(np.zeros((6, 8), "f4"))
    packed = library.make(np.arange(6, dtype="f4").view("u1"))
    unpack(packed, COLUMN, target)
    expected = np.zeros((6, 8), "f4")
    expected[:, 7] = np.arange(6)
    assert (to_host(target) == expected).all()


def test_from_dlpack_of_cupy():
    array = cp.from_dlpack(cp.asarray(numbers()))  # CuPy states the sum of the extents as the size
    assert pack(array, COLUMN).get().view("f4").tolist() == numbers()[:, 7].tolist()


def test_packed_into(library):
    out = library.make(np.full(40, 0xEE, "u1"))
    packed = pack(cp.asarray(numbers()), COLUMN, out=out)
    assert to_host(packed).view("f4").tolist() == numbers()[:, 7].tolist()
    assert (to_host(out)[24:] == 0xEE).all()


def test_beyond_the_array(source):
    with pytest.raises(FieldError):
        pack(source.make(numbers()), "f4", 49)


def test_jax_is_never_written_to(jax):
    array = jax.numpy.asarray(numbers())
    with pytest.raises(FieldError):
        unpack(cp.zeros(24, "u1"), COLUMN, array)
    with pytest.raises(FieldError):
        pack(cp.asarray(numbers()), COLUMN, out=jax.numpy.zeros(24, "u1"))
    received = cp.zeros((6, 8), "f4")
    unpack(pack(array, COLUMN), COLUMN, received)
    cp.cuda.get_current_stream().synchronize()
    assert (np.asarray(jax.dlpack.from_dlpack(received))[:, 7] == numbers()[:, 7]).all()


def test_bfloat16_as_integers(torch):
    bits = np.arange(16000, 16048, dtype="i2").reshape(6, 8)
    column = dt.subarray((6, 8), (6, 1), (0, 7), "i2")
    tensor = torch.tensor(bits, device="cuda").view(torch.bfloat16)
    packed = pack(tensor.view(torch.int16), column)
    assert packed.get().view("i2").tolist() == bits[:, 7].tolist()
    target = torch.zeros((6, 8), dtype=torch.bfloat16, device="cuda")
    unpack(packed, column, target.view(torch.int16))
    assert target.view(torch.int16).cpu().numpy()[:, 7].tolist() == bits[:, 7].tolist()


def test_work_under_way_on_another_stream_of_torch(torch):
    side = torch.cuda.Stream()
    with cp.cuda.Stream(non_blocking=True) as ours:
        tensor = torch.zeros((6, 8), device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            with cp.cuda.ExternalStream(side.cuda_stream):
                stall()
            tensor += torch.tensor(numbers(), device="cuda")
            packed = pack(tensor, COLUMN)
        ours.synchronize()
        assert packed.get().view("f4").tolist() == numbers()[:, 7].tolist()


def test_work_under_way_in_jax(jax):
    @jax.jit
    def far_away(x, large):
        for _ in range(20):
            large = large @ large * 1e-4
        return x + 0 * large[0, 0]

    large = jax.numpy.ones((4096, 4096), "f4")
    far_away(jax.numpy.asarray(numbers()), large).block_until_ready()  # compiles
    with cp.cuda.Stream(non_blocking=True) as ours:
        packed = pack(far_away(jax.numpy.asarray(numbers()), large), COLUMN)
        ours.synchronize()
        assert packed.get().view("f4").tolist() == numbers()[:, 7].tolist()


def test_captured(torch):
    tensor = torch.tensor(numbers(), device="cuda")
    packed = torch.zeros(24, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with cp.cuda.Stream(non_blocking=True) as stream:
        pack(tensor, COLUMN, out=packed)
        stream.begin_capture()
        pack(tensor, COLUMN, out=packed)
        graph = stream.end_capture()
        for factor in (2, 3):
            tensor.copy_(factor * torch.tensor(numbers()))
            torch.cuda.synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert to_host(packed).view("f4").tolist() == (factor * numbers()[:, 7]).tolist()


def test_a_tensor_that_needs_its_gradient(torch):
    tensor = torch.zeros(8, device="cuda", requires_grad=True)
    with pytest.raises(FieldError):
        pack(tensor, "f4")
    assert pack(tensor.detach(), "f4").size == 4


def test_page_locked_memory_of_torch(torch):
    out = torch.zeros(24, dtype=torch.uint8).pin_memory()
    array = cp.asarray(numbers())
    target = cp.zeros((6, 8), "f4")
    if not describe(out).writable:
        # DLPack before 1.0 has no read-only flag, so halox treats the memory as read-only.
        out = out.numpy()
    pack(array, COLUMN, out=out)
    unpack(out, COLUMN, target)
    assert (target.get()[:, 7] == numbers()[:, 7]).all()


def test_tensors_on_the_host(torch):
    tensor = torch.tensor(numbers())
    packed = pack(tensor, COLUMN)
    assert packed.view("f4").tolist() == numbers()[:, 7].tolist()
    target = torch.zeros((6, 8))
    unpack(packed, COLUMN, target if describe(target).writable else target.numpy())
    assert target[:, 7].tolist() == numbers()[:, 7].tolist()


def test_typed_messages(source, library):
    """A rank sends arrays of each library to itself, into each type of writable array."""
    from mpi4py import MPI

    array, target = source.make(numbers()), library.make(np.zeros((6, 8), "f4"))
    sends = [Send(array, TAIL, 0)]
    with Exchange(sends, [Recv(target, TAIL, 0)], comm=MPI.COMM_SELF) as exchange:
        for _ in range(2):
            exchange()
    expected = np.zeros((6, 8), "f4")
    expected[:, 6:] = numbers()[:, 6:]
    assert (to_host(target) == expected).all()


def test_jax_receives_nothing(jax):
    from mpi4py import MPI

    array = jax.numpy.asarray(numbers())
    with pytest.raises(FieldError, match="read-only"):
        Exchange(
            [Send(array, COLUMN, 0)],
            [Recv(array, dt.contiguous(6, "f4"), 0)],
            comm=MPI.COMM_SELF,
        )


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_the_halo_of_a_field(library, dtype):
    from mpi4py import MPI

    with Grid((5, 6, 7), periodic=True, device="gpu", comm=MPI.COMM_SELF) as grid:
        inner = np.arange(210).reshape(5, 6, 7).astype(dtype)
        padded = np.pad(inner, 1, constant_values=-1)
        expected = np.pad(inner, 1, mode="wrap")
        assert (padded != expected).any()
        field = library.make(padded)
        grid.exchange(field)
        assert (to_host(field) == expected).all()


def test_the_halo_of_a_field_of_bfloat16(torch):
    from mpi4py import MPI

    with Grid((8, 6), periodic=True, device="gpu", comm=MPI.COMM_SELF) as grid:
        inner = np.arange(48, dtype="i2").reshape(8, 6)
        bits = torch.tensor(np.pad(inner, 1, constant_values=-1), device="cuda")
        grid.exchange(bits.view(torch.bfloat16).view(torch.int16))
        assert (bits.cpu().numpy() == np.pad(inner, 1, mode="wrap")).all()
