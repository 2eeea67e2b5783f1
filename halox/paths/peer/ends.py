"""The ends of the messages that go the peer path: what this rank's kernel walks, and what its peers must know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from halox.packing.refine import Copy, Side, contiguous_side, paired
from halox.paths.base import Job
from halox.paths.messages import ALIGNMENT, Message, Part
from halox.paths.peer.table import (
    PACKET_EXPANSION,
    WIDE_WORDS,
    Stretch,
    in_even_chunks,
    least_word,
    stretches,
)

WIDE_BYTES = 1 << 17
"""Bytes of a message from which packets are wide: fewer threads do more each, and less goes over the wire."""

PACKET_WORD = 4
"""Bytes of data in the smallest packet: shorter words do not travel in packets."""

Tag = tuple[int, int]
"""Peer and tag of a message."""


@dataclass
class End:
    """One message on this rank: its stretches against a packed message at address 0, or the peer's array."""

    message: Message
    way: str
    stretches: list[Stretch]
    buffered: bool
    """Whether its packed bytes are collected in a buffer of this rank, for types that no kernel walks in one go."""
    buffer: int = 0
    is_wide: bool = False
    """Whether it goes in wide packets, as both ends' stretches are alike."""

    @property
    def tag(self) -> Tag:
        """Peer and tag of the message."""
        return self.message.peer, self.message.tag

    @property
    def signature(self) -> tuple[Any, ...]:
        """What its stretches have in common with those of the other end, if they match."""
        return tuple(stretch.signature for stretch in self.stretches)

    def widen(self, signature: tuple[Any, ...]) -> None:
        """Choose wide packets if the other end's stretches are alike, and the message is not too small."""
        words = {stretch.row.word_bytes for stretch in self.stretches}
        self.is_wide = (
            self.way == "ll"
            and self.message.nbytes >= WIDE_BYTES
            and self.signature == signature
            and words <= set(WIDE_WORDS)
            and all(stretch.packed >= 0 for stretch in self.stretches)
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of a slot of its staging memory."""
        if self.way == "direct":
            return 0
        if self.is_wide:
            return sum(stretch.tile_bytes for stretch in self.stretches)
        return self.message.packed_bytes * (PACKET_EXPANSION if self.way == "ll" else 1)


@dataclass(frozen=True)
class Announced:
    """What a sender tells the receiver of a message first: its chunks."""

    signature: tuple[Any, ...]
    chunks: int


def end_of(job: Job, message: Message, way: str) -> End:
    """Return this rank's end of a message that goes packed, or in packets; of a direct one, the receiver's."""
    if way == "direct":
        return End(message, way, [], False)
    is_send = message.direction == "send"
    pairs = _paired(message, job.arrays)
    buffered = pairs is None or (not is_send and job.operation == "add")
    copies = [Copy(a, b) if is_send else Copy(b, a) for a, b in pairs or ()]
    if buffered:
        runs = [(0, message.packed_bytes)] if is_send else _waited_for(message)
        sides = [contiguous_side(start, nbytes) for start, nbytes in runs]
        copies = [Copy(side, side) for side in sides]
    # Packets hold 8 bytes of a word at most.
    max_word = 8 if way == "ll" else 16
    return End(message, way, stretches(copies, packed=int(is_send), max_word=max_word), buffered)


def direct_ends(job: Job, targets: Sequence[tuple[Message, Sequence[Side]]], sms: int) -> list[End]:
    """Return this rank's ends of messages that it sends direct.

    Parameters
    ----------
    job : Job
    targets : sequence of (Message, sequence of Side)
        All such messages of a plan; for each of their parts, where the peer's array lies.
    sms : int
        Multiprocessors of the GPU.
    """
    ends = []
    for message, sides in targets:
        copies = [Copy(whole(job, p), side) for p, side in zip(message.parts, sides, strict=True)]
        ends.append(End(message, "direct", stretches(copies, packed=1), False))
    total = sum(stretch.row.nbytes for end in ends for stretch in end.stretches)
    for end in ends:
        end.stretches = [in_even_chunks(stretch, total, sms) for stretch in end.stretches]
    return ends


def whole(job: Job, part: Part) -> Side:
    """Return a part as strided blocks of its array."""
    strided = part.datatype.items(part.count).strided
    assert strided is not None
    return Side(job.arrays[part.array].pointer, strided)


def _waited_for(message: Message) -> list[tuple[int, int]]:
    """Return where the bytes of a message that every sender sends are, once packed: first byte, and length.

    A sender that packs straight from its arrays does not send what lies between the parts. A part that ends within a
    PACKET_WORD goes in packets only if its sender sends a packed message as a whole.
    """
    runs: list[tuple[int, int]] = []
    for part, start in zip(message.parts, message.offsets, strict=True):
        padded = -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        nbytes = padded if part.nbytes % PACKET_WORD else part.nbytes
        if runs and sum(runs[-1]) == start:
            start, nbytes = runs[-1][0], runs.pop()[1] + nbytes
        runs.append((start, nbytes))
    return runs


def shortest_word(message: Message, arrays: Sequence[Any]) -> int:
    """Return the bytes of the shortest word in which a kernel walks a message, 1 for runs of no alignment."""
    pairs = _paired(message, arrays)
    if pairs is None:
        return ALIGNMENT  # packed by itself first
    return least_word(stretches([Copy(a, b) for a, b in pairs], packed=1))


def _paired(message: Message, arrays: Sequence[Any]) -> list[tuple[Side, Side]] | None:
    """Return its bytes in the arrays beside those of the packed message; None if no kernel walks them in one go."""
    found: list[tuple[Side, Side]] = []
    for part, offset in zip(message.parts, message.offsets, strict=True):
        pairs = paired(arrays[part.array].pointer, part.datatype, part.count, offset)
        if pairs is None:
            return None
        found += pairs
    return found
