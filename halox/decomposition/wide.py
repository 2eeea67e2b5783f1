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

from halox.decomposition.axis_layout import Interval
from halox.decomposition.field_layout import FieldLayout


def wide_intervals(
    layout: FieldLayout,
) -> tuple[list[dict[int, Interval]], list[dict[int, Interval]]]:
    """Return the intervals of a rank's array that it sends and receives, by axis and displacement.

    Along an axis, both have the same displacements: 0 for the owned points, and every displacement at which the rank
    sends or receives points.
    """
    coords = layout.decomposition.coords_of(layout.rank)
    moved = [_moved(layout, axis, part) for axis, part in enumerate(coords)]
    return [sent for sent, _ in moved], [received for _, received in moved]


def _moved(
    layout: FieldLayout, axis: int, part: int
) -> tuple[dict[int, Interval], dict[int, Interval]]:
    """Return the intervals that a part sends and receives along an axis, by displacement."""
    partition, own = layout.decomposition.axes[axis], layout.along(axis, part)
    owned = Interval(own.low, own.points)
    sent, received = {0: owned}, {0: owned}
    parts = partition.parts
    # The shared point of a staggered field may lie beyond the periods that the halo covers.
    most = parts * -(-max(*layout.spec.halo[axis], 1) // partition.cells) + 1
    for displacement in range(-most, most + 1):
        peer = part + displacement
        if not displacement or not (partition.periodic or 0 <= peer < parts):
            continue
        _, incoming = _piece(layout, axis, part, displacement)
        outgoing, _ = _piece(layout, axis, peer % parts, -displacement)
        if incoming.size or outgoing.size:
            sent[displacement], received[displacement] = outgoing, incoming
    return sent, received


def _piece(
    layout: FieldLayout, axis: int, part: int, displacement: int
) -> tuple[Interval, Interval]:
    """Return the points of a part's halo that the part at a displacement owns.

    The first interval is in the owner's array, the second in the array with the halo.
    """
    partition, mine = layout.decomposition.axes[axis], layout.along(axis, part)
    turns, number = divmod(part + displacement, partition.parts)
    owner = layout.along(axis, number)
    # Global indices of the first point of each array.
    begin, owner_begin = (one.start - one.low for one in (mine, owner))
    owner_begin += turns * partition.cells
    halo = mine.received()[1 if displacement > 0 else -1]
    first = max(begin + halo.start, owner_begin + owner.low)
    past = min(begin + halo.start + halo.size, owner_begin + owner.low + owner.points)
    size = max(past - first, 0)
    return Interval(first - owner_begin, size), Interval(first - begin, size)
