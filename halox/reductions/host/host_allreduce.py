"""Allreduce of NumPy arrays of one shape: accepted arguments, the choice of the method, and the memory of results.

Small arrays are gathered in one round of the ranks, which also compares operation, dtype and shape; every rank combines
them. A `HostAlgorithm` combines large arrays, and on several nodes the arrays of a `halox.Allreduce`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NoReturn

import numpy as np

from halox.errors import as_halox_error, raising
from halox.reductions.host.host_algorithms import HostAlgorithm
from halox.reductions.operations import QUIET, Operation, check_array
from halox.runtime.arrays import Array, DType, as_ndarray, describe, scalar_array
from halox.runtime.context import Context
from halox.runtime.gathered_values import MOST_BYTES, Gathered, GatheredValues, aligned
from halox.runtime.gpu.devices import array_module, as_device_array, to_host

DOING = "an allreduce"
_NOTHING = np.empty(0)


class HostAllreduce:
    """Combines arrays on the host; arrays on a GPU are copied to the host, and the results are copied back.

    With ``compares``, every call compares operation, dtype and shape. The constructor is then local, and the first call
    makes what it needs.
    """

    captures = False

    def __init__(
        self,
        context: Context,
        shape: tuple[int, ...],
        dtype: DType,
        operation: Operation,
        algorithm: str = "host",
        *,
        compares: bool = False,
    ) -> None:
        self.shape, self.dtype, self.algorithm = shape, dtype, algorithm
        self.reasons: dict[str, str] = {}
        self._context, self._compares, self._guard = context, compares, context.world.guard
        self._operation = operation
        world, nbytes = context.world, prod(shape) * dtype.itemsize
        is_one_round = algorithm == "host" and world.ranks.gathers_in_memory
        self._is_small = nbytes <= MOST_BYTES and (compares or is_one_round or world.size == 1)
        self._large: HostAlgorithm | None = None
        self._signature = str(operation), (shape, str(dtype))
        fold = operation.fold
        join = None if operation.is_exact else lambda total, other: fold(total, [total, other])
        held = shape if self._is_small else (0,)
        self._values = GatheredValues(world, self._signature, dtype, held, join)
        self._gather = self._values.gather
        self._quietly = QUIET.copy().run
        elements = prod(held)
        rows = world.size if elements == 1 else 1
        self._sums = aligned(rows * elements * dtype.itemsize).view(dtype).reshape(rows, -1)
        self._total = self._sums[-1].reshape(held)
        self.launch = self._launch()
        if not (self._is_small or compares):
            self._make()

    def _folding(self, values: Gathered) -> tuple[Any, ...]:
        """Return the call that combines the ranks' values in `_total`: a function and its arguments.

        The values and the total have the same alignment on all ranks.
        """
        operation, sums, total, ranks = self._operation, self._sums, self._total, len(values.each)
        combine, dtype = operation.combine, self.dtype
        if not (operation.is_logical or operation.is_exact):
            if ranks == 2:
                if operation.name in ("min", "max"):  # NumPy takes their results by keyword only
                    return partial(combine, out=total), *values.each
                return combine, *values.each, total
            # Along the ranks at once. NumPy's complex products would round otherwise, and so would its sum of a single
            # column, but not of several.
            if ranks > 2 and dtype.kind != "c" and total.size:
                if total.size == 1:
                    return combine.accumulate, values.stacked, 0, dtype, sums
                return combine.reduce, values.stacked, 0, dtype, sums[0], False, None
        return operation.fold, sums[-1], [*values.stacked]  # of one dimension

    def _launch(self) -> Callable[[Any, Any], Any]:
        """Return `launch`, which combines plain arrays with little overhead in a counted call of its own.

        It returns None if the call needs `__call__`.
        """
        tick: Callable[[], object] = self._context.world.ticker("allreduce", 0) or int
        begin = self._values.calling("allreduce", self._folding)
        is_small, dtype, shape, plain = self._is_small, self.dtype, self.shape, np.ndarray
        guard, compares, total = self._guard, self._compares, self._total
        quietly: Callable[..., object] = self._quietly

        def run(array: Any, out: Any) -> Any:
            if guard.user or type(array) is not plain:
                return None
            if array.dtype is not dtype or array.shape != shape:
                return None
            if out is None:
                try:
                    out = np.empty(shape, dtype)
                except MemoryError:
                    return None
            elif not (
                type(out) is plain
                and out.dtype is dtype
                and out.shape == shape
                and out.flags.carray
            ):
                return None
            large = self._large
            if not is_small:
                if large is None or not array.flags.c_contiguous:
                    return None
                if not (out is array or large.buffers_all) and np.may_share_memory(array, out):
                    return None
            guard.user = 1
            try:
                if large is None:
                    folding = begin(array, DOING)
                    if folding is None:
                        self._raise_mismatch()
                    quietly(*folding)
                    out[...] = total
                else:
                    if not compares:
                        tick()
                    elif begin(_NOTHING, DOING) is None:
                        self._raise_mismatch()
                    large.reduce(array.reshape(-1), out.reshape(-1), None)
            except BaseException as error:
                guard.leave(error)
                raise
            guard.user = 0
            return out

        return run

    def _make(self) -> HostAlgorithm:
        """Make the algorithm for large arrays; collective."""
        what = self._operation, self.dtype, prod(self.shape)
        self._large = HostAlgorithm(self._context, self.algorithm, *what)
        return self._large

    def __call__(self, array: Any, out: Any = None) -> Any:
        """Combine the ranks' arrays, or raise on all ranks."""
        if not self._is_small:
            return self._combine_large(array, out)
        try:
            source, target = self._on_host(array), np.empty(self.shape, self.dtype)
            if out is not None:
                check_array(describe(out, "out"), self.shape, self.dtype, "out")
        except Exception as error:
            self.refuse(as_halox_error(error, DOING))
        values = self._gather(source, DOING)
        if values is None:
            self._raise_mismatch()
        self._quietly(*self._folding(values))
        target[...] = self._total
        return self._delivered(array, target, out)

    def _combine_large(self, array: Any, out: Any) -> Any:
        source: Array | None = None
        target: Array | None = None
        error: Exception | None = None
        try:
            source, target = self._memory(array, out)
        except Exception as caught:
            error = as_halox_error(caught, DOING)
        if self._compares:
            if error is not None:
                self.refuse(error)
            if self._gather(_NOTHING, DOING) is None:
                self._raise_mismatch()
        large = self._make() if self._large is None else self._large
        large.reduce(source, target, error)
        assert target is not None
        return self._delivered(array, target.reshape(self.shape), out)

    def _on_host(self, array: Any) -> Array:
        """Return a rank's array as a NumPy array, which has the shape and the dtype of the reduction."""
        if np.isscalar(array):
            array = scalar_array(array, self.dtype)
        check_array(describe(array, "array"), self.shape, self.dtype, "array")
        host = as_ndarray(array)
        return host if isinstance(host, np.ndarray) else to_host(array)

    def _memory(self, array: Any, out: Any) -> tuple[Array, Array]:
        """Return contiguous host arrays: the values, and memory for the result, which is ``out`` itself if possible."""
        source = np.require(self._on_host(array), requirements=["C", "A"]).reshape(-1)
        if out is not None:
            check_array(describe(out, "out"), self.shape, self.dtype, "out")
            target = as_ndarray(out)
            if isinstance(target, np.ndarray) and target.flags.carray:
                same = target.ctypes.data == source.ctypes.data
                if same or not np.may_share_memory(target, source):
                    return source, target.reshape(-1)
        return source, np.empty(source.shape, self.dtype)

    def _delivered(self, array: object, result: Array, out: object) -> object:
        if out is None:
            if type(array) is np.ndarray:
                return result
            if np.isscalar(array):
                return result[()]
            device = describe(array).device
            return result if device is None else array_module(device).asarray(result)
        target = as_ndarray(out)
        if not isinstance(target, np.ndarray):
            as_device_array(out)[...] = array_module(describe(out).device).asarray(result)
        elif not np.may_share_memory(target, result):
            target[...] = result
        return out

    def _raise_mismatch(self) -> NoReturn:
        """Raise on all ranks: their arguments differ."""
        operation, (shape, dtype) = self._signature
        mine = {"op": operation, "shape": shape, "dtype": dtype}
        self._context.world.attempt(lambda: (None, mine), DOING, alike=True)
        raise AssertionError("ranks have met with arguments of two kinds, and then of one")

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        if self._large is None or self._compares:
            self._context.world.attempt(raising(error), DOING)
        else:
            self._large.reduce(None, None, error)

    def close(self) -> None:
        """Free memory and communicators; collective."""
        if self._large is not None:
            self._large.close()
