"""The ``peer`` path: one kernel per exchange, through mapped memory of other GPUs.

`halox.paths.peer.channel` describes an exchange, `halox.paths.peer.negotiation` how a plan is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from halox.paths.base import Build, Candidate, ChannelMessages, Job, MessageEnds, Path, Protocol
from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message
from halox.paths.peer.endpoints import PACKET_WORD, PeerInfo, peer_info
from halox.paths.peer.table import pieces_between
from halox.runtime.arrays import Described
from halox.runtime.context import Context
from halox.runtime.handshake import handshake
from halox.runtime.topology import Topology

if TYPE_CHECKING:
    from halox.paths.peer.channel import PeerChannel

MOST_PIECES = 16
"""Largest number of loop nests of a directly stored part, which combine the layouts of its two ends."""


class PeerPath(Path):
    """Stores into the memory of GPUs whose kernels can wait for one another."""

    name = "peer"
    protocols = (
        # Data and epoch in one store, so that no flag is needed, but up to twice the bytes.
        Protocol("ll", ProtocolCost(3.9, 0.2, (200.0, 250.0, 290.0, 305.0))),
        # Packed into the peer's memory, with a flag per chunk, and unpacked there.
        Protocol("staging", ProtocolCost(4.8, 0.3, (160.0, 225.0, 290.0, 315.0))),
        # Stored into the halo itself, after its owner has signalled "begun": short blocks are short remote stores.
        Protocol("direct", ProtocolCost(7.4, 0.3, (73.0, 180.0, 330.0, 352.0)), in_field=True),
    )
    summary = (
        "between ranks with a GPU each that map one another's memory; see `halox info --paths -n N`"
    )

    def describe(
        self, message: Message, arrays: Sequence[Described], context: Context, *, relocatable: bool
    ) -> PeerInfo | None:
        return peer_info(message, arrays, None if relocatable else context.device_arena)

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate] | str:
        why = ends.why_not_gpus(Topology.why_no_signals)
        if why is not None:
            return why
        infos: tuple[PeerInfo, PeerInfo] = ends.described(self)
        offers = [self.candidate("staging", "a GPU each, peer access: packed, a flag a chunk")]
        if min(info.word_bytes for info in infos) >= PACKET_WORD:
            offers.append(
                self.candidate("ll", "a GPU each, peer access: data and epoch in one store")
            )
        if ends.selection.operation == "copy" and _can_store(*infos):
            why = "a GPU each, peer access: straight into the receiver's array"
            offers.append(self.candidate("direct", why))
        return offers

    def carries_copies(self, job: Job, copies: Job) -> bool:
        """Return whether the kernel can copy the messages: no accumulation, and strided at both ends."""
        return copies.operation == "copy" and all(m.is_strided for m in copies.messages)

    def negotiate(self, build: Build) -> PeerChannel | None:
        from halox.paths.peer.channel import PeerChannel
        from halox.paths.peer.negotiation import Cts, Negotiation

        world, job, copies = build.world, build.job(self), build.carried(self)
        infos = {(m.peer, m.tag): build.peer_info(self, m) for m in job.sends}
        arena = build.context.device_arena

        def begin() -> Negotiation | None:
            if arena is None or not job.messages:
                return None
            return Negotiation(world, arena, job, copies, build.protocols(job), infos)

        def finished(agreed: Negotiation, replies: Mapping[int, Cts]) -> PeerChannel:
            agreed.open(replies)
            return PeerChannel(agreed)

        # All GPUs are idle, so that no exchange of an earlier plan still uses the memory that is allocated now.
        rounds = (Negotiation.request, Negotiation.reply, finished)
        channel: PeerChannel | None = handshake(
            world, begin, rounds, "the making of a plan", peers=lambda agreed: agreed.peers
        )
        return channel

    def channels(self, build: Build, agreed: PeerChannel) -> Sequence[ChannelMessages]:
        messages = (*build.job(self).messages, *build.carried(self).messages)
        return [ChannelMessages(self.name, agreed, messages)]


def _can_store(sender: PeerInfo, receiver: PeerInfo) -> bool:
    """Whether the sender may store into the receiver's array itself."""
    if receiver.places is None or sender.layouts is None or receiver.layouts is None:
        return False
    if [a.nbytes for a in sender.layouts] != [b.nbytes for b in receiver.layouts]:
        return False  # the ends do not match; the receiver reports it
    pairs = zip(sender.layouts, receiver.layouts, strict=True)
    return all(pieces_between(a, b) <= MOST_PIECES for a, b in pairs)
