"""Kernel launches with arguments that are prepared once.

CuPy converts a kernel's arguments on every call, which takes 6 to 9 microseconds of host time. A plan launches the same
kernel with the same arguments thousands of times, and the driver needs only the addresses of the arguments. Plain
launches use CuPy's ``launchKernel``, which takes addresses; it measured 0.3 microseconds faster than NVIDIA's bindings.
CuPy has no dependent launches. They use the bindings, which measured 0.25 microseconds faster than ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock
from typing import Any, TypeAlias

from halox.errors import DeviceError
from halox.runtime.gpu import driver
from halox.runtime.gpu.cuda import cupy
from halox.values import as_int, shown

Parameter: TypeAlias = (
    "ctypes._SimpleCData[int] | ctypes._SimpleCData[int | None] | ctypes.Array[Any]"
)
"""Value of a kernel's parameter."""

_SHARED_BYTES = 0  # of dynamic shared memory; the kernels declare their sizes
_STREAMS = 16  # number of streams with cached arguments
_CAPABILITY, _DRIVER = 90, 12030  # minimum for programmatic dependent launch, also in graphs


class PreparedLaunch:
    """A kernel with its launch shape and arguments, prepared for repeated launches.

    ``function`` is a `halox.runtime.gpu.compiler.kernel` of ``device``; ``grid`` and ``block`` have one to three
    dimensions; ``args`` are ctypes values of exactly the kernel's parameter types. The launch keeps these values alive,
    but not the memory to which they point. A value changed in place (``args[1].value = n``) takes effect at the next
    launch.

    ``dependent`` requests programmatic dependent launch, if the GPU and its driver support it: blocks are scheduled as
    soon as the blocks of the preceding kernel in the stream have ended. The kernel must call ``wait_for_earlier``
    (``kernels/early.cu``) before it accesses memory.
    """

    def __init__(
        self,
        function: Any,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Parameter],
        *,
        device: int = 0,
        dependent: bool = False,
    ) -> None:
        self.args = tuple(args)
        self._function = function
        self._shape = (*_three(grid), *_three(block))
        self._device = device
        self._lock = Lock()
        self._addresses = (ctypes.c_void_p * max(1, len(self.args)))(
            *(ctypes.addressof(arg) for arg in self.args)
        )
        self._is_dependent = dependent and has_dependent_launch(device)
        self._entry = _entry(self._is_dependent)
        self._on_streams: dict[int, tuple[object, ...]] = {}

    def launch(self, stream_ptr: int) -> None:
        """Launch on a stream of the function's device, which must be the current device of the calling thread.

        Does not block. May be captured into a graph, which stores the current values of the arguments. Raises
        `DeviceError` if the driver refuses the launch.
        """
        self._run(self._on_streams.get(stream_ptr) or self._on_stream(stream_ptr))

    def ready(self, stream_ptr: int) -> Callable[[], None]:
        """Return a function that launches on a stream, without the look-up of :meth:`launch`."""
        return partial(self._run, self._on_stream(stream_ptr))

    def launch_at(self, stream_ptr: int, first: int, second: int) -> None:
        """Launch with new addresses in the first two arguments, ``c_void_p`` or ``c_uint64``.

        Thread-safe; otherwise like :meth:`launch`.
        """
        args = self.args
        with self._lock:
            args[0].value = first
            args[1].value = second
            self.launch(stream_ptr)

    def launch_with(self, stream_ptr: int, blocks: int, *values: int) -> None:
        """Launch a number of blocks, in one dimension, with new values of the first arguments.

        Thread-safe; otherwise like :meth:`launch`. Not for dependent launches.
        """
        shape = blocks, 1, 1, *self._shape[3:]
        addresses = ctypes.addressof(self._addresses), 0
        with self._lock:
            for arg, value in zip(self.args, values, strict=False):
                arg.value = value
            self._run((self._function.ptr, *shape, _SHARED_BYTES, stream_ptr, *addresses))

    def _on_stream(self, stream_ptr: int) -> tuple[object, ...]:
        arguments = ctypes.addressof(self._addresses), 0
        if self._is_dependent:
            function = driver.bindings().CUfunction(self._function.ptr)
            config = _dependent_config(self._shape, stream_ptr)
            call_arguments: tuple[object, ...] = config, function, *arguments
        else:
            call_arguments = self._function.ptr, *self._shape, _SHARED_BYTES, stream_ptr, *arguments
        if len(self._on_streams) >= _STREAMS:
            self._on_streams.clear()
        self._on_streams[stream_ptr] = call_arguments
        return call_arguments

    def _run(self, call_arguments: tuple[object, ...], may_lack_context: bool = True) -> None:
        """Launch; create the context in a thread without one, as the driver API does not create it implicitly."""
        try:
            codes: Any = self._entry(*call_arguments)
        except RuntimeError as error:  # CuPy raises, the bindings return a code
            codes = (error,)
        if codes and codes[0]:
            if may_lack_context and not int(driver.bindings().cuCtxGetCurrent()[1] or 0):
                driver.make_context(self._device)
                self._run(call_arguments, may_lack_context=False)
                return
            cause = codes[0] if isinstance(codes[0], RuntimeError) else None
            name = cause or codes[0].name
            raise DeviceError(f"kernel launch on device {self._device}: {name}") from cause


def _entry(is_dependent: bool) -> Callable[..., tuple[Any] | None]:
    """Return the launch function: CuPy's raises an error; the bindings' returns an error code in a tuple."""
    if is_dependent:
        launch: Callable[..., tuple[Any]] = driver.bindings().cuLaunchKernelEx
        return launch
    from cupy_backends.cuda.api.driver import launchKernel

    plain: Callable[..., None] = launchKernel
    return plain


def _dependent_config(shape: tuple[int, ...], stream_ptr: int) -> object:
    cu = driver.bindings()
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = shape[3:]
    config.sharedMemBytes = _SHARED_BYTES
    config.hStream = stream_ptr
    kinds = cu.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


@cache
def has_dependent_launch(device: int) -> bool:
    """Whether a GPU and its driver support programmatic dependent launch."""
    cuda = cupy().cuda
    capability = int(cuda.Device(device).compute_capability)
    return capability >= _CAPABILITY and cuda.runtime.driverGetVersion() >= _DRIVER


def check_max_blocks(max_blocks: int | None) -> None:
    """Raise `DeviceError` unless a limit of thread blocks is None or at least 1."""
    number = 1 if max_blocks is None else as_int(max_blocks)
    if number is None or number < 1:
        raise DeviceError(
            f"max_blocks: got {shown(max_blocks)}, must be at least 1, or None for no limit"
        )


def _three(shape: int | tuple[int, ...]) -> tuple[int, ...]:
    extents = (shape,) if isinstance(shape, int) else tuple(shape)
    return extents + (1,) * (3 - len(extents))
