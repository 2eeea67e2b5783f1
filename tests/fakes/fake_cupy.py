"""A GPU per rank, simulated on the host: the part of CuPy that reductions use, on memory that processes can map.

All work runs at once when it is enqueued on a stream. The kernels are the real ones, compiled by g++
(`tests.fakes.cpu_allreduce`). Exported memory is in files of /dev/shm.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
import pytest

from halox.errors import DeviceError
from halox.reductions.operations import find_operation
from halox.runtime.gpu.marks import Mark
from halox.runtime.gpu.pools import WORDS_BYTES, Pool
from halox.runtime.segments import Block, Place
from tests.fakes.cpu_allreduce import Launch, Stream
from tests.fakes.cpu_kernels import aligned
from tests.fakes.host_launches import leave
from tests.support import forget_captures


class Array:
    """Takes the place of cupy.ndarray."""

    def __init__(self, values: np.ndarray, device: int = 0) -> None:
        self.values, self.device_id = values, device
        pointer = values.__array_interface__["data"][0]
        self.data = SimpleNamespace(
            ptr=pointer, device_id=device, copy_from_device_async=partial(_fill, pointer)
        )

    shape = property(lambda self: self.values.shape)
    strides = property(lambda self: self.values.strides)
    dtype = property(lambda self: self.values.dtype)
    size = property(lambda self: self.values.size)
    flags = property(lambda self: self.values.flags)
    ndim = property(lambda self: self.values.ndim)
    real = property(lambda self: Array(self.values.real))
    imag = property(lambda self: Array(self.values.imag))

    def get(self) -> np.ndarray:
        return self.values.copy()

    def tolist(self) -> Any:
        return self.values.tolist()

    def copy(self, order: str = "C") -> Array:
        return Array(self.values.copy(order))

    def astype(self, dtype: Any, copy: bool = True) -> Array:
        return Array(np.asarray(self.values.astype(dtype)))

    def reshape(self, shape: Any) -> Array:
        return Array(self.values.reshape(shape))

    def __getitem__(self, index: Any) -> Array:
        return Array(self.values[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = plain(value)

    def __float__(self) -> float:
        return float(self.values)

    def __mul__(self, other: Any) -> Array:
        return Array(np.asarray(self.values * plain(other)))

    def __add__(self, other: Any) -> Array:
        return Array(np.asarray(self.values + plain(other)))

    def __truediv__(self, other: Any) -> Array:
        return Array(np.asarray(self.values / plain(other)))

    def __eq__(self, other: object) -> Any:
        return Array(np.asarray(self.values == plain(other)))

    def __ne__(self, other: object) -> Any:
        return Array(np.asarray(self.values != plain(other)))

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.values)

    def argmax(self) -> Any:
        return self.values.argmax()

    def all(self) -> Any:
        return self.values.all()


def _fill(pointer: int, source: Any, nbytes: int) -> None:
    ctypes.memmove(pointer, source.ptr, nbytes)


def _empty(shape: Any, dtype: Any = "f8") -> Array:
    """Reject the dtypes that CuPy 14 rejects."""
    found = np.dtype(dtype)
    if not found.names and (found.char not in "?bhilqBHILQefdFD" or not found.isnative):
        raise ValueError(f"Unsupported dtype {found}")
    return Array(np.empty(shape, dtype))


def plain(value: Any) -> Any:
    return value.values if isinstance(value, Array) else value


def _calls(function: Any) -> Any:
    def call(*arguments: Any, out: Any = None, **options: Any) -> Any:
        if out is not None:
            options["out"] = plain(out)
        found = np.asarray(function(*map(plain, arguments), **options))
        return out if out is not None else Array(found)

    return call


class FakeArena:
    """Takes the place of DeviceArena: one file per block, never reused."""

    mapped: ClassVar[dict[tuple[str, int], int]] = {}

    def __init__(self, device: int) -> None:
        self.device, self.name = device, f"halox-test-{uuid4().hex}"
        self._files: list[str] = []
        self._maps: list[Any] = []
        self.retired = 0
        atexit.register(self.free)

    def allocate(self, nbytes: int) -> Block:
        number = len(self._files)
        path = f"/dev/shm/{self.name}-{number}"
        with open(path, "wb") as file:
            file.truncate(nbytes)
        self._files.append(path)
        return Block(Place((self.name, number)), self._map((self.name, number), path), nbytes)

    def _map(self, segment: tuple[str, int], path: str) -> int:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._maps.append(memory)
        self.mapped[segment] = np.frombuffer(memory, np.uint8).ctypes.data
        return self.mapped[segment]

    def handles(self, places: Any) -> dict[Any, bytes]:
        return {p.segment: self._files[p.segment[1]].encode() for p in places}

    def open(self, handles: Any) -> None:
        for segment, handle in handles.items():
            if segment not in self.mapped:
                self._map(segment, handle.decode())

    def pointer(self, place: Place) -> int:
        return self.mapped[place.segment] + place.offset

    def locate(self, start: int, end: int) -> Place | None:
        return None  # all arrays are outside the arena

    def array(self, shape: Any, dtype: Any) -> Array:
        return Array(np.zeros(shape, dtype), self.device)

    def release(self, block: Block) -> None:
        pass

    def retire(self, block: Block) -> None:
        self.retired += 1

    def reclaim(self) -> None:
        self.retired = 0

    def synchronize(self) -> None:
        pass

    def unmap(self, names: Any) -> None:
        pass

    def free(self) -> None:
        for path in self._files:
            os.unlink(path)
        self._files.clear()


class MappedArena(FakeArena):
    """Memory that ranks can map, arrays included; all arenas of a process know one another's blocks."""

    arenas: ClassVar[dict[str, MappedArena]] = {}

    def __init__(self, device: int) -> None:
        super().__init__(device)
        self._blocks: list[Any] = []
        self.arenas[self.name] = self

    def handles(self, places: Any) -> dict[Any, bytes]:
        segments = {place.segment for place in places}
        return {(name, n): self.arenas[name]._files[n].encode() for name, n in segments}

    def array(self, shape: Any, dtype: Any) -> Array:
        nbytes = max(int(np.prod(shape)) * np.dtype(dtype).itemsize, 1)
        block = self.allocate(nbytes)
        self._blocks.append(block)
        raw = (ctypes.c_char * nbytes).from_address(block.pointer)
        return Array(np.frombuffer(raw, "u1").view(dtype).reshape(shape), self.device)

    def free(self) -> None:
        super().free()
        self._blocks.clear()

    def _block_around(self, start: int, end: int) -> Any:
        for block in (block for arena in self.arenas.values() for block in arena._blocks):
            if block.pointer <= start and end <= block.pointer + block.nbytes:
                return block
        return None

    def locate(self, start: int, end: int) -> Place | None:
        block = self._block_around(start, end)
        return block and block.place.at(start - block.pointer)

    def around(self, start: int, end: int) -> Any:
        block = self._block_around(start, end)
        return block and (block.pointer, block.nbytes, block)


class FakeEvents:
    """Takes the place of EventPool: without asynchronous work, the flags on the host suffice."""

    def __init__(self, device: int) -> None:
        self.taken = 0

    def acquire(self, count: int) -> list[int]:
        self.taken += count
        return list(range(self.taken - count, self.taken))

    def handles(self, numbers: Any) -> dict[int, bytes]:
        return dict.fromkeys(numbers, b"")

    def open(self, rank: int, handles: Any) -> None:
        pass

    def own(self, number: int) -> int:
        return number

    def opened(self, rank: int, number: int) -> int:
        return number

    def release(self, numbers: Any) -> None:
        pass

    def close(self) -> None:
        pass


class FakeArrayKernels:
    """Takes the place of ArrayKernels."""

    def __init__(self, dtype: Any, op: str, elements: int, device: int) -> None:
        self._operation, self._dtype, self._elements = find_operation(op, dtype), dtype, elements

    def _at(self, pointer: int) -> np.ndarray:
        nbytes = self._elements * self._dtype.itemsize
        raw = (ctypes.c_char * nbytes).from_address(pointer)
        return np.frombuffer(raw, self._dtype)

    def combine_launch(
        self, total: int, first: int, value: int, mark: Mark | None = None
    ) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            if mark is not None:
                leave(mark)
            both = [self._at(first).copy(), self._at(value).copy()]
            self._operation.fold(self._at(total), both)

        return launch

    def copy_launch(self, target: int, source: int, mark: Mark | None) -> Callable[[int], None]:
        def launch(stream: int) -> None:
            if mark is not None:
                leave(mark)
            self.copy(target, source, stream)

        return launch

    def copy(self, target: int, source: int, stream: int) -> None:
        self._at(target)[...] = self._at(source).copy()


def _no_nccl() -> Any:
    raise DeviceError("no libnccl.so.2 can be loaded")


class Machine:
    """The simulated GPU of a rank; ``capturing`` tells whether the current stream is being captured."""

    def __init__(self, rank: int, shared: bool) -> None:
        self.capturing = False
        self.launches = 0
        self.registered: list[np.ndarray] = []
        self._stream = Stream(rank, "random", 1, 0, 0)
        self._uuid = bytes(16) if shared else (rank + 1).to_bytes(16, "little")
        self.stream = SimpleNamespace(
            ptr=0, synchronize=lambda: None, wait_event=lambda event: None, done=True
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cupy", self._cupy())
        forget_captures(monkeypatch)
        gpu, reductions = "halox.runtime.gpu", "halox.reductions.device"
        replaced: dict[str, Any] = {
            # The communicators of other tests may have a survey of other GPUs.
            "halox.runtime.context.GPUS": uuid4().hex,
            f"{gpu}.cuda.why_no_gpu": lambda: None,
            f"{gpu}.cuda._cupy_types": set(),
            f"{gpu}.ipc_events.EventPool": FakeEvents,
            f"{gpu}.memory.register": self._register,
            f"{gpu}.memory.pinned": pinned,
            f"{gpu}.pools.HOST_WORDS": Pool(lambda _: pinned(WORDS_BYTES)),
            "halox.runtime.device_arena.DeviceArena": FakeArena,
            "halox.runtime.nccl_ranks.load_nccl": _no_nccl,
            "halox.packing.device.check_bounds": lambda *_: None,
            f"{reductions}.device_algorithms.ArrayKernels": FakeArrayKernels,
            f"{reductions}.device_algorithms.pinned": pinned,
            f"{reductions}.kernel_reductions.multiprocessors": lambda device: 2,
            f"{reductions}.kernel_reductions.kernel": lambda name, function, _, defines: (
                name,
                function,
                defines,
            ),
            f"{reductions}.kernel_reductions.PreparedLaunch": self._prepared,
        }
        for name, fake in replaced.items():
            monkeypatch.setattr(name, fake)

    def _register(self, array: np.ndarray) -> Any:
        self.registered.append(array)
        return SimpleNamespace(
            device_pointer=array.ctypes.data, close=lambda: self.registered.pop()
        )

    def _prepared(
        self,
        function: Any,
        blocks: int,
        threads: int,
        arguments: Any,
        *,
        device: int,
        dependent: bool,
    ) -> Any:
        launch = Launch(function, blocks, threads, arguments)

        def run(pointer: int) -> None:
            self.launches += 1
            launch.launch(self._stream)

        return SimpleNamespace(launch=run, ready=lambda pointer: partial(run, pointer))

    def _cupy(self) -> ModuleType:
        def copy(target: int, source: int, nbytes: int, kind: int, stream: int = 0) -> None:
            ctypes.memmove(target, source, nbytes)

        @contextlib.contextmanager
        def device(number: int = 0) -> Iterator[Any]:
            yield

        def at(number: int = 0) -> Any:
            found: Any = device(number)
            found.id, found.use, found.synchronize = number, lambda: None, lambda: None
            return found

        runtime = SimpleNamespace(
            memset=ctypes.memset,
            deviceSynchronize=lambda: None,
            memcpy=copy,
            memcpyAsync=copy,
            memcpyDefault=4,
            memcpyHostToDevice=1,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda number: {"uuid": self._uuid, "name": b"the host"},
            driverGetVersion=lambda: 0,
            streamIsCapturing=lambda stream: self.capturing,
            streamWaitEvent=lambda stream, event: None,
            eventRecord=lambda event, stream: None,
            CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
        )
        module: Any = ModuleType("cupy")
        module.ndarray = Array
        module.cuda = SimpleNamespace(
            Device=at,
            runtime=runtime,
            get_current_stream=lambda: self.stream,
            Stream=lambda non_blocking: self.stream,
            Event=_ended,
        )
        module.empty = _empty
        module.histogram = lambda a, edges: (Array(np.histogram(plain(a), plain(edges))[0]), edges)
        module.asarray = lambda a, dtype=None: (
            a if isinstance(a, Array) else Array(np.array(a, dtype))
        )
        for name in ("sum", "min", "max", "abs", "square", "conj", "sqrt", "isfinite"):
            setattr(module, name, _calls(getattr(np, name)))
        return module


def _ended(disable_timing: bool) -> Any:
    return SimpleNamespace(ptr=0, done=True, record=lambda stream: None, synchronize=lambda: None)


def pinned(nbytes: int) -> Any:
    array = aligned(nbytes)
    return SimpleNamespace(array=array, device_pointer=array.ctypes.data, close=lambda: None)
