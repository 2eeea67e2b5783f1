"""From the regions of fields to the messages that exchange, or accumulate, their halos."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halox.datatypes import slab
from halox.decomposition import Box, FieldLayout
from halox.errors import FieldError
from halox.exchange.draft import Draft
from halox.exchange.transpose import share_memory
from halox.paths.base import Operation
from halox.paths.messages import Part, fuse
from halox.runtime.arrays import Described, describe


def halo_draft(
    arrays: Sequence[Any],
    layouts: Sequence[FieldLayout],
    *,
    operation: Operation,
    corners: bool,
    device: int | None,
) -> Draft:
    """Make the messages of a halo exchange of some fields.

    Parameters
    ----------
    arrays : sequence of array
        This rank's arrays, each of its layout's ``padded_shape``.
    layouts : sequence of FieldLayout
        Where the cells of each array lie.
    operation : {"copy", "add"}
        "copy" sends owned cells into the neighbours' halos. "add" is its adjoint: it sends halos, which are
        added to the owners' cells and set to zero.
    corners : bool
        With edges and corners, or faces only.
    device : int or None
        The GPU that the arrays are on.

    Returns
    -------
    Draft
        One message a peer and direction, with all fields and all regions shared with that peer in it.
    """
    outgoing: list[tuple[tuple[int, ...], int, int, Part]] = []
    incoming: list[tuple[tuple[int, ...], int, int, Part]] = []
    for number, (array, layout) in enumerate(zip(arrays, layouts, strict=True)):
        found = describe(array)

        def part(box: Box, number: int = number, found: Any = found) -> Part:
            datatype = slab(found.shape, found.strides, box.starts, box.subsizes, found.dtype)
            return Part(number, datatype)

        for region in layout.regions(corners):
            # Both ends order their parts by the direction in which the sender sees the receiver.
            towards = region.direction
            from_there = tuple(-d for d in region.direction)
            sent, received = region.send, region.recv
            if operation == "add":
                sent, received = received, sent
            if sent is not None:
                outgoing.append((towards, number, region.peer, part(sent)))
            if received is not None:
                incoming.append((from_there, number, region.peer, part(received)))
    sends = fuse("send", ((peer, 0, p) for _, _, peer, p in _in_order(outgoing)))
    receives = fuse("receive", ((peer, 0, p) for _, _, peer, p in _in_order(incoming)))
    names = tuple(f"{a.dtype}{list(a.shape)}" for a in arrays)
    return Draft(tuple(arrays), sends, receives, operation, device, names)


def check_apart(fields: Sequence[Described]) -> None:
    """Refuse fields of one accumulation that share memory: the halos of one would be added by both.

    Raises
    ------
    FieldError
        Names the two fields by their positions.
    """
    for second, other in enumerate(fields):
        for first, one in enumerate(fields[:second]):
            if share_memory(one, other):
                raise FieldError(
                    f"fields {first} and {second} share memory, so that what they share would be added twice; give "
                    "each field once, or accumulate them one after the other"
                )


def _in_order(
    parts: list[tuple[tuple[int, ...], int, int, Part]],
) -> list[tuple[tuple[int, ...], int, int, Part]]:
    """Sort into faces, edges and corners, each by the axes concerned; then by direction and field.

    What is added to the same cells must be added in turn. Opposite faces seldom share a cell, nor do edges along
    one axis, or corners: in this order a GPU needs the fewest launches.
    """

    def place(
        part: tuple[tuple[int, ...], int, int, Part],
    ) -> tuple[int, tuple[int, ...], Any, int]:
        direction, number, _, _ = part
        axes = tuple(map(abs, direction))
        return sum(axes), axes, direction, number

    return sorted(parts, key=place)
