"""Allreduce of a grid's arrays on the host; each call compares the arguments of all ranks."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from halox.collectives.host.host_allreduce import HostAllreduce, deliver
from halox.collectives.operations import ReproducibleSum, check_out, find_operation
from halox.errors import MismatchError
from halox.runtime.arrays import Array, DType, describe
from halox.runtime.context import Context
from halox.runtime.gathered_values import MOST_BYTES, GatheredValues, aligned

DOING = "an allreduce"


class GridAllreduce:
    """Allreduce of arrays of one operation, dtype and shape; the constructor is local.

    In every call one synchronization of the ranks compares operation, dtype and shape. It also gathers small arrays,
    which every rank then combines. A `HostAllreduce`, made in the first call, combines large arrays.
    """

    def __init__(self, context: Context, op: str, dtype: DType, shape: tuple[int, ...]) -> None:
        self._context, self._op, self._dtype, self._shape = context, op, dtype, shape
        self._operation = find_operation(op, dtype)
        self._signature = op, (shape, dtype.str)
        elements = prod(shape)
        self._is_small = elements * dtype.itemsize <= MOST_BYTES
        self._large: HostAllreduce | None = None
        held = elements if self._is_small else 0
        fold, is_exact = self._operation.fold, isinstance(self._operation, ReproducibleSum)
        join = None if is_exact else lambda total, other: fold(total, [total, other])
        self._values = GatheredValues(context.world, self._signature, dtype, held, join)
        # Combine here, in memory with the same alignment on all ranks.
        self._total = aligned(held * dtype.itemsize).view(dtype)
        self._shaped = self._total.reshape(shape) if self._is_small else None

    def target(self, out: Any) -> object:
        """Return the array for a result: ``out`` if it fits, or a new array; local."""
        if out is None:
            return np.empty(self._shape, self._dtype)
        is_plain = type(out) is np.ndarray and out.dtype == self._dtype
        if not (is_plain and out.shape == self._shape and out.flags.carray):
            check_out(describe(out, "out"), self._shape, self._dtype)
        return out

    def __call__(self, array: Array, target: object) -> object:
        """Combine the ranks' arrays in ``target``, and return it; or raise on all ranks. Blocks."""
        values = self._values.gather(array.tobytes() if self._is_small else b"", DOING)
        if values is None:
            self._raise_mismatch()
        elif self._shaped is None:
            if self._large is None:
                self._large = HostAllreduce(self._context, self._shape, self._dtype, self._op)
            self._large(array, target)
        else:
            self._operation.fold(self._total, values)
            if type(target) is np.ndarray:  # with less overhead
                target[...] = self._shaped
            else:
                deliver(self._shaped, target)
        return target

    def _raise_mismatch(self) -> None:
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
        self._context.world.agree(error, DOING)

    def close(self) -> None:
        """Free memory and communicators; collective."""
        if self._large is not None:
            self._large.close()
