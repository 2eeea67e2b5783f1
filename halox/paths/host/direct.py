"""The ``direct`` protocol of the ``host`` path: the receiver copies cells from the sender's array in shared memory.

It serves arrays that a grid allocated, between ranks of a node, if runs are so long that reading another core's cache
lines in place is faster than packing. The receiver's array may be any array, with its axes in any order.
`halox.paths.in_place` describes the order of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np

from halox.datatypes import StridedBlocks
from halox.packing.blocking import Move, blocked
from halox.packing.host_views import common_views, element_view
from halox.paths.base import Job
from halox.paths.in_place import InPlaceChannel
from halox.paths.messages import Located
from halox.paths.node import NodeLink
from halox.runtime.arena import SharedArena
from halox.runtime.arrays import WORDS, HostArray, common_word
from halox.runtime.segments import Place

SharedParts: TypeAlias = Located
"""Parts of a message at one end, each a single strided item, in memory of the node."""


def are_readable(source: SharedParts, target: SharedParts) -> bool:
    """Whether each part of a message can be copied from the source's memory in one loop nest."""
    if source.places is None or len(target.layouts) != len(source.layouts):
        return False
    return all(
        _are_alike(a, b) or common_views(b, a) is not None
        for a, b in zip(source.layouts, target.layouts, strict=True)
    )


def run_bytes(parts: SharedParts) -> int:
    """Return the mean bytes of a message's contiguous runs, for a copy in the order of the addresses."""
    nbytes = sum([layout.nbytes for layout in parts.layouts])
    return nbytes // sum([layout.nbytes // _run_bytes(layout) for layout in parts.layouts])


def _run_bytes(layout: StridedBlocks) -> int:
    run = layout.block_bytes
    levels = zip(layout.strides, layout.counts, strict=True)
    for stride, count in sorted(levels, key=lambda level: abs(level[0])):
        if abs(stride) != run:
            break
        run *= count
    return run


def _are_alike(a: StridedBlocks, b: StridedBlocks) -> bool:
    return a.counts == b.counts and a.block_bytes == b.block_bytes


def _move(target: tuple[HostArray, StridedBlocks], source: tuple[HostArray, StridedBlocks]) -> Move:
    """View a part at both ends, with one shape."""
    layouts = target[1], source[1]
    if _are_alike(*layouts):
        word = WORDS[common_word(*((array.pointer, layout) for array, layout in (target, source)))]
        views = element_view(layouts[0], word), element_view(layouts[1], word)
    else:
        common = common_views(*layouts)
        assert common is not None, "layouts without a common loop nest were sent the direct way"
        views = common
    to, out_of = (
        np.ndarray(shape, dtype, array.memory, array.origin + offset, strides)
        for (shape, dtype, offset, strides), (array, _) in zip(views, (target, source), strict=True)
    )
    return to, out_of


def _array_at(arena: SharedArena, place: Place) -> HostArray:
    """Return the memory of another rank's array, by its address in this process."""
    segment = arena.memory(Place(place.segment))
    return HostArray(segment.data, place.offset, segment.ctypes.data + place.offset)


class DirectChannel(InPlaceChannel):
    """Copies from the neighbours' arrays."""

    def __init__(
        self,
        job: Job,
        arena: SharedArena,
        link: NodeLink,
        located_parts: Mapping[tuple[int, int], SharedParts],
    ) -> None:
        sources = sorted({m.peer for m in job.receives})
        readers = sorted({m.peer for m in job.sends})
        super().__init__(link, sources, readers)
        moves = []
        for message in job.receives:
            places, layouts = located_parts[message.peer, message.tag]
            for part, place, layout in zip(message.parts, places or (), layouts, strict=True):
                own = part.strided
                assert own is not None, "a part without a strided form was sent the direct way"
                source = _array_at(arena, place), layout
                moves.append(_move((job.arrays[part.array], own), source))
        self._moves = blocked(moves)

    def _move(self) -> None:
        for target, source in self._moves:
            target[...] = source

    def close(self) -> None:
        """Leave an exchange that is under way, and drop the arrays."""
        self._moves = []
        super().close()
