"""Transposes of fields between two decompositions of one grid, as messages between the ranks; for `Transpose` and FFTs.

Both decompositions cut each axis into consecutive parts. So the cells of a rank in ``a`` and the cells of a peer in
``b`` have one box in common, or nothing (`overlaps`)::

    a: rows                    b: columns                 from a's rank 1 to b's ranks
    +-----------------+        +-----+-----+-----+        +-----+-----+-----+
    |        0        |        |     |     |     |        |     .     .     |
    +-----------------+        |  0  |  1  |  2  |        +-----+-----+-----+
    |        1        |        |     |     |     |        | ->0 | ->1 | ->2 |
    +-----------------+        |     |     |     |        +-----+-----+-----+
    |        2        |        |     |     |     |        |     .     .     |
    +-----------------+        +-----+-----+-----+        +-----+-----+-----+

The second grid may have its axes in another order. ``axes`` always maps each axis of one grid to the same axis of the
other grid. Packed bytes must have the same order at both ends, independent of the strides of the arrays. Each end walks
the same axes in the same order, the slowest first, with the strides of its array (`transpose_draft`)::

    u of grid_a, axes (x, y, z)       walk: x, y, z       packed:  x slowest, z fastest
    v of grid_b, axes (y, z, x)       walk: x, y, z       the same, by the strides of v

Any order of axes is correct. The memory order of ``u`` gives ``u`` its longest runs, and also gives ``v`` its longest
runs if its memory has the same order. All ranks use rank 0's order, since an array of another rank may have other
strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from halox.datatypes import slab
from halox.decomposition import Box, Decomposition, FieldLayout, FieldSpec
from halox.errors import DecompositionError, FieldError
from halox.paths.messages import Part, fuse
from halox.plans.draft import Draft
from halox.runtime.arrays import Described, describe
from halox.values import as_int, as_list, shown


@dataclass(frozen=True, slots=True)
class Overlap:
    """Cells that this rank owns in one decomposition and ``peer`` in another; ``peer`` may be this rank.

    ``box`` is their place in this rank's array, with the whole component axes. It is never empty.
    """

    peer: int
    box: Box


@dataclass(frozen=True)
class TransposeEnd:
    """One end of a transpose on this rank."""

    array: object
    overlaps: tuple[Overlap, ...]  # boxes, each with the rank whose array has the same cells
    axes: tuple[int, ...]  # of the array, in the order that both ends use


def normalise_axes(axes: object, ndim: int) -> tuple[int, ...]:
    """Return an order of axes as a tuple; None means the natural order.

    Raises `DecompositionError` unless ``axes`` is a permutation of ``range(ndim)``.

    Examples
    --------
    >>> normalise_axes(None, 3), normalise_axes([2, 0, 1], 3)
    ((0, 1, 2), (2, 0, 1))
    """
    if axes is None:
        return tuple(range(ndim))
    order = [as_int(axis) for axis in as_list(axes) or ()]
    numbers = tuple(axis for axis in order if axis is not None)
    if len(order) != ndim or sorted(numbers) != list(range(ndim)):
        raise DecompositionError(
            f"axes: expected each of the axes 0 to {ndim - 1} once, got {shown(axes)}; axes[k] is the axis of grid_a "
            "that is axis k of grid_b"
        )
    return numbers


def inverse_axes(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse of an order of axes."""
    return tuple(sorted(range(len(axes)), key=lambda k: axes[k]))


def check_same_grid(a: Decomposition, b: Decomposition, axes: Sequence[int]) -> None:
    """Raise `DecompositionError` unless axis ``k`` of ``b`` has as many cells as axis ``axes[k]`` of ``a``."""
    wanted = tuple(a.grid_shape[axis] for axis in axes)
    if b.grid_shape != wanted:
        order = "" if tuple(axes) == tuple(range(a.ndim)) else f" in the order axes={tuple(axes)}"
        raise DecompositionError(
            f"grid_b: grid_shape={b.grid_shape} is not the {wanted} that grid_a has{order}; declare both grids with "
            "the same cells, or say with axes= which axis of grid_a each axis of grid_b is"
        )


def check_same_field(a: FieldLayout, b: FieldLayout, axes: Sequence[int]) -> None:
    """Raise `FieldError` unless two arrays of a rank, one per decomposition, can hold the same field.

    Both arrays must have the same component axes in the same order, but the component axes may be before the grid
    axes in one array and after the grid axes in the other. Axis ``k`` of ``b`` is axis ``axes[k]`` of ``a``.
    """
    first, second = a.spec, b.spec
    for name, spec in (("u", first), ("v", second)):
        if spec.parity is not None:
            raise FieldError(
                f"{name} has the {spec.parity} cells of a checkerboard, which are in pairs along another axis in each "
                "grid; give fields of all cells"
            )
    components = [spec.components_before + spec.components_after for spec in (first, second)]
    if components[0] != components[1]:
        raise FieldError(
            f"u has the component axes {components[0]}, v {components[1]}; give both the same, in the same order"
        )
    staggered = tuple(first.staggered[axis] for axis in axes)
    if staggered != second.staggered:
        raise FieldError(
            f"along the axes of grid_b, u is staggered {staggered}, v {second.staggered}; stagger both along the same"
        )
    for k, axis in enumerate(axes):
        if staggered[k] and a.decomposition.periodic[axis] != b.decomposition.periodic[k]:
            raise FieldError(
                f"a field that is staggered along axis {axis} of grid_a has one point more where the axis is not "
                f"periodic: periodic={a.decomposition.periodic} of grid_a, {b.decomposition.periodic} of grid_b; "
                "declare both alike along it"
            )


def overlaps(layout: FieldLayout, other: Decomposition, axes: Sequence[int]) -> tuple[Overlap, ...]:
    """Boxes of a rank's array that each rank owns in another decomposition of the same grid.

    The boxes are disjoint. Together they make up the interior of the array, without its halo. Axis ``i`` of
    ``layout``'s decomposition is axis ``axes[i]`` of ``other``. The overlaps are in ascending order of the peers,
    and peers without common cells are left out. The time grows with the number of overlaps, not with the number of
    ranks.

    Examples
    --------
    >>> from halox.decomposition import decompose
    >>> rows = decompose((6, 6), 3, proc_shape=(3, 1))
    >>> columns = decompose((6, 6), 3, proc_shape=(1, 3))
    >>> mine = FieldLayout(rows, 1, FieldSpec(((1, 1), (0, 0))))
    >>> [(o.peer, o.box.starts, o.box.subsizes) for o in overlaps(mine, columns, (0, 1))]
    [(0, (1, 0), (2, 2)), (1, (1, 2), (2, 2)), (2, (1, 4), (2, 2))]
    """
    spec = layout.spec
    # Per axis of the layout: parts of the same axis of `other`, each with start and size in the array.
    parts: list[list[tuple[int, int, int]]] = []
    for i, (owned, first) in enumerate(zip(layout.owned, layout.origin, strict=True)):
        axis = other.axes[axes[i]]
        shared = []
        for part in range(axis.parts):
            start, stop = axis.owned_points(part, spec.staggered[i])
            start, stop = max(start, owned.start), min(stop, owned.stop)
            if start < stop:
                shared.append((part, start - first, stop - start))
        parts.append(shared)
    boxes = []
    for chosen in product(*parts):
        coords = [0] * other.ndim
        for i, (part, _, _) in enumerate(chosen):
            coords[axes[i]] = part
        peer = other.rank_at(coords)
        assert peer is not None
        starts = tuple(start for _, start, _ in chosen)
        subsizes = tuple(size for _, _, size in chosen)
        boxes.append(Overlap(peer, spec.box(starts, subsizes)))
    return tuple(sorted(boxes, key=lambda overlap: overlap.peer))


def common_axes(spec: FieldSpec, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes of one array of a transpose in an order that both arrays share: component axes, then grid axes.

    The grid axes are in the order of ``grid_a``: axis ``i`` of ``grid_a`` is grid axis ``axes[i]`` of this array.

    Examples
    --------
    >>> common_axes(FieldSpec(((0, 0),) * 2, components_before=(3,), components_after=(4,)), (1, 0))
    (0, 3, 2, 1)
    """
    grid, after = spec.grid_axes, len(spec.components_after)
    behind = range(grid.stop, grid.stop + after)
    return (*range(grid.start), *behind, *(grid[axis] for axis in axes))


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
        title="transpose",
        names=(" into ".join(map(str, described)),),
    )
