"""Sides of a grid that are joined with a flip or a shift: folds of tripolar grids, poles, Moebius strips.

All points beyond a joined side are images of points of the grid, and so are some points of the grid itself, on the line
of a fold. An exchange fills every image from the rank that owns the point, corners included, so that no step waits for
an earlier one. For 6 x 4 cells, periodic along x and folded at the high side of y, with the pivot at a T point::

    y = 4   a f e d c b    beyond the side: y' = 6 - y, x' = -x modulo 6
    y = 3   0 1 2 3 2 1    the line: its second half is the image of its first half
    y = 2   a b c d e f    points that are not images

Each of these three kinds of rows has one map of indices per axis. The boxes of an exchange are products of the runs of
these maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, product
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from halox.decomposition.axis_layout import AxisLayout
from halox.decomposition.boundaries import SIDES
from halox.decomposition.partition import AxisPartition
from halox.errors import DecompositionError, FieldError
from halox.values import as_int, as_list, shown

PIVOTS = {"T": (1, 1), "U": (0, 1), "V": (1, 0), "F": (0, 0)}
"""Whether the pivot is at the center of a cell, along the flipped axis and along the joined axis."""

NONE = -(1 << 40)

_Map: TypeAlias = tuple[Any, Any]
"""Indices along an axis, and for each the index of its point, or `NONE`."""

_Run: TypeAlias = tuple[int, int, int, int]
"""First index, first point, number of points, and step from point to point."""

Turn: TypeAlias = tuple[tuple[int, int], ...]
"""For each axis of the images, the axis of their points, and the step from point to point."""


class Piece(NamedTuple):
    """A box that a part sends to another part, or receives."""

    key: int  # orders the boxes of two parts
    parts: tuple[int, ...]  # the other part
    sends: bool
    firsts: tuple[int, ...]  # global indices
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    turn: Turn | None  # if it comes across a connection


@dataclass(frozen=True)
class Connection:
    """A flip or a shift that joins sides of a grid; see ``connect`` of `halox.Grid`.

    Parameters
    ----------
    flip : int, optional
        Another grid axis, which is mirrored.
    shift : (int, int), optional
        Another, periodic grid axis, and the number of cells by which it is shifted.
    pivot : {"F", "T", "U", "V"}
        The point about which a side is folded that is joined with itself. "F" is the corner of a cell: the line of the
        fold follows the outer faces of the last row of cells. "T" is the center of a cell: the line follows the centers
        of this row. "U" is a face of the flipped axis in this row, and "V" the center of an outer face.

    Notes
    -----
    Cell ``i`` of an axis reaches from ``i`` to ``i + 1``. At the high side of M cells a fold maps a position ``y`` to
    ``2 * M - y``, or to ``2 * M - 1 - y`` with the pivot "T" or "U". Along the flipped axis of N cells ``x`` becomes
    ``-x``, or ``1 - x`` with the pivot "T" or "V", modulo N; if this axis is not periodic, ``N - x``. Indices follow
    from the places of a field's points: low faces along a staggered axis, else centers, or the option ``position`` of
    `Grid.zeros`. On cells, row ``M + k`` is row ``M - 1 - k`` with ``N - 1 - i`` for ``i`` if the pivot is "F", and row
    ``M - 2 - k`` with ``(N - i) % N`` if it is "T".

    Two indices stand for each point on the line of a fold. An exchange copies the first half of the line, in the order
    of the flipped or shifted axis, to the second half, with the sign of the field. Reductions count both halves, with
    ``unique=True`` only the first.
    No rank owns a line outside the indices of the field: high faces along a line at the low end of the grid, or low
    faces along one at the high end if the axis is not staggered. An exchange leaves these points to you.

    Examples
    --------
    >>> import halox
    >>> fold = {(0, "high"): halox.Connection(flip=1)}
    >>> with halox.Grid((4, 6), periodic=(False, True), connect=fold, device="cpu") as grid:
    ...     u = grid.zeros()
    ...     grid.interior(u)[-1] = range(6)
    ...     grid.exchange(u)
    ...     u[-1]
    array([0., 5., 4., 3., 2., 1., 0., 5.])
    """

    flip: int | None = None
    shift: tuple[int, int] | None = None
    pivot: Literal["F", "T", "U", "V"] = "F"


@dataclass(frozen=True)
class _Side:
    """A joined side: ``step`` and ``shift`` map the indices of the axis ``other``; the pivot is that of `PIVOTS`."""

    side: int
    other: int
    step: int
    shift: int
    pivot: tuple[int, int]


class Along(NamedTuple):
    """A grid axis and a field along it."""

    partition: AxisPartition
    layouts: Sequence[AxisLayout]  # of each part's array
    halo: tuple[int, int]
    staggered: bool
    position: int  # twice the distance of the points from the low faces of their cells
    is_filled: bool  # whether the halo of an undivided periodic axis is filled earlier, and then counts as owned

    @property
    def points(self) -> int:
        return self.partition.points(self.staggered)

    def plain_map(self) -> _Map:
        """Return the indices that the arrays of all parts have, and the points of an axis without connections."""
        index = np.arange(-self.halo[0], self.points + self.halo[1] + 1)
        if self.partition.periodic:
            return index, index if self.is_filled else index % self.points
        return index, np.where((index >= 0) & (index < self.points), index, NONE)

    def owned(self, part: int) -> tuple[int, int]:
        """Return the half-open range of indices that a part owns."""
        if self.is_filled:
            return -self.halo[0], self.points + self.halo[1] + self.staggered
        return self.partition.owned_points(part, self.staggered)

    def zone(self, part: int, zone: int) -> tuple[int, int]:
        """Return the half-open range of indices of a zone of a part's array; `Joined.pieces` explains zones."""
        layout = self.layouts[part]
        start, end = layout.start, layout.start + layout.points
        low, high = start - layout.moved_low, end + min(layout.high, layout.moved_high)
        return ((low, high), (start, end), (low, start), (end, high))[zone]


def _runs(map_: _Map, inside: Any, owned: Any, steps: tuple[int, ...]) -> list[_Run]:
    """Return the runs with images of owned points inside a range of indices."""
    begin, (first, past) = map_[0][0], inside
    index, points = (values[first - begin : past - begin] for values in map_)
    runs: list[_Run] = []
    for i, point in zip(index.tolist(), points.tolist(), strict=True):
        if not owned[0] <= point < owned[1]:
            continue
        if runs:
            at, first, size, step = runs[-1]
            new = point - first if size == 1 else step
            if i == at + size and point == first + size * new and new in steps:
                runs[-1] = at, first, size + 1, new
                continue
        runs.append((i, point, 1, 1))
    return runs


@dataclass(frozen=True)
class Joined:
    """The joined sides of an axis. Each is joined with itself or, if ``wraps``, with the other side."""

    axis: int
    sides: tuple[_Side, ...]
    wraps: bool
    text: str

    @property
    def walls(self) -> tuple[tuple[int, int], ...]:
        """The axis and the number of each joined side."""
        return tuple((self.axis, joined.side) for joined in self.sides)

    def __str__(self) -> str:
        return self.text

    def check(self, axes: Sequence[Along], is_vector: bool) -> None:
        """Raise `DecompositionError` or `FieldError` if a field does not suit the connections."""
        if is_vector:
            raise FieldError("sign: only a halox.CubedSphere has vectors; give signs by component")
        # The image of a halo must not reach the line of another fold, or the copy of a first staggered point.
        cells, halo = axes[self.axis].partition.cells, axes[self.axis].halo
        for joined in self.sides:
            most = cells - (1 if self.wraps else len(self.sides))
            if not self.wraps:
                # The outermost row may itself be an image.
                last = axes[self.axis].points - 1
                image = _mirror(joined, axes[self.axis]) - last * joined.side
                most = min(most, image if joined.side else last - image)
            if most < 0:
                raise DecompositionError(
                    f"grid_shape: axis {self.axis} needs at least {cells - most} cells for its two joined sides, got "
                    f"{cells}"
                )
            if halo[joined.side] > most:
                raise DecompositionError(
                    f"halo: expected at most {most} at the joined {SIDES[joined.side]} side of axis {self.axis} of "
                    f"{cells} cells, got {halo[joined.side]}"
                )
            other = axes[joined.other]
            mirrors_ends = joined.step < 0 and not other.partition.periodic
            if mirrors_ends and other.position + other.staggered != 1:
                raise FieldError(
                    f"position: axis {joined.other} is flipped and not periodic; points along it must be 'center', or "
                    "the field staggered"
                )

    def images(self, axes: Sequence[Along]) -> Iterator[tuple[list[_Map], Turn | None]]:
        """Yield for each kind of row the maps of all axes, and the turn if it crosses a connection."""
        straight = tuple((axis, 1) for axis in range(len(axes)))
        plain = [along.plain_map() for along in axes]
        index, rows = plain[self.axis]
        is_plain, joined_rows = rows >= 0, []
        for joined in self.sides:
            if self.wraps:
                cells = axes[self.axis].partition.cells
                image = (index + cells, index - cells)[joined.side]
                is_beyond, is_line = (index < 0, index >= cells)[joined.side], index < -cells
            else:
                image = _mirror(joined, axes[self.axis]) - index
                is_beyond = image < index if joined.side else image > index
                is_line = image == index
            is_plain &= ~(is_beyond | is_line)
            number, same = plain[joined.other]
            across = _across(joined, axes[joined.other], number)
            n = axes[joined.other].points
            is_second = across % n < number % n
            for where, columns, turn in (
                (is_beyond, across, straight),
                (is_line, np.where(is_second, NONE, same), None),
                (is_line, np.where(is_second, across, NONE), straight),
            ):
                maps = plain.copy()
                maps[self.axis] = index, np.where(where, image, NONE)
                maps[joined.other] = number, columns
                joined_rows.append((maps, turn))
        plain[self.axis] = index, np.where(is_plain, rows, NONE)
        yield plain, None
        yield from joined_rows

    def unowned(self, axes: Sequence[Along]) -> list[int]:
        """Return the indices along this axis of lines that are outside the points of a field."""
        doubles = [] if self.wraps else [_mirror(joined, axes[self.axis]) for joined in self.sides]
        points = axes[self.axis].points
        return [n // 2 for n in doubles if n % 2 == 0 and not 0 <= n // 2 < points]

    def pieces(
        self,
        axes: Sequence[Along],
        coords: tuple[int, ...],
        corners: bool,
        fixed: Sequence[int] = (),
    ) -> Iterator[Piece]:
        """Yield the boxes that the part at some coordinates sends and receives in an exchange.

        Without ``corners`` each box is in one zone of the array per axis: its own points, or the low or the high halo.
        Along ``fixed`` axes it is in the own points.
        """
        ndim, straight = len(axes), tuple((axis, 1) for axis in range(len(axes)))
        per_axis = [(1,) if n in fixed else (0,) if corners else (1, 2, 3) for n in range(ndim)]
        zones = [z for z in product(*per_axis) if sum(z) - max(z) < ndim]
        # As arrays of all parts: with loops over the parts, the boxes of 1,024 parts took a second.
        owned = [np.array([*map(along.owned, range(along.partition.parts))]) for along in axes]
        stored = [
            {
                n: np.array([along.zone(part, n) for part in range(along.partition.parts)])
                for n in {*chain(*zones)}
            }
            for along in axes
        ]
        for number, (maps, turn) in enumerate(self.images(axes), 1):
            sources = [source for source, _ in turn or straight]
            # Of 2 periodic points, a step back could join owned points and halo.
            allowed = (1,) if turn is None else (1, -1)
            for zone, sends in product(zones, (False, True)):
                choices = []
                for at, (source, map_) in enumerate(zip(sources, maps, strict=True)):
                    inside, owners = stored[at][zone[at]], owned[source]
                    index, points = map_
                    if sends:
                        mine, theirs = owners[coords[source]], inside
                        found = index[(points >= mine[0]) & (points < mine[1])]
                    else:
                        mine, theirs = inside[coords[at]], owners
                        found = np.sort(points[slice(*(mine - index[0]))])
                    lower, upper = np.searchsorted(found, theirs).T
                    choices.append(
                        [
                            (other, n, *run)
                            for other in np.flatnonzero(lower < upper).tolist()
                            for n, run in enumerate(
                                _runs(map_, theirs[other], mine, allowed)
                                if sends
                                else _runs(map_, mine, theirs[other], allowed)
                            )
                        ]
                    )
                for chosen in product(*choices):
                    parts, runs, firsts, points, sizes, steps = zip(*chosen, strict=True)
                    if turn is None and firsts == points and parts == coords:
                        continue
                    key = reduce(lambda whole, n: whole << 10 | n, (*zone, *runs), number)
                    # Turns swap two axes at most, so that they are their own inverses.
                    if sends:
                        points, sizes, steps = (
                            tuple(one[n] for n in sources) for one in (points, sizes, steps)
                        )
                        yield Piece(key, parts, sends, points, sizes, steps, turn)
                    else:
                        parts = tuple(parts[n] for n in sources)
                        yield Piece(key, parts, sends, firsts, sizes, (1,) * ndim, turn)


def _across(joined: _Side, along: Along, index: Any) -> Any:
    """Return the images of indices along the flipped or shifted axis, or `NONE`."""
    n = along.points
    if not along.partition.periodic:
        return np.where((index >= 0) & (index < n), n - 1 - index, NONE)
    shift = joined.pivot[0] - along.position if joined.step < 0 else joined.shift
    image = joined.step * index + shift % n
    first, past = along.owned(0) if along.is_filled else (0, n)
    return np.where((image >= first) & (image < past), image, image % n)


def _mirror(joined: _Side, along: Along) -> int:
    """Return the sum of the indices of a point and its image along a folded axis."""
    at_center = joined.pivot[1]
    line = 2 * along.partition.cells - at_center if joined.side else at_center
    return line - along.position


def negated_boxes(
    box: tuple[slice, ...], extents: Sequence[int], is_negative: Callable[[tuple[int, ...]], bool]
) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of a box with components that change their sign; ``extents`` has 0 for grid axes."""
    components = [*np.ndindex(*filter(None, extents))]
    negative = [component for component in components if is_negative(component)]
    if len(negative) == len(components):
        yield box
        return
    for component in negative:
        cuts = iter([slice(n, n + 1) for n in component])
        yield tuple(next(cuts) if n else cut for cut, n in zip(box, extents, strict=True))


def normalise_connect(
    connect: object, grid_shape: Sequence[int], periodic: Sequence[bool]
) -> Joined:
    """Return the joined sides of a grid, from the argument ``connect`` of `halox.Grid`; raises `DecompositionError`."""
    if isinstance(connect, Joined):
        if any(periodic):
            raise DecompositionError(
                f"periodic: a {connect} has no periodic axis, got {tuple(periodic)}; give a Cartesian communicator "
                "without periods, or comm=mpi4py.MPI.Intracomm(comm) to ignore its topology"
            )
        return connect
    if not isinstance(connect, Mapping) or not connect:
        raise DecompositionError(
            f"connect: expected a dict such as {{(0, 'high'): halox.Connection(flip=1)}}, got {shown(connect)}"
        )
    sides: dict[int | None, _Side] = {}
    axes = set()
    for key, connection in connect.items():
        entries = [key, None] if as_int(key) is not None else as_list(key) or []
        axis = as_int(entries[0]) if len(entries) == 2 else None
        if axis is None or not 0 <= axis < len(periodic) or entries[1] not in (None, *SIDES):
            raise DecompositionError(
                f"connect: the keys are grid axes, 0 to {len(periodic) - 1}, or pairs of an axis and 'low' or 'high', "
                f"got {shown(key)}"
            )
        if not isinstance(connection, Connection):
            raise DecompositionError(
                f"connect: expected a halox.Connection for {key!r}, got {shown(connection)}"
            )
        axes.add(axis)
        side = None if entries[1] is None else SIDES.index(entries[1])
        sides[side] = _side(connection, axis, side, grid_shape, periodic)
    whole = sides.pop(None, None)
    if len(axes) > 1 or (whole and sides):
        raise DecompositionError(
            "connect: expected one axis, or its 'low' and 'high' sides with themselves, got "
            f"{', '.join(map(repr, connect))}"
        )
    # Beyond the low side the shift is backwards.
    both = (replace(whole, shift=-whole.shift), replace(whole, side=1)) if whole else None
    text = ", ".join(f"{key!r}: {connection}" for key, connection in connect.items())
    return Joined(axes.pop(), both or tuple(sides.values()), bool(whole), f"{{{text}}}")


def coarsened(connect: object, factors: Sequence[int]) -> object:
    """Return the argument ``connect`` for cells larger by some factors; raises `DecompositionError` if it has none."""
    if not isinstance(connect, Mapping):
        return connect
    result = {}
    for key, connection in connect.items():
        axis, cells = connection.shift or (0, 0)
        if connection.pivot != "F" or cells % factors[axis]:
            raise DecompositionError(
                f"factor: {connection} has its pivot or its shift between cells that are larger by {factors}"
            )
        shift = (axis, cells // factors[axis])
        result[key] = replace(connection, shift=connection.shift and shift)
    return result


def _side(
    connection: Connection,
    axis: int,
    side: int | None,
    grid_shape: Sequence[int],
    periodic: Sequence[bool],
) -> _Side:
    """Return a joined side; raises `DecompositionError` if the connection does not fit the grid."""
    shift = [connection.flip, 0] if connection.shift is None else as_list(connection.shift) or []
    other, cells = map(as_int, shift if len(shift) == 2 else (None, None))
    problem = ""
    if periodic[axis]:
        problem = "this axis is periodic; make the grid without periodic"
    elif (connection.flip is None) == (connection.shift is None):
        problem = "give either flip=axis or shift=(axis, cells)"
    elif other is None or cells is None or other == axis or not 0 <= other < len(periodic):
        problem = f"flip and shift name another grid axis, 0 to {len(periodic) - 1}"
    elif connection.pivot not in [*PIVOTS]:
        problem = "pivot must be 'F', 'T', 'U' or 'V'"
    elif side is None and connection.pivot != "F":
        problem = "sides that are joined with each other have no pivot; leave it out"
    elif connection.shift is not None and not periodic[other]:
        problem = f"only a periodic axis can be shifted, and axis {other} is not"
    elif (
        connection.shift is not None
        and side is not None
        and 2 * (cells % grid_shape[other]) != grid_shape[other]
    ):
        problem = f"a side joined with itself is shifted by half of the {grid_shape[other]} cells, an even number"
    elif connection.flip is not None and PIVOTS[connection.pivot][0] and not periodic[other]:
        problem = (
            f"axis {other} is not periodic and is flipped about its middle; give pivot='F' or 'U'"
        )
    if problem or other is None or cells is None:
        raise DecompositionError(f"connect: {connection} for axis {axis}: {problem}")
    step = 1 if connection.flip is None else -1
    return _Side(side or 0, other, step, cells, PIVOTS[connection.pivot])
