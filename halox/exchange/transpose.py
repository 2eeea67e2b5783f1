"""Transposes of fields between two decompositions, as messages between the ranks.

Packed bytes must have the same order at both ends, independent of the strides of the arrays. Each end walks the same
axes in the same order, the slowest first, with the strides of its array::

    u of grid_a, axes (x, y, z)       walk: x, y, z       packed:  x slowest, z fastest
    v of grid_b, axes (y, z, x)       walk: x, y, z       the same, by the strides of v

Any order of axes is correct. The memory order of ``u`` gives ``u`` its longest runs, and also gives ``v`` its longest
runs if its memory has the same order. All ranks use rank 0's order, since an array of another rank may have other
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halox.datatypes import slab
from halox.decomposition import FieldLayout, Overlap, common_axes, inverse_axes, overlaps
from halox.exchange.draft import Draft
from halox.paths.messages import Part, fuse
from halox.runtime.arrays import Described, describe


@dataclass(frozen=True)
class TransposeEnd:
    """One end of a transpose on this rank."""

    array: object
    overlaps: tuple[Overlap, ...]  # boxes, each with the rank whose array has the same cells
    axes: tuple[int, ...]  # of the array, in the order that both ends use


def memory_order(array: Described, axes: Sequence[int]) -> tuple[int, ...]:
    """Return the memory order of some axes, the slowest first, as indices into ``axes``."""
    return tuple(sorted(range(len(axes)), key=lambda i: -abs(array.strides[axes[i]])))


def transpose_ends(
    u: object, of_u: FieldLayout, v: object, of_v: FieldLayout, axes: Sequence[int]
) -> tuple[TransposeEnd, TransposeEnd]:
    """Return the ends of a transpose between an array ``u`` with layout ``of_u`` and an array ``v``.

    Grid axis ``k`` of ``v`` is grid axis ``axes[k]`` of ``u``.
    """
    back, natural = inverse_axes(axes), range(len(axes))
    return (
        TransposeEnd(u, overlaps(of_u, of_v.decomposition, back), common_axes(of_u.spec, natural)),
        TransposeEnd(v, overlaps(of_v, of_u.decomposition, axes), common_axes(of_v.spec, back)),
    )


def transpose_draft(source: TransposeEnd, target: TransposeEnd, walk: Sequence[int]) -> Draft:
    """Make the messages from the cells of one array to the same cells of a second array.

    ``walk`` is the packing order of the common axes, the slowest first; the same on all ranks.
    """
    described = describe(source.array), describe(target.array)

    def part(number: int, side: TransposeEnd, overlap: Overlap) -> Part:
        array, box = described[number], overlap.box
        shape, strides, starts, subsizes = (
            [form[side.axes[i]] for i in walk]
            for form in (array.shape, array.strides, box.starts, box.subsizes)
        )
        return Part(number, slab(shape, strides, starts, subsizes, array.dtype))

    return Draft(
        (source.array, target.array),
        described,
        fuse("send", ((o.peer, 0, part(0, source, o)) for o in source.overlaps)),
        fuse("receive", ((o.peer, 0, part(1, target, o)) for o in target.overlaps)),
        names=(" into ".join(map(str, described)),),
    )
