"""Allreduce of NumPy arrays of one shape: accepted arguments, and where results are formed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from math import prod
from threading import get_ident
from typing import Any, TypeGuard

import numpy as np

from halox.collectives.array_reduction import ArrayReduction
from halox.collectives.host.host_algorithms import HostAlgorithm
from halox.collectives.operations import find_operation
from halox.collectives.prepared import Launch
from halox.errors import as_halox_error
from halox.runtime.arrays import Array, DType, as_ndarray, describe, scalar_array
from halox.runtime.context import Context
from halox.runtime.gpu.devices import array_module, as_device_array, to_host


class HostAllreduce(ArrayReduction):
    """Combines arrays on the host; arrays of a GPU are copied there and back.

    ``prepared`` are the beginning of a grid's prepared calls, and the call where their arrays have changed.
    """

    def __init__(
        self,
        context: Context,
        shape: tuple[int, ...],
        dtype: DType,
        op: str,
        algorithm: str = "host",
        prepared: tuple[Callable[[], None], Callable[..., object]] | None = None,
    ) -> None:
        super().__init__(shape, dtype, op)
        self.algorithm, self._guard = algorithm, context.world.guard
        self._prepared = prepared
        operation = find_operation(op, dtype)
        self._combined = HostAlgorithm(context, algorithm, operation, dtype, prod(shape))

    def __call__(self, array: Any, out: Any = None) -> Any:
        """Combine the ranks' arrays, or raise on all ranks."""
        source: Array | None = None
        target: Array | None = None
        error: Exception | None = None
        is_plain = self._are_plain(array, out)
        try:
            if is_plain:  # with less on the way
                result = np.empty(self.shape, self.dtype) if out is None else out
                source = array if array.ndim == 1 else array.reshape(-1)
                target = source if out is array else result.reshape(-1)
            else:
                source, target = self._memory(array, out)
        except Exception as caught:
            source, error = None, as_halox_error(caught, "an allreduce")
        self._combined.reduce(source, target, error)
        if is_plain:
            return result
        assert target is not None
        return self._delivered(array, target.reshape(self.shape), out)

    def _memory(self, array: object, out: object) -> tuple[Array, Array]:
        """Return contiguous values of the host, and where the result is formed: in ``out`` where that will do."""
        if np.isscalar(array):
            array = scalar_array(array, self.dtype)
        self._check(describe(array, "array"), "array")
        host = as_ndarray(array)
        if not isinstance(host, np.ndarray):
            host = to_host(array)
        source = np.require(host, requirements=["C", "A"]).reshape(-1)
        if out is not None:
            self._check(describe(out, "out"), "out")
            held = as_ndarray(out)
            if isinstance(held, np.ndarray) and held.flags.carray:
                same = held.ctypes.data == source.ctypes.data
                if same or not np.may_share_memory(held, source):
                    return source, held.reshape(-1)
        return source, np.empty(source.shape, self.dtype)

    def _delivered(self, array: object, result: Array, out: object) -> object:
        if out is None:
            if np.isscalar(array):
                return result[()]
            device = describe(array).device
            return result if device is None else array_module(device).asarray(result)
        held = as_ndarray(out)
        if not isinstance(held, np.ndarray):
            as_device_array(out)[...] = array_module(describe(out).device).asarray(result)
        elif not np.may_share_memory(held, result):
            held[...] = result
        return out

    def _is_plain(self, array: object) -> TypeGuard[Array]:
        """Whether an array is NumPy's own, fits, and is a run that can be read and written as it is."""
        return (
            type(array) is np.ndarray
            and array.dtype == self.dtype
            and array.shape == self.shape
            and array.flags.carray
        )

    def _are_plain(self, array: object, out: object) -> TypeGuard[Array]:
        """Whether arrays are plain, and ``out`` none, the same one or disjoint."""
        return self._is_plain(array) and (
            out is None
            or out is array
            or (self._is_plain(out) and not np.may_share_memory(array, out))
        )

    def bind(self, array: object, out: object) -> Launch | None:
        """Prepare calls with plain arrays; None for others, and without a grid."""
        if self._prepared is None or not self._are_plain(array, out):
            return None
        begin, again = self._prepared
        # Held weakly, since launches are kept for as long as their arrays live.
        find_source, find_target = weakref.ref(array), None if out is None else weakref.ref(out)
        dtype, shape, reduce, guard = array.dtype, self.shape, self._combined.reduce, self._guard

        def launch() -> object:
            source: Any = find_source()
            is_plain = source.dtype is dtype and source.shape == shape and source.flags.carray
            if find_target is None:
                target: Any = _empty(shape, dtype)
            else:
                target = find_target()
                is_plain &= target is source or self._is_plain(target)
            if not is_plain or target is None:
                return again(self.op, [source], None if find_target is None else target)
            if guard.user:
                guard.refuse()
            guard.user = get_ident()
            try:
                begin()
                reduce(source.reshape(-1), target.reshape(-1), None)
            finally:
                guard.user = 0
            return target

        return launch

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        self._combined.reduce(None, None, error)

    def close(self) -> None:
        """Free memory and communicators; collective."""
        self._combined.close()


def _empty(shape: tuple[int, ...], dtype: DType) -> Array | None:
    """Return a new array; None without memory, which is an error of the whole call."""
    try:
        return np.empty(shape, dtype)
    except MemoryError:
        return None
