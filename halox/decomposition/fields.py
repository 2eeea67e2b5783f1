"""Layout of a field in each rank's array, and the boxes that an exchange sends and receives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias

from halox.decomposition.axis_layout import AxisLayout, Box, Interval
from halox.decomposition.boundaries import SIDES, Boundaries, boundary_text
from halox.decomposition.domain import Decomposition
from halox.decomposition.normalise import Halo, check_periods
from halox.decomposition.parity import PARITIES, Parity, check_checkerboard, parity_boxes
from halox.decomposition.walls import Walls
from halox.errors import DecompositionError, FieldError
from halox.tables import html_facts
from halox.values import as_int, shown

if TYPE_CHECKING:
    from halox.decomposition.connections import Along, Joined, Turn


@dataclass(frozen=True)
class FieldSpec:
    """Properties of a field that the grid does not determine: halo, component axes, staggering, parity, offsets.

    Parameters
    ----------
    halo : tuple of (int, int)
        ``(low, high)`` per grid axis, in cells.
    components_before, components_after : tuple of int
        Extents of the array's axes before and after the grid axes.
    staggered : tuple of bool
        Per grid axis, whether the field has one more point along it. Empty if the field is not staggered.
    parity : {"even", "odd"}, optional
        Parity of the field's cells on a checkerboard; all cells by default.
    offsets : tuple of int
        Distances along the axes at which a stencil reads the field. Exchanges then update the halo up to the largest
        distance, without corners. Empty for whole halos.
    boundary : tuple
        What an exchange writes into the halo at the walls of the grid, from `normalise_boundary`.
    signs : tuple of (component, sign)
        Signs of components across connections, () standing for all others; empty without a change.
    positions : tuple of int
        Per grid axis the place of the points in their cells: 0 (low face), 1 (center) or 2 (high face). By default
        0 along staggered axes, else 1.
    is_vector : bool
        Whether both components are those of a vector along two axes of a cubed sphere.

    Raises
    ------
    DecompositionError
        If a halo width is negative, ``halo`` does not hold pairs, a component axis has an extent of less
        than one, ``staggered`` does not have one entry per grid axis, the field is staggered and has a parity,
        ``parity`` is not valid, or an offset is less than one or larger than a halo width that is not 0.
    FieldError
        If the field has a parity and a boundary, if the boundary or a sign names a component that the field does not
        have, or ``positions`` contradicts ``staggered``.
    """

    halo: Halo
    components_before: tuple[int, ...] = ()
    components_after: tuple[int, ...] = ()
    staggered: tuple[bool, ...] = ()
    parity: Parity | None = None
    offsets: tuple[int, ...] = ()
    boundary: Boundaries = ()
    signs: tuple[tuple[tuple[int, ...], int], ...] = ()
    positions: tuple[int, ...] = ()
    is_vector: bool = False

    def __post_init__(self) -> None:
        """Fill in ``staggered`` and check all properties."""
        if any(len(sides) != 2 or min(sides) < 0 for sides in self.halo):
            raise DecompositionError(
                f"halo: expected (low, high) per grid axis, 0 or more, got {self.halo}; "
                "see normalise_halo for shorter forms"
            )
        if any(extent < 1 for extent in self.components_before + self.components_after):
            raise DecompositionError(
                "components: expected extents of 1 or more, got "
                f"{self.components_before} before and {self.components_after} after the grid axes"
            )
        if not self.staggered:
            object.__setattr__(self, "staggered", (False,) * self.ndim)
        if len(self.staggered) != self.ndim:
            raise DecompositionError(
                f"staggered: expected one entry per grid axis ({self.ndim}), got {self.staggered}"
            )
        if self.parity is not None:
            if self.parity not in PARITIES:
                raise DecompositionError(
                    f"parity: expected one of {', '.join(PARITIES)}, or None, got {self.parity!r}"
                )
            if any(self.staggered):
                raise DecompositionError(
                    f"parity: a staggered field has points that are not cells of a checkerboard, got "
                    f"staggered={self.staggered} with parity={self.parity!r}; give one of the two"
                )
        self._check_offsets()
        self._check_boundary()

    def _check_boundary(self) -> None:
        if self.parity is not None and self.boundary:
            raise FieldError(
                "boundary: a field of one parity has no mirror images of its cells; give boundary=None for this field"
            )
        extents = self.components_before + self.components_after
        named = [("boundary", component) for component, _ in self.boundary]
        for name, component in [*named, *(("sign", component) for component, _ in self.signs)]:
            if component and (
                len(component) != len(extents)
                or any(one >= extent for one, extent in zip(component, extents, strict=True))
            ):
                raise FieldError(
                    f"{name}: the field has no component {component}; its component axes have the extents {extents}"
                )
        if self.is_vector and self.components_before != (2,):
            raise FieldError(
                f"sign: a vector needs components=2, got {self.components_before} before the grid axes"
            )
        if any(
            place and is_so for place, is_so in zip(self.positions, self.staggered, strict=False)
        ):
            raise FieldError(
                f"position: a staggered field has its points at the low faces, got {self.positions} (0 low, 1 center, "
                f"2 high) with staggered={self.staggered}"
            )

    def _check_offsets(self) -> None:
        if min(self.offsets, default=1) < 1:
            raise DecompositionError(
                f"offsets: expected distances of 1 cell or more, got {self.offsets}; each holds in both directions "
                "of every axis"
            )
        for axis, widths in enumerate(self.halo):
            if any(0 < width < max(self.offsets, default=0) for width in widths):
                raise DecompositionError(
                    f"offsets: the stencil reaches {max(self.offsets)} cells, and the halo along axis {axis} has "
                    f"{widths} (low, high); give a halo of {max(self.offsets)}, or of 0 on a side without"
                )

    @property
    def ndim(self) -> int:
        """Number of grid axes."""
        return len(self.halo)

    def box(
        self,
        starts: tuple[int, ...],
        subsizes: tuple[int, ...],
        steps: tuple[int, ...] | None = None,
    ) -> Box:
        """Box with the given extents along the grid axes and the whole component axes."""
        before, after = self.components_before, self.components_after
        if steps is not None:
            steps = (1,) * len(before) + steps + (1,) * len(after)
        starts = (0,) * len(before) + starts + (0,) * len(after)
        return Box(starts, before + subsizes + after, steps)

    @cached_property
    def without_boundary(self) -> FieldSpec:
        """The same properties without boundaries, which may hold functions that cannot be sent to another rank."""
        return replace(self, boundary=()) if self.boundary else self

    def is_negative(self, turn: Turn, component: tuple[int, ...]) -> bool:
        """Whether a component changes its sign across a connection."""
        if self.is_vector:
            return turn[1 + component[0]][1] < 0
        signs = dict(self.signs)
        return signs.get(component, signs.get((), 1)) < 0

    @cached_property
    def text(self) -> str:
        """Text of all properties; equal specs have equal texts in every process."""
        return str(self)

    @cached_property
    def digest(self) -> str:
        """Hash of 16 hexadecimal digits; equal specs have equal hashes in every process."""
        return blake2b(self.text.encode(), digest_size=8).hexdigest()

    def _across(self) -> dict[str, object]:
        """Return the options ``sign`` and ``position``."""
        places = tuple(("low", "center", "high")[place] for place in self.positions)
        return {"sign": "vector" if self.is_vector else dict(self.signs), "position": places}

    def declaration(self, halo: Halo) -> str:
        """Return the text of a call that declares an array with these properties; ``halo`` is the grid's halo.

        Examples
        --------
        >>> FieldSpec(((2, 2), (2, 2)), (3,), staggered=(True, False)).declaration(((1, 1), (1, 1)))
        'grid.declare(array, components=(3,), staggered=(0,), halo=2)'
        """
        widths = {width for sides in self.halo for width in sides}
        options = {
            "staggered": tuple(axis for axis, is_so in enumerate(self.staggered) if is_so),
            "parity": self.parity,
            "offsets": self.offsets,
            **self._across(),
        }
        texts = [f"{name}={value!r}" for name, value in options.items() if value]
        if self.components_before or self.components_after:
            components = components_text(self.components_before, self.components_after)
            texts.insert(0, f"components={components}")
        if self.boundary:
            texts.append("boundary=...")
        if self.halo != halo:
            texts.append(f"halo={widths.pop() if len(widths) == 1 else self.halo}")
        return f"grid.declare({', '.join(['array', *texts])})"

    def __str__(self) -> str:
        """Return the properties as text."""
        text = (
            f"components={components_text(self.components_before, self.components_after)}, "
            f"staggered={self.staggered}, halo={self.halo}"
        )
        if self.parity is not None:
            text += f", parity={self.parity!r}"
        if self.offsets:
            text += f", offsets={self.offsets}"
        text += "".join(f", {name}={value!r}" for name, value in self._across().items() if value)
        return f"{text}, boundary={boundary_text(self.boundary)}" if self.boundary else text


def components_text(before: tuple[int, ...], after: tuple[int, ...]) -> str:
    """Return component axes before and after the grid axes as the value of the option ``components``.

    Examples
    --------
    >>> components_text((2,), ()), components_text((2,), (3, 4)), components_text((), (3,))
    ('(2,)', '(2, ..., 3, 4)', '(..., 3)')
    """
    return f"({', '.join(map(str, (*before, '...', *after)))})" if after else str(before)


@dataclass(frozen=True, slots=True)
class Region:
    """Boxes exchanged with the neighbour in one direction.

    ``send`` holds owned points, ``recv`` holds halo points. The points of ``send`` are the points of the neighbour's
    ``recv`` in the opposite direction, even if the same peer is the neighbour in several directions. A field of one
    parity may have several regions per direction. The sender and the receiver then list these regions in the same
    order.
    """

    direction: tuple[int, ...]  # -1, 0 or +1 per grid axis; any displacement if a halo is wide
    peer: int  # rank of the neighbour; this rank itself along a periodic axis of one rank
    send: Box | None  # owned points; None if no points are sent
    recv: Box | None  # halo points; None if no points are received
    turn: Turn | None = None  # if the points come across a connection


_Intervals: TypeAlias = tuple[Interval, ...] | dict[int, Interval]
"""Intervals along an axis by direction or displacement."""


@dataclass(frozen=True, eq=False)
class FieldLayout:
    """Positions of a field's points in the array of one rank and in the grid; `halox.Grid.layout` returns it.

    A grid has one object for equal properties, which is compared by identity.

    Parameters
    ----------
    decomposition : Decomposition
        The grid and its ranks.
    rank : int
        The array's rank.
    spec : FieldSpec
        Properties of the field; the same on all ranks.

    Raises
    ------
    DecompositionError
        If ``spec`` is for another number of grid axes, or ``rank`` is out of range. For a field of one parity, also if
        an extent is odd, or a block along the last axis begins at an odd cell.

    Examples
    --------
    >>> from halox.decomposition import decompose
    >>> domain = decompose((10, 8), 4, periodic=True, proc_shape=(2, 2))
    >>> layout = FieldLayout(domain, 1, FieldSpec(((1, 1), (2, 0)), components_after=(3,)))
    >>> layout.padded_shape, layout.origin
    ((7, 6, 3), (-1, 2))
    >>> layout.owned
    (slice(0, 5, None), slice(4, 8, None))
    >>> layout.interior
    (slice(1, 6, None), slice(2, 6, None), slice(None, None, None))
    """

    decomposition: Decomposition
    rank: int
    spec: FieldSpec

    def __post_init__(self) -> None:
        """Check the number of axes, the rank and, for a field of one parity, the cuts of the grid."""
        if self.spec.ndim != self.decomposition.ndim:
            raise DecompositionError(
                f"spec: expected halo widths for {self.decomposition.ndim} grid axes "
                f"(grid_shape={self.decomposition.grid_shape}), got {self.spec.halo}"
            )
        self.decomposition.coords_of(self.rank)
        if self.spec.parity is not None:
            check_checkerboard(self.decomposition.axes)

    def __repr__(self) -> str:
        """Return text with the shape of the rank's array and the properties of its axes."""
        facts = ", ".join(f"{name} {value}" for name, value in self._facts().items())
        return f"<halox field layout: {facts}>"

    def _repr_html_(self) -> str:
        """Return a table for a notebook."""
        return html_facts("halox field layout", self._facts())

    def _facts(self) -> dict[str, object]:
        spec = self.spec
        facts: dict[str, object] = {
            "rank": self.rank,
            "padded shape": self.padded_shape,
            "halo": spec.halo,
            "owned": ", ".join(f"{cut.start}:{cut.stop}" for cut in self.owned),
        }
        for name, components in (
            ("components before", spec.components_before),
            ("components after", spec.components_after),
        ):
            if components:
                facts[name] = components
        if any(spec.staggered):
            facts["staggered"] = spec.staggered
        if spec.parity is not None:
            facts["parity"] = f"{spec.parity}, last axis in pairs"
        if spec.offsets:
            facts["offsets"] = spec.offsets
        return facts

    @cached_property
    def _cells(self) -> tuple[AxisLayout, ...]:
        """Grid axes of the array, in cells even for a field of one parity."""
        coords = self.decomposition.coords_of(self.rank)
        return tuple(self.along(axis, part) for axis, part in enumerate(coords))

    def along(self, axis: int, part: int) -> AxisLayout:
        """Return a grid axis of the array of a part along it, in cells."""
        spec, partition = self.spec, self.decomposition.axes[axis]
        return AxisLayout.of(partition, part, spec.halo[axis], spec.staggered[axis], spec.offsets)

    @cached_property
    def _axes(self) -> tuple[AxisLayout, ...]:
        """Grid axes of the array as stored; for one parity the last axis is in pairs."""
        *others, last = self._cells
        return (*others, last if self.spec.parity is None else last.in_pairs())

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of the rank's array, with halo and component axes."""
        return self._with_components(tuple(axis.stored for axis in self._axes))

    @cached_property
    def is_flat_somewhere(self) -> bool:
        """Whether a grid axis of the array has one point on some ranks, and more points on other ranks.

        On ranks with one point, arrays in C and in Fortran order may have the same strides. On ranks with more points
        the strides differ.
        """
        spec, axes = self.spec, self.decomposition.axes
        for index, (axis, halo, staggered) in enumerate(
            zip(axes, spec.halo, spec.staggered, strict=True)
        ):
            of_parts = (
                AxisLayout.of(axis, part, halo, staggered, spec.offsets)
                for part in range(axis.parts)
            )
            in_pairs = spec.parity is not None and index == len(axes) - 1
            stored = {(along.in_pairs() if in_pairs else along).stored for along in of_parts}
            if 1 in stored and len(stored) > 1:
                return True
        return False

    @cached_property
    def is_wide(self) -> bool:
        """Whether an exchange fills a halo that is wider than a neighbour's block, on any rank."""
        spec, most = self.spec, max(self.spec.offsets, default=None)
        per_axis = zip(self.decomposition.axes, spec.halo, spec.staggered, strict=True)
        return any(
            limit is not None and (width if most is None else min(width, most)) > limit
            for axis, halo, staggered in per_axis
            for width, limit in zip(halo, axis.width_limits(staggered), strict=True)
        )

    @property
    def origin(self) -> tuple[int, ...]:
        """Global index of the array's first point, per grid axis; negative in a low halo.

        Along the last axis of a field of one parity, `origin` and `owned` count pairs of cells.
        """
        return tuple(axis.start - axis.low for axis in self._axes)

    @cached_property
    def interior(self) -> tuple[slice, ...]:
        """Index of the owned points in the array, with the whole component axes."""
        grid = tuple(slice(axis.low, axis.low + axis.points) for axis in self._axes)
        before, after = self.spec.components_before, self.spec.components_after
        return (slice(None),) * len(before) + grid + (slice(None),) * len(after)

    @property
    def owned(self) -> tuple[slice, ...]:
        """Global index of the owned points, per grid axis."""
        return tuple(slice(axis.start, axis.start + axis.points) for axis in self._axes)

    @cached_property
    def owned_of_ranks(self) -> tuple[tuple[slice, ...], ...]:
        """`owned` of every rank."""
        ranks = range(self.decomposition.ranks)
        return tuple(FieldLayout(self.decomposition, rank, self.spec).owned for rank in ranks)

    @property
    def stored(self) -> tuple[slice, ...]:
        """Global index of the array's points, halo included, per grid axis."""
        return tuple(
            slice(axis.start - axis.low, axis.start + axis.points + axis.high)
            for axis in self._axes
        )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole field, component axes included; for one parity the last grid axis counts pairs."""
        axes = zip(self.decomposition.axes, self.spec.staggered, strict=True)
        *others, last = [axis.points(staggered) for axis, staggered in axes]
        return self._with_components((*others, last if self.spec.parity is None else last // 2))

    def regions(self, corners: bool = True) -> tuple[Region, ...]:
        """Boxes that an exchange sends and receives, one ``Region`` per neighbour.

        If the direction along an axis is 0, the box covers the owned points along this axis. So the owner of
        a halo point fills it, the diagonal neighbour fills a corner, and the messages may arrive in any order. If
        `is_wide`, more distant ranks also send, and there is a ``Region`` per displacement in the process grid.

        Parameters
        ----------
        corners : bool
            Whether to include edges and corners. A field with ``offsets`` has faces only.

        Returns
        -------
        tuple of Region
            In the lexicographic order of their directions. Regions without points are included. A field of one parity
            may have several regions in a direction along the last axis, because faces that cut pairs are irregular.

        Notes
        -----
        Not collective; touches no device. Meaningful only if ``check_widths`` passes.
        """
        corners = corners and not self.spec.offsets
        if self.decomposition.joined is not None:
            return tuple(self._joined_regions(self.decomposition.joined, corners))
        sent: Sequence[_Intervals] = [axis.sent() for axis in self._cells]
        received: Sequence[_Intervals] = [axis.received() for axis in self._cells]
        neighbours = self.decomposition.neighbours(self.rank, corners)
        if self.is_wide:
            from halox.decomposition.wide import wide_intervals, wide_neighbours

            spec, at = self.spec, (self.decomposition, self.rank)
            sent, received = wide_intervals(*at, spec.halo, spec.staggered, spec.offsets)
            neighbours = wide_neighbours(*at, sent, corners)
        return tuple(
            Region(at.direction, at.rank, send, receive)
            for at in neighbours
            for send, receive in zip_longest(
                self._boxes(sent, at.direction), self._boxes(received, at.direction)
            )
        )

    def joined_axes(self, *, in_turn: bool = False) -> tuple[Along, ...]:
        """Return the grid axes, for connections; ``in_turn`` is for `slabs`."""
        from halox.decomposition.connections import Along

        spec = self.spec
        places = spec.positions or tuple(1 - staggered for staggered in spec.staggered)
        return tuple(
            Along(
                axis,
                [self.along(n, part) for part in range(axis.parts)],
                spec.halo[n],
                spec.staggered[n],
                places[n],
                in_turn and axis.periodic and axis.parts == 1,
            )
            for n, axis in enumerate(self.decomposition.axes)
        )

    def _joined_regions(
        self, joined: Joined, corners: bool, *, in_turn: bool = False
    ) -> Iterator[Region]:
        """Yield the regions on a grid with connections, each either sent or received; ``in_turn`` is for `slabs`."""
        spec, coords = self.spec, self.decomposition.coords_of(self.rank)
        for piece in joined.pieces(self.joined_axes(in_turn=in_turn), coords, corners):
            peer = self.decomposition.rank_at(piece.parts)
            assert peer is not None
            starts = tuple(n - at for n, at in zip(piece.firsts, self.origin, strict=True))
            # Directions only order the regions of two ranks.
            if not piece.sends:
                yield Region((-piece.key,), peer, None, spec.box(starts, piece.sizes), piece.turn)
                continue
            box = spec.box(starts, piece.sizes, piece.steps)
            order = [source for source, _ in piece.turn or ()]
            if order != sorted(order):
                first, axes = len(spec.components_before), range(len(box.starts))
                order = [*axes[:first], *(first + n for n in order), *axes[first + spec.ndim :]]
                box = replace(box, order=tuple(order))
                if spec.is_vector:  # both components are swapped, too
                    steps = (-1, *(box.steps or ())[1:])
                    box = replace(box, starts=(1, *box.starts[1:]), steps=steps)
            yield Region((piece.key,), peer, box, None, piece.turn)

    def slabs(self) -> tuple[Region, ...]:
        """Boxes of an exchange with edges and corners: fewer boxes than `regions`, which must be moved in this order.

        The first slabs are the faces of the axes along which this rank is its own neighbour, one axis after another.
        Each slab covers the halos of the previous axes, which are already filled. The slabs of all other neighbours
        follow, and they cover these halos, too. In three dimensions 6 slabs replace 26 regions if at most one axis is
        divided::

            regions  c e e c    slabs  2 1 1 2    1: the first axis
                     e . . e           2 . . 2    2: the second axis, corners included
                     e . . e           2 . . 2
                     c e e c           2 1 1 2

        A slab that this rank exchanges with itself also covers the halos of previous divided axes, if these axes have
        neighbours on both sides. The slab copies undefined cells there, which the neighbours' messages overwrite later.
        But with these cells the slab's blocks are a constant stride apart.

        Returns
        -------
        tuple of Region
            The regions exchanged with other ranks are last. They match the neighbours' regions, because an axis is
            undivided on all ranks or on no rank.

        Notes
        -----
        Not collective; touches no device. Meaningful only if ``check_widths`` passes, and for a field without
        ``offsets`` that is not `is_wide`.
        """
        sent = [axis.sent() for axis in self._cells]
        received = [axis.received() for axis in self._cells]
        whole = [Interval(0, axis.stored) for axis in self._cells]
        neighbours = self.decomposition.neighbours(self.rank)
        alone = [axis.parts == 1 and axis.periodic for axis in self.decomposition.axes]
        faces = {at.direction for at in neighbours if sum(map(abs, at.direction)) == 1}
        # If an axis has neighbours on both sides, a slab may cover its whole halo.
        joined = self.decomposition.joined
        unowned = {axis for axis, _ in self._unowned()}  # no message overwrites these lines
        inner = [
            all(
                tuple(side * (n == axis) for n in range(len(alone))) in faces
                or (axis, side > 0) in self.decomposition.joined_sides
                for side in (-1, 1)
            )
            and (alone[axis] or self.spec.parity is None)
            and axis not in unowned
            for axis in range(len(alone))
        ]
        first: list[list[Region]] = [[] for _ in alone]
        others: list[Region] = []
        for at in neighbours:
            across = [axis for axis, side in enumerate(at.direction) if side]
            own = any(alone[axis] for axis in across)
            if own and len(across) > 1:
                continue
            covered = alone
            if own:
                covered = [axis < across[0] and spans for axis, spans in enumerate(inner)]
            ends = [
                [
                    (all_, *along[1:]) if spans else along
                    for all_, along, spans in zip(whole, moved, covered, strict=True)
                ]
                for moved in (sent, received)
            ]
            boxes = zip_longest(*(self._boxes(end, at.direction) for end in ends))
            into = first[across[0]] if own else others
            into += [Region(at.direction, at.rank, send, receive) for send, receive in boxes]
        if joined is not None:
            others = [*self._joined_regions(joined, True, in_turn=True)]
        return tuple(chain(*first, others))

    def check_widths(self) -> None:
        """Raise `DecompositionError`, on every rank or on none, for a halo wider than a periodic axis."""
        decomposition = self.decomposition
        check_periods(self.spec.halo, decomposition.grid_shape, decomposition.periodic)
        if decomposition.joined is not None:
            if self.spec.parity is not None:
                raise FieldError(
                    "parity: a grid with connect= has no fields of one parity; leave it out"
                )
            decomposition.joined.check(self.joined_axes(), self.spec.is_vector)
        elif self.spec.signs or self.spec.positions or self.spec.is_vector:
            raise FieldError(
                "sign, position: only connections use them, and this grid has none; make the grid with connect=, or "
                "leave them out"
            )
        self._check_walls()

    def _check_walls(self) -> None:
        """Raise `FieldError` if a boundary reads more points than a block at a wall has; the same on all ranks."""
        spec, decomposition = self.spec, self.decomposition
        for component_sides in self.spec.boundary:
            for index, pair in enumerate(component_sides[1]):
                axis = decomposition.axes[index]
                for side, boundary in enumerate(pair):
                    part = (0, axis.parts - 1)[side]
                    along = self.along(index, part)
                    # Beyond its points it has those that the next blocks send.
                    beyond = (along.moved_high, along.moved_low)[side] if axis.parts > 1 else 0
                    most = min(along.points + beyond, axis.points(spec.staggered[index]))
                    width = (along.low, along.high)[side]
                    if boundary is not None and boundary.reach(width) > most:
                        raise FieldError(
                            f"boundary: {boundary} at the {SIDES[side]} side of axis {index} reads "
                            f"{boundary.reach(width)} points for a halo of {width}, and there are "
                            f"{most} (grid_shape={decomposition.grid_shape}, "
                            f"proc_shape={decomposition.proc_shape}); use a narrower halo"
                        )

    @cached_property
    def _within_grid(self) -> list[tuple[AxisLayout, tuple[bool, bool]]]:
        """`AxisLayout.within_grid` of each grid axis."""
        per_axis = zip(self._cells, self.decomposition.axes, self.spec.staggered, strict=True)
        return [along.within_grid(axis.points(staggered)) for along, axis, staggered in per_axis]

    @property
    def within_walls(self) -> tuple[slice, ...]:
        """Index of the array's points that are not beyond a wall, per grid axis, in cells."""
        return tuple(
            slice(None) if periodic else slice(axis.low, axis.low + axis.points)
            for (axis, _), periodic in zip(
                self._within_grid, self.decomposition.periodic, strict=True
            )
        )

    @cached_property
    def at_wall(self) -> tuple[tuple[bool, bool], ...]:
        """Per grid axis, whether the rank's block is the first and the last one, along periodic axes, too."""
        decomposition = self.decomposition
        coords = decomposition.coords_of(self.rank)
        return tuple(
            (at == 0, at == axis.parts - 1)
            for at, axis in zip(coords, decomposition.axes, strict=True)
        )

    def indices(self, xp: Any, *, halo: bool) -> tuple[Any, ...]:
        """Return the global indices of the owned or stored points, as `halox.Grid.indices` describes them."""
        cuts = self.stored if halo else self.owned
        *others, last = xp.ix_(*(xp.arange(cut.start, cut.stop) for cut in cuts))
        if self.spec.parity is not None:
            last = 2 * last + (sum(others) + PARITIES.index(self.spec.parity)) % 2
        return (*others, last)

    def is_at_wall(self, axis: int, side: str) -> bool:
        """Whether the rank's block ends the grid on a side of an axis that is not periodic or joined there.

        Raises `FieldError` if there is no such axis or side.
        """
        ndim, number = self.spec.ndim, as_int(axis)
        if number is None or not -ndim <= number < ndim:
            raise FieldError(f"axis must be a grid axis, 0 to {ndim - 1}, got {shown(axis)}")
        if side not in SIDES:
            raise FieldError(f"side must be 'low' or 'high', got {shown(side)}")
        wall = number % ndim, SIDES.index(side)
        is_open = self.decomposition.periodic[number] or wall in self.decomposition.joined_sides
        return not is_open and self.at_wall[wall[0]][wall[1]]

    def wall(self, axis: int, side: str, depth: int, *, halo: bool) -> tuple[slice, ...]:
        """Return the index of the cells next to a wall, as `halox.Grid.wall` describes them."""
        is_there = self.is_at_wall(axis, side)
        index = [slice(None)] * len(self.padded_shape) if halo else list(self.interior)
        place = len(self.spec.components_before) + axis % self.spec.ndim
        owned, number = self.interior[place], as_int(depth)
        extent = owned.stop - owned.start
        if number is None or number < 0 or (is_there and number > extent):
            raise FieldError(f"depth must be an int from 0 to {extent}, got {shown(depth)}")
        if not is_there:
            index[place] = slice(owned.start, owned.start)
        elif side == "low":
            index[place] = slice(0 if halo else owned.start, owned.start + number)
        else:
            index[place] = slice(owned.stop - number, None if halo else owned.stop)
        return tuple(index)

    def walls(self, corners: bool = True) -> Walls:
        """Return the parts of this rank's halo beyond walls of the grid, which are filled after the neighbours' cells.

        Parameters
        ----------
        corners : bool
            Whether to fill edges and corners. A field with ``offsets`` has faces only.
        """
        spec, joined = self.spec, self.decomposition.joined_sides
        axes, at_wall = zip(*self._within_grid, strict=True)
        corners = corners and not spec.offsets
        negated: list[tuple[slice, ...]] = []
        if self.decomposition.joined is not None:
            from halox.decomposition.connections import negated_boxes

            extents = (*spec.components_before, *(0,) * spec.ndim, *spec.components_after)
            regions = self._joined_regions(self.decomposition.joined, corners, in_turn=corners)
            for region in regions if spec.signs or spec.is_vector else ():
                if region.recv is not None and region.turn is not None:
                    is_negative = partial(spec.is_negative, region.turn)
                    negated += negated_boxes(region.recv.slices, extents, is_negative)
            at_wall = tuple(
                tuple(is_at and (axis, side) not in joined for side, is_at in enumerate(pair))
                for axis, pair in enumerate(at_wall)
            )
        received = []
        for own, inside, ends, periodic in zip(
            self._cells, axes, at_wall, self.decomposition.periodic, strict=True
        ):
            start, stop = own.low - own.moved_low, own.low + own.points
            stop += min(own.high, own.moved_high)
            if ends[0] and not periodic:
                start = max(start, inside.low)
            if ends[1] and not periodic:
                stop = min(stop, inside.low + inside.points)
            received.append(slice(start, stop))
        return Walls(
            spec.boundary,
            axes,
            [slice(axis.low, axis.low + axis.points) for axis in self._cells],
            received,
            at_wall,
            self.decomposition.periodic,
            spec.staggered,
            (spec.components_before, spec.components_after),
            corners,
            negated,
            self._unowned(),
        )

    def _unowned(self) -> list[tuple[int, int]]:
        """Return the axis and the layer of each line of a fold in the array that no rank owns."""
        joined = self.decomposition.joined
        if joined is None:
            return []
        along, first = self._cells[joined.axis], self.origin[joined.axis]
        layers = [index - first for index in joined.unowned(self.joined_axes())]
        return [(joined.axis, layer) for layer in layers if 0 <= layer < along.stored]

    def _with_components(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        return self.spec.components_before + grid + self.spec.components_after

    def _boxes(
        self, intervals: Sequence[_Intervals], direction: tuple[int, ...]
    ) -> list[Box | None]:
        """Return the boxes of the array that hold a box of cells; ``[None]`` if the box is empty."""
        starts, subsizes = zip(
            *[along[side] for along, side in zip(intervals, direction, strict=True)], strict=True
        )
        spec = self.spec
        if 0 in subsizes:
            return [None]
        if spec.parity is None:
            return [spec.box(starts, subsizes)]
        firsts = [n + axis.start - axis.low for n, axis in zip(starts, self._cells, strict=True)]
        boxes: list[Box | None] = []
        for box in parity_boxes(spec.parity, firsts, subsizes):
            local = tuple(n - first for n, first in zip(box.starts, self.origin, strict=True))
            boxes.append(spec.box(local, box.subsizes, box.steps))
        return boxes or [None]


def infer_spec(
    decomposition: Decomposition, rank: int, shape: Sequence[int], halo: Halo
) -> FieldSpec:
    """Infer from an array's shape which of its axes are grid axes.

    An array may have component axes before or after the grid axes. The result is never staggered; otherwise
    an array of a wrong shape could pass for a staggered field. Raises `FieldError`, with the expected shape,
    unless exactly one choice of the grid axes fits. If the ranks have blocks of different sizes, one rank
    alone may raise, or the ranks may infer different axes. A caller must compare the results of all ranks
    before it continues collectively.

    Examples
    --------
    >>> from halox.decomposition import decompose
    >>> domain = decompose((10, 8), 1)
    >>> infer_spec(domain, 0, (12, 10, 3), ((1, 1), (1, 1))).components_after
    (3,)
    """
    shape = tuple(shape)
    plain = FieldLayout(decomposition, rank, FieldSpec(halo)).padded_shape
    readings = []
    for first in range(len(shape) - len(plain) + 1):
        behind = first + len(plain)
        before, grid, after = shape[:first], shape[first:behind], shape[behind:]
        if grid == plain and min(before + after, default=1) >= 1:
            readings.append(FieldSpec(halo, before, after))
    if len(readings) == 1:
        return readings[0]
    expected = f"rank {rank} with halo={halo} has padded_shape={plain}"
    if readings:
        raise FieldError(
            f"array: shape {shape} can be read in {len(readings)} ways ({expected}); tell which with "
            f"{ways_to_declare(readings, halo)}"
        )
    problem = (
        f"array: shape {shape} does not fit the grid: {expected}, component axes in front or behind"
    )
    own = decomposition.rank_shape(rank)
    bare = tuple((0, 0) for _ in own)
    without = [
        FieldSpec(bare, shape[:first], shape[first + len(own) :])
        for first in range(len(shape) - len(own) + 1)
        if shape[first : first + len(own)] == own and 0 not in shape
    ]
    if without:
        raise FieldError(
            f"{problem}; these are the rank's cells without their halo: give the field itself, no slice of it and "
            f"not grid.interior(field), or tell with {ways_to_declare(without, halo)} if it has none"
        )
    raise FieldError(
        f"{problem}; allocate with grid.zeros, or tell with grid.declare(array, components=..., "
        "staggered=..., halo=...) if it is staggered or has another halo"
    )


def ways_to_declare(specs: Iterable[FieldSpec], halo: Halo) -> str:
    """Return the text of calls that declare an array with each of some specs; ``halo`` is the grid's halo."""
    return ", or ".join(spec.declaration(halo) for spec in specs)
