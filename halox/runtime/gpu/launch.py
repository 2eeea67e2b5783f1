"""Kernel launches whose arguments are laid out once.

CuPy converts a kernel's arguments on every call, 6 to 9 microseconds of host time; a plan launches the same kernel with
the same arguments thousands of times, and the driver needs only their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from threading import Lock
from typing import Any

from halox.errors import DeviceError
from halox.runtime.gpu import driver
from halox.runtime.gpu.cuda import cupy
from halox.values import as_int, shown

_STREAMS = 16  # for whose launches a configuration is kept
_CAPABILITY, _DRIVER = 90, 12030  # of programmatic dependent launch, in graphs too


class PreparedLaunch:
    """A kernel, its launch shape and its arguments, ready to be launched again and again.

    Parameters
    ----------
    function : object with ``ptr``
        What :func:`halox.runtime.gpu.compiler.kernel` returns; kept alive.
    grid, block : int or tuple of int
        Thread blocks, and threads of a block, in one to three dimensions.
    args : sequence of ctypes values
        Arguments of exactly the kernel's parameter types, such as ``c_void_p(pointer)`` or
        ``c_uint32(n)``. Kept alive, unlike the memory they point to; a value changed in place
        (``args[1].value = n``) holds from the next launch on.
    device : int
        The GPU the function was loaded on.
    shared_bytes : int
        Dynamic shared memory.
    dependent : bool
        Programmatic dependent launch, where the GPU and its driver have it: blocks are scheduled as soon as those of
        the kernel ahead in the stream have ended, and there wait until its stores are visible. The kernel must call
        ``wait_for_earlier`` (``kernels/signals.cu``) before it accesses memory.
    """

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Any],
        *,
        device: int = 0,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        self.args = tuple(args)
        self._function = function
        self._shape = (*_three(grid), *_three(block), shared_bytes)
        self._device = device
        self._lock = Lock()
        self._addresses = (ctypes.c_void_p * max(1, len(self.args)))(
            *(ctypes.addressof(arg) for arg in self.args)
        )
        self._entry = driver.bindings().cuLaunchKernelEx
        self._is_dependent = dependent and has_dependent_launch(device)
        self._on_streams: dict[int, tuple[Any, ...]] = {}

    def launch(self, stream_ptr: int) -> None:
        """Launch on a stream of the function's device, which must be the calling thread's current one.

        Does not block. May be captured into a graph, which keeps the arguments' present values.

        Raises
        ------
        DeviceError
            If the driver refuses the launch.
        """
        given = self._on_streams.get(stream_ptr) or self._on_stream(stream_ptr)
        (code,) = self._entry(*given)
        if code:
            self._launch_again(given, code)

    def ready(self, stream_ptr: int) -> Callable[[], None]:
        """Return :meth:`launch` on a stream, with the look-up done."""
        entry, given = self._entry, self._on_stream(stream_ptr)

        def run() -> None:
            (code,) = entry(*given)
            if code:
                self._launch_again(given, code)

        return run

    def launch_at(self, stream_ptr: int, first: int, second: int) -> None:
        """Launch with other addresses as the first two arguments, ``c_void_p`` or ``c_uint64``.

        May be called by several threads at once; otherwise as :meth:`launch`.
        """
        args = self.args
        with self._lock:
            args[0].value = first
            args[1].value = second
            self.launch(stream_ptr)

    def _on_stream(self, stream_ptr: int) -> tuple[Any, ...]:
        """Return the driver's arguments for a launch on a stream."""
        cu = driver.bindings()
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self._shape[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self._shape[3:6]
        config.sharedMemBytes, config.hStream = self._shape[6], stream_ptr
        if self._is_dependent:
            attribute = cu.CUlaunchAttribute()
            kind = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.id = kind
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        if len(self._on_streams) >= _STREAMS:
            self._on_streams.clear()
        given = config, cu.CUfunction(self._function.ptr), ctypes.addressof(self._addresses), 0
        self._on_streams[stream_ptr] = given
        return given

    def _launch_again(self, given: tuple[Any, ...], code: Any) -> None:
        """Raise for a launch that was refused, unless only the thread's context was missing."""
        if not int(driver.bindings().cuCtxGetCurrent()[1] or 0):
            driver.make_context(self._device)
            (code,) = self._entry(*given)
        if code:
            raise DeviceError(f"kernel launch on device {self._device}: {code.name}")


@cache
def has_dependent_launch(device: int) -> bool:
    """Whether a GPU and its driver have programmatic dependent launch."""
    cuda = cupy().cuda
    capability = int(cuda.Device(device).compute_capability)
    return capability >= _CAPABILITY and cuda.runtime.driverGetVersion() >= _DRIVER


def check_max_blocks(max_blocks: int | None) -> None:
    """Raise `DeviceError` unless a limit of thread blocks leaves one at least."""
    number = 1 if max_blocks is None else as_int(max_blocks)
    if number is None or number < 1:
        raise DeviceError(
            f"max_blocks: got {shown(max_blocks)}, must be at least 1, or None for no limit"
        )


def _three(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    given = (shape,) if isinstance(shape, int) else tuple(shape)
    return given + (1,) * (3 - len(given))
