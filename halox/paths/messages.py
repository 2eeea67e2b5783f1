"""Messages: the data that one rank sends to one peer, or receives from it, in one exchange.

A message is a list of parts. A part is a datatype at the start of one of the plan's arrays. The parts travel packed, in
sequence, so that all fields and all directions between two ranks share one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

from halox.datatypes import Datatype, StridedBlocks
from halox.datatypes.signature import Signature
from halox.errors import MismatchError
from halox.runtime.arrays import Described, HostArray
from halox.runtime.segments import Place
from halox.values import rounded_up

Direction = Literal["send", "receive"]

PartSignature = tuple[Signature, int]
"""Signature and count of a part."""


@dataclass(frozen=True)
class Part:
    """``count`` items of a datatype at the first element of array number ``array``."""

    array: int
    datatype: Datatype
    count: int = 1

    @property
    def nbytes(self) -> int:
        return self.datatype.size * self.count

    @property
    def strided(self) -> StridedBlocks | None:
        """The part as strided blocks; None if the whole part has no strided form."""
        return self.datatype.items(self.count).strided


@dataclass(frozen=True)
class Message:
    """All data in one direction between this rank and ``peer`` under one tag."""

    peer: int
    direction: Direction
    parts: tuple[Part, ...]
    tag: int = 0

    @property
    def key(self) -> tuple[str, int, int]:
        """Direction, peer and tag: the identity of a message in a plan."""
        return self.direction, self.peer, self.tag

    @property
    def opposite(self) -> tuple[Direction, int]:
        """Direction and tag of the message at its other end."""
        return "send" if self.direction == "receive" else "receive", self.tag

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole message once packed, without padding."""
        return sum([part.nbytes for part in self.parts])

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each part in the packed message; parts are aligned to 16 bytes."""
        offsets, end = [], 0
        for part in self.parts:
            offsets.append(end)
            end += rounded_up(part.nbytes, ALIGNMENT)
        return tuple(offsets)

    @cached_property
    def packed_bytes(self) -> int:
        """Bytes of the packed message, the alignment of its parts included."""
        return self.offsets[-1] + rounded_up(self.parts[-1].nbytes, ALIGNMENT) if self.parts else 0

    @cached_property
    def is_strided(self) -> bool:
        """Whether each whole part has a strided form."""
        return all(part.strided is not None for part in self.parts)

    @cached_property
    def signatures(self) -> tuple[PartSignature, ...]:
        """Signature and count of each part; their products are equal on both ends of a valid message."""
        return tuple([(part.datatype.signature, part.count) for part in self.parts])

    @cached_property
    def block_bytes(self) -> int:
        """Mean length of the contiguous runs of all parts, an input of path selection."""
        return self.nbytes // max(self.block_count, 1)

    @cached_property
    def row_bytes(self) -> int:
        """Mean length of the runs on a GPU: kernels move rows of tiles if packing changes the order of the axes."""
        from halox.packing.strided_plan import least_row_bytes

        rows = [
            part.nbytes / least_row_bytes(strided)
            if (strided := part.strided) is not None
            else run_count(part.datatype, part.count)
            for part in self.parts
        ]
        return max(self.block_bytes, int(self.nbytes // max(sum(rows), 1)))

    @cached_property
    def block_count(self) -> int:
        """Contiguous runs of all parts together."""
        return sum([run_count(part.datatype, part.count) for part in self.parts])


ALIGNMENT = 16
"""In a packed message parts start at multiples of this, so that kernels can use 16-byte words."""


def run_count(datatype: Datatype, count: int = 1) -> int:
    """Return the number of contiguous runs of some items of a datatype.

    Examples
    --------
    >>> from halox.datatypes import contiguous, indexed
    >>> run_count(contiguous(10, "f8"), 100), run_count(indexed([1, 2], [0, 4], "f8"), 100)
    (1, 101)
    """
    strided = datatype.items(count).strided
    if strided is not None:
        return strided.n_blocks
    one, two = (len(datatype.blocks(items).lengths) for items in (1, 2))
    return one + (count - 1) * (two - one)  # the last run of an item may go on in the next item


def fuse(direction: Direction, parts: Iterable[tuple[int, int, Part]]) -> tuple[Message, ...]:
    """Fuse (peer, tag, part) triples into one message per peer and tag, in ascending order; drops parts of no bytes."""
    groups: dict[tuple[int, int], list[Part]] = {}
    for peer, tag, part in parts:
        if part.nbytes:
            groups.setdefault((peer, tag), []).append(part)
    return tuple(
        Message(peer, direction, tuple(group), tag)
        for (peer, tag), group in sorted(groups.items(), key=lambda item: item[0])
    )


def check_match(
    rank: int, peer: int, received: Sequence[PartSignature], expected: Sequence[PartSignature]
) -> None:
    """Raise a `MismatchError` unless a peer's message has the expected signatures."""
    if len(received) != len(expected):
        raise MismatchError(
            f"rank {peer} sends {len(received)} datatype(s) to rank {rank}, which receives "
            f"{len(expected)} from it; give both ends the same fields in the same order"
        )
    for number, (theirs, ours) in enumerate(zip(received, expected, strict=True)):
        if theirs[0] * theirs[1] != ours[0] * ours[1]:
            raise MismatchError(
                f"datatype {number} of the message from rank {peer} to rank {rank} differs: sent "
                f"{_readable(theirs)}, received as {_readable(ours)}; the same field needs the same "
                "dtype, shape and halo on every rank"
            )


def _readable(part: PartSignature) -> str:
    signature, count = part
    return f"{count} x ({signature})"


class Located(NamedTuple):
    """Places and layouts of a message's parts."""

    places: tuple[Place, ...] | None  # of the arrays; None unless all are in an arena
    layouts: tuple[StridedBlocks, ...]


Addressed: TypeAlias = Described | HostArray
"""An array with an address."""


def located(
    message: Message,
    arrays: Sequence[Addressed],
    locate: Callable[[int, int], Place | None],
) -> Located | None:
    """Locate a message's parts in an arena; None unless each part has a strided form."""
    layouts = tuple([strided for part in message.parts if (strided := part.strided) is not None])
    if len(layouts) < len(message.parts):
        return None
    places = []
    for part in message.parts:
        pointer = arrays[part.array].pointer
        first, end = part.datatype.reach(part.count)
        place = locate(pointer + first, pointer + end)
        if place is None:
            return Located(None, layouts)
        places.append(place.at(-first))
    return Located(tuple(places), layouts)
