"""One axis of a field in a rank's array, and the intervals that an exchange sends and receives.

A rank stores these points along an axis, in this order::

    |  low halo  |          owned points          |   high halo   |
    0            low                              low + points    stored

A staggered field has one more point than cells. The part that owns cell ``i`` also owns point ``i``.
The last part owns the point after the last cell. On a periodic axis the point after the last cell
*is* point 0. Without its halo, every part stores one point more than it has cells. All parts except
the last part of a non-periodic axis do not own this extra point. Their high halo is one point wider
than the requested halo, and its first point is the first point of the next part::

    cells            0   1   2 | 3   4   5
    points         0   1   2   3   4   5   6
    part 0 stores  0   1   2  (3)                 (3): a copy, part 1 owns it
    part 1 stores              3   4   5   6      6:   owned, the axis ends here
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from halox.decomposition.partition import AxisPartition


class Interval(NamedTuple):
    """First index and extent along one axis."""

    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Box:
    """Box of an array: first index, extent and step along every axis.

    ``steps`` is None if every step is 1. Fields of one parity, and boxes sent across a connection, have other steps.
    ``order`` has the axes from the slowest to the fastest one if the box, with steps, is not walked in C order.
    """

    starts: tuple[int, ...]
    subsizes: tuple[int, ...]
    steps: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = field(default=None, repr=False)

    @property
    def slices(self) -> tuple[slice, ...]:
        cuts = []
        steps = self.steps or (1,) * len(self.starts)
        for start, size, step in zip(self.starts, self.subsizes, steps, strict=True):
            past = start + (size - 1) * step + (1 if step > 0 else -1)
            cuts.append(slice(start, past if past >= 0 else None, step))
        return tuple(cuts)


class AxisLayout(NamedTuple):
    """One grid axis of a rank's array; see the diagram in the module's docstring."""

    start: int  # global index of the first owned point
    low: int
    points: int
    high: int
    moved_low: int  # exchanged points of the low halo, next to the owned points
    moved_high: int  # exchanged points of the high halo, if there is a part above

    @classmethod
    def of(
        cls,
        axis: AxisPartition,
        part: int,
        halo: tuple[int, int],
        staggered: bool,
        offsets: tuple[int, ...],
    ) -> AxisLayout:
        """Return the layout of one part's array along the axis."""
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
        return self.low + self.points + self.high

    def sent(self) -> tuple[Interval, ...]:
        """Return the intervals sent in the directions 0, +1 and -1; the direction is the index."""
        end = self.low + self.points
        return (
            Interval(self.low, self.points),
            Interval(end - self.moved_low, self.moved_low),
            Interval(self.low, self.moved_high),
        )

    def received(self) -> tuple[Interval, ...]:
        """Return the intervals received from the directions 0, +1 and -1; the direction is the index."""
        end = self.low + self.points
        return (
            Interval(self.low, self.points),
            Interval(end, min(self.high, self.moved_high)),
            Interval(self.low - self.moved_low, self.moved_low),
        )

    def within_grid(self, points: int) -> tuple[AxisLayout, tuple[bool, bool]]:
        """Return the axis with all layers in a grid of ``points`` as points, and only layers beyond it as halo.

        Also returns whether the exchanged layers reach the low and the high end of the grid. With halos wider than
        blocks, this holds for more parts than the first and the last.
        """
        # Layers from the owned points to each end of the grid.
        to_low, to_high = self.start, points - self.start - self.points
        moved_low, moved_high = self.moved_low, min(self.high, self.moved_high)
        low, high = max(self.low - to_low, 0), max(self.high - to_high, 0)
        inside = AxisLayout(
            max(to_low - self.low, 0),
            low,
            self.stored - low - high,
            high,
            max(moved_low - to_low, 0),
            max(moved_high - to_high, 0),
        )
        return inside, (moved_low >= to_low, moved_high >= to_high)

    def in_pairs(self) -> AxisLayout:
        """Return the axis in pairs of cells, for a block that begins and ends at even cells.

        `halox.decomposition.parity` explains pairs. The result has the array's shape, but not the intervals of an
        exchange: a pair that the end of the halo cuts has only one cell in the halo.
        """
        # The owned cells begin at an even cell, so an odd halo width cuts a pair, which is stored whole.
        low, high = (self.low + 1) // 2, (self.high + 1) // 2
        return AxisLayout(self.start // 2, low, self.points // 2, high, low, high)
