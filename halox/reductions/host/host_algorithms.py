"""The algorithms of allreduce for NumPy arrays.

``host`` combines the arrays of all ranks, in the order of the ranks; in shared memory if they are on one node.
``hierarchical`` combines first within each node. Then the first ranks of the nodes combine the results, in the order of
the nodes, and broadcast the total within their nodes::

    node 0   rank 0 <- 1, 2, 3      rank 0 <-> rank 4      rank 0 -> 1, 2, 3
    node 1   rank 4 <- 5, 6, 7                             rank 4 -> 5, 6, 7

Each algorithm gives the same bits on every rank and in every run. The bits of the two algorithms may differ, since
``hierarchical`` combines ``(a0 op a1 op a2 op a3) op (a4 op a5 op a6 op a7)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from halox.errors import raising
from halox.reductions.host.mpi_reduction import PIECE_BYTES, OrderedReduction
from halox.reductions.host.shared_reduction import HostMoves, make_shared_reduction
from halox.reductions.operations import Operation
from halox.runtime.arrays import Array, DType
from halox.runtime.context import Context
from halox.runtime.finalizing import keep
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_DOING = "an allreduce"
_MAKING = "the making of an allreduce"


class HostAlgorithm:
    """``host`` or ``hierarchical``, see the module; the constructor, calls and `close` are collective."""

    def __init__(
        self, context: Context, name: str, operation: Operation, dtype: DType, elements: int
    ) -> None:
        world = self._world = context.world
        what = operation, dtype, elements
        by_node = name == "hierarchical"
        shared = None
        if by_node or world.node_size == world.size:
            shared = make_shared_reduction(world, context.arena, *what)
        comm = world.node_comm if by_node else world.data_comm

        def make() -> OrderedReduction | None:
            is_done = shared is not None or world.size == 1
            return None if is_done else OrderedReduction(comm, world.wait_all, *what)

        self._operation = operation
        self._shared, self._ordered = shared, world.attempt(make, _MAKING)
        carries_errors = self._ordered is None or self._ordered.carries_errors
        self._agrees_first = world.size > 1 and (by_node or not carries_errors)
        self._leaders = Leaders(world, *what) if by_node and world.size > 1 else None
        self.buffers_all = shared is not None and shared.buffers_all
        """Whether the result may overlap the array, since no result is written before the whole array is read."""

    def reduce(self, source: Array | None, target: Array | None, error: Exception | None) -> None:
        """Combine contiguous arrays, the same or disjoint, or raise on all ranks; collective, blocks."""
        try:
            if self._agrees_first:
                self._world.attempt(raising(error), _DOING)
            if self._shared is not None:
                moves = None if source is None or target is None else HostMoves(source, target)
                self._shared.reduce(moves, error)
            elif self._ordered is not None:
                if not self._ordered(source, target):
                    self._world.attempt(raising(error), _DOING)
            elif source is None or target is None:
                self._world.attempt(raising(error), _DOING)
            else:  # the only rank
                self._operation.fold(target, [source])
            if self._leaders is not None:
                assert target is not None
                self._leaders.combine(target)
        except BaseException:
            if error is None:
                keep(self, source, target)
            raise

    def close(self) -> None:
        """Release the shared memory and the leaders' communicator; collective."""
        if self._shared is not None:
            self._shared.close()
        if self._leaders is not None:
            self._leaders.close()


class Leaders:
    """The first ranks of the nodes; they combine their nodes' values and broadcast the result. Collective to make."""

    def __init__(self, world: World, operation: Operation, dtype: DType, elements: int) -> None:
        self._world = world
        self.is_one = world.node_rank == 0  # whether this rank is the first rank of its node
        # The order of the nodes is the order of their first ranks.
        world.attempt(raising(None), _MAKING)
        color = 0 if self.is_one else world.mpi.UNDEFINED
        comm = cast("MPI.Intracomm", world.comm.Split(color, world.rank))
        self._comm: MPI.Intracomm | None = comm
        if self.is_one:
            self._between = OrderedReduction(comm, world.wait_all, operation, dtype, elements)

    def combine(self, values: Array) -> None:
        """Combine the nodes' values in place; on ranks that are not leaders the values are only overwritten.

        Collective; blocks.
        """
        if self.is_one:
            self._between(values, values)
        raw = values.view(np.uint8)
        for start in range(0, len(raw), PIECE_BYTES):
            request = self._world.node_comm.Ibcast(raw[start : start + PIECE_BYTES])
            self._world.wait_all([request], "in an allreduce for the first rank of its node")

    def close(self) -> None:
        """Free the communicator; collective."""
        if self.is_one and self._comm is not None:
            self._comm.Free()
        self._comm = None
