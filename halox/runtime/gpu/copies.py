"""Prepared copies by the CUDA driver: contiguous, 2D, 3D, and batches of contiguous copies.

CuPy offers only the contiguous copy. All addresses are unified addresses: memory of this GPU, of a peer GPU, or
page-locked host memory; the driver determines the kind. A copy is prepared once; each launch is then one driver call.

The batched copy is called through ctypes by its address. The bindings would take its up to 65,536 addresses and sizes
as lists of objects, and convert each object in every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError
from halox.runtime.gpu import driver
from halox.runtime.gpu.streams import LEGACY_STREAMS

MAX_PITCH = 2**31 - 1
"""Largest row pitch in bytes that the driver accepts."""

_BATCH_SINCE = 12080  # CUDA version that introduced this signature; later drivers keep it


class PreparedMemcpy:
    """A copy of ``depth`` slices of ``height`` rows of ``width`` bytes; each launch passes the addresses.

    Pitches are the distances between rows in bytes, from ``width`` to ``MAX_PITCH``. ``target_rows`` and
    ``source_rows`` are the distances between slices in rows. In a thread without a CUDA context, ``device`` is made
    current. Raises `DeviceError` if there is no driver.
    """

    def __init__(
        self,
        width: int,
        height: int = 1,
        depth: int = 1,
        *,
        target_pitch: int = 0,
        source_pitch: int = 0,
        target_rows: int = 0,
        source_rows: int = 0,
        device: int | None = None,
    ) -> None:
        self.nbytes = width * height * depth
        self._device = device
        self._lock = Lock()
        self._shape: Any = None
        self._addresses: tuple[int, int] | None = None
        cu = driver.bindings()
        if height == depth == 1:
            self._call = cu.cuMemcpyAsync
            return
        if depth == 1:
            self._call, shape = cu.cuMemcpy2DAsync, cu.CUDA_MEMCPY2D()
        else:
            self._call, shape = cu.cuMemcpy3DAsync, cu.CUDA_MEMCPY3D()
            shape.Depth, shape.srcHeight, shape.dstHeight = depth, source_rows, target_rows
        shape.WidthInBytes, shape.Height = width, height
        shape.srcMemoryType = shape.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        shape.srcPitch, shape.dstPitch = source_pitch, target_pitch
        self._shape = shape

    def launch(self, target: int, source: int, stream: int) -> None:
        """Enqueue the copy between two addresses on a stream, which may be capturing; thread-safe.

        Does not block, except for pageable host memory. Raises `DeviceError` if the driver refuses the copy.
        """
        if not self.nbytes:
            return
        shape = self._shape
        if shape is None:
            driver.call(self._call, target, source, self.nbytes, stream, device=self._device)
            return
        # The driver reads the struct during the call, so the next launch may change it.
        with self._lock:
            if self._addresses != (target, source):
                shape.dstDevice, shape.srcDevice = self._addresses = target, source
            driver.call(self._call, shape, stream, device=self._device)


class PreparedBatch:
    """Contiguous copies of any lengths, passed to the driver together.

    Offsets are in bytes, relative to the addresses of the launch, and may be negative. Sizes must be positive. Raises
    `DeviceError` if there is no driver, or the three arrays differ in length.

    A launch is one ``cuMemcpyBatchAsync``. It is one ``cuMemcpyAsync`` per copy in three cases: the driver is older
    than CUDA 12.8; the stream is a legacy default stream, which the batched copy does not accept; or the stream is
    capturing, which drivers older than CUDA 13.1 refuse for the batched copy. Copies of one batch are not ordered, so
    targets must not overlap each other or any source.
    """

    def __init__(
        self,
        target_offsets: npt.ArrayLike,
        source_offsets: npt.ArrayLike,
        sizes: npt.ArrayLike,
        *,
        device: int | None = None,
    ) -> None:
        self._offsets = [
            np.array(a, np.int64).reshape(-1) for a in (target_offsets, source_offsets)
        ]
        self._sizes = np.array(sizes, np.uint64).reshape(-1)
        lengths = [len(a) for a in (*self._offsets, self._sizes)]
        if len(set(lengths)) > 1:
            raise DeviceError(
                f"target_offsets, source_offsets, sizes: got {lengths} entries, must be as many"
            )
        self.nbytes = int(self._sizes.sum())
        self._device = device
        self._lock = Lock()
        self._addresses = [np.empty_like(a) for a in self._offsets]
        cu = driver.bindings()
        self._single, self._is_capturing = cu.cuMemcpyAsync, cu.cuStreamIsCapturing
        self._batch = batch_function()
        self._attributes = cu.CUmemcpyAttributes() if self._batch else None
        if self._attributes is None:
            return
        order = cu.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        self._attributes.srcAccessOrder = order
        # Index of the first copy with the attributes, and index of a failed copy.
        self._indices = (ctypes.c_size_t * 2)()
        at = ctypes.addressof(self._indices)
        self._arguments = (
            *(a.ctypes.data for a in (*self._addresses, self._sizes)),
            len(self._sizes),
            *(int(self._attributes.getPtr()), at, 1, at + ctypes.sizeof(ctypes.c_size_t)),
        )

    def launch(self, target: int, source: int, stream: int) -> None:
        """Enqueue the copies between two addresses on a stream; see :meth:`PreparedMemcpy.launch`."""
        if not self.nbytes:
            return
        if self._batch is None or stream in LEGACY_STREAMS or self._is_captured(stream):
            columns = (a.tolist() for a in (*self._offsets, self._sizes))
            for to, at, size in zip(*columns, strict=True):
                driver.call(
                    self._single, target + to, source + at, size, stream, device=self._device
                )
            return
        with self._lock:
            for base, offsets, addresses in zip(
                (target, source), self._offsets, self._addresses, strict=True
            ):
                np.add(offsets, base, out=addresses)
            driver.call(self._batch, *self._arguments, stream, device=self._device)

    def _is_captured(self, stream: int) -> bool:
        return bool(driver.call(self._is_capturing, stream, device=self._device)[0])


@cache
def batch_function() -> Callable[..., tuple[int]] | None:
    """Return the driver's batched copy, called with addresses of arrays; None before CUDA 12.8."""
    code, address, _ = driver.bindings().cuGetProcAddress(b"cuMemcpyBatchAsync", _BATCH_SINCE, 0)
    if code or not address:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    parameters = (*(pointer,) * 3, size, pointer, pointer, size, pointer, pointer)
    entry = ctypes.CFUNCTYPE(ctypes.c_int, *parameters)(address)

    def cuMemcpyBatchAsync(*arguments: int) -> tuple[int]:
        return (entry(*arguments),)

    return cuMemcpyBatchAsync
