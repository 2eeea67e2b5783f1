"""From the regions of fields to the messages that exchange, or accumulate, their halos."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from halox.datatypes import Datatype, slab
from halox.decomposition import Box, FieldLayout
from halox.errors import FieldError
from halox.exchange.draft import Draft
from halox.paths.base import Operation
from halox.paths.messages import Direction, Message, Part, fuse
from halox.runtime.arrays import Described, share_memory


def halo_draft(
    arrays: Sequence[object],
    described: Sequence[Described],
    layouts: Sequence[FieldLayout],
    *,
    operation: Operation,
    corners: bool,
    device: int | None,
) -> Draft:
    """Make the messages of a halo exchange of some fields: one per peer and direction, with all fields in it.

    Parameters
    ----------
    arrays, described, layouts : sequence
        This rank's arrays, each of its layout's ``padded_shape``.
    operation : {"copy", "add"}
        "copy" sends owned cells into the neighbours' halos. "add" is its adjoint: it sends halos, which are
        added to the owners' cells and set to zero.
    corners : bool
        With edges and corners, or faces only.
    device : int or None
        The GPU that the arrays are on.
    """
    outgoing: list[_Ordered] = []
    incoming: list[_Ordered] = []
    for number, (found, layout) in enumerate(zip(described, layouts, strict=True)):
        for region in layout.regions(corners):
            sent, received = region.send, region.recv
            if operation == "add":
                sent, received = received, sent
            # Both ends order their parts by the direction in which the sender sees the receiver.
            if sent is not None:
                part = Part(number, _slab(found, sent))
                outgoing.append((*_place(region.direction), number, region.peer, part))
            if received is not None:
                part = Part(number, _slab(found, received))
                from_there = tuple([-d for d in region.direction])
                incoming.append((*_place(from_there), number, region.peer, part))
    sends, receives = _fused("send", outgoing), _fused("receive", incoming)
    names = tuple([f"{found.dtype}{list(found.shape)}" for found in described])
    return Draft(tuple(arrays), tuple(described), sends, receives, operation, device, names)


_Ordered = tuple[int, tuple[int, ...], tuple[int, ...], int, int, Part]
"""What a part is sorted by (see `_place`), its field, the peer, and the part."""


def _slab(found: Described, box: Box) -> Datatype:
    return slab(found.shape, found.strides, box.starts, box.subsizes, found.dtype)


def _place(direction: tuple[int, ...]) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return what sorts into faces, edges and corners, each by the axes concerned; then by direction.

    What is added to the same cells must be added in turn. Opposite faces seldom share a cell, nor do edges along
    one axis, or corners: in this order a GPU needs the fewest launches.
    """
    axes = tuple(map(abs, direction))
    return sum(axes), axes, direction


def _fused(direction: Direction, parts: list[_Ordered]) -> tuple[Message, ...]:
    parts.sort(key=itemgetter(0, 1, 2, 3))
    return fuse(direction, [(peer, 0, part) for *_, peer, part in parts])


def check_apart(fields: Sequence[Described]) -> None:
    """Raise `FieldError` for fields of one accumulation that share memory: both would add the halos there."""
    for second, other in enumerate(fields):
        for first, one in enumerate(fields[:second]):
            if share_memory(one, other):
                raise FieldError(
                    f"fields {first} and {second} share memory, so that what they share would be added twice; give "
                    "each field once, or accumulate them one after the other"
                )
