"""Prepared copies by the CUDA driver: contiguous, 2D and 3D.

CuPy offers only the contiguous copy. All addresses are unified addresses: memory of this GPU, of a peer GPU, or
page-locked host memory; the driver determines the kind. A copy is prepared once; each launch is then one driver call.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from halox.runtime.gpu import driver

MAX_PITCH = 2**31 - 1
"""Largest row pitch in bytes that the driver accepts."""


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
