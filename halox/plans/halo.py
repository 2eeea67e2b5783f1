"""Halo exchanges and accumulations of fields, as messages between the ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from operator import itemgetter

from halox.datatypes import Datatype, slab
from halox.decomposition import (
    Box,
    FieldLayout,
    check_widths,
    exchange_regions,
    exchange_slabs,
    walls_of,
)
from halox.errors import FieldError, HaloxError
from halox.paths.base import Operation
from halox.paths.messages import Part, fuse
from halox.plans.draft import Draft
from halox.plans.wall_operations import FieldWalls
from halox.plans.walls import check_boundaries
from halox.runtime.arrays import Described, check_elements_apart, sharing


def halo_draft(
    arrays: tuple[object, ...],
    read: Sequence[tuple[Described, FieldLayout]],
    *,
    operation: Operation,
    corners: bool,
    fixed: tuple[int, ...] = (),
    numbers: tuple[int, ...] = (),
    relocatable: bool = False,
) -> Draft:
    """Make the messages of a halo exchange of some fields: one per peer and direction, with all fields in it.

    ``read`` has the descriptions of the arrays, each with its layout; `Draft` explains ``numbers`` and ``relocatable``.
    "copy" sends owned cells into the neighbours' halos. "add" is the adjoint operation: it sends halos, adds them to
    the owners' cells and sets the sent halos to zero. With ``corners`` the regions include edges and corners, otherwise
    only faces. The halo along ``fixed`` grid axes is left out.

    Raises `FieldError` if a field is read-only or cannot be accumulated or a halo cannot be filled, and `HaloxError`
    if ``HALOX_DEBUG_HALO`` is invalid.
    """
    _check_fields(read, operation)
    outgoing: list[_Ordered] = []
    incoming: list[_Ordered] = []
    for number, (described, layout) in enumerate(read):
        # Slabs move axis by axis, so that corner cells travel several times. This suits neither a GPU, which moves all
        # regions at once, nor sums, which would add these cells several times.
        in_turn = corners and operation == "copy" and described.device is None
        in_turn = in_turn and not (layout.spec.offsets or layout.is_wide)
        for region in (
            exchange_slabs(layout, fixed) if in_turn else exchange_regions(layout, corners, fixed)
        ):
            sent, received = region.send, region.recv
            if operation == "add":
                sent, received = received, sent
            # Both ends sort their parts by direction from the sender to the receiver.
            for box, sign, parts in ((sent, 1, outgoing), (received, -1, incoming)):
                if box is not None:
                    datatype = (
                        slab(
                            described.shape,
                            described.strides,
                            box.starts,
                            box.subsizes,
                            described.dtype,
                        )
                        if box.steps is None
                        else _stepped(described, box, box.steps)
                    )
                    direction = tuple([sign * d for d in region.direction])
                    part = Part(number, datatype)
                    parts.append((_place(direction), number, region.peer, part))
    for parts in (outgoing, incoming):
        parts.sort(key=itemgetter(0, 1))
    return Draft(
        arrays,
        tuple([described for described, _ in read]),
        fuse("send", [(peer, 0, part) for *_, peer, part in outgoing]),
        fuse("receive", [(peer, 0, part) for *_, peer, part in incoming]),
        operation,
        numbers=numbers,
        specs=tuple([str(layout.spec) for _, layout in read]),
        relocatable=relocatable,
        poisons=operation == "copy" and _poisons_halos(),
        walls=_walls(read, corners=corners, fixed=fixed),
    )


def _walls(
    read: Sequence[tuple[Described, FieldLayout]], *, corners: bool, fixed: tuple[int, ...]
) -> tuple[FieldWalls, ...]:
    """Return the walls of all fields; empty if none is filled on this rank."""
    walls = tuple(
        FieldWalls(
            number,
            layout.origin,
            walls_of(layout, corners, fixed),
            layout.spec.parity is None and layout.decomposition.joined is None,
        )
        for number, (_, layout) in enumerate(read)
    )
    return walls if any(one.walls.negated or one.walls.fills() for one in walls) else ()


def _poisons_halos() -> bool:
    """Return whether ``HALOX_DEBUG_HALO`` asks for the fills of `halox.plans.poison`."""
    text = os.environ.get("HALOX_DEBUG_HALO", "")
    if text not in ("", "0", "1"):
        raise HaloxError(
            f"HALOX_DEBUG_HALO={text!r}: expected 1 (exchanges first fill halos with NaN), 0 or nothing"
        )
    return text == "1"


def _stepped(described: Described, box: Box, steps: Sequence[int]) -> Datatype:
    """Return the datatype of a box with steps between its cells, in C order, or in the order of the box.

    An axis with another step than 1 is given twice: for the first cell, and for the steps from there.
    """
    axes = []
    per_axis = list(
        zip(described.shape, described.strides, box.starts, box.subsizes, steps, strict=True)
    )
    for axis in box.order or range(len(steps)):
        extent, stride, start, size, step = per_axis[axis]
        axes += (
            [(extent, stride, start, size)]
            if step == 1
            else [(extent, stride, start, 1), (size, stride * step, 0, size)]
        )
    shape, strides, starts, subsizes = zip(*axes, strict=True)
    return slab(shape, strides, starts, subsizes, described.dtype)


_Place = tuple[int, tuple[int, ...], tuple[int, ...]]

_Ordered = tuple[_Place, int, int, Part]
"""A part, preceded by its `_place` and the numbers of its field and of its peer."""


def _place(direction: tuple[int, ...]) -> _Place:
    """Return a sort key: faces, then edges, then corners; then by the axes concerned, then by direction.

    Contributions to the same cells must be added in sequence. Opposite faces seldom share a cell, and neither
    do edges along one axis, or corners; in this order a GPU needs the fewest launches. Slabs of the first axis are
    first.
    """
    axes = tuple([-abs(d) for d in direction])
    return -sum(axes), axes, direction


def _check_fields(read: Sequence[tuple[Described, FieldLayout]], operation: Operation) -> None:
    for described, layout in read:
        if not described.writable:
            raise FieldError("field is read-only; its halo cannot be filled")
        check_elements_apart(described, "field")
        if operation == "add" and described.dtype.kind not in "iufc":
            raise FieldError(f"accumulate has no meaning for dtype {described.dtype}; use numbers")
        check_widths(layout)
        check_boundaries(layout, described.dtype, operation)
    pair = sharing([described for described, _ in read])
    if pair is not None:
        done, call = ("added", "accumulate") if operation == "add" else ("filled", "exchange")
        raise FieldError(
            f"fields {pair[0]} and {pair[1]} share memory, so that what they share would be {done} twice; give each "
            f"field once, or {call} them one after the other"
        )
