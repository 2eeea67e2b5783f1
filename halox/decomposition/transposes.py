"""Overlaps of two divisions of one grid: every rank's share of every other's cells.

Both divisions cut each axis into consecutive parts, so that the cells of a rank in one and of a peer in the other
meet in one box, or not at all::

    a: rows                    b: columns                 from a's rank 1 to b's ranks
    +-----------------+        +-----+-----+-----+        +-----+-----+-----+
    |        0        |        |     |     |     |        |     .     .     |
    +-----------------+        |  0  |  1  |  2  |        +-----+-----+-----+
    |        1        |        |     |     |     |        | ->0 | ->1 | ->2 |
    +-----------------+        |     |     |     |        +-----+-----+-----+
    |        2        |        |     |     |     |        |     .     .     |
    +-----------------+        +-----+-----+-----+        +-----+-----+-----+

The axes of the second may stand in another order. `axes` always gives, for each axis of one grid, the axis of the
other that is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from halox.decomposition.axis_layout import Box
from halox.decomposition.domain import Decomposition
from halox.decomposition.fields import FieldLayout, FieldSpec
from halox.errors import DecompositionError, FieldError
from halox.values import as_int, as_list, shown


@dataclass(frozen=True, slots=True)
class Overlap:
    """Cells that this rank owns in one division and ``peer``, possibly itself, in the other.

    ``box``, never empty, is their place in this rank's array, component axes in full.
    """

    peer: int
    box: Box


def normalise_axes(axes: object, ndim: int) -> tuple[int, ...]:
    """Return an order of axes as a tuple; the natural order for None.

    Raises `DecompositionError` if it is no permutation of ``range(ndim)``.

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
    """Return the order that undoes an order of axes."""
    return tuple(sorted(range(len(axes)), key=lambda k: axes[k]))


def check_same_grid(a: Decomposition, b: Decomposition, axes: Sequence[int]) -> None:
    """Raise `DecompositionError` unless axis ``k`` of ``b`` has the cells of axis ``axes[k]`` of ``a``."""
    wanted = tuple(a.grid_shape[axis] for axis in axes)
    if b.grid_shape != wanted:
        order = "" if tuple(axes) == tuple(range(a.ndim)) else f" in the order axes={tuple(axes)}"
        raise DecompositionError(
            f"grid_b: grid_shape={b.grid_shape} is not the {wanted} that grid_a has{order}; declare both grids with "
            "the same cells, or say with axes= which axis of grid_a each axis of grid_b is"
        )


def check_same_field(a: FieldLayout, b: FieldLayout, axes: Sequence[int]) -> None:
    """Raise `FieldError` unless two arrays of a rank, one in either decomposition, can hold the same field.

    The component axes may stand before the grid axes in one and after them in the other, in the same
    order. Axis ``k`` of ``b`` is axis ``axes[k]`` of ``a``.
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
    """Boxes of a rank's array that the ranks own in another decomposition of the same grid.

    Together they are the interior, and no two have a cell in common; halos belong to none. Axis ``i`` of the
    layout's decomposition is axis ``axes[i]`` of ``other``. In ascending order of the peer, without peers
    that share no cell; the time grows with their number, not with that of ranks.

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
    parts: list[list[tuple[int, int, int]]] = []  # per own axis: part of the other, start, size
    for i, (owned, first) in enumerate(zip(layout.owned, layout.origin, strict=True)):
        axis = other.axes[axes[i]]
        shared = []
        for part in range(axis.parts):
            start, stop = axis.owned_points(part, spec.staggered[i])
            start, stop = max(start, owned.start), min(stop, owned.stop)
            if start < stop:
                shared.append((part, start - first, stop - start))
        parts.append(shared)
    found = []
    for chosen in product(*parts):
        coords = [0] * other.ndim
        for i, (part, _, _) in enumerate(chosen):
            coords[axes[i]] = part
        peer = other.rank_at(coords)
        assert peer is not None
        starts = tuple(start for _, start, _ in chosen)
        subsizes = tuple(size for _, _, size in chosen)
        found.append(Overlap(peer, spec.box(starts, subsizes)))
    return tuple(sorted(found, key=lambda overlap: overlap.peer))


def common_axes(spec: FieldSpec, axes: Sequence[int]) -> tuple[int, ...]:
    """Axes of an array of a transpose in an order common to both: components, then ``grid_a``'s.

    ``axes`` are the grid axes of this array, in the order of ``grid_a``.

    Examples
    --------
    >>> common_axes(FieldSpec(((0, 0),) * 2, components_before=(3,), components_after=(4,)), (1, 0))
    (0, 3, 2, 1)
    """
    before, after = len(spec.components_before), len(spec.components_after)
    behind = range(before + spec.ndim, before + spec.ndim + after)
    return (*range(before), *behind, *(before + axis for axis in axes))
