"""Numbers of all ranks, gathered and checked for equal meaning in one collective.

A rank's record has its collective call, a digest of the meaning, and the bytes of its numbers. If all ranks share
memory, each rank reads the numbers of the other ranks in place. Otherwise one MPI collective gathers the records. Small
reductions on the host use this module, since `World.gather` pickles objects, which takes longer. Numbers of many ranks
without common memory are combined in a tree, after one MPI reduction has compared the calls and meanings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from halox.runtime.arrays import Array, DType
from halox.runtime.communicator import UNFINISHED, digest, objects
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
TREE_TAG = 4

# NumPy's loops may depend on alignment: see `halox.collectives.host.mpi_reduction`.
_LINE_BYTES = 64


class GatheredValues:
    """Arrays of all ranks, of one dtype and length. Construction is local.

    ``meaning`` describes the values and must be equal on all ranks; its ``repr`` must not depend on the process.
    `gather` is collective and blocks. The numbers of a rank have at most `MOST_BYTES`. ``join`` combines numbers of
    many ranks; if it is None, any number of ranks gather.
    """

    def __init__(
        self, world: World, meaning: object, dtype: DType, elements: int, join: Join | None = None
    ) -> None:
        self._world, self._ranks, self._dtype = world, world.ranks, dtype
        self._kind = digest(repr(meaning).encode()) << 1 | 1  # even kinds are objects
        self._nbytes = nbytes = elements * dtype.itemsize
        self._in_memory = world.ranks.gathers_in_memory
        self._slots: list[list[Array]] = []
        if self._in_memory:
            self._slots = [[*rows[:, :nbytes].view(dtype)] for rows in self._ranks.slots]
        else:
            self._join = join if world.size > MOST_GATHERED else None
            count = 2 if self._join else world.size
            rows = aligned(count * rounded_up(nbytes, _LINE_BYTES)).reshape(count, -1)
            self._rows = [row[:nbytes] for row in rows]
            self._values = [row.view(dtype) for row in self._rows]

    def gather(self, mine: bytes, step: str) -> Sequence[Array] | None:
        """Return the values of every rank, in rank order, valid until the next call; None if the meanings differ.

        For many ranks ``join`` combines all values, and the result is the only one that is returned.
        Raises the errors of ranks that are in `World.gather` at the same time, and the errors of `World.gather` itself.
        """
        ranks = self._ranks
        if self._world.size == 1:
            return [np.frombuffer(mine, self._dtype)]
        if ranks.watch.failed:
            ranks.check()
        kind = self._kind
        if self._in_memory:
            slot = ranks.round(kind, len(mine), mine, step)
            if ranks.are_alike(slot, kind):
                return self._slots[slot]
            records = ranks.read(slot, mine, step)
        else:
            records = ranks.by_mpi(kind, b"" if self._join else mine, step)[1] or []
            if not records:  # all ranks have this kind
                if self._join and mine:
                    self._rows[0][...] = np.frombuffer(mine, np.uint8)
                    combine(self._world.comm, self._values, self._join, self._world.wait_all)
                return self._values[:1] if self._join else self._values
            if all(sent_kind == kind for sent_kind, _ in records):
                for row, (_, raw) in zip(self._rows, records, strict=True):
                    row[...] = np.frombuffer(raw, np.uint8)
                return self._values
        self._world.raise_errors(objects(records), step)
        return None


def combine(comm: MPI.Intracomm, pair: Sequence[Array], join: Join, wait: Wait) -> None:
    """Combine an array of each rank: the first of ``pair``, which receives the result. Collective; blocks.

    ``join`` combines two arrays in the first one. Rank 0 broadcasts the result: the same bits on all ranks, always::

        rank 0 <- 1    rank 2 <- 3    rank 4
        rank 0 <------ 2              rank 4
        rank 0 <--------------------- 4
    """
    total, other = (each.view(np.uint8) for each in pair)
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
        UNFINISHED.extend(pair)
        raise


def aligned(nbytes: int) -> Array:
    """Return zeroed bytes that begin at a cache line."""
    memory = np.zeros(nbytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + nbytes]
