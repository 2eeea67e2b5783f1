"""Addresses of a message's parts in device memory that the ranks of a node map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halox.datatypes import StridedBlocks, contiguous
from halox.paths.messages import Message
from halox.runtime.device_arena import Allocation, DeviceArena, DevicePlace


@dataclass(frozen=True)
class Exported:
    """The parts of a message in exported device memory.

    Attributes
    ----------
    places : tuple of DevicePlace
        Of each part's array's first element.
    layouts : tuple of StridedBlocks
        Of each part, all its items.
    handles : mapping
        Of the segments concerned, by number.
    """

    places: tuple[DevicePlace, ...]
    layouts: tuple[StridedBlocks, ...]
    handles: Mapping[Allocation, bytes]


def exported_parts(message: Message, arrays: Sequence[Any], arena: DeviceArena) -> Exported | None:
    """Return where the parts of a message lie, None unless all are strided and in the arena."""
    places, layouts = [], []
    for part in message.parts:
        items = part.datatype if part.count == 1 else contiguous(part.count, part.datatype)
        if items.strided is None:
            return None
        pointer = arrays[part.array].pointer
        place = arena.locate(pointer + items.true_lb, pointer + items.true_ub)
        if place is None:
            return None
        places.append(place.at(-items.true_lb))
        layouts.append(items.strided)
    return Exported(tuple(places), tuple(layouts), arena.handles(places))
