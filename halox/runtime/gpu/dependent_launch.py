"""Launches that may begin while the kernel ahead of them in their stream ends: programmatic dependent launch.

Offered by the driver, not by CuPy; see the section of that name in the CUDA programming guide.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from halox.runtime.gpu import libcuda
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.launch import PreparedLaunch

_CAPABILITY, _DRIVER = 90, 12030  # from which graphs have it too
_STREAMS = 16  # for whose launches a configuration is kept
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a number as its value."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("shape", ctypes.c_uint * 6),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


class EarlyLaunch(PreparedLaunch):
    """A launch whose blocks come onto the GPU as soon as those of the kernel ahead have ended.

    There they wait until what that kernel has stored is seen, which hides part of the time that a launch takes. The
    kernel must call ``wait_for_earlier`` (``kernels/signals.cu``) before it looks at any memory. What follows in the
    stream begins after it as ever.

    Parameters
    ----------
    function, grid, block, args, device
        As for :class:`PreparedLaunch`.

    Notes
    -----
    Not collective. On GPUs of compute capability 9 and drivers of CUDA 12.3 on; elsewhere a `PreparedLaunch`.
    """

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any],
        *,
        device: int = 0,
    ) -> None:
        super().__init__(function, grid, block, args, device=device)
        self._is_early = can_begin_early(device)
        if not self._is_early:
            return
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._pointer, *shape, self._shared_bytes = self._before_stream
        self._shape = tuple(shape)
        self._entry = libcuda.function("cuLaunchKernelEx")
        self._on_streams: dict[int, tuple[Any, ...]] = {}
        self._call = self._launch_early
        self._before_stream = self._after_stream = ()

    def ready(self, stream_ptr: int) -> Callable[[], None]:
        """Return what `launch` does on a stream, with less on the way each time."""
        if not self._is_early:
            return super().ready(stream_ptr)
        entry, given = self._entry, self._on_stream(stream_ptr)

        def go() -> None:
            code = entry(*given)
            if code:
                self._launch_again(stream_ptr, RuntimeError(libcuda.error_name(code)))

        return go

    def _launch_early(self, stream_ptr: int) -> None:
        code = self._entry(*(self._on_streams.get(stream_ptr) or self._on_stream(stream_ptr)))
        if code:
            raise RuntimeError(libcuda.error_name(code))

    def _on_stream(self, stream_ptr: int) -> tuple[Any, ...]:
        """Return the driver's arguments for a launch on a stream."""
        config = _Config(
            self._shape,
            self._shared_bytes,
            stream=stream_ptr,
            attributes=ctypes.addressof(self._attribute),
            count=1,
        )
        if len(self._on_streams) >= _STREAMS:
            self._on_streams.clear()
        found = ctypes.byref(config), self._pointer, ctypes.addressof(self._addresses), None
        self._on_streams[stream_ptr] = found
        return found


@cache
def can_begin_early(device: int) -> bool:
    """Whether a GPU and its driver have such launches."""
    cuda = cupy().cuda
    capability = int(cuda.Device(device).compute_capability)
    return capability >= _CAPABILITY and cuda.runtime.driverGetVersion() >= _DRIVER
