"""Segments of memory that several ranks can access, and the blocks in them.

`halox.runtime.arena` makes segments of host memory, and `halox.runtime.device_arena` segments of a GPU's memory. Each
manages the room in its segments with `Segments`. A `Place` is an address that all ranks of a node understand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, TypeAlias

from halox.runtime.deferred import Deferred
from halox.values import rounded_up

SegmentKey: TypeAlias = tuple[int | str, int]
"""Identity of a segment: its rank's index on the node, or the name of its GPU arena; and its number there."""


@dataclass(frozen=True)
class Place:
    """Address with the same meaning on every rank of a node: a segment, and an offset in bytes."""

    segment: SegmentKey
    offset: int = 0

    def at(self, offset: int) -> Place:
        return replace(self, offset=self.offset + offset)


@dataclass(eq=False)
class Block:
    """A block of this rank's memory: its place, as other ranks name it, its local address and its size in bytes."""

    place: Place
    pointer: int
    nbytes: int


class FreeList:
    """Free ranges of a segment of ``nbytes``, with adjacent ranges merged; initially all bytes are free."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges = [(0, nbytes)]

    @property
    def is_whole(self) -> bool:
        return self._ranges == [(0, self._nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate bytes in the smallest sufficient range; return their offset, or None if all ranges are too small."""
        fitting = [(length, offset) for offset, length in self._ranges if nbytes <= length]
        if not fitting:
            return None
        length, offset = min(fitting)
        at = self._ranges.index((offset, length))
        self._ranges[at : at + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._ranges, (offset, nbytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((start, length))
        self._ranges = merged


@dataclass(eq=False)
class Segment:
    """Memory from the address ``start``; ``memory`` keeps it allocated, also for the blocks that are in use."""

    memory: Any
    start: int
    nbytes: int
    is_kept: bool = True  # while no block is in use, since other ranks may have mapped it
    handle: bytes | None = None  # of a GPU's memory, once it has been exported
    idle: int = 0  # allocations since the last use

    def __post_init__(self) -> None:
        self.free = FreeList(self.nbytes)


class Segments:
    """The segments of one rank, by number. Finalizers may release blocks at any point, on any thread."""

    def __init__(self, owner: int | str, granule: int) -> None:
        self.by_number: dict[int, Segment] = {}
        self._owner, self._granule = owner, granule
        self._lock = Deferred()

    def rounded(self, nbytes: int) -> int:
        return rounded_up(max(nbytes, 1), self._granule)

    def take(self, nbytes: int, largest: float = inf) -> Block | None:
        """Return a block in the smallest segment that has room for it; None if all are too small.

        No segment without blocks is taken if it is larger than ``largest``.
        """
        with self._lock:
            by_size = sorted(self.by_number.items(), key=lambda item: (item[1].nbytes, item[0]))
            for number, segment in by_size:
                if segment.free.is_whole and segment.nbytes > largest:
                    continue
                offset = segment.free.allocate(self.rounded(nbytes))
                if offset is not None:
                    segment.idle = 0
                    place = Place((self._owner, number), offset)
                    return Block(place, segment.start + offset, nbytes)
        return None

    def add(self, number: int, segment: Segment, nbytes: int) -> Block:
        """Add a new segment, and return a block in it."""
        offset = segment.free.allocate(self.rounded(nbytes))
        assert offset == 0
        self.by_number[number] = segment
        return Block(Place((self._owner, number)), segment.start, nbytes)

    def release(self, block: Block) -> None:
        """Release a block; does nothing if its segment is gone."""
        self._lock.do(partial(self._release, block))

    def _release(self, block: Block) -> None:
        number = block.place.segment[1]
        segment = self.by_number.get(number)
        if segment is not None:
            segment.free.release(block.place.offset, self.rounded(block.nbytes))
            if segment.free.is_whole and not segment.is_kept:
                self.by_number.pop(number, None)

    def locate(self, start: int, end: int) -> Place | None:
        """Return the place of memory [start, end) if it is in one of the segments."""
        # Iterate over a copy: the garbage collector may free fields, and with them segments.
        for number, segment in self.by_number.copy().items():
            if segment.start <= start and end <= segment.start + segment.nbytes:
                return Place((self._owner, number), start - segment.start)
        return None
