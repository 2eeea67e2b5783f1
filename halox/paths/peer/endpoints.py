"""Endpoints of the messages of the peer path: the runs that this rank's kernel moves, and their signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from halox.datatypes import StridedBlocks
from halox.packing.refine import Copy, Side, contiguous_side, paired
from halox.paths.base import Job
from halox.paths.messages import ALIGNMENT, Addressed, Message, Part, located
from halox.paths.peer.table import (
    PACKET_EXPANSION,
    WIDE_WORDS,
    MessageRun,
    both_packed,
    in_even_chunks,
    least_word,
    runs,
)
from halox.runtime.device_arena import DeviceArena
from halox.runtime.segments import Place, SegmentKey
from halox.values import rounded_up

WIDE_BYTES = 1 << 17
"""Bytes of a message from which packets are LL128-like: fewer threads move more bytes each, and fewer bytes travel."""

PACKET_WORD = 4
"""Bytes of data in the smallest packet: shorter words do not travel in packets."""

RunSignatures = tuple[tuple[int, int, int, int], ...]
"""Signatures of the runs of a message, in order."""

Tag = tuple[int, int]
"""Peer and tag of a message."""


@dataclass
class PeerEndpoint:
    """A message at this rank: its runs, relative to a packed message at address 0 or to the peer's array."""

    message: Message
    protocol: str
    runs: list[MessageRun]
    buffered: bool
    """Whether a buffer of this rank holds its packed bytes, for types that the kernel cannot move in one pass."""
    buffer: int = 0
    is_wide: bool = False
    """Whether the message travels in LL128-like packets, since the runs of both ends are equal."""

    @property
    def tag(self) -> Tag:
        return self.message.peer, self.message.tag

    @property
    def signature(self) -> RunSignatures:
        """Signatures of the runs; equal at both ends if the runs match."""
        return tuple([run.signature for run in self.runs])

    def widen(self, signature: RunSignatures) -> None:
        """Choose LL128-like packets if the runs of the other end are equal, and the message is not too small."""
        words = {run.row.word_bytes for run in self.runs}
        self.is_wide = (
            self.protocol == "ll"
            and self.message.nbytes >= WIDE_BYTES
            and self.signature == signature
            and words <= set(WIDE_WORDS)
            and all(run.packed >= 0 for run in self.runs)
        )

    def through_buffer(self, buffer: int) -> PeerEndpoint:
        """Return an endpoint with the same words and chunks, and a buffer of packed bytes in place of the array."""
        side = int(self.message.direction == "send")
        return replace(
            self,
            runs=[run._replace(row=both_packed(run.row, side), array=-1) for run in self.runs],
            buffered=True,
            buffer=buffer,
        )

    @property
    def staging_bytes(self) -> int:
        if self.protocol == "direct":
            return 0
        if self.is_wide:
            return sum(run.tile_bytes for run in self.runs)
        return self.message.packed_bytes * (PACKET_EXPANSION if self.protocol == "ll" else 1)


@dataclass(frozen=True)
class Rts:
    """Ready to send: the sender's record of a message for the receiver."""

    signature: RunSignatures
    chunks: int


def endpoint_of(job: Job, message: Message, protocol: str) -> PeerEndpoint:
    """Return this rank's endpoint of a packed message or of packets; of a direct message, the receiver's endpoint."""
    if protocol == "direct":
        return PeerEndpoint(message, protocol, [], False)
    is_send = message.direction == "send"
    pairs = _paired(message, job.arrays)
    buffered = pairs is None or (not is_send and job.operation == "add")
    copies = [(Copy(a, b) if is_send else Copy(b, a), number) for a, b, number in pairs or ()]
    if buffered:
        blocks = [(0, message.packed_bytes)] if is_send else _waited_for(message)
        sides = [contiguous_side(start, nbytes) for start, nbytes in blocks]
        copies = [(Copy(side, side), -1) for side in sides]
    # Packets hold 8 bytes of a word at most.
    max_word = 8 if protocol == "ll" else 16
    message_runs = [
        run._replace(array=number)
        for copy, number in copies
        for run in runs([copy], packed=int(is_send), max_word=max_word, tiles=protocol != "ll")
    ]
    return PeerEndpoint(message, protocol, message_runs, buffered)


def direct_endpoints(
    job: Job, targets: Sequence[tuple[Message, Sequence[Side]]], sms: int
) -> list[PeerEndpoint]:
    """Return this rank's endpoints of direct messages that it sends."""
    ends = []
    for message, sides in targets:
        copies = [
            Copy(array_side(job, p), side) for p, side in zip(message.parts, sides, strict=True)
        ]
        ends.append(PeerEndpoint(message, "direct", runs(copies, packed=1, tiles=True), False))
    total = sum(run.row.nbytes for end in ends for run in end.runs)
    for end in ends:
        end.runs = [in_even_chunks(run, total, sms) for run in end.runs]
    return ends


def array_side(job: Job, part: Part) -> Side:
    """Return a part as strided blocks of its array."""
    strided = part.strided
    assert strided is not None
    return Side(job.arrays[part.array].pointer, strided)


def _waited_for(message: Message) -> list[tuple[int, int]]:
    """Return the blocks of a packed message (first byte and length) that every possible sender fills.

    A sender that packs straight from its arrays does not send the padding between the parts. A part whose length is not
    a multiple of PACKET_WORD travels in packets only if its sender sends the packed message as a whole.
    """
    blocks: list[tuple[int, int]] = []
    for part, start in zip(message.parts, message.offsets, strict=True):
        padded = rounded_up(part.nbytes, ALIGNMENT)
        nbytes = padded if part.nbytes % PACKET_WORD else part.nbytes
        if blocks and sum(blocks[-1]) == start:
            start, nbytes = blocks[-1][0], blocks.pop()[1] + nbytes
        blocks.append((start, nbytes))
    return blocks


def _paired(message: Message, arrays: Sequence[Addressed]) -> list[tuple[Side, Side, int]] | None:
    """Return pairs of a message's bytes in the arrays and in the packed message, with the numbers of the arrays.

    None if the kernel cannot move the message in one pass.
    """
    message_pairs: list[tuple[Side, Side, int]] = []
    for part, offset in zip(message.parts, message.offsets, strict=True):
        pairs = paired(arrays[part.array].pointer, part.datatype, part.count, offset)
        if pairs is None:
            return None
        message_pairs += [(*pair, part.array) for pair in pairs]
    return message_pairs


@dataclass(frozen=True)
class PeerInfo:
    """Description of a message on a GPU for the kernels of both its ends."""

    word_bytes: int  # bytes of the kernel's shortest word; 1 for unaligned runs
    layouts: tuple[StridedBlocks, ...] | None = None  # of its parts, if each has a strided form
    places: tuple[Place, ...] | None = None  # of their arrays, if peers can map them
    handles: Mapping[SegmentKey, bytes] = field(default_factory=dict)


def _nowhere(start: int, end: int) -> None:
    """Locate no memory."""


def peer_info(message: Message, arrays: Sequence[Addressed], arena: DeviceArena | None) -> PeerInfo:
    """Describe a message of arrays on this rank's GPU."""
    pairs = _paired(message, arrays)
    # A message that the kernel cannot move in one pass is packed by a separate launch first.
    copies = [Copy(a, b) for a, b, _ in pairs or ()]
    word = ALIGNMENT if pairs is None else least_word(runs(copies, packed=1))
    places = located(message, arrays, _nowhere if arena is None else arena.locate)
    if places is None:
        return PeerInfo(word)
    if arena is None or places.places is None:
        return PeerInfo(word, places.layouts)
    return PeerInfo(word, places.layouts, places.places, arena.handles(places.places))
