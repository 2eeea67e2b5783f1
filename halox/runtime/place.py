"""Addresses of memory that several ranks can access."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

SegmentT = TypeVar("SegmentT", bound=Hashable)


@dataclass(frozen=True)
class Place(Generic[SegmentT]):
    """Address with the same meaning on every rank of a node: a segment of an arena, and an offset in bytes."""

    segment: SegmentT
    offset: int = 0

    def at(self, offset: int) -> Self:
        """Return the place ``offset`` bytes further."""
        return replace(self, offset=self.offset + offset)
