"""Combination of NumPy arrays of all ranks in the order of the ranks, by MPI's collectives.

MPI does not define the order in which `MPI_Allreduce` combines, so that its bits may differ from run to run, and with
some algorithms from rank to rank. Here MPI only moves bytes. The result is ``((a0 op a1) op a2) op ...`` on every rank,
in every run and for every size of array, except for the tree. There are three methods::

    gathered    all ranks get all arrays, and each rank combines them: one step, (R - 1) n bytes to each rank
    tree        small arrays of many ranks: ((a0 op a1) op (a2 op a3)) op ...; at most log2(R) n bytes to each
    scattered   rank r gets part r of all arrays, combines it, and all gather the parts: two steps, 2 n bytes to each
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from halox.reductions.operations import Operation
from halox.runtime import gathered_values
from halox.runtime.arrays import Array, DType
from halox.runtime.gathered_values import Wait, aligned
from halox.values import rounded_up

if TYPE_CHECKING:
    from mpi4py import MPI

GATHERED_BYTES = 8192
"""Most bytes of an array for the gathered method and the tree."""

PIECE_BYTES = 4 << 20
"""Bytes of an array that are scattered at a time, which bounds temporary memory and MPI's counts."""

_LINE_BYTES = 64
"""Alignment of arrays, so that NumPy runs the same loops on all ranks. Its vector loops and its scalar loops give the
same numbers, except that the sign of a NaN, or the choice between zeros of opposite sign, may differ."""

HEAD_BYTES = _LINE_BYTES
"""Bytes of the header of a gathered record, which says whether the rank's array is valid."""

_WAITING = "in an allreduce for the other ranks"


class OrderedReduction:
    """Combines one-dimensional arrays of one length over a communicator.

    If ``carries_errors``, a rank without a valid array may call with None, and all ranks get False.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        wait: Wait,
        operation: Operation,
        dtype: DType,
        elements: int,
    ) -> None:
        self._comm, self._wait, self._operation = comm, wait, operation
        self._dtype = dtype
        nbytes = elements * dtype.itemsize
        self.carries_errors = nbytes <= GATHERED_BYTES
        if self.carries_errors:
            record = HEAD_BYTES + rounded_up(nbytes, _LINE_BYTES)
            self._in_tree = comm.size > gathered_values.MOST_GATHERED and not operation.is_exact
            count = 2 if self._in_tree else comm.size
            self._records = aligned(count * record).reshape(count, record)
            self._record = self._records[0] if self._in_tree else np.zeros(record, np.uint8)
            self._heads = self._records[:, 0]
            values = slice(HEAD_BYTES, HEAD_BYTES + nbytes)
            self._mine = self._record[values]
            self._values = [row[values].view(dtype) for row in self._records]
            self._total = aligned(nbytes).view(dtype)
        else:
            self._piece = max(comm.size, PIECE_BYTES // dtype.itemsize)
            longest = -(-min(self._piece, elements) // comm.size)
            self._parts = np.empty(comm.size * longest, dtype)
            self._total = np.empty(longest, dtype)

    def __call__(self, source: Array | None, target: Array | None) -> bool:
        """Combine the ranks' arrays; return False if a rank has called with None.

        Collective; blocks.
        """
        if self.carries_errors:
            return self._gather(source, target)
        assert source is not None and target is not None
        for start in range(0, len(source), self._piece):
            piece = slice(start, start + self._piece)
            self._scatter(source[piece], target[piece])
        return True

    def _gather(self, source: Array | None, target: Array | None) -> bool:
        record = self._record
        record[0] = source is not None
        if source is not None:
            self._mine[:] = source.view(np.uint8)
        if self._in_tree:
            gathered_values.combine(self._comm, [*self._records], self._join, self._wait)
        else:
            self._wait([self._comm.Iallgather(record, self._records)], _WAITING)
        results = slice(1 if self._in_tree else None)
        if not self._heads[results].all():
            return False
        assert target is not None
        target[...] = self._combined(self._values[results])
        return True

    def _join(self, total: Array, other: Array) -> None:
        total[0] &= other[0]
        self._operation.fold(self._values[0], self._values)

    def _scatter(self, source: Array, target: Array) -> None:
        comm, itemsize = self._comm, self._dtype.itemsize
        bounds = [len(source) * rank // comm.size for rank in range(comm.size + 1)]
        counts = [(b - a) * itemsize for a, b in pairwise(bounds)]
        starts = [bound * itemsize for bound in bounds[:-1]]
        mine = counts[comm.rank]
        parts = self._parts.view(np.uint8)[: mine * comm.size]
        incoming = [mine] * comm.size, [mine * rank for rank in range(comm.size)]
        sent = comm.Ialltoallv(
            [source.view(np.uint8), (counts, starts)],
            [parts, incoming],
        )
        self._wait([sent], _WAITING)
        rows = parts.view(self._dtype).reshape(comm.size, -1)
        combined = self._combined(list(rows))
        gathered = comm.Iallgatherv(
            [combined.view(np.uint8), mine],
            [target.view(np.uint8), (counts, starts)],
        )
        self._wait([gathered], _WAITING)

    def _combined(self, values: Sequence[Array]) -> Array:
        total = self._total[: len(values[0])]
        self._operation.fold(total, values)
        return total
