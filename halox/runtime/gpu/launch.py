"""Kernel launches whose arguments are laid out once.

CuPy converts a kernel's arguments on every call, 6 to 9 microseconds of host time; a plan launches the same kernel with
the same arguments thousands of times, and the driver needs only their addresses. Plain launches go by CuPy's call that
takes addresses, measured 0.3 microseconds below that of NVIDIA's bindings; dependent ones, which CuPy lacks, by the
bindings, 0.25 below ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from halox.errors import DeviceError
from halox.runtime.gpu import driver
from halox.runtime.gpu.cuda import cupy
from halox.values import as_int, shown

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyFunction

Parameter: TypeAlias = (
    "ctypes._SimpleCData[int] | ctypes._SimpleCData[int | None] | ctypes.Array[ctypes.c_char]"
)
"""Value of a kernel's parameter."""

_STREAMS = 16  # for whose launches a configuration is kept
_CAPABILITY, _DRIVER = 90, 12030  # of programmatic dependent launch, in graphs too


class PreparedLaunch:
    """A kernel, its launch shape and its arguments, ready to be launched again and again.

    ``function`` is a `halox.runtime.gpu.compiler.kernel` of ``device``; ``grid`` and ``block`` have one to three
    dimensions; ``args`` are ctypes values of exactly the kernel's parameter types, kept alive unlike the memory they
    point to. A value changed in place (``args[1].value = n``) holds from the next launch on.

    ``dependent`` asks for programmatic dependent launch, where the GPU and its driver have it: blocks are scheduled as
    soon as those of the kernel ahead in the stream have ended. The kernel must call ``wait_for_earlier``
    (``kernels/signals.cu``) before it accesses memory.
    """

    def __init__(
        self,
        function: CupyFunction,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        args: Sequence[Parameter],
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
        self._is_dependent = dependent and has_dependent_launch(device)
        self._entry = _entry(self._is_dependent)
        self._on_streams: dict[int, tuple[object, ...]] = {}

    def launch(self, stream_ptr: int) -> None:
        """Launch on a stream of the function's device, which must be the calling thread's current one.

        Does not block. May be captured into a graph, which keeps the arguments' present values. Raises `DeviceError`
        if the driver refuses the launch.
        """
        self._run(self._on_streams.get(stream_ptr) or self._on_stream(stream_ptr))

    def ready(self, stream_ptr: int) -> Callable[[], None]:
        """Return :meth:`launch` on a stream, with the look-up done."""
        return partial(self._run, self._on_stream(stream_ptr))

    def launch_at(self, stream_ptr: int, first: int, second: int) -> None:
        """Launch with other addresses as the first two arguments, ``c_void_p`` or ``c_uint64``.

        May be called by several threads at once; otherwise as :meth:`launch`.
        """
        args = self.args
        with self._lock:
            args[0].value = first
            args[1].value = second
            self.launch(stream_ptr)

    def _on_stream(self, stream_ptr: int) -> tuple[object, ...]:
        """Return the driver's arguments for a launch on a stream."""
        arguments = ctypes.addressof(self._addresses), 0
        if self._is_dependent:
            function = driver.bindings().CUfunction(self._function.ptr)
            given: tuple[object, ...] = _dependent(self._shape, stream_ptr), function, *arguments
        else:
            given = self._function.ptr, *self._shape, stream_ptr, *arguments
        if len(self._on_streams) >= _STREAMS:
            self._on_streams.clear()
        self._on_streams[stream_ptr] = given
        return given

    def _run(self, given: tuple[object, ...], may_lack_context: bool = True) -> None:
        """Launch; a thread that has not used CUDA yet gets its context, since only the runtime makes it unasked."""
        try:
            codes: Any = self._entry(*given)
        except RuntimeError as error:  # CuPy's way to say so
            codes = (error,)
        if codes and codes[0]:
            if may_lack_context and not int(driver.bindings().cuCtxGetCurrent()[1] or 0):
                driver.make_context(self._device)
                self._run(given, may_lack_context=False)
                return
            cause = codes[0] if isinstance(codes[0], RuntimeError) else None
            name = cause or codes[0].name
            raise DeviceError(f"kernel launch on device {self._device}: {name}") from cause


def _entry(is_dependent: bool) -> Callable[..., tuple[Any] | None]:
    """Return a function that launches: CuPy's raises, and the bindings' returns the driver's code in a tuple."""
    if is_dependent:
        launch: Callable[..., tuple[Any]] = driver.bindings().cuLaunchKernelEx
        return launch
    from cupy_backends.cuda.api.driver import launchKernel

    plain: Callable[..., None] = launchKernel
    return plain


def _dependent(shape: tuple[int, ...], stream_ptr: int) -> object:
    """Return the configuration of a programmatic dependent launch."""
    cu = driver.bindings()
    config, attribute = cu.CUlaunchConfig(), cu.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ, config.sharedMemBytes = shape[3:]
    config.hStream = stream_ptr
    kinds = cu.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.attrs, config.numAttrs = [attribute], 1
    return config


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
