"""Which cells pass between two ways of dividing one grid: every rank's share of every other's.

Both divisions cut each axis into consecutive parts, so what a rank owns in one and a peer owns in the other meet in
one box, or not at all::

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

from halox.decomposition.domain import Decomposition
from halox.decomposition.fields import Box, FieldLayout, FieldSpec
from halox.errors import DecompositionError, FieldError
from halox.values import as_int, as_list, shown


@dataclass(frozen=True, slots=True)
class Overlap:
    """What this rank owns in one division and ``peer`` owns in the other.

    Attributes
    ----------
    peer : int
        The other rank; may be this one.
    box : Box
        The cells in this rank's array, component axes in full. Never empty.
    """

    peer: int
    box: Box


def normalise_axes(axes: object, ndim: int) -> tuple[int, ...]:
    """Return an order of axes as a tuple; the natural order for None.

    Parameters
    ----------
    axes : None or sequence of int
        Every axis once.
    ndim : int
        Number of axes.

    Raises
    ------
    DecompositionError
        If it is no permutation of ``range(ndim)``.

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
    """Return the order that undoes an order of axes.

    Examples
    --------
    >>> inverse_axes((2, 0, 1))
    (1, 2, 0)
    """
    return tuple(sorted(range(len(axes)), key=lambda k: axes[k]))


def check_same_grid(a: Decomposition, b: Decomposition, axes: Sequence[int]) -> None:
    """Refuse two decompositions that are not of the same cells.

    Parameters
    ----------
    a, b : Decomposition
    axes : sequence of int
        Axis ``k`` of ``b`` is axis ``axes[k]`` of ``a``.

    Raises
    ------
    DecompositionError
        If the cells along any axis differ.

    Notes
    -----
    Not collective; the same outcome on every rank.
    """
    wanted = tuple(a.grid_shape[axis] for axis in axes)
    if b.grid_shape != wanted:
        order = "" if tuple(axes) == tuple(range(a.ndim)) else f" in the order axes={tuple(axes)}"
        raise DecompositionError(
            f"grid_b: grid_shape={b.grid_shape} is not the {wanted} that grid_a has{order}; declare both grids with "
            "the same cells, or say with axes= which axis of grid_a each axis of grid_b is"
        )


def check_same_field(a: FieldLayout, b: FieldLayout, axes: Sequence[int]) -> None:
    """Refuse two arrays that cannot hold the same field.

    The component axes may stand before the grid axes in one and behind them in the other, in the same order.

    Parameters
    ----------
    a, b : FieldLayout
        Of the same rank, in either decomposition.
    axes : sequence of int
        Axis ``k`` of ``b`` is axis ``axes[k]`` of ``a``.

    Raises
    ------
    FieldError
        If components or staggering differ, or if a staggered axis is periodic in one grid only.
    """
    first, second = a.spec, b.spec
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

    Together they are the interior, and no two have a cell in common. Halos belong to none.

    Parameters
    ----------
    layout : FieldLayout
        The rank's array in its own decomposition.
    other : Decomposition
        The other one.
    axes : sequence of int
        Axis ``i`` of the layout's decomposition is axis ``axes[i]`` of ``other``.

    Returns
    -------
    tuple of Overlap
        In ascending order of the peer, without peers that share no cell.

    Notes
    -----
    Not collective; touches no device. The time grows with the number of peers in the result, not with that of ranks.

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
    before, after = spec.components_before, spec.components_after
    found = []
    for chosen in product(*parts):
        coords = [0] * other.ndim
        for i, (part, _, _) in enumerate(chosen):
            coords[axes[i]] = part
        peer = other.rank_at(coords)
        if peer is None:
            raise AssertionError("a part of an axis lies outside the process grid")
        starts = tuple(start for _, start, _ in chosen)
        subsizes = tuple(size for _, _, size in chosen)
        box = Box(
            (0,) * len(before) + starts + (0,) * len(after),
            before + subsizes + after,
        )
        found.append(Overlap(peer, box))
    return tuple(sorted(found, key=lambda overlap: overlap.peer))


def common_axes(spec: FieldSpec, axes: Sequence[int]) -> tuple[int, ...]:
    """Positions of an array's axes in an order that both arrays of a transpose have in common.

    Parameters
    ----------
    spec : FieldSpec
        Which axes of the array are the grid's.
    axes : sequence of int
        The grid axes of this array, in the order of ``grid_a``.

    Returns
    -------
    tuple of int
        First the component axes, then the grid axes in the order of ``grid_a``.

    Examples
    --------
    >>> common_axes(FieldSpec(((0, 0),) * 2, components_before=(3,), components_after=(4,)), (1, 0))
    (0, 3, 2, 1)
    """
    before, after = len(spec.components_before), len(spec.components_after)
    behind = range(before + spec.ndim, before + spec.ndim + after)
    return (*range(before), *behind, *(before + axis for axis in axes))
