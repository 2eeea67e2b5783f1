"""The algorithms of allreduce for NumPy arrays.

``host``: all ranks alike, in the order of the ranks; in shared memory if they are on one node. ``hierarchical``: the
ranks of each node first, then the first ranks of the nodes, in the order of the nodes; these tell the others of
theirs::

    node 0   rank 0 <- 1, 2, 3      rank 0 <-> rank 4      rank 0 -> 1, 2, 3
    node 1   rank 4 <- 5, 6, 7                             rank 4 -> 5, 6, 7

The result of either is the same bits on every rank and in every run. Those of one may differ from the other's, since
``hierarchical`` combines ``(a0 op a1 op a2 op a3) op (a4 op a5 op a6 op a7)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halox.collectives.host.mpi_reduction import PIECE_BYTES, OrderedReduction
from halox.collectives.host.shared_reduction import HostMoves, make_shared_reduction
from halox.collectives.operations import Operation
from halox.runtime.context import Context
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

Values = npt.NDArray[Any]

_DOING = "an allreduce"
_MAKING = "the making of an allreduce"


class InRankOrder:
    """``host``: see the module. Collective to make, to call and to close."""

    def __init__(
        self, context: Context, operation: Operation, dtype: np.dtype[Any], elements: int
    ) -> None:
        world = self._world = context.world
        what = operation, dtype, elements
        is_one_node = world.node_size == world.size
        self._shared = make_shared_reduction(world, context.arena, *what) if is_one_node else None
        self._all: OrderedReduction | None = None
        if self._shared is None:
            self._all = world.guarded(
                lambda: OrderedReduction(world.data_comm, world.wait_all, *what), _MAKING
            )

    def reduce(
        self,
        source: Values | None,
        target: Values | None,
        error: Exception | None,
    ) -> None:
        """Combine contiguous arrays, the same or disjoint, or raise on all ranks; collective, blocks."""
        if self._shared is not None:
            moves = None if source is None or target is None else HostMoves(source, target)
            self._shared.reduce(moves, error)
            return
        assert self._all is not None
        if not self._all.carries_errors:
            self._world.agree(error, _DOING)
        if not self._all(source, target):
            self._world.agree(error, _DOING)

    def close(self) -> None:
        """Give the shared memory back; the communicators are the world's."""
        if self._shared is not None:
            self._shared.close()


class Leaders:
    """The first ranks of the nodes, which combine their nodes' values and tell the others; collective to make."""

    def __init__(
        self, world: World, operation: Operation, dtype: np.dtype[Any], elements: int
    ) -> None:
        self._world = world
        is_leader = world.node_rank == 0
        color = 0 if is_leader else world.mpi.UNDEFINED
        # Nodes are numbered in the order of their first ranks.
        world.gather(None, _MAKING)
        leaders: Any = world.comm.Split(color, world.rank)
        self._leaders: MPI.Intracomm = leaders
        self._between: OrderedReduction | None = None
        if is_leader:
            self._between = OrderedReduction(
                self._leaders, world.wait_all, operation, dtype, elements
            )
        self._closed = False

    @property
    def is_one(self) -> bool:
        """Whether this rank is the first one of its node."""
        return self._between is not None

    def combine(self, values: Values) -> None:
        """Combine the nodes' values in place; on other ranks than the first ones they are only written.

        Collective; blocks.
        """
        if self._between is not None:
            self._between(values, values)
        told = values.view(np.uint8)
        for start in range(0, len(told), PIECE_BYTES):
            request = self._world.node_comm.Ibcast(told[start : start + PIECE_BYTES])
            self._world.wait_all([request], "in an allreduce for the first rank of its node")

    def close(self) -> None:
        """Give the communicator back; collective."""
        if not self._closed and self._between is not None:
            self._leaders.Free()
        self._closed = True


class Hierarchical:
    """``hierarchical``: see the module. Collective to make, to call and to close."""

    def __init__(
        self, context: Context, operation: Operation, dtype: np.dtype[Any], elements: int
    ) -> None:
        world = self._world = context.world
        what = operation, dtype, elements
        self._shared = make_shared_reduction(world, context.arena, *what)
        self._node = (
            None if self._shared else OrderedReduction(world.node_comm, world.wait_all, *what)
        )
        self._leaders = Leaders(world, *what)

    def reduce(
        self,
        source: Values | None,
        target: Values | None,
        error: Exception | None,
    ) -> None:
        """Combine contiguous arrays, the same or disjoint, or raise on all ranks; collective, blocks."""
        self._world.agree(error, _DOING)
        assert source is not None and target is not None
        if self._shared is not None:
            self._shared.reduce(HostMoves(source, target), None)
        else:
            assert self._node is not None
            self._node(source, target)
        self._leaders.combine(target)

    def close(self) -> None:
        """Give memory and the leaders' communicator back; collective."""
        if self._shared is not None:
            self._shared.close()
        self._leaders.close()


HostAlgorithm = InRankOrder | Hierarchical

HOST: dict[str, type[InRankOrder] | type[Hierarchical]] = {
    "host": InRankOrder,
    "hierarchical": Hierarchical,
}
"""By name."""
