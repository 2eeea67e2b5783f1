"""How packed messages get from one rank's host memory to another's.

A carrier owns a buffer for each message in each of its ``slots`` and moves their contents; packing and unpacking
are its user's. One exchange (epoch e = 1, 2, ...) calls, in this order::

    open(e)        the outgoing buffers of slot e may be written from now on
      ... pack ...
    post(e)        they have been written
    collect(e)     the incoming buffers of slot e may be read from now on
      ... unpack ...
    release(e)     they have been read
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halox.messages import Message
from halox.transports.arena import Bytes, SharedArena
from halox.transports.node import NodeLink
from halox.world import World


class Carrier(ABC):
    """Buffers for the messages of one channel, and what moves them.

    Attributes
    ----------
    slots : int
        Buffers a message; epoch e uses slot ``e % slots``.
    outgoing, incoming : list of list of ndarray
        ``outgoing[slot][number]`` is the buffer of send number ``number``: bytes, on the host.
    """

    slots: int
    outgoing: list[list[Bytes]]
    incoming: list[list[Bytes]]

    def open(self, epoch: int) -> None:  # noqa: B027 - nothing to wait for by default
        """Wait until the outgoing buffers may be written."""

    @abstractmethod
    def post(self, epoch: int) -> None:
        """Send the outgoing buffers."""

    @abstractmethod
    def collect(self, epoch: int) -> None:
        """Wait until all incoming buffers are filled."""

    def release(self, epoch: int) -> None:  # noqa: B027 - nobody waits by default
        """Say that the incoming buffers have been read."""

    @abstractmethod
    def device_pointers(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the GPU's addresses of ``outgoing`` and ``incoming``, page-locking them."""

    def close(self) -> None:  # noqa: B027 - nothing kept by default
        """Give the buffers back; local."""


class SharedCarrier(Carrier):
    """Packs into memory that the receiver reads: no copy by MPI, one flag a rank and exchange.

    Two slots: when a rank sees its peer's flag for epoch e + 1, the peer has finished reading epoch e, because it
    packs e + 1 only after that. So slot e % 2 is free for epoch e + 2 without an acknowledgement, between ranks
    that send both ways. A rank to which nothing is sent back waits for the receiver's second flag instead::

        A: pack 1 | ready=1 |           | pack 2 | ready=2 | ... pack 3 overwrites slot 1
        B:        | ready=1 | unpack 1  |        | ready=2 | <- seen by A before it packs 3
    """

    slots = 2

    def __init__(
        self,
        arena: SharedArena,
        link: NodeLink,
        sends: Sequence[Message],
        receives: Sequence[Message],
    ) -> None:
        self._arena, self._link = arena, link
        self._places_out = [
            [link.outgoing_place(m, slot) for m in sends] for slot in range(self.slots)
        ]
        self._places_in = [
            [link.incoming_place(m, slot) for m in receives] for slot in range(self.slots)
        ]
        self.outgoing = self._views(self._places_out, sends)
        self.incoming = self._views(self._places_in, receives)
        sources = sorted({m.peer for m in receives})
        targets = {m.peer for m in sends}
        self._ready = link.gate("packed", sources)
        self._drained = link.gate("drained", sorted(targets.difference(sources)))

    def _views(self, places: Any, messages: Sequence[Message]) -> list[list[Bytes]]:
        return [
            [
                self._arena.memory(place)[: m.packed_bytes]
                for place, m in zip(row, messages, strict=True)
            ]
            for row in places
        ]

    def open(self, epoch: int) -> None:
        """Wait for receivers that send nothing back to have read the slot's last message."""
        self._drained.wait(epoch - 2)

    def post(self, epoch: int) -> None:
        """Raise this rank's flag."""
        self._ready.raise_to(epoch)

    def collect(self, epoch: int) -> None:
        """Wait for the flags of all senders."""
        self._ready.wait(epoch)

    def release(self, epoch: int) -> None:
        """Raise the flag for senders that get nothing back."""
        self._drained.raise_to(epoch)

    def device_pointers(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the GPU's addresses of both sides' buffers."""
        pointer = self._arena.device_pointer
        return (
            [[pointer(place) for place in row] for row in self._places_out],
            [[pointer(place) for place in row] for row in self._places_in],
        )


class RequestCarrier(Carrier):
    """Sends the buffers with persistent MPI requests, one message a peer.

    One slot: receives are posted when this rank's own messages are packed, by which time it has read the last ones.
    """

    slots = 1

    def __init__(
        self,
        world: World,
        sends: Sequence[Message],
        receives: Sequence[Message],
        mpi_tag: Callable[[Message], int],
        pinned: bool = False,
    ) -> None:
        self._world = world
        self._pinned: list[Any] = []
        self.outgoing = [[self._buffer(m.packed_bytes, pinned) for m in sends]]
        self.incoming = [[self._buffer(m.packed_bytes, pinned) for m in receives]]
        comm = world.comm
        self._requests = [
            comm.Recv_init(buffer, m.peer, mpi_tag(m))
            for buffer, m in zip(self.incoming[0], receives, strict=True)
        ] + [
            comm.Send_init(buffer, m.peer, mpi_tag(m))
            for buffer, m in zip(self.outgoing[0], sends, strict=True)
        ]
        self._peers = sorted({m.peer for m in receives})

    def _buffer(self, nbytes: int, pinned: bool) -> Bytes:
        if not pinned:
            return np.zeros(nbytes, np.uint8)
        from halox.engine.memory import pinned as pinned_buffer

        self._pinned.append(pinned_buffer(nbytes))
        array: Bytes = self._pinned[-1].array
        return array[:nbytes]

    def post(self, epoch: int) -> None:
        """Start all receives, then all sends."""
        self._world.mpi.Prequest.Startall(self._requests)

    def collect(self, epoch: int) -> None:
        """Wait for all of them."""
        self._world.wait(self._requests, f"for messages with ranks {self._peers}")

    def device_pointers(self) -> tuple[list[list[int]], list[list[int]]]:
        """Return the GPU's addresses of the page-locked buffers."""
        pointers = [int(buffer.device_pointer) for buffer in self._pinned]
        sends = len(self.outgoing[0])
        return [pointers[:sends]], [pointers[sends:]]

    def close(self) -> None:
        """Free the requests and the page-locked memory."""
        for request in self._requests:
            request.Free()
        self._requests = []
        for buffer in self._pinned:
            buffer.close()
        self._pinned = []
