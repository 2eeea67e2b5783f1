"""Copies that the CUDA driver performs by itself: contiguous, of rows, of slices, of many pieces.

CuPy offers only the first; :mod:`halox.runtime.gpu.libcuda` reaches the others. All addresses are those
of unified addressing: the GPU's own memory, a peer's, or page-locked host memory, and the driver
finds out which. A copy is prepared once (:class:`PreparedMemcpy`, :class:`PreparedBatch`) and then
costs a call.
"""

from __future__ import annotations

import ctypes
from functools import cache
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from halox.errors import DeviceError
from halox.runtime.gpu import libcuda

MAX_PITCH = 2**31 - 1
"""Most bytes from one row to the next that the driver takes."""

UNIFIED = 4  # CU_MEMORYTYPE_UNIFIED
_LEGACY_STREAMS = (0, 1)  # the null stream, and CU_STREAM_LEGACY


def _side(name: str, *, three: bool) -> list[tuple[str, Any]]:
    """Return the fields of one side of a copy, in the order of the C structs."""
    size = ctypes.c_size_t
    return [
        (f"{name}XInBytes", size),
        (f"{name}Y", size),
        *([(f"{name}Z", size), (f"{name}LOD", size)] if three else []),
        (f"{name}MemoryType", ctypes.c_uint),
        (f"{name}Host", ctypes.c_void_p),
        (f"{name}Device", ctypes.c_uint64),
        (f"{name}Array", ctypes.c_void_p),
        *([(f"{name}Reserved", ctypes.c_void_p)] if three else []),
        (f"{name}Pitch", size),
        *([(f"{name}Height", size)] if three else []),
    ]


class Memcpy2D(ctypes.Structure):
    """CUDA_MEMCPY2D_v2, what ``cuMemcpy2DAsync_v2`` takes."""

    _fields_ = (
        *_side("src", three=False),
        *_side("dst", three=False),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
    )


class Memcpy3D(ctypes.Structure):
    """CUDA_MEMCPY3D_v2, what ``cuMemcpy3DAsync_v2`` takes."""

    _fields_ = (
        *_side("src", three=True),
        *_side("dst", three=True),
        ("WidthInBytes", ctypes.c_size_t),
        ("Height", ctypes.c_size_t),
        ("Depth", ctypes.c_size_t),
    )


class MemcpyAttributes(ctypes.Structure):
    """CUmemcpyAttributes_v1; locations are hints for managed memory only, and stay 0."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_uint),
        ("srcLocHint", ctypes.c_int * 2),
        ("dstLocHint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class PreparedMemcpy:
    """A copy of rows, or of slices of rows, whose shape is fixed and whose addresses are not.

    Parameters
    ----------
    width : int
        Contiguous bytes a row.
    height, depth : int
        Rows a slice, and slices.
    target_pitch, source_pitch : int
        Bytes from one row to the next, ``width`` or more and at most ``MAX_PITCH``; without meaning
        for one row.
    target_rows, source_rows : int
        Rows from one slice to the next, ``height`` or more; without meaning for one slice.
    device : int, optional
        GPU to make current in a thread that has not used CUDA yet.

    Raises
    ------
    DeviceError
        If there is no driver.

    Notes
    -----
    Not collective. Copies one row by ``cuMemcpyAsync``, one slice by ``cuMemcpy2DAsync``, several
    by ``cuMemcpy3DAsync``.
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
        self._shape: Memcpy2D | Memcpy3D | None = None
        if not self.nbytes:
            return
        if height == depth == 1:
            self._call = libcuda.function("cuMemcpyAsync")
            return
        if depth == 1:
            self._call = libcuda.function("cuMemcpy2DAsync_v2")
            shape: Memcpy2D | Memcpy3D = Memcpy2D()
        else:
            self._call = libcuda.function("cuMemcpy3DAsync_v2")
            shape = Memcpy3D(Depth=depth, srcHeight=source_rows, dstHeight=target_rows)
        shape.WidthInBytes, shape.Height = width, height
        shape.srcMemoryType = shape.dstMemoryType = UNIFIED
        shape.srcPitch, shape.dstPitch = source_pitch, target_pitch
        self._shape = shape
        self._address = ctypes.addressof(shape)

    def launch(self, target: int, source: int, stream: int) -> None:
        """Copy on a stream.

        Parameters
        ----------
        target, source : int
            Addresses of the first bytes.
        stream : int
            Address of a stream.

        Raises
        ------
        DeviceError
            If the driver refuses the copy.

        Notes
        -----
        Not collective; does not block unless a side is ordinary host memory; ordered as work of the
        stream, and may be captured. May be called by several threads at once.
        """
        shape = self._shape
        if shape is None:
            if self.nbytes:
                libcuda.call(self._call, target, source, self.nbytes, stream, device=self._device)
            return
        # The driver has read the struct when it returns.
        with self._lock:
            shape.dstDevice, shape.srcDevice = target, source
            libcuda.call(self._call, self._address, stream, device=self._device)


class PreparedBatch:
    """Contiguous copies of any lengths handed to the driver together.

    Parameters
    ----------
    target_offsets, source_offsets : array of int, shape (n,)
        Bytes from the two addresses that a launch names; may be negative.
    sizes : array of int, shape (n,)
        Bytes of each copy, more than 0.
    device : int, optional
        GPU to make current in a thread that has not used CUDA yet.

    Raises
    ------
    DeviceError
        If there is no driver, or the three arrays differ in length.

    Notes
    -----
    Not collective. One ``cuMemcpyBatchAsync``; a ``cuMemcpyAsync`` a copy where the driver is
    older than CUDA 12.8, on the legacy default stream, which a batch may not use, and while the
    stream is captured, which drivers older than CUDA 13.1 refuse. Copies of one batch are not
    ordered among themselves, so targets must not overlap one another or any source.
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
        self._attributes = MemcpyAttributes(srcAccessOrder=1)
        self._attribute_index = ctypes.c_size_t(0)
        self._single = libcuda.function("cuMemcpyAsync")
        self._batch = _batch_function()
        self._is_capturing = libcuda.function("cuStreamIsCapturing")
        self._arguments = (
            *(a.ctypes.data for a in (*self._addresses, self._sizes)),
            len(self._sizes),
            ctypes.addressof(self._attributes),
            ctypes.addressof(self._attribute_index),
            1,
        )

    def launch(self, target: int, source: int, stream: int) -> None:
        """Copy on a stream; as :meth:`PreparedMemcpy.launch`."""
        if not self.nbytes:
            return
        if self._batch is None or stream in _LEGACY_STREAMS or self._captured(stream):
            for to, at, size in zip(
                *(a.tolist() for a in (*self._offsets, self._sizes)), strict=True
            ):
                libcuda.call(
                    self._single, target + to, source + at, size, stream, device=self._device
                )
            return
        called, fail_index = self._batch
        with self._lock:
            for base, offsets, addresses in zip(
                (target, source), self._offsets, self._addresses, strict=True
            ):
                np.add(offsets, base, out=addresses)
            libcuda.call(called, *self._arguments, *fail_index, stream, device=self._device)

    def _captured(self, stream: int) -> bool:
        status = ctypes.c_int()
        libcuda.call(self._is_capturing, stream, ctypes.byref(status), device=self._device)
        return status.value != 0


@cache
def _batch_function() -> tuple[Any, tuple[None, ...]] | None:
    """Return the driver's batched copy and what goes before the stream, or None without it."""
    if libcuda.has("cuMemcpyBatchAsync_v2"):
        return libcuda.function("cuMemcpyBatchAsync_v2"), ()
    if libcuda.has("cuMemcpyBatchAsync"):
        # Its index of the copy that failed may be left out.
        return libcuda.function("cuMemcpyBatchAsync"), (None,)
    return None
