"""Memory that the ranks of a node share, allocated in blocks.

A segment is a POSIX shared-memory object. One rank creates it, and all ranks of the node map it. Its blocks hold the
fields that a grid allocates and the staging memory of plans. Creation and mapping of a segment are collective over the
ranks of the node. A release is local, and each rank may release at a different time, so the ranks have different room
left. Each rank therefore reserves room (`SharedArena.reserve`). The ranks tell each other whether any of them needs the
node, and if so, they create and unmap segments (`SharedArena.commit`).

The segments belong to a communicator and serve all grids and other objects on it. Segments larger than `_CHUNK` are
unmapped when they have been unused for `_IDLE_ALLOCATIONS` allocations, and when an object is closed. Closing the last
object ends the use of all segments; a field that outlives it keeps its memory until its last view is deleted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.runtime import shared_memory
from halox.runtime.communicator import Communicator
from halox.runtime.dlpack import Array, DType
from halox.runtime.segments import Block, Place, Segment, SegmentKey, Segments
from halox.runtime.shared_memory import Bytes, SharedSegment

if TYPE_CHECKING:
    from halox.runtime.gpu.memory import RegisteredBuffer

_GRANULE = 256
"""Alignment of blocks in bytes."""

_CHUNK = 1 << 19
"""Size in bytes of segments for small blocks; a block of more than half of it has a segment of its own."""

_IDLE_ALLOCATIONS = 16
"""Number of allocations after which an unused large segment is unmapped."""

_ALLOCATING = "an allocation"
_CLOSING = "a collective close"


@dataclass(eq=False)
class Room:
    """Reserved room for ``nbytes``, by default for nothing; ``block`` is None if no segment has enough.

    ``idle`` lists segments of this rank that can be unmapped.
    """

    nbytes: int | None = None
    block: Block | None = None
    idle: Sequence[int] = ()

    @property
    def needs_segment(self) -> bool:
        """Whether no segment has room."""
        return self.nbytes is not None and self.block is None

    @property
    def needs_node(self) -> bool:
        """Whether the ranks of the node must create or unmap segments."""
        return self.needs_segment or bool(self.idle)


class SharedArena:
    """Shared memory of the ranks of one node."""

    def __init__(self, ranks: Communicator) -> None:
        self.node_rank = ranks.node_ranks[ranks.rank]
        self.shares_memory = ranks.shares_memory
        self._own = Segments(self.node_rank, _GRANULE)
        self._mapped: dict[SegmentKey, SharedSegment] = {}
        self._registered: dict[SegmentKey, RegisteredBuffer] = {}
        self._next_number = 0
        self._node_size = len(ranks.node_ranks)
        self._gather: Callable[..., list[Any]] = ranks.gather
        self._reduce = ranks.reduce

    @property
    def segments(self) -> int:
        return len(self._own.by_number)

    def allocate(self, nbytes: int) -> Block | None:
        """Return uninitialized shared memory, of any size on each rank; collective over the ranks of the node.

        Returns None on all ranks of the node if shared memory is too small, or if the node has only one rank.
        """
        if not self.shares_memory:
            return None
        room = self.reserve(nbytes)
        (needs_node,), _ = self._reduce(None, _ALLOCATING, [room.needs_node], of_node=True)
        return self.commit(room, bool(needs_node))

    def reserve(self, nbytes: int) -> Room:
        """Reserve room for a block; local. Pass the room to `commit` after the ranks have agreed, or to `cancel`."""
        for segment in self._own.by_number.values():
            segment.idle += 1
        # The flags of a plan must not keep the memory of a field allocated.
        block = self._own.take(nbytes, largest=4 * max(nbytes, _CHUNK))
        return Room(nbytes, block, self._unused(_IDLE_ALLOCATIONS))

    def cancel(self, room: Room) -> None:
        if room.block is not None:
            self._own.release(room.block)

    def commit(self, room: Room, needs_node: bool) -> Block | None:
        """Return the reserved block; ``needs_node`` says whether any rank has a `Room` that needs the node.

        Collective over the ranks of the node if so, and local otherwise. Returns None in the cases of `allocate`, and
        if nothing was reserved.
        """
        if not needs_node:
            return room.block
        (missing,), idle = self._reduce(
            [*room.idle], _ALLOCATING, [room.needs_segment], of_node=True
        )
        self._unmap(idle or [room.idle] * self._node_size)
        if not missing:
            return room.block
        made = self._create_segment(room)
        if made is None:
            self.cancel(room)
            return None
        number, segment = made
        if segment is None or room.nbytes is None:
            return room.block
        return self._own.add(number, Segment(segment, segment.start, segment.nbytes), room.nbytes)

    def _unused(self, allocations: int = 0) -> list[int]:
        """Return the large segments of this rank that have been unused for more allocations than that."""
        return [
            number
            for number, segment in self._own.by_number.items()
            if segment.nbytes > _CHUNK and segment.free.is_whole and segment.idle >= allocations
        ]

    def _create_segment(self, room: Room) -> tuple[int, SharedSegment | None] | None:
        """Create a segment on each rank that needs one, and map the new segments; None if any rank fails."""
        number, self._next_number = self._next_number, self._next_number + 1
        name, segment = "", None
        if room.needs_segment and room.nbytes is not None:
            name = shared_memory.new_name()
            size = self._own.rounded(room.nbytes)
            with suppress(OSError):
                segment = shared_memory.create(name, _CHUNK if 2 * size <= _CHUNK else size)
        mapped = {} if segment is None else {self.node_rank: segment}
        try:
            is_made = segment is not None or not name
            names = self._gather((is_made, name), _ALLOCATING, of_node=True)
            is_mapped = all([is_made for is_made, _ in names])
            if is_mapped:
                with suppress(OSError):
                    for node_rank, (_, other) in enumerate(names):
                        if other and node_rank != self.node_rank:
                            mapped[node_rank] = shared_memory.attach(other)
                is_mapped = len(mapped) == len([other for _, other in names if other])
            is_mapped = self._reduce(None, _ALLOCATING, [not is_mapped], of_node=True)[0] == [0]
        finally:
            if name:
                shared_memory.unlink(name)
        if not is_mapped:
            return None
        self._mapped |= {(node_rank, number): one for node_rank, one in mapped.items()}
        return number, segment

    def release(self, block: Block) -> None:
        """Release a block; local. This rank may use it again, in an allocation that all ranks of the node enter."""
        self._own.release(block)

    def array(self, block: Block, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an array in a block; deleting the last view releases the block. Local."""
        # NumPy makes ``root`` the base of every view, so ``root`` lives as long as any view. The base of ``root`` must
        # not be an array: NumPy would then use that array as the base of the views.
        mapping = self._mapped[block.place.segment].mapping
        root: Bytes = np.ndarray((block.nbytes,), np.uint8, mapping, block.place.offset)
        weakref.finalize(root, self.release, block).atexit = False
        array: Array = np.ndarray(shape, dtype, buffer=root)
        return array

    def locate(self, start: int, end: int) -> Place | None:
        """Return the place of memory [start, end) of this rank if it is in the arena."""
        return self._own.locate(start, end)

    def memory(self, place: Place) -> Bytes:
        """Return the bytes of any rank's segment from a place onwards."""
        return self._mapped[place.segment].memory[place.offset :]

    def device_pointer(self, place: Place) -> int:
        """Return the device address of a place; page-lock its segment at the first use."""
        key = place.segment
        if key not in self._registered:
            from halox.runtime.gpu.memory import register

            self._registered[key] = register(self._mapped[key].memory)
        return int(self._registered[key].device_pointer) + place.offset

    def close(self, *, is_last: bool) -> None:
        """Unmap the large free segments, or with ``is_last`` all segments; collective over the node.

        Call this when an object on the communicator is closed, after all ranks have completed its calls. ``is_last`` is
        True for the last object.
        """
        if is_last:
            for registration in self._registered.values():
                registration.close()
            self._registered.clear()
            self._mapped.clear()
            self._own.by_number.clear()
        elif self.shares_memory:
            unused = self._unused()
            of_all = self._reduce(unused, _CLOSING, of_node=True)[1]
            self._unmap(of_all or [unused] * self._node_size)

    def _unmap(self, dropped: Sequence[Sequence[int]]) -> None:
        """Unmap segments, by number, that each rank of the node no longer uses."""
        for node_rank, numbers in enumerate(dropped):
            for number in numbers:
                registration = self._registered.pop((node_rank, number), None)
                if registration is not None:
                    registration.close()
                self._mapped.pop((node_rank, number), None)
                if node_rank == self.node_rank:
                    self._own.by_number.pop(number, None)
