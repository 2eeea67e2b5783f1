"""A GPU for the benchmarks' own logic, made of host memory: its kernels run as C++, its clock is the host's."""

from __future__ import annotations

import contextlib
import ctypes
import time
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.datatypes import Datatype, hindexed
from halox.errors import DatatypeError
from halox.packing.host import HostPacker
from halox.runtime.gpu.compiler import preamble
from halox_bench.common import byhand, kernels, neighbour, rig, timing
from halox_bench.common.layouts import Records
from halox_bench.common.reference import mixed
from halox_bench.pack import baselines, contention, on_device, targets
from tests.unit.cpu_kernels import SHIM, shared_library

ENTRIES = {
    "bench": """
extern "C" void run_fill(unsigned grid, unsigned block, u64 words, u64 n, u64 flip, int combine)
{
    launch_on_cpu(grid, block, true, fill, (u64*)words, n, flip, combine);
}
""",
    "byhand": """
extern "C" void run_boxes(unsigned grid, unsigned block, u64 array, u64 packed, const Boxes* table)
{
    launch_on_cpu(grid, block, true, boxes, (unsigned char*)array, (unsigned char*)packed, *table);
}
extern "C" void run_gathers(unsigned grid, unsigned block, u64 array, u64 packed, const Gathers* table)
{
    launch_on_cpu(grid, block, true, gathers, (unsigned char*)array, (unsigned char*)packed, *table);
}
extern "C" void run_faces(unsigned grid, unsigned block, const Box* table, unsigned each)
{
    launch_on_cpu(grid, block, true, faces, table, each);
}
extern "C" void run_triangle(unsigned grid, unsigned block, u64 array, u64 packed, unsigned n, int lower)
{
    launch_on_cpu(grid, block, true, triangle, (double*)array, (double*)packed, n, lower);
}
""",
}


@cache
def library(name: str, settings: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """Compile a kernel file of the benchmarks for the CPU."""
    text = f'{preamble(settings)}#include "{SHIM}"\n{kernels.source(name)}\n{ENTRIES[name]}'
    return shared_library(text, "-O1")  # megabytes go through these


class Launch:
    """In the place of PreparedLaunch."""

    def __init__(self, function: Any, grid: int, block: int, args: Any, *, device: int = 0) -> None:
        self._function, self._shape, self.args = function, (grid, block), args

    def launch_at(self, stream: int, *addresses: int) -> None:
        for arg, address in zip(self.args, addresses, strict=False):
            arg.value = address
        self.launch(stream)

    def launch(self, stream: int) -> None:
        name, function, settings = self._function
        grid, block = self._shape
        if function == "hold":
            _, staying, _, held, *_ = self.args
            ctypes.c_uint32.from_address(staying.value).value = 2 * held.value
        elif function == "records":
            self._records(dict(settings))
        elif function == "fill" and self.args[1].value > 1 << 12:
            self._fill()
        elif function not in ("nothing", "wait", "turns"):
            args = [
                ctypes.byref(arg) if isinstance(arg, ctypes.Structure) else arg for arg in self.args
            ]
            getattr(library(name, settings), f"run_{function}")(
                ctypes.c_uint(grid), ctypes.c_uint(block), *args
            )

    def _fill(self) -> None:
        """Fill by NumPy, which is faster than the kernel on a CPU."""
        address, n, flip, combine = (arg.value for arg in self.args)
        words = memory_at(address, 8 * n).view(np.uint64)
        value = mixed(np.arange(n)) ^ np.uint64(flip)
        words[:] = words ^ value if combine else value

    def _records(self, settings: dict[str, str]) -> None:
        array, packed, n = (arg.value for arg in self.args)
        arrays = [memory_at(array, 24 * n)]
        assert settings["UNPACK"] == "0"
        Records(n).pack(arrays, memory_at(packed, 17 * n))


def memory_at(address: int, nbytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_char * nbytes).from_address(address), np.uint8)


def rows(address: int, pitch: int, width: int, height: int) -> np.ndarray:
    memory = memory_at(address, (height - 1) * pitch + width)
    return np.lib.stride_tricks.as_strided(memory, (height, width), (pitch, 1))


class Array(np.ndarray):
    """Host memory with the part of CuPy's arrays that is used."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self)

    def set(self, values: np.ndarray) -> None:
        self[...] = values


class Event:
    done = True

    def record(self, stream: Any) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        pass


class Stream:
    done = True

    def __init__(self, **_: Any) -> None:
        self.ptr = id(self) & 0xFFFF

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=lambda stream: None)


class Ticks:
    """In the place of the module ``time``: a millisecond a look, however busy the machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-3
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Device(contextlib.AbstractContextManager[None]):
    def __init__(self, device: int) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def use(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def memcpy(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    ctypes.memmove(target, source, nbytes)


def memcpy_2d(
    target: int, to_pitch: int, source: int, pitch: int, width: int, height: int, *_: int
) -> None:
    rows(target, to_pitch, width, height)[...] = rows(source, pitch, width, height)


def memcpy_3d(address: int, stream: int) -> None:
    given = baselines._Parameters3D.from_address(address)
    width, height, depth = given.extent
    for plane in range(depth):
        memcpy_2d(
            given.dst.ptr + plane * given.dst.pitch * given.dst.ysize,
            given.dst.pitch,
            given.src.ptr + plane * given.src.pitch * given.src.ysize,
            given.src.pitch,
            width,
            height,
        )


def empty(count: int, dtype: Any) -> Array:
    # Aligned as a GPU's allocations are.
    memory = np.empty(count * np.dtype(dtype).itemsize + 512, np.uint8).view(Array)
    start = -memory.ctypes.data % 512
    return memory[start : memory.size - 512 + start].view(dtype)


class Packer:
    """In the place of all device packers."""

    def __init__(self, method: str, datatype: Any, count: int) -> None:
        if method == "copy_engine" and datatype.strided is None:
            raise DatatypeError("method 'copy_engine' cannot pack this datatype: its blocks differ")
        self.method, self._datatype, self._count = method, datatype, count
        self.nbytes = datatype.size * count

    @cached_property
    def _touched(self) -> tuple[int, int, Datatype]:
        """First and last byte, and the blocks from the first on."""
        blocks = self._datatype.blocks(self._count)
        low, high = int(blocks.offsets.min()), int((blocks.offsets + blocks.lengths).max())
        return low, high, hindexed(blocks.lengths, blocks.offsets - low, "u1")

    def _host(self, array: int) -> HostPacker:
        low, high, moved = self._touched
        return HostPacker(memory_at(array + low, high - low), moved)

    def pack(self, array: int, packed: int, stream: int) -> None:
        self._host(array).pack(memory_at(packed, self.nbytes))

    def unpack(self, packed: int, array: int, stream: int) -> None:
        self._host(array).unpack(memory_at(packed, self.nbytes))


def fake_cupy(l2_bytes: int) -> Any:
    runtime = SimpleNamespace(
        memcpyAsync=memcpy,
        memcpy2DAsync=memcpy_2d,
        memcpy3DAsync=memcpy_3d,
        getDeviceProperties=lambda device: {
            "name": b"host memory",
            "l2CacheSize": l2_bytes,
            "maxThreadsPerMultiProcessor": 2048,
        },
        getDeviceCount=lambda: 2,
        memGetInfo=lambda: (1 << 28, 1 << 28),
        deviceCanAccessPeer=lambda one, other: True,
        deviceEnablePeerAccess=lambda other: None,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
        CUDARuntimeError=RuntimeError,
    )
    cuda = SimpleNamespace(
        runtime=runtime,
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_elapsed_time=lambda begin, end: (end.time - begin.time) * 1e3,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
    )
    return SimpleNamespace(
        __version__="0",
        cuda=cuda,
        empty=empty,
        zeros=lambda count, dtype: np.zeros(count, dtype).view(Array),
        asarray=lambda values: np.array(values).view(Array),
        count_nonzero=np.count_nonzero,
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
    )


def pinned(nbytes: int) -> Any:
    array = np.zeros(nbytes, np.uint8)
    return SimpleNamespace(array=array, device_pointer=array.ctypes.data, nbytes=nbytes)


def make_packer(
    method: str, datatype: Any, count: int, device: int, max_blocks: Any = None, **_: Any
) -> Packer:
    return Packer("strided" if method == "auto" else method, datatype, count)


def install(monkeypatch: pytest.MonkeyPatch, *, l2_bytes: int = 1 << 18) -> None:
    """Put host memory in the place of the GPU, for all modules of the benchmarks."""
    cp = fake_cupy(l2_bytes)
    replacements = {
        "cupy": lambda: cp,
        "kernel": lambda name, function, device, settings=(): (name, function, settings),
        "PreparedLaunch": Launch,
        "multiprocessors": lambda device: 4,
        "gpu_count": lambda: 2,
        "pinned": pinned,
        "make_packer": make_packer,
    }
    monkeypatch.setattr(rig, "DEVICE_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(rig, "LINK_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(baselines, "MOST_BLOCKS", 256)
    # Waits with a limit end at once or never.
    for module in (contention, neighbour):
        monkeypatch.setattr(module, "time", Ticks())
    for module in (baselines, byhand, contention, neighbour, targets, on_device, rig, timing):
        for name, value in replacements.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
