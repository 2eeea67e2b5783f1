"""A stand-in for the NVIDIA driver: ``fake_libcuda.c``, called through ``cuda.bindings`` or `FakeDriver`."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from halox.runtime.gpu import dmabuf, driver
from tests.fakes.cpu_kernels import compiled_once
from tests.fakes.fake_verbs import DMABUFS

SOURCE = Path(__file__).with_name("fake_libcuda.c")
FLAGS = (
    "-x",
    "c",
    "-std=c11",
    "-D_GNU_SOURCE",
    "-O1",
    "-shared",
    "-fPIC",
    "-Wall",
    "-Wextra",
    "-Werror",
)
# The soname of the driver. Once a process has loaded the library, the bindings find it under this name.
NAMED = "-Wl,-soname,libcuda.so.1"
CAPTURED = 7
STREAM = 0x5000
COUNTERS = ("calls_1d", "calls_2d", "calls_3d")
_LONG = ("last_stream",)


def compiled(named: bool = False) -> Path:
    """Compile the library; with ``named``, its soname is the driver's."""
    return compiled_once(SOURCE.read_text(), *FLAGS, *([NAMED] if named else []))


class FakeDriver:
    """Takes the place of ``cuda.bindings.driver``, with its types, and calls the stand-in for the driver.

    The real bindings load the driver once per process, so that a test could not replace it. The script
    ``with_bindings.py`` runs in a separate process and shows that the real bindings make the same calls.
    """

    def __init__(self, library: ctypes.CDLL, without: tuple[str, ...]) -> None:
        from cuda.bindings import driver as types

        self._library, self._types, self._without = library, types, without
        self.files: list[tuple[int, int, str]] = []
        """Address (at the start of a page), bytes and file of memory that can be exported as a dmabuf."""
        self.has_dmabufs, self.is_ordered, self.flushes = True, True, 0

    def __getitem__(self, name: str) -> int:
        return self._variable(name).value

    def __setitem__(self, name: str, value: int) -> None:
        self._variable(name).value = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._types, name)

    def counts(self) -> tuple[int, ...]:
        """Return the number of calls of each copy function since the previous `counts`."""
        found = tuple(self[name] for name in COUNTERS)
        for name in COUNTERS:
            self[name] = 0
        return found

    def cuDriverGetVersion(self):
        return self._called("cuDriverGetVersion", ctypes.c_int())

    def cuMemcpyAsync(self, target, source, nbytes, stream):
        return self._called(
            "cuMemcpyAsync", *map(ctypes.c_uint64, (target, source, nbytes, stream))
        )

    def cuMemcpy2DAsync(self, copy, stream):
        return self._called("cuMemcpy2DAsync_v2", *map(ctypes.c_uint64, (copy.getPtr(), stream)))

    def cuMemcpy3DAsync(self, copy, stream):
        return self._called("cuMemcpy3DAsync_v2", *map(ctypes.c_uint64, (copy.getPtr(), stream)))

    def cuMemGetHandleForAddressRange(self, address, nbytes, kind, flags):
        wanted = self._types.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        assert kind == wanted and not flags
        if not self.has_dmabufs:
            return self._types.CUresult.CUDA_ERROR_NOT_SUPPORTED, 0
        page = mmap.PAGESIZE
        for start, size, path in self.files:
            inside = start <= address and address + nbytes <= start + -(-size // page) * page
            if inside and not address % page and not nbytes % page:
                descriptor = os.open(path, os.O_RDWR)
                DMABUFS[descriptor] = address - start, nbytes
                return self._types.CUresult.CUDA_SUCCESS, descriptor
        return self._types.CUresult.CUDA_ERROR_INVALID_VALUE, 0

    def cuDeviceGetAttribute(self, attribute, device):
        asked = self._types.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
        assert attribute == asked
        return self._types.CUresult.CUDA_SUCCESS, 100 if self.is_ordered else 0

    def cuFlushGPUDirectRDMAWrites(self, target, scope):
        self.flushes += 1
        return (self._types.CUresult.CUDA_SUCCESS,)

    def cuStreamIsCapturing(self, stream):
        code, status = self._called("cuStreamIsCapturing", ctypes.c_uint64(stream), ctypes.c_int())
        return code, self._types.CUstreamCaptureStatus(status)

    def _called(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        """Call a function; returns its result and, if the last argument is an int to fill in, its value."""
        if name in self._without:
            raise RuntimeError(f'Function "{name}" not found')
        *given, last = arguments
        is_found = isinstance(last, ctypes.c_int)
        code = self._library[name](*given, ctypes.byref(last) if is_found else last)
        found = (last.value,) if is_found else ()
        return (self._types.CUresult(code), *found)  # raises for an unknown error number

    def _variable(self, name: str):
        kind = ctypes.c_uint64 if name in _LONG else ctypes.c_int
        return kind.in_dll(self._library, name)


@contextmanager
def fake_driver(version: int = 13000, without: tuple[str, ...] = ()) -> Iterator[FakeDriver]:
    """Patch halox to call the stand-in instead of the driver."""
    fake = FakeDriver(ctypes.CDLL(str(compiled())), without)
    fake.counts()
    fake["version"] = version
    fake["next_error"] = 0
    dmabuf._needs_flush.cache_clear()
    try:
        with patch.object(driver, "bindings", lambda: fake):
            yield fake
    finally:
        dmabuf._needs_flush.cache_clear()
