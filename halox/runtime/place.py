"""Addresses of memory that several ranks reach."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic, Self, TypeVar

SegmentT = TypeVar("SegmentT", bound=Hashable)


@dataclass(frozen=True)
class Place(Generic[SegmentT]):
    """Address in terms that mean the same to every rank of a node: a segment of an arena, and bytes into that."""

    segment: SegmentT
    offset: int = 0

    def at(self, offset: int) -> Self:
        """Return the place some bytes further on."""
        return replace(self, offset=self.offset + offset)
