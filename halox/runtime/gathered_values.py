"""Numbers of all ranks, gathered and checked for equal meaning in one collective.

A rank's record has its collective call, a digest of the meaning, and the bytes of its numbers. If all ranks share
memory, each rank reads the numbers of the other ranks in place. Otherwise one MPI collective gathers the records. Small
reductions on the host use this module, since `World.gather` pickles objects, which takes longer. Numbers of many ranks
without common memory are combined in a tree, after one MPI reduction has compared the calls and meanings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from halox.runtime.arrays import Array, DType
from halox.runtime.communicator import digest, objects
from halox.runtime.finalizing import keep
from halox.runtime.status import SLOT_BYTES
from halox.runtime.world import World
from halox.values import rounded_up

if TYPE_CHECKING:
    from mpi4py import MPI

MOST_BYTES = SLOT_BYTES
"""Largest size of a rank's numbers in bytes."""

MOST_GATHERED = 64
"""Most ranks without common memory that gather numbers. Gathering takes some 2 us of Python for each rank."""

Join = Callable[[Array, Array], None]
Wait: TypeAlias = "Callable[[Sequence[MPI.Request], str], None]"
Result = TypeVar("Result")
TREE_TAG = 4

# NumPy's loops may depend on alignment: see `halox.reductions.host.mpi_reduction`.
_LINE_BYTES = 64


class Gathered(NamedTuple):
    """The values of all ranks, in rank order: each rank's array, and all of them as a row for each rank."""

    each: list[Array]
    stacked: Array


class GatheredValues:
    """Arrays of all ranks, of one dtype and shape. Construction is local.

    ``meaning`` describes the values and must be equal on all ranks; its ``repr`` must not depend on the process.
    `gather` is collective and blocks. The numbers of a rank have at most `MOST_BYTES`. ``join`` combines numbers of
    many ranks; if it is None, any number of ranks gather.
    """

    def __init__(
        self,
        world: World,
        meaning: object,
        dtype: DType,
        shape: tuple[int, ...],
        join: Join | None = None,
    ) -> None:
        self._world, self._ranks = world, world.ranks
        self._kind = digest(repr(meaning).encode()) << 1 | 1  # even kinds are objects
        self._nbytes = nbytes = prod(shape) * dtype.itemsize
        in_memory = world.ranks.gathers_in_memory
        self._join = None if in_memory or world.size <= MOST_GATHERED else join
        # The values of all ranks, and of this rank, in each slot: two in shared memory, else one.
        slots = self._ranks.slots if in_memory else [self._rows()]
        self._gathered = [
            Gathered([row.reshape(shape) for row in rows], rows)
            for rows in (slot[:, :nbytes].view(dtype) for slot in slots)
        ]
        place = 0 if self._join else world.rank
        self._mine = [values.each[place] for values in self._gathered]
        kind, mine, gathered = self._kind, self._mine, self._gathered
        self.gather: Callable[[Any, str], Gathered | None] = (
            self._ranks.gatherer(kind, mine, gathered, self._differ) if in_memory else self._by_mpi
        )
        """Return the values of every rank, valid until the next call; None if the meanings differ.

        The first argument has this rank's values: an array of the shape, or a scalar for one value. The second argument
        is the step in the text of a timeout. For many ranks ``join`` combines all values, and the result is the only
        one that is returned. Raises the errors of ranks that are in `World.gather` at the same time, and the errors of
        `World.gather` itself.
        """

    def _rows(self) -> Array:
        count = 2 if self._join else self._world.size
        return aligned(count * rounded_up(self._nbytes, _LINE_BYTES)).reshape(count, -1)

    def calling(
        self, name: str, result: Callable[[Gathered], Result]
    ) -> Callable[[Any, str], Result | None]:
        """Return a function that counts a call, and then gathers as `gather` does; it returns ``result`` of the values.

        In shared memory, ``result`` is called here, once for each slot.
        """
        world, gather = self._world, self.gather
        if world.ranks.gathers_in_memory and not world.debug:
            results = [result(values) for values in self._gathered]
            what = self._kind, self._mine, results
            return world.ranks.gatherer(*what, self._differ, world.code(name))
        tick = world.ticker(name, 0) or int

        def call(values: Any, step: str) -> Result | None:
            tick()
            gathered = gather(values, step)
            return None if gathered is None else result(gathered)

        return call

    def _differ(self, slot: int, step: str) -> None:
        """Raise the errors that the records of a round contain, if there are any."""
        ranks = self._ranks
        self._world.raise_errors(objects(ranks.read(slot, b"", step)), step)

    def _by_mpi(self, mine: Any, step: str) -> Gathered | None:
        ranks, gathered, own = self._ranks, self._gathered[0], self._mine[0]
        if ranks.watch.failed:
            ranks.check()
        own[...] = mine
        if self._world.size == 1:
            return gathered
        sent = b"" if self._join else own.tobytes()
        records = ranks.by_mpi(self._kind, sent, step)[1] or []
        if not records:  # all ranks have this kind
            if self._join is None:
                return gathered
            if self._nbytes:
                combine(self._world.comm, gathered.each, self._join, self._world.wait_all)
            return Gathered(gathered.each[:1], gathered.stacked[:1])
        if all(sent_kind == self._kind for sent_kind, _ in records):
            for row, (_, raw) in zip(gathered.stacked, records, strict=True):
                row[...] = np.frombuffer(raw, row.dtype)
            return gathered
        self._world.raise_errors(objects(records), step)
        return None


def combine(comm: MPI.Intracomm, pair: Sequence[Array], join: Join, wait: Wait) -> None:
    """Combine an array of each rank: the first of ``pair``, which receives the result. Collective; blocks.

    ``join`` combines two arrays in the first one. Rank 0 broadcasts the result: the same bits on all ranks, always::

        rank 0 <- 1    rank 2 <- 3    rank 4
        rank 0 <------ 2              rank 4
        rank 0 <--------------------- 4
    """
    total, other = (each.reshape(-1).view(np.uint8) for each in pair)
    rank, size, span = comm.rank, comm.size, 1
    waiting = "in a reduction for the other ranks"
    try:
        while span < size and not rank & span:
            if rank + span < size:
                wait([comm.Irecv(other, rank + span, TREE_TAG)], waiting)
                join(*pair)
            span *= 2
        if rank:
            wait([comm.Isend(total, rank - span, TREE_TAG)], waiting)
        wait([comm.Ibcast(total)], waiting)
    except BaseException:
        keep(*pair)
        raise


def aligned(nbytes: int) -> Array:
    """Return zeroed bytes that begin at a cache line."""
    memory = np.zeros(nbytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + nbytes]
