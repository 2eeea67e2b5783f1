"""Allreduce of NumPy arrays of one shape: accepted arguments, and the memory of results.

`HostAlgorithm` combines contiguous arrays. This module converts other arguments to such arrays, and back.
"""

from __future__ import annotations

from math import prod
from typing import Any, TypeGuard

import numpy as np

from halox.collectives.array_reduction import ArrayReduction
from halox.collectives.host.host_algorithms import HostAlgorithm
from halox.collectives.operations import find_operation
from halox.errors import as_halox_error
from halox.runtime.arrays import Array, DType, as_ndarray, describe, scalar_array
from halox.runtime.context import Context
from halox.runtime.gpu.devices import array_module, as_device_array, to_host


class HostAllreduce(ArrayReduction):
    """Combines arrays on the host; arrays on a GPU are copied to the host, and the results are copied back."""

    def __init__(
        self,
        context: Context,
        shape: tuple[int, ...],
        dtype: DType,
        op: str,
        algorithm: str = "host",
    ) -> None:
        super().__init__(shape, dtype, op)
        self.algorithm = algorithm
        operation = find_operation(op, dtype)
        self._algorithm = HostAlgorithm(context, algorithm, operation, dtype, prod(shape))

    def __call__(self, array: Any, out: Any = None) -> Any:
        """Combine the ranks' arrays, or raise on all ranks."""
        source: Array | None = None
        target: Array | None = None
        error: Exception | None = None
        is_plain = self._are_plain(array, out)
        try:
            if is_plain:  # with less overhead
                result = np.empty(self.shape, self.dtype) if out is None else out
                source = array if array.ndim == 1 else array.reshape(-1)
                target = source if out is array else result.reshape(-1)
            else:
                source, target = self._memory(array, out)
        except Exception as caught:
            source, error = None, as_halox_error(caught, "an allreduce")
        self._algorithm.reduce(source, target, error)
        if is_plain:
            return result
        assert target is not None
        return self._delivered(array, target.reshape(self.shape), out)

    def _memory(self, array: object, out: object) -> tuple[Array, Array]:
        """Return contiguous host arrays: the values, and memory for the result, which is ``out`` itself if possible."""
        if np.isscalar(array):
            array = scalar_array(array, self.dtype)
        self._check(describe(array, "array"), "array")
        host = as_ndarray(array)
        if not isinstance(host, np.ndarray):
            host = to_host(array)
        source = np.require(host, requirements=["C", "A"]).reshape(-1)
        if out is not None:
            self._check(describe(out, "out"), "out")
            target = as_ndarray(out)
            if isinstance(target, np.ndarray) and target.flags.carray:
                same = target.ctypes.data == source.ctypes.data
                if same or not np.may_share_memory(target, source):
                    return source, target.reshape(-1)
        return source, np.empty(source.shape, self.dtype)

    def _delivered(self, array: object, result: Array, out: object) -> object:
        if out is None:
            if np.isscalar(array):
                return result[()]
            device = describe(array).device
            return result if device is None else array_module(device).asarray(result)
        deliver(result, out)
        return out

    def _is_plain(self, array: object) -> TypeGuard[Array]:
        """Whether an array is a NumPy array of the right form, C-contiguous, aligned and writable."""
        return (
            type(array) is np.ndarray
            and array.dtype == self.dtype
            and array.shape == self.shape
            and array.flags.carray
        )

    def _are_plain(self, array: object, out: object) -> TypeGuard[Array]:
        """Whether ``array`` is plain, and ``out`` is None, the same array, or plain and disjoint."""
        return self._is_plain(array) and (
            out is None
            or out is array
            or (self._is_plain(out) and not np.may_share_memory(array, out))
        )

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        self._algorithm.reduce(None, None, error)

    def close(self) -> None:
        """Free memory and communicators; collective."""
        self._algorithm.close()


def deliver(result: Array, out: object) -> None:
    """Copy a result to an array, on the host or a GPU."""
    target = as_ndarray(out)
    if not isinstance(target, np.ndarray):
        as_device_array(out)[...] = array_module(describe(out).device).asarray(result)
    elif not np.may_share_memory(target, result):
        target[...] = result
