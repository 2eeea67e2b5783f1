"""Allreduce of arrays of one shape on GPUs: accepted arguments, and the memory of results.

A `DeviceAlgorithm` combines contiguous, aligned arrays. This module converts other arguments to such arrays, and back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from halox.errors import DeviceError, FieldError, StateError
from halox.reductions.device.device_algorithms import make_algorithm
from halox.reductions.device.kernel_reductions import KernelReduction
from halox.reductions.device.nccl_reduction import DeviceAlgorithm, NcclHierarchicalReduction
from halox.reductions.operations import Operation, check_array
from halox.reductions.prepared import Launch
from halox.runtime.arrays import Array, Described, DType, as_ndarray, describe, scalar_array
from halox.runtime.context import Context
from halox.runtime.gpu.cuda import cupy, is_cupy_array, is_device_array
from halox.runtime.gpu.devices import as_device_array
from halox.runtime.gpu.streams import is_capturing

if TYPE_CHECKING:
    from halox.runtime.array_types import CupyArray


class DeviceAllreduce:
    """Combines arrays on the GPUs of all ranks; arrays on the host are copied to the GPU, and their results back."""

    def __init__(
        self,
        context: Context,
        device: int,
        shape: tuple[int, ...],
        dtype: DType,
        operation: Operation,
        algorithm: str | None = None,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self._rank, self._device = context.world.rank, device
        what = operation, dtype, prod(shape)
        self._algorithm, self.algorithm, self.reasons = make_algorithm(
            context, device, what, algorithm
        )
        self.captures = self._algorithm.captures
        self._nbytes = prod(shape) * dtype.itemsize
        self._part = dtype.itemsize // 2 if dtype.kind == "c" else dtype.itemsize
        self._empty: Callable[..., CupyArray] = cupy().empty
        self._current_stream = cupy().cuda.get_current_stream

    def __call__(self, array: object, out: object = None) -> object:
        """Return ``out``, or a new array in the memory of ``array``; a NumPy scalar for a scalar."""
        stream = self._current_stream()
        try:
            check_captures(self._algorithm, self.algorithm, "allreduce")
            source = self._source(array)
            target = self._target(source, out)
        except Exception as error:
            self.refuse(error)
            raise
        self._algorithm.reduce(source.data.ptr, target.data.ptr, stream, None)
        if out is None:
            if is_device_array(array):
                return target
            values = target.get()
            return values[()] if np.isscalar(array) else values
        if target is not out:
            _write(out, target)
        return out

    def bind(self, array: object, out: object) -> Launch | None:
        """Prepare calls without host work, for arrays that kernels can read and write in place; None for others."""
        if not isinstance(
            self._algorithm, KernelReduction | NcclHierarchicalReduction
        ) or not self._is_plain(array):
            return None
        if out is None:
            new = partial(self._empty, self.shape, self.dtype)
            return self._algorithm.bind(array.data.ptr, new)
        return (
            self._algorithm.bind(array.data.ptr, out.data.ptr)
            if self._is_target(out, array)
            else None
        )

    def refuse(self, error: Exception) -> None:
        """Raise the error that keeps this rank out of a call: on all ranks if the host takes part, else only here."""
        self._algorithm.reduce(0, 0, self._current_stream(), error)

    def close(self) -> None:
        """Free memory and communicators; collective."""
        self._algorithm.close()

    def _source(self, array: object) -> CupyArray:
        """Return this rank's values as a contiguous array on the GPU."""
        given = scalar_array(array, self.dtype) if np.isscalar(array) else array
        described = describe(given, "array")
        self._check(described, "array")
        if described.device is None:
            check_lasts("array")
        return self._plain(as_device_array(_host(given) if described.device is None else given))

    def _is_plain(self, array: object) -> TypeGuard[CupyArray]:
        """Whether an array is a contiguous, aligned CuPy array."""
        return (
            is_cupy_array(array) and array.flags.c_contiguous and array.data.ptr % self._part == 0
        )

    def _plain(self, array: CupyArray) -> CupyArray:
        """Return a GPU array itself, or an aligned contiguous copy of it."""
        is_contiguous, is_aligned = array.flags.c_contiguous, array.data.ptr % self._part == 0
        if is_contiguous and is_aligned:
            return array
        check_lasts("array")
        if is_aligned:
            return array.copy(order="C")
        if not is_contiguous:
            raise FieldError(
                f"array: its address is not a multiple of {self._part} bytes, and it is not contiguous either; copy it "
                "first"
            )
        copy = self._empty(self.shape, self.dtype)
        copy.data.copy_from_device_async(array.data, self._nbytes)
        return copy

    def _target(self, source: CupyArray, out: object) -> CupyArray:
        """Return the array that receives the result: ``out`` itself, if that is possible."""
        if out is not None:
            self._check(describe(out, "out"), "out")
            if self._is_target(out, source):
                return out
            check_lasts("out")
        return self._empty(self.shape, self.dtype)

    def _is_target(self, out: object, source: CupyArray) -> TypeGuard[CupyArray]:
        """Whether a result can be formed in ``out``, which must be the source or disjoint from it."""
        if not self._is_plain(out):
            return False
        apart = abs(out.data.ptr - source.data.ptr)
        return not apart or apart >= self._nbytes

    def _check(self, described: Described, name: str) -> None:
        check_array(described, self.shape, self.dtype, name)
        if described.device is not None and described.device != self._device:
            raise DeviceError(
                f"{name} is on GPU {described.device}, rank {self._rank} reduces on GPU {self._device}; "
                f"allocate under `with cupy.cuda.Device({self._device}):`"
            )


def check_lasts(name: str) -> None:
    """Raise `StateError` in a capture: replays would use the memory of a temporary copy after it has been freed."""
    if is_capturing():
        raise StateError(
            f"{name} needs a copy on the way, which cannot be captured in a CUDA graph; give a contiguous CuPy array, "
            "or copy before the capture"
        )


def check_captures(allreduce: DeviceAlgorithm, algorithm: str, name: str) -> None:
    """Raise `StateError` in a capture if a reduction's allreduce needs the host."""
    if not allreduce.captures and is_capturing():
        raise StateError(
            f"{name}: the {algorithm!r} algorithm needs the host in every call and cannot be captured in a CUDA graph; "
            "a capture needs a GPU of its own for every rank, and NCCL between nodes"
        )


def _host(array: Any) -> Array:
    return np.ascontiguousarray(as_ndarray(array)).reshape(np.shape(array))


def _write(out: object, result: CupyArray) -> None:
    if is_device_array(out):
        as_device_array(out)[...] = result
    else:
        as_ndarray(out)[...] = result.get()
