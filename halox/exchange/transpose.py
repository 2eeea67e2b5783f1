"""From the boxes that two decompositions share to the messages that carry a field from one to the other.

Packed bytes must come in one order at both ends, whatever the strides of either array. Each end walks the same axes in
the same order, the slowest first, each with its own strides::

    u of grid_a, axes (x, y, z)       walk: x, y, z       packed:  x slowest, z fastest
    v of grid_b, axes (y, z, x)       walk: x, y, z       the same, through other strides

Any order is right; the one in which the axes of ``u`` lie in memory on rank 0 gives ``u`` its longest runs, and
``v`` too where its memory has the same order. Rank 0's is taken by all, since an array of another rank may lie
otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halox.datatypes import Datatype, slab
from halox.decomposition import Overlap
from halox.exchange.draft import Draft
from halox.paths.messages import Direction, Message, Part, fuse
from halox.runtime.arrays import Described, describe


@dataclass(frozen=True)
class Side:
    """One end of a transpose on this rank.

    Attributes
    ----------
    array : array
        Of any strides.
    overlaps : tuple of Overlap
        Its boxes, and which rank's array holds the same cells at the other end.
    axes : tuple of int
        Its axes in the order that both ends have in common.
    """

    array: object
    overlaps: tuple[Overlap, ...]
    axes: tuple[int, ...]


def memory_order(found: Described, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the order in which some axes are in memory, the slowest first, as indices into ``axes``."""
    return tuple(sorted(range(len(axes)), key=lambda i: -abs(found.strides[axes[i]])))


def transpose_draft(source: Side, target: Side, walk: Sequence[int]) -> Draft:
    """Make the messages that carry the cells of one array to those that hold them at the other end.

    Parameters
    ----------
    source, target : Side
        This rank's arrays to send from, and to receive into.
    walk : sequence of int
        Order in which the axes in common are packed, the slowest first; the same on all ranks.
    """
    arrays = (source.array, target.array)
    described = describe(source.array), describe(target.array)
    return Draft(
        arrays,
        described,
        _messages("send", 0, source, described[0], walk),
        _messages("receive", 1, target, described[1], walk),
        names=(" into ".join(f"{d.dtype}{list(d.shape)}" for d in described),),
    )


def _messages(
    direction: Direction, number: int, side: Side, found: Described, walk: Sequence[int]
) -> tuple[Message, ...]:
    order = [side.axes[i] for i in walk]

    def datatype(overlap: Overlap) -> Datatype:
        box = overlap.box
        return slab(
            [found.shape[axis] for axis in order],
            [found.strides[axis] for axis in order],
            [box.starts[axis] for axis in order],
            [box.subsizes[axis] for axis in order],
            found.dtype,
        )

    return fuse(direction, ((o.peer, 0, Part(number, datatype(o))) for o in side.overlaps))
