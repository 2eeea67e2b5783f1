"""One axis of a field in a rank's array, and the intervals that an exchange moves.

Along one axis a rank stores, in this order::

    |  low halo  |          owned points          |   high halo   |
    0            low                              low + points    stored

A staggered field has one more point than cells. Point ``i`` belongs to the part that owns cell
``i``, and the point past the last cell to the last part (on a periodic axis that point *is*
point 0). Every part stores one point more than it has cells, so in all parts but that last one
the high halo is one wider than asked, and its first point is the next part's first one::

    cells            0   1   2 | 3   4   5
    points         0   1   2   3   4   5   6
    part 0 stores  0   1   2  (3)                 (3): a copy, part 1 owns it
    part 1 stores              3   4   5   6      6:   owned, the axis ends here
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from halox.decomposition.partition import AxisPartition


class Interval(NamedTuple):
    """Start and extent along one axis."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Box:
    """Box of an array: first index, extent and step along every axis.

    ``steps`` is None where every step is 1, as in all fields but those of one parity.
    """

    starts: tuple[int, ...]
    subsizes: tuple[int, ...]
    steps: tuple[int, ...] | None = None

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the array."""
        steps = self.steps or (1,) * len(self.starts)
        return tuple(
            slice(start, start + (size - 1) * step + 1, step)
            for start, size, step in zip(self.starts, self.subsizes, steps, strict=True)
        )


class AxisLayout(NamedTuple):
    """One grid axis of a rank's array; see the diagram in the module's docstring."""

    start: int  # global index of the first owned point
    low: int
    points: int
    high: int
    moved_low: int  # of the low halo, next to the owned points: exchanged
    moved_high: int  # the same of the high halo, of a part that has one above it

    @classmethod
    def of(
        cls,
        axis: AxisPartition,
        part: int,
        halo: tuple[int, int],
        staggered: bool,
        offsets: tuple[int, ...],
    ) -> AxisLayout:
        """Return the axis of the array of one part."""
        start, stop = axis.owned_points(part, staggered)
        low, high = halo
        moved_low, moved_high = (min(width, max(offsets, default=width)) for width in halo)
        return cls(
            start,
            low,
            stop - start,
            high if axis.closes(part) else high + staggered,
            moved_low,
            moved_high + staggered,
        )

    @property
    def stored(self) -> int:
        """Points that the array has along the axis."""
        return self.low + self.points + self.high

    def sent(self) -> tuple[Interval, ...]:
        """Return intervals sent in direction 0, +1, -1, so that the direction is the index."""
        end = self.low + self.points
        return (
            Interval(self.low, self.points),
            Interval(end - self.moved_low, self.moved_low),
            Interval(self.low, self.moved_high),
        )

    def received(self) -> tuple[Interval, ...]:
        """Return intervals received from direction 0, +1, -1."""
        end = self.low + self.points
        return (
            Interval(self.low, self.points),
            Interval(end, min(self.high, self.moved_high)),
            Interval(self.low - self.moved_low, self.moved_low),
        )

    def in_pairs(self) -> AxisLayout:
        """Return the axis in pairs of cells, of blocks that begin and end at even ones; no layout to exchange by."""
        low, high = (self.low + 1) // 2, (self.high + 1) // 2  # of cells counted from an even one
        return AxisLayout(self.start // 2, low, self.points // 2, high, low, high)
