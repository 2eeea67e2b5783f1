"""Packers of GPU arrays on the CPU: kernels compiled by g++, and copies by a stand-in for the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np

from halox.datatypes import Datatype
from halox.packing import device_packer, strided, traversal, workunits, workunits_lists
from halox.packing.choosing import packers
from halox.packing.host import HostPacker
from halox.packing.workunits_lists import ListCache
from halox.runtime.gpu import memory
from halox.runtime.gpu.compiler import preamble, source
from tests.fakes.cpu_kernels import SHIM, aligned, compiled, run_workunits, shared_library
from tests.fakes.fake_driver import STREAM, fake_driver
from tests.packers import GUARD
from tests.support import require

MARGIN = 256

_TRAVERSAL = """
extern "C" void run(unsigned grid, unsigned block, int backwards, int unpack, u64 array, u64 packed, const void* table)
{
    launch_with_barriers(grid, block, backwards != 0, unpack ? traversal_unpack : traversal_pack, array, packed,
                         *(const Table*)table);
}
extern "C" { unsigned long layout[] = {
    NODES, sizeof(Node), sizeof(Table), __builtin_offsetof(Table, node), __builtin_offsetof(Node, children)}; }
"""


@cache
def traversal_library(defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    """Compile traversal.cu to a library with a function ``run``, which launches one of its kernels."""
    text = f'{preamble(defines)}#include "{SHIM}"\n{source("traversal")}\n{_TRAVERSAL}'
    return shared_library(text)


class CpuMemory:
    """Host bytes between guards; implements `tests.packers.Memory`."""

    def __init__(self, values: np.ndarray, offset: int = 0) -> None:
        self._whole = aligned(values.size + 2 * MARGIN, offset)
        self._whole[:] = GUARD
        self.array = self._whole[MARGIN : MARGIN + values.size]
        self.array[:] = values
        self.pointer = self.array.ctypes.data

    def get(self) -> np.ndarray:
        ends = self._whole[:MARGIN], self._whole[MARGIN + self.array.size :]
        assert all((end == GUARD).all() for end in ends), "bytes beside the memory were written"
        return self.array


class HostBackend:
    """The host packer, in views of NumPy arrays."""

    method = "host"
    memory = CpuMemory

    def packer(self, datatype: Datatype, count: int, max_blocks: int | None = None) -> Any:
        def pack(array: CpuMemory, origin: int, packed: CpuMemory) -> None:
            HostPacker(array.array[origin:], datatype, count).pack(packed.array)

        def unpack(packed: CpuMemory, array: CpuMemory, origin: int) -> None:
            HostPacker(array.array[origin:], datatype, count).unpack(packed.array)

        return SimpleNamespace(pack=pack, unpack=unpack)


class CpuBackend:
    """A packer class of GPU arrays; ``events`` lists its uploads and launches, ``backwards`` reverses the threads."""

    memory = CpuMemory

    def __init__(self, method: str) -> None:
        self.method = method
        self.events: list[tuple[Any, ...]] = []
        self.backwards = self.capturing = False

    def packer(self, datatype: Datatype, count: int, max_blocks: int | None = None) -> Any:
        made = packers()[self.method](datatype, count, 0, max_blocks)
        assert made.nbytes == datatype.size * count

        def pack(array: CpuMemory, origin: int, packed: CpuMemory) -> None:
            made.pack(array.pointer + origin, packed.pointer, STREAM)

        def unpack(packed: CpuMemory, array: CpuMemory, origin: int) -> None:
            made.unpack(packed.pointer, array.pointer + origin, STREAM)

        return SimpleNamespace(pack=pack, unpack=unpack, made=made)

    def uploaded(self, values: np.ndarray, device: int) -> Any:
        self.events.append(("upload", values.nbytes))
        copy = aligned(values.nbytes)
        copy[:] = values.reshape(-1).view(np.uint8)
        return SimpleNamespace(pointer=copy.ctypes.data, nbytes=copy.size, memory=copy)


class _DeviceBytes:
    """Takes the place of `DeviceBytes`."""

    def __init__(self, backend: CpuBackend, nbytes: int, device: int) -> None:
        self.nbytes, self._events = nbytes, backend.events
        self.array = aligned(nbytes)
        self.array[:] = 0xEE
        self.pointer = self.array.ctypes.data

    def write(self, at: int, values: np.ndarray) -> None:
        text = values.reshape(-1).view(np.uint8)
        assert at + text.size <= self.nbytes, "the list outgrew its memory"
        self.array[at : at + text.size] = text
        self._events.append(("upload", text.size))

    def order(self, stream: int) -> None:
        assert stream == STREAM
        self._events.append(("order",))

    def wait(self) -> None:
        pass


class _Launch:
    """Takes the place of `PreparedLaunch`; a launch blocks."""

    def __init__(
        self,
        backend: CpuBackend,
        function: tuple[str, str, tuple[tuple[str, str], ...]],
        grid: int,
        block: int,
        args: Any,
        *,
        device: int,
    ) -> None:
        self._backend, self._function, self._args = backend, function, args
        self.grid, self.block = grid, block

    def launch_at(self, stream: int, first: int, second: int) -> None:
        (file, entry, defines), (_, _, table, *_) = self._function, self._args
        backwards = self._backend.backwards
        self._backend.events.append(("launch", entry))
        if file == "workunits":
            name = entry.removeprefix("workunits_")
            shape = self.grid, self.block
            run_workunits(name, table.raw, *shape, first, second, backwards=backwards)
            return
        memory = aligned(len(table))
        memory[:] = np.frombuffer(table, np.uint8)
        start = ctypes.c_uint(self.grid), ctypes.c_uint(self.block), ctypes.c_int(backwards)
        places = ctypes.c_uint64(first % 2**64), ctypes.c_uint64(second % 2**64)
        pointer = ctypes.c_void_p(memory.ctypes.data)
        unpack = ctypes.c_int(entry == "traversal_unpack")
        traversal_library(defines).run(*start, unpack, *places, pointer)

    def launch(self, stream: int) -> None:
        """Launch a strided kernel, or work units at the addresses of the arguments."""
        if self._function[0] == "workunits":
            self.launch_at(stream, *(address.value for address in self._args[:2]))
            return
        (file, entry, defines), (bases, table, *numbers) = self._function, self._args
        self._backend.events.append(("launch", entry))
        memory = aligned(len(table))
        memory[:] = np.frombuffer(table, np.uint8)
        start = ctypes.c_uint(self.grid), ctypes.c_uint(self.block)
        pointer = ctypes.c_void_p(memory.ctypes.data)
        marks = map(ctypes.byref, numbers[3:])
        backwards = ctypes.c_int(self._backend.backwards)
        compiled(file, defines).run(*start, backwards, bases, pointer, *numbers[:3], *marks)


@contextmanager
def cpu_backend(method: str, *, sms: int = 4) -> Iterator[CpuBackend]:
    """Let the packers of GPU arrays run on the CPU, and yield a backend for one of them.

    The traversal packer has few threads, because each one is a fiber.
    """
    require("cxx")
    backend = CpuBackend(method)
    runtime = SimpleNamespace(streamIsCapturing=lambda stream: backend.capturing)
    fake_cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    with ExitStack() as stack:
        for module in (strided, traversal, workunits):
            stack.enter_context(patch.object(module, "multiprocessors", lambda device: sms))
            stack.enter_context(patch.object(module, "uploaded", backend.uploaded))
        for module, name, value in (
            (workunits_lists, "uploaded", backend.uploaded),
            (workunits_lists, "DeviceBytes", partial(_DeviceBytes, backend)),
            (workunits_lists, "cache", ListCache(1 << 20)),
            (workunits, "cupy", lambda: fake_cupy),
            (memory, "DeviceBytes", partial(_DeviceBytes, backend)),
            (traversal, "THREADS", 8),
            (traversal, "CAPPED_THREADS", 8),
            (traversal, "THREADS_PER_SM", 6),
            (device_packer, "kernel", lambda file, entry, device, defines: (file, entry, defines)),
            (device_packer, "PreparedLaunch", partial(_Launch, backend)),
        ):
            stack.enter_context(patch.object(module, name, value))
        if method == "copy_engine":
            require("nvrtc")  # the bindings belong to the same package
            stack.enter_context(fake_driver())
        yield backend
