"""Messages of one call, of which only a few are under way at once, so that they need little memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from halox.runtime.arrays import Array
from halox.runtime.communicator import CELLS, UNFINISHED
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(eq=False)
class _Message:
    memory: Array
    peer: int
    receives: bool
    then: Callable[[], None] | None = None
    request: MPI.Request | None = None  # None while it is started

    @property
    def has_ended(self) -> bool:
        return self.request is not None and bool(self.request.Test())


class Window:
    """Messages under way, the oldest first, at most so many at once, each with the memory that it works on.

    ``doing`` is the call, as in "a gather", for the texts of timeouts.

    As a context manager it ends all messages, or on an error cancels the receives, since MPI cancels no sends. The
    memory of messages that go on is kept for good.
    """

    def __init__(self, world: World, most: int, doing: str) -> None:
        self._world, self._most, self._doing = world, most, doing
        self._tag = world.ranks.call_tag(CELLS)
        self._messages: deque[_Message] = deque()

    def make_room(self) -> None:
        """Wait until one more message may be started; before its memory is allocated."""
        while len(self._messages) >= self._most:
            self._end_oldest()

    def send(self, memory: Array, peer: int) -> None:
        """Start to send a contiguous array."""
        message = self._add(_Message(memory, peer, False))
        message.request = self._world.comm.Isend(as_bytes(memory), peer, self._tag)

    def receive(self, memory: Array, peer: int, then: Callable[[], None] | None = None) -> None:
        """Start to receive into a contiguous array; ``then`` is called once it has come."""
        message = self._add(_Message(memory, peer, True, then))
        message.request = self._world.comm.Irecv(as_bytes(memory), peer, self._tag)

    def _add(self, message: _Message) -> _Message:
        """Keep a message's memory before it is started, since an interruption may come at any time."""
        self._messages.append(message)
        return message

    def send_copy(self, part: Array, peer: int) -> None:
        """Wait for room, and start to send an array of any strides."""
        self.make_room()
        self.send(np.ascontiguousarray(part), peer)

    def receive_into(self, part: Array, peer: int) -> None:
        """Wait for room, and start to receive into an array of any strides, through a buffer where it must be."""
        self.make_room()
        if part.flags.c_contiguous:
            self.receive(part, peer)
        else:
            buffer = np.empty(part.shape, part.dtype)
            self.receive(buffer, peer, partial(np.copyto, part, buffer))

    def end(self) -> None:
        """Wait for all messages."""
        while self._messages:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Wait for the oldest message; it stays if that fails."""
        first = self._messages[0]
        for_what = (
            f"rank {first.peer}" if first.receives else f"rank {first.peer} to take its cells"
        )
        assert first.request is not None
        self._world.wait([first.request], f"in {self._doing} for {for_what}", lambda: [first.peer])
        self._messages.popleft()
        if first.then is not None:
            first.then()

    def __enter__(self) -> Window:
        """Return the window."""
        UNFINISHED.append(self._messages)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """End all messages, or leave them to MPI after an error."""
        try:
            if kind is None:
                self.end()
        finally:
            for message in self._messages:
                if message.receives and message.request is not None:
                    message.request.Cancel()
            if all([message.has_ended for message in self._messages]):
                UNFINISHED[:] = [one for one in UNFINISHED if one is not self._messages]


def opaque(array: Array) -> Array:
    """View structs as bytes: NumPy would copy field by field, and leave the gaps out."""
    return array if array.dtype.names is None else array.view(f"V{array.itemsize}")


def as_bytes(array: Array) -> Array:
    """View a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
