"""Numbers of all ranks, gathered and checked for equal meaning in one collective.

A rank's record has its collective call, a digest of the meaning, and the bytes of its numbers. If all ranks share
memory, each rank reads the numbers of the other ranks in place. Otherwise one MPI collective gathers the records. Small
reductions on the host use this module, since `World.gather` pickles objects, which takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halox.runtime.arrays import Array, DType
from halox.runtime.communicator import digest, objects
from halox.runtime.status import SLOT_BYTES
from halox.runtime.world import World
from halox.values import rounded_up

MOST_BYTES = SLOT_BYTES
"""Largest size of a rank's numbers in bytes."""

# NumPy's loops may depend on alignment: see `halox.collectives.host.mpi_reduction`.
_LINE_BYTES = 64


class GatheredValues:
    """Arrays of all ranks, of one dtype and length. Construction is local.

    ``meaning`` describes the values and must be equal on all ranks; its ``repr`` must not depend on the process.
    `gather` is collective and blocks. The numbers of a rank have at most `MOST_BYTES`.
    """

    def __init__(self, world: World, meaning: object, dtype: DType, elements: int) -> None:
        self._world, self._ranks, self._dtype = world, world.ranks, dtype
        self._kind = digest(repr(meaning).encode()) << 1 | 1  # even kinds are objects
        self._nbytes = nbytes = elements * dtype.itemsize
        self._in_memory = world.ranks.gathers_in_memory
        self._slots: list[list[Array]] = []
        if self._in_memory:
            self._slots = [[*rows[:, :nbytes].view(dtype)] for rows in self._ranks.slots]
        else:
            rows = aligned(world.size * rounded_up(nbytes, _LINE_BYTES)).reshape(world.size, -1)
            self._rows = [row[:nbytes] for row in rows]
            self._values = [row.view(dtype) for row in self._rows]

    def gather(self, mine: bytes, step: str) -> Sequence[Array] | None:
        """Return the values of every rank, in rank order, valid until the next call; None if the meanings differ.

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
            records = ranks.by_mpi(kind, mine, step)[1] or []
            if all(sent_kind == kind for sent_kind, _ in records):
                for row, (_, raw) in zip(self._rows, records, strict=True):
                    row[...] = np.frombuffer(raw, np.uint8)
                return self._values
        self._world.raise_errors(objects(records), step)
        return None


def aligned(nbytes: int) -> Array:
    """Return zeroed bytes that begin at a cache line."""
    memory = np.zeros(nbytes + _LINE_BYTES, np.uint8)
    start = -memory.ctypes.data % _LINE_BYTES
    return memory[start : start + nbytes]
