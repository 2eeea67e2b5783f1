"""Memory that the ranks of a node share, allocated in blocks.

A segment is a POSIX shared-memory object. One rank creates it, and all ranks of the node map it. Its blocks hold the
fields that a grid allocates and the staging memory of plans. Creation and mapping of a segment are collective over the
ranks of the node. A release is local, and each rank may release at a different time, so the ranks have different room
left. An allocation therefore gathers which ranks have no room (`SharedArena.reserve`), and these ranks create a segment
(`SharedArena.commit`).

The segments belong to a communicator and serve all grids and other objects on it. Closing an object unmaps large free
segments, and closing the last one unmaps all free segments. A field that outlives all grids returns its pages to the
system when its last view is deleted.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from halox.runtime import shared_memory
from halox.runtime.communicator import Communicator
from halox.runtime.dlpack import Array, DType
from halox.runtime.free_list import FreeList
from halox.runtime.place import Place
from halox.runtime.shared_memory import Bytes, SharedSegment
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.runtime.gpu.memory import RegisteredBuffer

_GRANULE = 256
"""Alignment of blocks in bytes."""

_FIRST_CHUNK, _LAST_CHUNK = 1 << 18, 1 << 22
"""Sizes in bytes of the first and of later segments for small blocks. Larger segments are unmapped when unused."""

_IDLE_ALLOCATIONS = 16
"""Number of allocations after which an unused large segment is unmapped."""

_ALLOCATING = "an allocation"
_CLOSING = "a collective close"


class SegmentKey(NamedTuple):
    """Identity of a segment: its number among the segments of its creator, and the creator's index on the node."""

    number: int
    node_rank: int


HostPlace: TypeAlias = Place[SegmentKey]
"""Place of a block."""

Requests: TypeAlias = tuple[bool, Sequence[int]]
"""Whether a rank needs a new segment, and the numbers of its segments that all ranks should unmap."""


@dataclass(eq=False)
class Block:
    """A piece of shared memory of this rank; ``memory`` is its bytes."""

    place: HostPlace
    memory: Bytes
    number: int


@dataclass(eq=False)
class _OwnSegment:
    """A segment that this rank has created; ``idle`` counts the allocations since its last use.

    A trimmed segment has returned its pages to the system.
    """

    segment: SharedSegment
    free: FreeList
    idle: int = 0
    is_trimmed: bool = False


@dataclass(eq=False)
class Room:
    """Reserved room for ``nbytes`` at ``offset`` of one of this rank's segments; by default 0 bytes.

    ``rounded`` is the reserved number of bytes. ``segment`` is None if a new segment is needed. ``idle`` lists segments
    of this rank that can be unmapped.
    """

    nbytes: int = 0
    rounded: int = 0
    segment: int | None = None
    offset: int = 0
    idle: Sequence[int] = ()

    @property
    def needs_segment(self) -> bool:
        """Whether no segment has room."""
        return self.rounded > 0 and self.segment is None

    @property
    def requests(self) -> Requests | None:
        """Requests of this rank that need all ranks of the node; None if it has no request."""
        return (self.needs_segment, self.idle) if self.needs_segment or self.idle else None


class SharedArena:
    """Shared memory of the ranks of one node."""

    def __init__(self, ranks: Communicator) -> None:
        self._segments: dict[SegmentKey, SharedSegment] = {}
        self._own: dict[int, _OwnSegment] = {}
        # By block number: segment number, offset, size in the segment, and whether the block is a field.
        self._used: dict[int, tuple[int, int, int, bool]] = {}
        self._released: deque[int] = deque()
        self._is_sweeping = False
        self._next_number = 0
        self._numbers = count()
        self._chunk = _FIRST_CHUNK
        self._registered: dict[SegmentKey, RegisteredBuffer] = {}
        self._is_open = True
        self.node_rank = ranks.node_ranks[ranks.rank]
        self.shares_memory = ranks.shares_memory
        self._node_size = len(ranks.node_ranks)
        self._gather: Callable[..., list[Any]] = ranks.gather
        self._reduce = ranks.reduce

    def open(self) -> None:
        """Serve another object after `close`; local."""
        self._is_open = True

    @property
    def segments(self) -> int:
        """Number of segments that this rank has created."""
        return len(self._own)

    def allocate(self, nbytes: int, *, is_field: bool = False) -> Block | None:
        """Return uninitialized shared memory, of any size on each rank; collective over the ranks of the node.

        Returns None on all ranks of the node if shared memory is too small, or if the node has only one rank.
        """
        if not self.shares_memory:
            return None
        room = self.reserve(nbytes)
        return self.commit(
            room, self._reduce(room.requests, _ALLOCATING, of_node=True)[1], is_field=is_field
        )

    def reserve(self, nbytes: int) -> Room:
        """Reserve room for a block; local. Pass the room to `commit` after the gather of the node, or to `cancel`."""
        rounded = rounded_up(max(nbytes, 1), _GRANULE)
        self._sweep()
        for own in self._own.values():
            own.idle += 1
        idle = self._idle_segments()
        number, offset = self._take_room(rounded) or (None, 0)
        return Room(nbytes, rounded, number, offset, [n for n in idle if n != number])

    def cancel(self, room: Room) -> None:
        """Return room that was not taken; local."""
        if room.segment is not None:
            self._own[room.segment].free.release(room.offset, room.rounded)

    def commit(
        self, room: Room, gathered: Sequence[Requests | None] | None, *, is_field: bool = False
    ) -> Block | None:
        """Return the reserved block, after the ranks of the node have compared their requests.

        ``gathered`` holds these requests, by rank on the node; it is None if all are equal. Collective over the ranks
        of the node if any rank has a request, and local otherwise. Returns None in the cases of `allocate`, and if
        nothing was reserved.
        """
        if gathered is None:
            gathered = [room.requests] * self._node_size
        self._unmap([requests[1] if requests else () for requests in gathered])
        if any([requests is not None and requests[0] for requests in gathered]):
            number = self._create_segment(room.rounded if room.needs_segment else 0)
            if number is None:
                self.cancel(room)
                return None
            if room.needs_segment:
                self._own[number].free.allocate(room.rounded)
                room.segment = number
        if room.segment is None:
            return None
        own = self._own[room.segment]
        own.idle = 0
        place = Place(SegmentKey(room.segment, self.node_rank), room.offset)
        memory = own.segment.memory[room.offset : room.offset + room.nbytes]
        block = Block(place, memory, next(self._numbers))
        self._used[block.number] = room.segment, room.offset, room.rounded, is_field
        return block

    def _take_room(self, nbytes: int) -> tuple[int, int] | None:
        """Take room in this rank's smallest segment that has enough; populate its pages if they were trimmed."""
        by_size = sorted(self._own.items(), key=lambda item: (item[1].segment.nbytes, item[0]))
        for number, own in by_size:
            # Skip a free segment that is far too large: the flags of a plan must not keep the memory of a field
            # allocated.
            if own.free.is_whole and own.segment.nbytes > 4 * max(nbytes, _LAST_CHUNK):
                continue
            offset = own.free.allocate(nbytes)
            if offset is None:
                continue
            if own.is_trimmed:
                try:
                    own.segment.fill()
                except OSError:
                    own.free.release(offset, nbytes)
                    continue
                own.is_trimmed = False
            return number, offset
        return None

    def _idle_segments(self) -> list[int]:
        """Return the large segments of this rank that have been unused for many allocations."""
        return [
            number
            for number, own in self._own.items()
            if own.free.is_whole
            and own.idle > _IDLE_ALLOCATIONS
            and own.segment.nbytes > _LAST_CHUNK
        ]

    def _create_segment(self, nbytes: int) -> int | None:
        """Create a segment on each rank that needs one, and map the new segments; None if any rank fails."""
        number, self._next_number = self._next_number, self._next_number + 1
        name, segment = "", None
        if nbytes:
            name = shared_memory.new_name()
            size = self._chunk if 2 * nbytes <= self._chunk else nbytes
            self._chunk = min(2 * self._chunk, _LAST_CHUNK)
            with suppress(OSError):
                segment = shared_memory.create(name, size)
        mapped = {} if segment is None else {self.node_rank: segment}
        try:
            is_made = segment is not None or not nbytes
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
        for node_rank, mapped_segment in mapped.items():
            self._segments[SegmentKey(number, node_rank)] = mapped_segment
        if segment is not None:
            self._own[number] = _OwnSegment(segment, FreeList(segment.nbytes))
        return number

    def release(self, block: Block) -> None:
        """Release a block; local. It is reused when every rank of the node has entered the next allocation."""
        # A finalizer calls this at an arbitrary point, when the garbage collector frees an array.
        self._released.append(block.number)
        if not self._is_open:
            self._sweep()

    def _sweep(self) -> None:
        """Return the released blocks to the free lists of their segments."""
        if self._is_sweeping:
            return
        self._is_sweeping = True
        while self._released:
            number, offset, length, _ = self._used.pop(self._released.popleft(), (-1, 0, 0, False))
            own = self._own.get(number)
            if own is None:
                continue
            own.free.release(offset, length)
            if own.free.is_whole and not self._is_open:
                own.segment.trim()
                own.is_trimmed = True
        self._is_sweeping = False

    def array(self, block: Block, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an array in a block; deleting the last view releases the block. Local."""
        # NumPy makes ``root`` the base of every view, so ``root`` lives as long as any view. The base of ``root`` must
        # not be an array: NumPy would then use that array as the base of the views.
        nbytes = len(block.memory)
        raw: Any = (ctypes.c_char * nbytes).from_address(block.memory.ctypes.data)
        root: Bytes = np.ndarray((nbytes,), np.uint8, buffer=raw)
        weakref.finalize(root, self.release, block).atexit = False
        array: Array = np.ndarray(shape, dtype, buffer=root)
        return array

    def locate(self, start: int, end: int) -> HostPlace | None:
        """Return the place of memory [start, end) of this rank if it is in the arena."""
        for number, own in self._own.items():
            first = own.segment.start
            if first <= start and end <= first + own.segment.nbytes:
                return Place(SegmentKey(number, self.node_rank), start - first)
        return None

    def memory(self, place: HostPlace) -> Bytes:
        """Return the bytes of any rank's segment from a place onwards."""
        return self._segments[place.segment].memory[place.offset :]

    def device_pointer(self, place: HostPlace) -> int:
        """Return the device address of a place; page-lock its segment at the first use."""
        key = place.segment
        if key not in self._registered:
            from halox.runtime.gpu.memory import register

            self._registered[key] = register(self._segments[key].memory)
        return int(self._registered[key].device_pointer) + place.offset

    def close(self, *, is_last: bool) -> None:
        """Unmap the large free segments, or with ``is_last`` all segments without fields; collective over the node.

        Call this when an object on the communicator is closed, after all ranks have completed its calls. ``is_last`` is
        True for the last object.
        """
        if is_last:
            for registration in self._registered.values():
                registration.close()
            self._registered.clear()
            self._is_open = False
            self._release_plans()
        else:
            self._sweep()
        if not self.shares_memory:
            return
        unused = [
            number
            for number, own in self._own.items()
            if own.free.is_whole and (is_last or own.segment.nbytes > _LAST_CHUNK)
        ]
        of_all = self._reduce(unused, _CLOSING, of_node=True)[1]
        self._unmap(of_all or [unused] * self._node_size)

    def _release_plans(self) -> None:
        """Release all blocks except the fields'. Plans that failed, at construction or later, do not release theirs."""
        used = self._used.copy()  # the garbage collector may free fields meanwhile
        self._released.extend(key for key, (*_, is_field) in used.items() if not is_field)
        self._sweep()

    def _unmap(self, dropped: Sequence[Sequence[int]]) -> None:
        """Unmap segments, by number, that each rank of the node no longer uses."""
        for node_rank, numbers in enumerate(dropped):
            for number in numbers:
                registration = self._registered.pop(SegmentKey(number, node_rank), None)
                if registration is not None:
                    registration.close()
                self._segments.pop(SegmentKey(number, node_rank), None)
                if node_rank == self.node_rank:
                    self._own.pop(number, None)
