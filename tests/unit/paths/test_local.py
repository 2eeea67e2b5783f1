"""Exchanges of a rank with itself on the host and on a GPU, and arrays that take the place of a plan's array.

On a GPU, g++ compiles the kernel, which runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halox import datatypes as dt
from halox import pack, unpack
from halox.decomposition import FieldLayout, FieldSpec, decompose
from halox.errors import StateError
from halox.packing import device, strided
from halox.packing.strided_plan import StridedPlan
from halox.paths.base import Job
from halox.paths.launches import copying, packing
from halox.paths.local import LocalDeviceChannel, LocalHostChannel
from halox.plans.halo import halo_draft
from halox.runtime.arrays import borrow, describe
from tests.fakes.cpu_kernels import aligned, run
from tests.fakes.cpu_packers import cpu_backend
from tests.fakes.fake_driver import STREAM
from tests.fakes.host_cuda import HostCuda, host_cuda
from tests.support import require

SHAPE, HALO = (6, 9, 5), ((1, 1), (2, 1), (1, 2))
DTYPES = ["f8", "u1", "c16", "S3", "S7", "f8,i4", "M8[s]"]
INNER = tuple(slice(low, low + n) for n, (low, _) in zip(SHAPE, HALO, strict=True))


def job_of(arrays: Sequence[Any], found: Sequence[Any], *, corners: bool = True) -> Job:
    layout = FieldLayout(decompose(SHAPE, 1, periodic=True), 0, FieldSpec(HALO))
    described = [(describe(array), layout) for array in arrays]
    draft = halo_draft(tuple(arrays), described, operation="copy", corners=corners)
    return Job([*found], draft.sends, draft.receives)


# On the host


def array_of(dtype: str, form: str) -> np.ndarray:
    """Return an array of zeros, with the halo, in the given memory layout."""
    n, m, k = (size + low + high for size, (low, high) in zip(SHAPE, HALO, strict=True))
    made: dict[str, Any] = {
        "C": lambda: np.zeros((n, m, k), dtype),
        "F": lambda: np.zeros((n, m, k), dtype, order="F"),
        "every other": lambda: np.zeros((n, 2 * m, k), dtype)[:, ::2],
        "reversed": lambda: np.zeros((n, m, k), dtype)[::-1, :, ::-1],
        "inside": lambda: np.zeros((n + 2, m + 1, k + 3), dtype)[1:-1, 1:, 2:-1],
        "of no alignment": lambda: np.zeros((n, m, k), [("a", "i1"), ("b", dtype)])["b"],
    }
    return made[form]()


@pytest.mark.parametrize("form", ["C", "F", "every other", "reversed", "inside", "of no alignment"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.part(2)
def test_on_the_host(dtype: str, form: str) -> None:
    """Exchange an array, then other arrays of the same layout; guard bytes stay unchanged."""
    u, v = array_of(dtype, form), array_of(dtype, form)
    channel = LocalHostChannel(job_of([u], [borrow(u)]))
    assert channel.is_movable
    for seed, array in enumerate((u, v, u)):
        memory = borrow(array)
        everything = np.frombuffer(memory.memory, "u1")
        everything[:] = 7
        cells = np.random.default_rng(seed).integers(0, 256, (*SHAPE, array.itemsize), "u1")
        array[INNER] = cells.view(array.dtype)[..., 0]
        channel.bind(channel.views([memory.memory]))
        channel.start()
        numbers = np.pad(np.arange(np.prod(SHAPE)).reshape(SHAPE), HALO, mode="wrap")
        wanted = cells.reshape(-1, array.itemsize)[numbers]
        found = np.ascontiguousarray(array).view("u1").reshape(*array.shape, array.itemsize)
        assert np.array_equal(found, wanted)
        at = np.arange(array.itemsize) + memory.origin
        for n, stride in zip(array.shape, array.strides, strict=True):
            at = ((np.arange(n) * stride)[:, None] + at).ravel()
        everything[at] = 7
        assert (everything == 7).all(), "nothing between the elements was written"


# On a GPU


class OnCpu:
    """Takes the place of the launch of a table."""

    made = launches = 0

    def __init__(
        self, name: str, planned: StridedPlan, gpu: int, defines: Any = (), mark: Any = None
    ) -> None:
        OnCpu.made += 1
        self.nbytes, self._shifts = planned.nbytes, [0] * 100
        self.bases = [(self._shifts, array, array) for array in planned.arrays]

        def at(stream: int) -> None:
            OnCpu.launches += 1
            run(name, planned, defines, shifts=self._shifts)

        self.at = self.launch = at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostCuda]:
    require("cxx")
    monkeypatch.setattr(strided, "_Launch", OnCpu)
    monkeypatch.setattr(strided, "multiprocessors", lambda device: 4)
    OnCpu.made = OnCpu.launches = 0
    with host_cuda() as found:
        yield found


def on_gpu(arrays: Sequence[np.ndarray]) -> Job:
    return job_of(arrays, [replace(describe(array), device=0) for array in arrays])


def array_at(dtype: str, offset: int = 0) -> np.ndarray:
    """Return an array at an address ``offset`` bytes beyond a multiple of 256."""
    shape = [n + low + high for n, (low, high) in zip(SHAPE, HALO, strict=True)]
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return aligned(nbytes, offset).view(dtype).reshape(shape)


def filled(array: np.ndarray, *seed: int) -> np.ndarray:
    """Fill the cells of an array; returns the expected array, with its halo."""
    cells = np.random.default_rng(seed).integers(1, 200, SHAPE).astype(array.dtype)
    array[...] = 0
    array[INNER] = cells
    return np.pad(cells, HALO, mode="wrap")


def check(channel: LocalDeviceChannel, arrays: Sequence[np.ndarray], seed: int) -> None:
    """Exchange arrays by the channel, and compare with NumPy."""
    wanted = [filled(array, seed, number) for number, array in enumerate(arrays)]
    channel.bind(channel.views([array.ctypes.data for array in arrays]))
    channel.start()
    assert all(map(np.array_equal, arrays, wanted))


@pytest.mark.parametrize("dtype", ["u1", "c16"])
def test_arrays_at_lower_and_higher_addresses(dtype: str, gpu: HostCuda) -> None:
    arrays = sorted((array_at(dtype) for _ in range(3)), key=lambda array: array.ctypes.data)
    first = arrays.pop(1)
    channel = LocalDeviceChannel(on_gpu([first]), 0)
    assert channel.is_movable
    for number, array in enumerate((*arrays, first)):
        check(channel, [array], number)
    assert OnCpu.made == 1


@pytest.mark.parametrize("offset", [1, 4, 8, 24])
def test_arrays_of_another_alignment(offset: int, gpu: HostCuda) -> None:
    """The shorter words need a second table, once."""
    dtype = f"u{offset}" if offset < 8 else "f8"
    channel = LocalDeviceChannel(on_gpu([array_at(dtype)]), 0)
    for number in range(4):
        check(channel, [array_at(dtype, offset * (number % 2))], number)
    assert OnCpu.made == 2


@pytest.mark.parametrize("count", [3, 17])
def test_several_arrays_move_in_one_launch(count: int, gpu: HostCuda) -> None:
    """A launch has room for 15 arrays."""
    dtypes = ["f8", "u1", "c16", *["f4"] * (count - 3)]
    first = [array_at(dtype) for dtype in dtypes]
    channel = LocalDeviceChannel(on_gpu(first), 0)
    for number in range(3):
        others = [array_at(dtype, 16 * ((number + 3 * k) % 8)) for k, dtype in enumerate(dtypes)]
        check(channel, others, number)
        check(channel, [first[0], *others[1:-1], first[-1]], number)
        check(channel, first, number)
    assert OnCpu.made == -(-count // 15) and OnCpu.launches == 9 * OnCpu.made


def test_added_arrays_move(gpu: HostCuda) -> None:
    """The cells beside a face are added to the halo at the other face."""
    arrays = [array_at("f8", offset) for offset in (0, 16, 8, 24)]
    job = job_of(arrays[:1], [replace(describe(arrays[0]), device=0)], corners=False)
    made = copying(replace(job, operation="add"), [*job.pairs()], 0)
    for number, array in enumerate(arrays):
        array[...] = np.random.default_rng(number).integers(1, 200, array.shape)
        came = np.zeros_like(array)
        came[INNER] = array[INNER]
        LocalHostChannel(job_of([came], [borrow(came)], corners=False)).start()
        came[INNER] = 0
        wanted = array + came
        made.bind(made.view([array.ctypes.data]))
        made.launch(0)
        assert np.array_equal(array, wanted)


def test_no_table_is_made_while_a_stream_is_captured(gpu: HostCuda) -> None:
    first = array_at("f8")
    channel = LocalDeviceChannel(on_gpu([first]), 0)
    gpu.capturing.add(gpu.current.ptr)
    check(channel, [array_at("f8", 16)], 0)
    with pytest.raises(StateError):
        channel.views([first.ctypes.data + 8])
    check(channel, [first], 1)


def test_packing_with_copies_in_one_launch(gpu: HostCuda) -> None:
    """Copies move source and target with the arrays, packing the source only."""
    arrays = [array_at("f8", 16 * number) for number in range(2)]
    job = on_gpu(arrays[:1])
    (send, *_), pairs = job.sends[0].parts, [*job.pairs()]
    packed = np.zeros(send.nbytes, np.uint8)
    made = packing(job, [(send, packed.ctypes.data)], 0, pairs=pairs)
    for number in (0, 1, 0, 1):
        array = arrays[number]
        wanted = filled(array, number)
        oracle = pack(array, send.datatype, send.count)
        packed[:] = 0
        made.bind(made.view([array.ctypes.data]))
        made.launch(0)
        assert np.array_equal(array, wanted) and packed.tobytes() == oracle.tobytes()
    assert OnCpu.made == 1 and OnCpu.launches == 4


def test_irregular_parts_of_several_arrays() -> None:
    """One launch of strided parts, and one of all irregular parts."""
    list_type = dt.indexed_block(2, np.random.default_rng(1).permutation(200) * 3, "f8")
    types = [list_type, dt.vector(50, 2, 5, "f8"), list_type]
    with cpu_backend("workunits") as backend:
        arrays = [aligned(8 * 700, 8 * n).view("f8") for n in range(3)]
        packed = [aligned(one.size) for one in types]
        ends = [
            (device.Endpoint(describe(array), one, 1, number), to.ctypes.data)
            for number, (array, one, to) in enumerate(zip(arrays, types, packed, strict=True))
        ]
        pack_all = device.launch_pack(ends, 0, 8)
        unpack_all = device.launch_unpack(ends, 0, 8)
        for n, array in enumerate(arrays):
            array[:] = np.arange(700) + 1000 * n
        backend.events.clear()
        pack_all.at(STREAM)
        assert len(backend.events) == 2
        wanted = [pack(array, one) for array, one in zip(arrays, types, strict=True)]
        assert all(map(np.array_equal, packed, wanted))
        kept = [array.copy() for array in arrays]
        for array, one in zip(arrays, types, strict=True):
            unpack(np.zeros(one.size, "u1"), one, array)
        unpack_all.at(STREAM)
        assert all(map(np.array_equal, arrays, kept))
