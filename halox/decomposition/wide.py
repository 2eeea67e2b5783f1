"""Intervals of an exchange with halos wider than blocks: each owner sends its points of a halo itself.

A displacement is the number of parts from one part to another along an axis. It counts on across the ends of a
periodic axis, so the images of a part have different displacements. A halo may be wider than the axis, and then has
several images of a part. The bounds of the parts cut a halo into pieces, with one displacement each. For example,
blocks of 2, 1 and 3 cells of a periodic axis fill a halo of 4 cells on both sides of part 1::

    cell           4   5 | 0   1 | 2 | 3   4   5 | 0
    part             2   |   0   | 1 |     2     | 0
    displacement    -2   |  -1   | 0 |     1     | 2

Over all axes, the regions are the products of these pieces. Two blocks exchange at most one region per displacement,
so the displacement plays the part of the direction of ordinary regions, which is a displacement of -1, 0 or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from halox.decomposition.axis_layout import AxisLayout, Interval
from halox.decomposition.domain import Decomposition, Neighbour
from halox.decomposition.normalise import Halo
from halox.decomposition.partition import AxisPartition


def wide_intervals(
    decomposition: Decomposition,
    rank: int,
    halo: Halo,
    staggered: Sequence[bool],
    offsets: tuple[int, ...],
) -> tuple[list[dict[int, Interval]], list[dict[int, Interval]]]:
    """Return the intervals of a rank's array that it sends and receives, by axis and displacement.

    Along an axis, both have the same displacements: 0 for the owned points, and every displacement at which the rank
    sends or receives points.
    """
    per_axis = zip(decomposition.axes, halo, staggered, strict=True)
    axes = [_WideAxis(*properties, offsets) for properties in per_axis]
    moved = [
        axis.moved(part) for axis, part in zip(axes, decomposition.coords_of(rank), strict=True)
    ]
    return [sent for sent, _ in moved], [received for _, received in moved]


def wide_neighbours(
    decomposition: Decomposition,
    rank: int,
    intervals: Sequence[dict[int, Interval]],
    corners: bool,
) -> tuple[Neighbour, ...]:
    """Return the rank at every displacement, in lexicographic order; ``intervals`` has the displacements per axis.

    A rank appears once per displacement. Without ``corners``, displacements are along one axis only.
    """
    coords = decomposition.coords_of(rank)
    neighbours = []
    for direction in product(*map(sorted, intervals)):
        across = sum(map(bool, direction))
        peer = decomposition.rank_at([c + d for c, d in zip(coords, direction, strict=True)])
        if peer is not None and (across == 1 or (across and corners)):
            neighbours.append(Neighbour(direction, peer))
    return tuple(neighbours)


class _WideAxis(NamedTuple):
    """One grid axis: its cuts, and the properties of a field along it."""

    axis: AxisPartition
    halo: tuple[int, int]
    staggered: bool
    offsets: tuple[int, ...]

    def moved(self, part: int) -> tuple[dict[int, Interval], dict[int, Interval]]:
        """Return the intervals that a part sends and receives, by displacement."""
        layout = self._layout(part)
        own = Interval(layout.low, layout.points)
        sent, received = {0: own}, {0: own}
        parts = self.axis.parts
        # The shared point of a staggered field may lie beyond the periods that the halo covers.
        most = parts * -(-max(*self.halo, 1) // self.axis.cells) + 1
        for displacement in range(-most, most + 1):
            peer = part + displacement
            if not displacement or not (self.axis.periodic or 0 <= peer < parts):
                continue
            _, incoming = self._piece(part, displacement)
            outgoing, _ = self._piece(peer % parts, -displacement)
            if incoming.size or outgoing.size:
                sent[displacement], received[displacement] = outgoing, incoming
        return sent, received

    def _layout(self, part: int) -> AxisLayout:
        return AxisLayout.of(self.axis, part, self.halo, self.staggered, self.offsets)

    def _piece(self, part: int, displacement: int) -> tuple[Interval, Interval]:
        """Return the points of a part's halo that the part at a displacement owns.

        The first interval is in the owner's array, the second in the array with the halo.
        """
        layout = self._layout(part)
        turns, number = divmod(part + displacement, self.axis.parts)
        owner = self._layout(number)
        # Global indices of the first point of each array.
        begin, owner_begin = (one.start - one.low for one in (layout, owner))
        owner_begin += turns * self.axis.cells
        halo = layout.received()[1 if displacement > 0 else -1]
        first = max(begin + halo.start, owner_begin + owner.low)
        past = min(begin + halo.start + halo.size, owner_begin + owner.low + owner.points)
        size = max(past - first, 0)
        return Interval(first - owner_begin, size), Interval(first - begin, size)
