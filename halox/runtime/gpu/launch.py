"""Kernel launches whose arguments are laid out once.

CuPy converts a kernel's arguments on every call, 6 to 9 microseconds of host time; a plan
launches the same kernel with the same arguments thousands of times, and the driver needs only
their addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

from halox.errors import DeviceError
from halox.values import as_int, shown


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
        ``c_uint32(n)``. Kept alive; a value changed in place (``args[1].value = n``) holds from the
        next launch on.
    device : int
        The GPU the function was loaded on.
    shared_bytes : int
        Dynamic shared memory.

    Notes
    -----
    Not collective. Memory that arguments point to is the caller's to keep alive.
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
    ) -> None:
        from cupy_backends.cuda.api import driver, runtime

        self.args = tuple(args)
        self._function = function
        self._device = device
        self._lock = Lock()
        self._addresses = (ctypes.c_void_p * max(1, len(self.args)))(
            *(ctypes.addressof(arg) for arg in self.args)
        )
        self._call = driver.launchKernel
        self._current_context = driver.ctxGetCurrent
        self._runtime = runtime
        self._before_stream: tuple[Any, ...] = (
            function.ptr,
            *_three(grid),
            *_three(block),
            shared_bytes,
        )
        self._after_stream: tuple[Any, ...] = (ctypes.addressof(self._addresses), 0)

    def launch(self, stream_ptr: int) -> None:
        """Launch on a stream.

        Parameters
        ----------
        stream_ptr : int
            Address of a stream of the function's device.

        Raises
        ------
        DeviceError
            If the driver refuses the launch.

        Notes
        -----
        Not collective; does not block; ordered as work of that stream. The function's device must
        be the calling thread's current one. May be captured into a graph, which keeps the
        arguments' present values.
        """
        try:
            self._call(*self._before_stream, stream_ptr, *self._after_stream)
        except RuntimeError as error:
            self._launch_again(stream_ptr, error)

    def ready(self, stream_ptr: int) -> Callable[[], None]:
        """Return what :meth:`launch` does on a stream, with less on the way each time."""
        return partial(self.launch, stream_ptr)

    def launch_at(self, stream_ptr: int, first: int, second: int) -> None:
        """Launch with other addresses as the first two arguments.

        Parameters
        ----------
        stream_ptr : int
            As for :meth:`launch`.
        first, second : int
            Values of the first two arguments, which must be ``c_void_p`` or ``c_uint64``.

        Raises
        ------
        DeviceError
            If the driver refuses the launch.

        Notes
        -----
        As for :meth:`launch`. May be called by several threads at once.
        """
        args = self.args
        with self._lock:
            args[0].value = first
            args[1].value = second
            try:
                self._call(*self._before_stream, stream_ptr, *self._after_stream)
            except RuntimeError as error:
                self._launch_again(stream_ptr, error)

    def _launch_again(self, stream_ptr: int, error: RuntimeError) -> None:
        """Raise for a launch that was refused, unless only the thread's context was missing."""
        if self._current_context():
            raise self._refused(error) from error
        # This thread has not used CUDA yet, and only the runtime makes contexts unasked.
        self._runtime.setDevice(self._device)
        self._runtime.free(0)
        try:
            self._call(*self._before_stream, stream_ptr, *self._after_stream)
        except RuntimeError as second:
            raise self._refused(second) from second

    def _refused(self, error: RuntimeError) -> DeviceError:
        return DeviceError(f"kernel launch on device {self._device}: {error}")


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
