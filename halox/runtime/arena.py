"""Memory that the ranks of a node share, allocated in blocks.

Blocks are in segments of POSIX shared memory, each of which one rank makes and all ranks of its node map: fields that
a grid allocates, and staging memory of plans. Releases are local, at another time on every rank; so allocation asks
all ranks of the node whether each has room, and those that have none make a segment.

The segments belong to a communicator and serve all grids made on it, one after the other. Free ones are unmapped when
a grid is closed; fields that outlive their grid return their pages when the last view is gone.
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
from halox.runtime.dlpack import Array, DType
from halox.runtime.free_list import FreeList
from halox.runtime.place import Place
from halox.runtime.shared_memory import Bytes, SharedSegment
from halox.runtime.world import World
from halox.values import rounded_up

if TYPE_CHECKING:
    from halox.runtime.gpu.memory import RegisteredBuffer

_GRANULE = 256
_FIRST_CHUNK, _LAST_CHUNK = 1 << 18, 1 << 22
_IDLE_ALLOCATIONS = 16
_ALLOCATING = "an allocation"
_CLOSING = "a collective close"


class SegmentKey(NamedTuple):
    """Number of a segment among those of its rank, and that rank's place on the node.

    ``arena`` is the number of its arena among those of `Context.locate`.
    """

    number: int
    node_rank: int
    arena: int = 0


HostPlace: TypeAlias = Place[SegmentKey]
"""Place of a block."""

Wishes: TypeAlias = tuple[bool, Sequence[int]]
"""Whether a rank needs a new segment, and which of its segments are to be unmapped."""


@dataclass(eq=False)
class Block:
    """A piece of shared memory of this rank; ``memory`` is its bytes."""

    place: HostPlace
    memory: Bytes
    number: int


@dataclass(eq=False)
class _Own:
    """A segment that this rank has made; ``idle`` counts allocations since its last use, ``trim`` returns its pages."""

    segment: SharedSegment
    free: FreeList
    idle: int = 0
    is_trimmed: bool = False


@dataclass(eq=False)
class Room:
    """Room for ``nbytes`` at ``offset`` of an own segment, None where a new one is needed; for no block by default.

    ``idle`` are own segments to be unmapped.
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
    def wishes(self) -> Wishes | None:
        """Steps that the ranks of the node are to take together; None for none."""
        return (self.needs_segment, self.idle) if self.needs_segment or self.idle else None


def arena_of(world: World) -> SharedArena:
    """Return the shared memory of a world's communicator, made at the first use; local."""
    arena: SharedArena | None = world.ranks.kept.get("arena")
    if arena is None:
        arena = world.ranks.kept["arena"] = SharedArena(world)
    arena.open(world)
    return arena


class SharedArena:
    """Shared memory of the ranks of one node."""

    def __init__(self, world: World) -> None:
        self._segments: dict[SegmentKey, SharedSegment] = {}
        self._own: dict[int, _Own] = {}
        self._used: dict[int, tuple[int, int, int, bool]] = {}
        self._released: deque[int] = deque()
        self._is_sweeping = False
        self._next = 0
        self._numbers = count()
        self._chunk = _FIRST_CHUNK
        self._registered: dict[SegmentKey, RegisteredBuffer] = {}
        self._is_open = False
        self._world: weakref.ref[World] | None = None
        self.node_rank = world.node_rank
        self.open(world)

    def open(self, world: World) -> None:
        """Serve another world of the same communicator; local, once the last one is closed on all ranks."""
        if self._world is not None and self._world() is world:
            return
        self._world = weakref.ref(world)
        self._release_plans()
        self._is_open = True
        self.shares_memory = world.shares_memory
        # A field's finalizer keeps the arena, which must not keep the world.
        self._gather: Callable[[object, str], list[Any]] = world.ranks.gather_node

    @property
    def segments(self) -> int:
        """Number of segments that this rank has made."""
        return len(self._own)

    def allocate(self, nbytes: int, *, is_field: bool = False) -> Block | None:
        """Return shared memory with undefined contents, of any size on each rank; collective over those of the node.

        None on all of them if the node's shared memory is too small, or there is only one rank.
        """
        if not self.shares_memory:
            return None
        room = self.reserve(nbytes)
        return self.take(room, self._gather(room.wishes, _ALLOCATING), is_field=is_field)

    def reserve(self, nbytes: int) -> Room:
        """Find room for a block, for `take` once all ranks of the node have met, or for `cancel`; local."""
        rounded = rounded_up(max(nbytes, 1), _GRANULE)
        self._sweep()
        for own in self._own.values():
            own.idle += 1
        idle = self._idle()
        number, offset = self._find(rounded) or (None, 0)
        return Room(nbytes, rounded, number, offset, [n for n in idle if n != number])

    def cancel(self, room: Room) -> None:
        """Return room that was not taken; local."""
        if room.segment is not None:
            self._own[room.segment].free.put(room.offset, room.rounded)

    def take(
        self, room: Room, said: Sequence[Wishes | None], *, is_field: bool = False
    ) -> Block | None:
        """Take a block, by the wishes of all ranks of the node; None as of `allocate`, or if the room is for none.

        Collective over the ranks of the node if any of them has wishes, and local otherwise.
        """
        for node_rank, wishes in enumerate(said):
            self._drop(node_rank, wishes[1] if wishes else ())
        if any(wishes and wishes[0] for wishes in said):
            made = self._make(room.rounded if room.needs_segment else 0)
            if made is None:
                self.cancel(room)
                return None
            if room.needs_segment:
                self._own[made].free.take(room.rounded)
                room.segment = made
        if room.segment is None:
            return None
        own = self._own[room.segment]
        own.idle = 0
        place = Place(SegmentKey(room.segment, self.node_rank), room.offset)
        memory = own.segment.memory[room.offset : room.offset + room.nbytes]
        block = Block(place, memory, next(self._numbers))
        self._used[block.number] = room.segment, room.offset, room.rounded, is_field
        return block

    def _find(self, nbytes: int) -> tuple[int, int] | None:
        """Take room in the smallest own segment that has it, and its pages if they were returned to the system."""
        by_size = sorted(self._own.items(), key=lambda item: (item[1].segment.nbytes, item[0]))
        for number, own in by_size:
            # Not one that is far too large: a plan's flags must not hold a field's memory.
            if own.free.is_whole and own.segment.nbytes > 4 * max(nbytes, _LAST_CHUNK):
                continue
            offset = own.free.take(nbytes)
            if offset is None:
                continue
            if own.is_trimmed:
                try:
                    own.segment.fill()
                except OSError:
                    own.free.put(offset, nbytes)
                    continue
                own.is_trimmed = False
            return number, offset
        return None

    def _idle(self) -> list[int]:
        """Return the large segments of this rank that nothing has used for a while."""
        return [
            number
            for number, own in self._own.items()
            if own.free.is_whole
            and own.idle > _IDLE_ALLOCATIONS
            and own.segment.nbytes > _LAST_CHUNK
        ]

    def _make(self, nbytes: int) -> int | None:
        """Make a segment on each rank that needs one, and map those of the others; None if one fails anywhere."""
        number, self._next = self._next, self._next + 1
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
            names = self._gather((is_made, name), _ALLOCATING)
            is_mapped = all(is_made for is_made, _ in names)
            if is_mapped:
                with suppress(OSError):
                    for node_rank, (_, other) in enumerate(names):
                        if other and node_rank != self.node_rank:
                            mapped[node_rank] = shared_memory.attach(other)
                is_mapped = len(mapped) == sum(bool(other) for _, other in names)
            is_mapped = all(self._gather(is_mapped, _ALLOCATING))
        finally:
            if name:
                shared_memory.unlink(name)
        if not is_mapped:
            return None
        for node_rank, one in mapped.items():
            self._segments[SegmentKey(number, node_rank)] = one
        if segment is not None:
            self._own[number] = _Own(segment, FreeList(segment.nbytes))
        return number

    def release(self, block: Block) -> None:
        """Release a block, for use again once every rank of the node has entered an allocation; local."""
        # May run in the middle of anything, where an array is collected.
        self._released.append(block.number)
        if not self._is_open:
            self._sweep()

    def _sweep(self) -> None:
        """Put released blocks back where they were taken."""
        if self._is_sweeping:
            return
        self._is_sweeping = True
        while self._released:
            number, offset, length, _ = self._used.pop(self._released.popleft(), (-1, 0, 0, False))
            own = self._own.get(number)
            if own is None:
                continue
            own.free.put(offset, length)
            if own.free.is_whole and not self._is_open:
                own.segment.trim()
                own.is_trimmed = True
        self._is_sweeping = False

    def array(self, block: Block, shape: tuple[int, ...], dtype: DType) -> Array:
        """Return an array of a block that is released with its last view; local."""
        # NumPy makes this the base of every view, so that it lives as long as any of them. Its own base must
        # not be an array: NumPy would then pass over it, to the array at the end of the chain.
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
        """Return the GPU's address of a place, page-locking its segment at the first use."""
        key = place.segment
        if key not in self._registered:
            from halox.runtime.gpu.memory import register

            self._registered[key] = register(self._segments[key].memory)
        return int(self._registered[key].device_pointer) + place.offset

    def close(self) -> None:
        """Return to the system what no field needs any more; collective over the ranks of the node."""
        for registration in self._registered.values():
            registration.close()
        self._registered.clear()
        if not self._is_open or not self.shares_memory:
            return
        self._gather(None, _CLOSING)  # until then ranks may read what others have packed for them
        self._is_open = False
        self._release_plans()
        unused = [number for number, own in self._own.items() if own.free.is_whole]
        for node_rank, dropped in enumerate(self._gather(unused, _CLOSING)):
            self._drop(node_rank, dropped)

    def _release_plans(self) -> None:
        """Release all blocks but fields': plans whose making failed, or that failed later, have no other end."""
        used = self._used.copy()  # fields may be collected meanwhile
        self._released.extend(key for key, (*_, is_field) in used.items() if not is_field)
        self._sweep()

    def _drop(self, node_rank: int, numbers: Sequence[int]) -> None:
        """Unmap segments of a rank, which it does not use any more."""
        for number in numbers:
            self._segments.pop(SegmentKey(number, node_rank), None)
            if node_rank == self.node_rank:
                self._own.pop(number, None)
