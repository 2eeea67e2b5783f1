"""Messages of one gather, scatter or save, with only a few in flight at once to limit memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from halox.runtime.arrays import Array
from halox.runtime.communicator import CELLS
from halox.runtime.finalizing import drop, keep
from halox.runtime.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(eq=False)
class _Message:
    memory: Array
    peer: int
    is_receive: bool
    then: Callable[[], None] | None = None
    request: MPI.Request | None = None  # None until the message is posted

    @property
    def has_ended(self) -> bool:
        return self.request is not None and bool(self.request.Test())


class MessageQueue:
    """Queue of at most ``most`` messages in flight, the oldest first, each with its buffer.

    ``step`` names the call in timeout errors, as in "a gather".

    The context manager completes all messages on exit. After an error it cancels only the receives, since MPI does not
    cancel sends. The buffers of unfinished messages stay allocated.
    """

    def __init__(self, world: World, most: int, step: str) -> None:
        self._world, self._most, self._step = world, most, step
        self._tag = world.ranks.call_tag(CELLS)
        self._messages: deque[_Message] = deque()

    def send(self, part: Array, peer: int) -> None:
        """Wait for room, and start sending an array of any strides."""
        self._make_room()
        memory = np.ascontiguousarray(part)
        message = self._add(_Message(memory, peer, False))
        message.request = self._world.comm.Isend(as_bytes(memory), peer, self._tag)

    def receive(self, part: Array, peer: int) -> None:
        """Wait for room, and start receiving into an array of any strides, through a buffer if it is not contiguous."""
        self._make_room()
        memory, then = part, None
        if not part.flags.c_contiguous:
            memory = np.empty(part.shape, part.dtype)
            then = partial(np.copyto, part, memory)
        message = self._add(_Message(memory, peer, True, then))
        message.request = self._world.comm.Irecv(as_bytes(memory), peer, self._tag)

    def _make_room(self) -> None:
        while len(self._messages) >= self._most:
            self._end_oldest()

    def _add(self, message: _Message) -> _Message:
        """Queue a message before MPI starts it: after an interrupt in between, the queue still holds its buffer."""
        self._messages.append(message)
        return message

    def end(self) -> None:
        while self._messages:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Wait for the oldest message; after an error it stays in the queue."""
        first = self._messages[0]
        for_what = (
            f"rank {first.peer}" if first.is_receive else f"rank {first.peer} to take its cells"
        )
        assert first.request is not None
        self._world.wait([first.request], f"in {self._step} for {for_what}", lambda: [first.peer])
        self._messages.popleft()
        if first.then is not None:
            first.then()

    def __enter__(self) -> MessageQueue:
        keep(self._messages)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.end()
        finally:
            for message in self._messages:
                if message.is_receive and message.request is not None:
                    message.request.Cancel()
            if all([message.has_ended for message in self._messages]):
                drop(self._messages)


def as_void(array: Array) -> Array:
    """View a structured array as raw bytes, since NumPy copies it field by field, without padding bytes."""
    return array if array.dtype.names is None else array.view(f"V{array.itemsize}")


def as_bytes(array: Array) -> Array:
    """View a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8)
