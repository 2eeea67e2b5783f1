"""Migration from a GPU: the search by `halox/sampling/kernels/outside.cu`, and copies through page-locked memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from halox.runtime.arrays import Array
from halox.runtime.gpu.compiler import kernel
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch

_THREADS, _ROWS = 256, 8


def outside_on_gpu(positions: Any, owned: Sequence[slice]) -> Any:
    """Return the rows of the positions that are outside of a block, or not finite, in any order; waits for the GPU."""
    n, axes = positions.shape
    rows, count = cupy().empty(n, "i8"), cupy().zeros(1, "u8")
    bounds = (ctypes.c_double * (2 * axes))(
        *(cut.start for cut in owned), *(cut.stop for cut in owned)
    )
    device, pointer = positions.device.id, ctypes.c_uint64
    defines = (("AXES", str(axes)), ("THREADS", str(_THREADS)), ("ROWS", str(_ROWS)))
    if n:
        PreparedLaunch(
            kernel("outside", "outside", device, defines),
            -(-n // (_THREADS * _ROWS)),
            _THREADS,
            [
                pointer(positions.data.ptr),
                ctypes.c_longlong(n),
                bounds,
                pointer(rows.data.ptr),
                pointer(count.data.ptr),
            ],
            device=device,
        ).launch(cupy().cuda.get_current_stream().ptr)
    return rows[: int(count.get()[0])]


def pinned_rows(shape: tuple[int, int]) -> Array:
    """Return rows of bytes on the host, in page-locked memory of CuPy's pool."""
    memory = cupy().cuda.alloc_pinned_memory(max(1, prod(shape)))
    return np.frombuffer(memory, np.uint8, prod(shape)).reshape(shape)


def to_gpu(rows: Array) -> Any:
    """Return a copy of `pinned_rows` on the current GPU."""
    copy, stream = cupy().empty(rows.shape, np.uint8), cupy().cuda.get_current_stream()
    copy.set(rows, stream)
    stream.synchronize()  # before the pool uses the memory again
    return copy
