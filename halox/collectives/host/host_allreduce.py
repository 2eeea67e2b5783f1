"""Allreduce of NumPy arrays of one shape: accepted arguments, the choice of the method, and the memory of results.

Small arrays are gathered in one round of the ranks, which also compares operation, dtype and shape; every rank combines
them. A `HostAlgorithm` combines large arrays, and on several nodes the arrays of a `halox.Allreduce`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NoReturn, TypeGuard

import numpy as np

from halox.collectives.array_reduction import ArrayReduction
from halox.collectives.host.host_algorithms import HostAlgorithm
from halox.collectives.operations import QUIET, ReproducibleSum, check_out, find_operation
from halox.errors import MismatchError, as_halox_error
from halox.runtime.arrays import Array, DType, as_ndarray, describe, scalar_array
from halox.runtime.context import Context
from halox.runtime.gathered_values import MOST_BYTES, Gathered, GatheredValues, aligned
from halox.runtime.gpu.devices import array_module, as_device_array, to_host

DOING = "an allreduce"


class HostAllreduce(ArrayReduction):
    """Combines arrays on the host; arrays on a GPU are copied to the host, and the results are copied back.

    With ``compares``, every call compares operation, dtype and shape. The constructor is then local, and the first call
    makes what it needs.
    """

    def __init__(
        self,
        context: Context,
        shape: tuple[int, ...],
        dtype: DType,
        op: str,
        algorithm: str = "host",
        *,
        compares: bool = False,
    ) -> None:
        super().__init__(shape, dtype, op)
        self.algorithm = algorithm
        self._context, self._compares, self._guard = context, compares, context.world.guard
        self._operation = operation = find_operation(op, dtype)
        world, nbytes = context.world, prod(shape) * dtype.itemsize
        is_one_round = algorithm == "host" and world.ranks.gathers_in_memory
        self._is_small = nbytes <= MOST_BYTES and (compares or is_one_round or world.size == 1)
        self._large: HostAlgorithm | None = None
        self._signature = op, (shape, dtype.str)
        fold, is_exact = operation.fold, isinstance(operation, ReproducibleSum)
        join = None if is_exact else lambda total, other: fold(total, [total, other])
        held = shape if self._is_small else (0,)
        self._values = GatheredValues(world, self._signature, dtype, held, join)
        self._gather = self._values.gather
        self._fold = self._folding(held)
        self.launch = self._launch()
        if not (self._is_small or compares):
            self._make()

    def _folding(self, shape: tuple[int, ...]) -> Callable[[Gathered], Array]:
        """Return the function that combines the ranks' values, in memory with the same alignment on all ranks."""
        operation, dtype = self._operation, self.dtype
        combine, quietly = operation.combine, QUIET.copy().run
        ranks = self._context.world.ranks
        is_plain = not (operation.is_logical or isinstance(operation, ReproducibleSum))
        size = ranks.size if ranks.gathers_in_memory and is_plain else 0
        # Sums along the ranks; for few ranks, calls for pairs are faster. Complex products would round otherwise.
        if size > 3 and dtype.kind != "c" and 0 not in shape:
            sums = aligned(size * prod(shape) * dtype.itemsize).view(dtype).reshape(size, -1)
            last: Array = sums[-1].reshape(shape)
            accumulate = combine.accumulate

            def fold_many(values: Gathered) -> Array:
                quietly(accumulate, values.stacked, 0, dtype, sums)
                return last

            return fold_many
        total = aligned(prod(shape) * dtype.itemsize).view(dtype).reshape(shape)
        if size == 2:

            def fold_pair(values: Gathered) -> Array:
                first, second = values.each
                quietly(combine, first, second, out=total)
                return total

            return fold_pair

        def fold(values: Gathered) -> Array:
            operation.fold(total, values.each)
            return total

        return fold

    def _launch(self) -> Callable[[Any, Any], Any]:
        """Return `launch`, which combines small plain arrays with little overhead in a counted call of its own.

        It returns None if the call needs `__call__`.
        """
        tick = self._context.world.ticker("allreduce", 0) or int
        is_small, dtype, shape, plain = self._is_small, self.dtype, self.shape, np.ndarray
        guard, gather, fold = self._guard, self._gather, self._fold

        def run(array: Any, out: Any) -> Any:
            if guard.user or not is_small or type(array) is not plain:
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
            guard.user = 1
            try:
                tick()
                values = gather(array, DOING)
                if values is None:
                    self._raise_mismatch()
                out[...] = fold(values)
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
                check_out(describe(out, "out"), self.shape, self.dtype)
        except Exception as error:
            self.refuse(as_halox_error(error, DOING))
        values = self._gather(source, DOING)
        if values is None:
            self._raise_mismatch()
        target[...] = self._fold(values)
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
            if self._gather((), DOING) is None:
                self._raise_mismatch()
        large = self._make() if self._large is None else self._large
        large.reduce(source, target, error)
        assert target is not None
        return self._delivered(array, target.reshape(self.shape), out)

    def _on_host(self, array: Any) -> Array:
        """Return a rank's array as a NumPy array, which has the shape and the dtype of the reduction."""
        if np.isscalar(array):
            array = scalar_array(array, self.dtype)
        self._check(describe(array, "array"), "array")
        host = as_ndarray(array)
        return host if isinstance(host, np.ndarray) else to_host(array)

    def _memory(self, array: Any, out: Any) -> tuple[Array, Array]:
        """Return contiguous host arrays: the values, and memory for the result, which is ``out`` itself if possible."""
        if self._is_plain(array):
            source = array.reshape(-1)
        else:
            source = np.require(self._on_host(array), requirements=["C", "A"]).reshape(-1)
        if out is not None:
            if not self._is_plain(out):
                check_out(describe(out, "out"), self.shape, self.dtype)
            target = as_ndarray(out)
            if isinstance(target, np.ndarray) and target.flags.carray:
                same = target.ctypes.data == source.ctypes.data
                if same or not np.may_share_memory(target, source):
                    return source, target.reshape(-1)
        return source, np.empty(source.shape, self.dtype)

    def _is_plain(self, array: object) -> TypeGuard[Array]:
        """Whether an array is a NumPy array of the right form, C-contiguous, aligned and writable."""
        return (
            type(array) is np.ndarray
            and array.dtype == self.dtype
            and array.shape == self.shape
            and array.flags.carray
        )

    def _delivered(self, array: object, result: Array, out: object) -> object:
        if out is None:
            if type(array) is np.ndarray:
                return result
            if np.isscalar(array):
                return result[()]
            device = describe(array).device
            return result if device is None else array_module(device).asarray(result)
        deliver(result, out)
        return out

    def _raise_mismatch(self) -> NoReturn:
        """Raise on all ranks: their arguments differ."""
        signatures = self._context.world.gather(self._signature, DOING)
        rank = next(rank for rank, other in enumerate(signatures) if other != signatures[0])
        part = int(signatures[rank][1] != signatures[0][1])
        raise MismatchError(
            f"allreduce needs the same {('operation', 'shape and dtype')[part]} on all ranks: rank 0 gave "
            f"{signatures[0][part]}, rank {rank} {signatures[rank][part]}"
        )

    def refuse(self, error: Exception) -> None:
        """Raise an error on all ranks."""
        if self._large is None or self._compares:
            self._context.world.agree(error, DOING)
        else:
            self._large.reduce(None, None, error)

    def close(self) -> None:
        """Free memory and communicators; collective."""
        if self._large is not None:
            self._large.close()


def deliver(result: Array, out: object) -> None:
    """Copy a result to an array, on the host or a GPU."""
    target = as_ndarray(out)
    if not isinstance(target, np.ndarray):
        as_device_array(out)[...] = array_module(describe(out).device).asarray(result)
    elif not np.may_share_memory(target, result):
        target[...] = result
