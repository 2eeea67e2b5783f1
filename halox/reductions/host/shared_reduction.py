"""Combination of arrays of the ranks of one node in the order of the ranks, in memory that the ranks share.

A rank's block of shared memory holds its flag, a total, and slots for pieces of its array::

    | flag | total | slot 0 | slot 1 | slot 2 |

The flag counts the synchronizations of the ranks, in steps of two. A rank advances its flag when it has written its
data for its peers, and waits until all ranks have advanced their flags. An odd count means that the rank has no valid
array. The flag stays odd until all ranks have seen it, since all ranks then raise the error together.

Every rank combines small arrays completely. Of larger arrays rank r combines part r of all ranks, in place in rank 0's
slot, from which all ranks then copy the whole result. Meanwhile each rank copies its next piece, so that a piece takes
one synchronization::

    small    write a              | sync | total = a0 op a1 op a2 ...; read the total
    large    write piece 0        | sync |
             write piece 1, combine part r of piece 0 | sync | read piece 0
             write piece 2, combine part r of piece 1 | sync | read piece 1 ...

Three slots are enough. A rank writes piece p + 3 after the synchronization that follows the combination of piece p + 1,
and its peers had read piece p before that synchronization. On GPUs, the peers had only enqueued the copy of piece p
before they wrote piece p + 2; but then they waited for their streams, and the synchronization after the combination of
piece p + 1 followed that wait.
"""

from __future__ import annotations

from typing import Protocol

from halox.errors import ExchangeTimeoutError, HaloxError, raising
from halox.reductions.operations import Operation
from halox.runtime.arena import SharedArena
from halox.runtime.arrays import Array, DType
from halox.runtime.segments import Block
from halox.runtime.shared_memory import NEEDS_FENCE, fence
from halox.runtime.world import World
from halox.values import rounded_up

SMALL_BYTES = 32 << 10
"""Most bytes of an array that every rank combines completely."""

PIECE_BYTES, DEVICE_PIECE_BYTES = 512 << 10, 1 << 20
"""Most bytes of a piece, which bound the shared memory: all ranks' arrays stay in caches, or on GPUs the copies are
long enough to be efficient."""

_SLOTS = 3
_LINE_BYTES = 64  # see `halox.reductions.host.mpi_reduction`
_HEAD_BYTES = 128  # two cache lines, since processors fetch them in pairs
_MOST = 1 << 62
_DOING = "an allreduce"
_MAKING = "the making of an allreduce"


class Moves(Protocol):
    """Moves one rank's array into shared memory, and the result from there; positions count elements."""

    def fetch(self, values: Array, start: int) -> None:
        """Begin to fill ``values`` with the array, from element ``start`` on."""

    def wait(self) -> None:
        """Wait until all moves have ended."""

    def bring(self, values: Array, start: int) -> None:
        """Begin to write ``values`` to the result, from element ``start`` on."""


class HostMoves:
    """`Moves` of contiguous arrays on the host, in the same memory or disjoint."""

    __slots__ = ("_source", "_target")

    def __init__(self, source: Array, target: Array) -> None:
        self._source, self._target = source, target

    def fetch(self, values: Array, start: int) -> None:
        values[...] = self._source[start : start + len(values)]

    def wait(self) -> None:
        """Do nothing: copies have ended when they return."""

    def bring(self, values: Array, start: int) -> None:
        self._target[start : start + len(values)] = values


class SharedReduction:
    """Combines one-dimensional arrays of one length over a node's ranks; made by :func:`make_shared_reduction`."""

    def __init__(
        self,
        world: World,
        arena: SharedArena,
        block: Block,
        operation: Operation,
        dtype: DType,
        elements: int,
        longest: int,
    ) -> None:
        self._world, self._arena, self._operation = world, arena, operation
        self._block: Block | None = block
        size = world.node_size
        line = _LINE_BYTES // dtype.itemsize
        self._elements, self._longest = elements, longest
        self.buffers_all = elements == longest
        self._is_small = self.buffers_all and elements * dtype.itemsize <= SMALL_BYTES
        last = (elements - 1) % longest + 1  # length of the last piece

        flag = arena.memory(block.place)[:8].data.cast("B").cast("q")
        if not 0 <= flag[0] < _MOST:
            flag[0] = 0  # the block was a field's memory, and nobody reads these bytes any longer
        records = world.ranks.gather((block.place, flag[0]), _MAKING, of_node=True)
        places = [place for place, _ in records]
        # Blocks that the moves of this rank write and read.
        self.moved = {places[world.node_rank], places[world.node_rank if self._is_small else 0]}
        # Counts start from the greatest count that any block holds from its earlier uses.
        self._count = max(count for _, count in records)
        self._flag = flag
        names = {place: rank for rank, place in world.node_ranks.items()}
        self._others: list[tuple[int, memoryview]] = []
        self._slots: list[list[Array]] = [[] for _ in range(_SLOTS)]
        stride = rounded_up(longest * dtype.itemsize, _LINE_BYTES)
        for number, place in enumerate(places):
            memory = arena.memory(place)
            if number != world.node_rank:
                self._others.append((names[number], memory[:8].data.cast("B").cast("q")))
            at = _HEAD_BYTES + -memory[_HEAD_BYTES:].ctypes.data % _LINE_BYTES
            values = [
                memory[at + stride * i :][: longest * dtype.itemsize].view(dtype)
                for i in range(1 + _SLOTS)
            ]
            for slot, view in zip(self._slots, values[1:], strict=True):
                slot.append(view)
            if number == world.node_rank:
                self._total = values[0]
        self._mine = [slot[world.node_rank] for slot in self._slots]
        # The part of each rank's piece that this rank combines.
        self._parts, self._last_parts = (
            [[piece[part] for piece in slot] for slot in self._slots]
            for part in (_part(n, line, world.node_rank, size) for n in (longest, last))
        )
        self._slot = 0
        self._waiter, self._looks = world.waiter(), world.ranks.looks

    def reduce(self, moves: Moves | None, error: Exception | None) -> None:
        """Combine, or raise on all ranks.

        Collective over the world, which must be of one node if a rank may have an error. Blocks, except for the moves.
        """
        slot = self._slot
        if error is None:
            assert moves is not None
            try:
                mine = self._mine[slot]
                moves.fetch(mine, 0)
                moves.wait()
            except Exception as caught:
                error = caught
        if not self._synchronize(error is None):
            self._world.attempt(raising(error), _DOING)
        assert moves is not None
        if self._is_small:
            self._operation.fold(self._total, self._slots[slot])
            moves.bring(self._total, 0)
            self._slot = (slot + 1) % _SLOTS
        else:
            self._in_parts(moves)

    def _in_parts(self, moves: Moves) -> None:
        elements, longest = self._elements, self._longest
        for start in range(0, elements, longest):
            values = self._slots[self._slot]
            all_parts = self._last_parts if start + longest >= elements else self._parts
            parts = all_parts[self._slot]
            self._slot = (self._slot + 1) % _SLOTS
            after = start + longest
            is_last = after >= elements
            if not is_last:
                moves.fetch(self._mine[self._slot][: elements - after], after)
            self._operation.fold(parts[0], parts)
            if not is_last:
                moves.wait()
            self._synchronize(True)
            moves.bring(values[0][: elements - start], start)

    def _synchronize(self, is_good: bool) -> bool:
        """Synchronize the ranks, and return whether all have valid arrays."""
        count = self._count = self._count + 2
        if NEEDS_FENCE:
            fence()
        self._flag[0] = count if is_good else count + 1
        for rank, flag in self._others:
            for _ in self._looks:
                if flag[0] >= count:
                    break
            else:
                self._wait_for(rank, flag, count)
            if flag[0] == count + 1:
                is_good = False
        if NEEDS_FENCE:
            fence()
        return is_good

    def _wait_for(self, rank: int, flag: memoryview, count: int) -> None:
        self._waiter.until(
            lambda: flag[0] >= count,
            lambda: f"rank {self._world.rank} has waited in an allreduce for rank {rank}",
            lambda: [rank],
        )

    def close(self) -> None:
        """Release the block, after all moves have ended; local."""
        if self._block is not None:
            self._arena.release(self._block)
            self._block = None


def make_shared_reduction(
    world: World,
    arena: SharedArena,
    operation: Operation,
    dtype: DType,
    elements: int,
    *,
    page_locked: bool = False,
) -> SharedReduction | None:
    """Make a reduction of a node's ranks in shared memory; None for empty arrays, or without enough shared memory.

    Collective over the ranks of the node. ``page_locked`` locks the memory for copies to and from GPUs; the call is
    then collective over the world, which must be of one node.
    """
    if not elements:
        return None
    most = DEVICE_PIECE_BYTES if page_locked else PIECE_BYTES
    longest = min(elements, most // dtype.itemsize)
    slots = (1 + _SLOTS) * rounded_up(longest * dtype.itemsize, _LINE_BYTES)
    block = arena.allocate(_HEAD_BYTES + _LINE_BYTES + slots)
    if block is None:
        return None
    reduction = SharedReduction(world, arena, block, operation, dtype, elements, longest)
    if page_locked:
        try:
            world.attempt(lambda: [arena.device_pointer(b) for b in reduction.moved], _MAKING)
        except ExchangeTimeoutError:
            raise
        except HaloxError:  # on all ranks
            reduction.close()
            return None
    return reduction


def _part(length: int, line: int, rank: int, ranks: int) -> slice:
    """Return the slice of a piece that a rank combines: whole cache lines.

    Examples
    --------
    >>> [_part(20, 8, rank, 2) for rank in range(2)]
    [slice(0, 8, None), slice(8, 20, None)]
    """
    lines = -(-length // line)
    start, end = (min(lines * r // ranks * line, length) for r in (rank, rank + 1))
    return slice(start, end)
