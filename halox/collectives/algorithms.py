"""The algorithms of allreduce for NumPy arrays, by name, and what they cost.

``host``: all ranks alike, in the order of the ranks. ``hierarchical``: the ranks of each node first, then the first
ranks of the nodes, in the order of the nodes; these tell the others of theirs::

    node 0   rank 0 <- 1, 2, 3      rank 0 <-> rank 4      rank 0 -> 1, 2, 3
    node 1   rank 4 <- 5, 6, 7                             rank 4 -> 5, 6, 7

The result of either is the same bits on every rank and in every run. Those of one may differ from the other's, since
``hierarchical`` combines ``(a0 op a1 op a2 op a3) op (a4 op a5 op a6 op a7)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from halox.collectives.ordered import GATHERED_BYTES, PIECE_BYTES, OrderedReduction
from halox.engine.operations import Operation
from halox.errors import FieldError
from halox.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

_B_PER_US = 1e3

_DOING = "an allreduce"


class HostAlgorithm(Protocol):
    """Combines one-dimensional arrays of one length over all ranks of a world."""

    def reduce(
        self,
        source: npt.NDArray[Any] | None,
        target: npt.NDArray[Any] | None,
        error: Exception | None,
    ) -> None:
        """Combine, or raise on all ranks.

        Parameters
        ----------
        source, target : ndarray or None
            Contiguous; the same memory or disjoint. None with an error.
        error : Exception or None
            Why this rank cannot take part.

        Notes
        -----
        Collective; blocks.
        """

    def close(self) -> None:
        """Give communicators back; collective."""


class InRankOrder:
    """``host``: see the module."""

    def __init__(
        self, world: World, operation: Operation, dtype: np.dtype[Any], elements: int
    ) -> None:
        self._world = world
        self._all = OrderedReduction(world.comm, world.wait, operation, dtype, elements)

    def reduce(
        self,
        source: npt.NDArray[Any] | None,
        target: npt.NDArray[Any] | None,
        error: Exception | None,
    ) -> None:
        """Combine: see `HostAlgorithm`."""
        if not self._all.carries_errors:
            self._world.agree(error, _DOING)
        if not self._all(source, target):
            self._world.agree(error, _DOING)

    def close(self) -> None:
        """Do nothing: the communicators are the world's."""


class Hierarchical:
    """``hierarchical``: see the module. Collective to make."""

    def __init__(
        self, world: World, operation: Operation, dtype: np.dtype[Any], elements: int
    ) -> None:
        self._world = world
        self._node = OrderedReduction(world.node_comm, world.wait, operation, dtype, elements)
        is_leader = world.node_rank == 0
        color = 0 if is_leader else world.mpi.UNDEFINED
        # Nodes are numbered in the order of their first ranks.
        leaders: Any = world.comm.Split(color, world.rank)
        self._leaders: MPI.Intracomm = leaders
        self._between: OrderedReduction | None = None
        if is_leader:
            self._between = OrderedReduction(self._leaders, world.wait, operation, dtype, elements)
        self._closed = False

    def reduce(
        self,
        source: npt.NDArray[Any] | None,
        target: npt.NDArray[Any] | None,
        error: Exception | None,
    ) -> None:
        """Combine: see `HostAlgorithm`."""
        self._world.agree(error, _DOING)
        assert source is not None and target is not None
        self._node(source, target)
        if self._between is not None:
            self._between(target, target)
        told = target.view(np.uint8)
        for start in range(0, len(told), PIECE_BYTES):
            request = self._world.node_comm.Ibcast(told[start : start + PIECE_BYTES])
            self._world.wait([request], "in an allreduce for the first rank of its node")

    def close(self) -> None:
        """Give the leaders' communicator back; collective."""
        if not self._closed and self._between is not None:
            self._leaders.Free()
        self._closed = True


ALGORITHMS: dict[str, type[InRankOrder] | type[Hierarchical]] = {
    "host": InRankOrder,
    "hierarchical": Hierarchical,
}
"""By name."""


@dataclass(frozen=True)
class Link:
    """What a step of a collective costs: its latency, and GB/s of each node's share of the wire."""

    step_us: float
    gb_per_s: float

    def us(self, ranks: int, nbytes: float) -> float:
        """Return the microseconds of a collective of some ranks that brings a node so many bytes."""
        return self.step_us * math.ceil(math.log2(max(ranks, 1))) + nbytes / (
            self.gb_per_s * _B_PER_US
        )


WITHIN, BETWEEN = Link(1.0, 8.0), Link(5.0, 10.0)
"""Shared memory of a node, and a network: orders of magnitude, which is all that the choice below needs."""


def predict_us(name: str, nbytes: int, ranks: int, nodes: int) -> float:
    """Return what an algorithm is expected to take.

    Parameters
    ----------
    name : {"host", "hierarchical"}
    nbytes : int
        Of a rank's array.
    ranks, nodes : int

    Examples
    --------
    >>> predict_us("host", 8, 64, 8) > predict_us("hierarchical", 8, 64, 8)
    True
    >>> predict_us("host", 1 << 20, 4, 1) < predict_us("hierarchical", 1 << 20, 4, 1)
    True
    """
    if name == "hierarchical":
        each = math.ceil(ranks / nodes)
        told = WITHIN.us(each, nbytes)
        return _ordered_us(nbytes, each, 1) + _ordered_us(nbytes, nodes, nodes) + told
    return _ordered_us(nbytes, ranks, nodes)


def _ordered_us(nbytes: int, ranks: int, nodes: int) -> float:
    """Cost of an `OrderedReduction`."""
    link = BETWEEN if nodes > 1 else WITHIN
    each = math.ceil(ranks / nodes)
    far = ranks - each if nodes > 1 else ranks - 1
    if nbytes <= GATHERED_BYTES:
        return link.us(ranks, each * far * nbytes)
    return 2 * link.us(ranks, each * far / ranks * nbytes)


def choose(name: str | None, nbytes: int, ranks: int, nodes: int) -> str:
    """Choose an algorithm: the one asked for, or the one that is expected to be fastest.

    Parameters
    ----------
    name : str or None
        What was asked for.
    nbytes, ranks, nodes
        As of :func:`predict_us`.

    Raises
    ------
    FieldError
        If there is no such algorithm.

    Examples
    --------
    >>> choose(None, 8, 4, 1), choose(None, 8, 64, 8), choose(None, 8, 4, 4)
    ('host', 'hierarchical', 'host')
    """
    if name is None:
        return min(ALGORITHMS, key=lambda one: predict_us(one, nbytes, ranks, nodes))
    if name not in ALGORITHMS:
        raise FieldError(
            f"algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, or None for the fastest, got {name!r}"
        )
    return name
