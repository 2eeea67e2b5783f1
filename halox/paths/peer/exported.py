"""Addresses of a message's parts in device memory that the ranks of a node map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halox.datatypes import StridedBlocks
from halox.paths.messages import Message, located
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
    """Return the addresses of a message's parts, None unless all are strided and in the arena."""
    found = located(message, arrays, arena.locate)
    return None if found is None else Exported(*found, arena.handles(found[0]))
