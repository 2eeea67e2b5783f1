"""Packs, sends and unpacks large messages stage by stage, so that the three overlap.

A stage is one fragment of every large message (`halox.paths.fragments`). All stages are packed one after the
other on the user's stream; the host posts each as soon as its packing has ended, and has each that arrives unpacked
on a stream of the channel's own, since stores to host memory and loads from it do not slow each other down::

    user's stream | pack 0 | pack 1 | pack 2 | pack 3 |                                        | user's kernels
    host            post 0 ->  post 1 ->  post 2 -> post 3
    MPI                       | 0 there ...| 1 there ...| 2 there ...| 3 there ...|
    own stream                              | unpack 0 | | unpack 1 | | unpack 2 | | unpack 3 |

Its GPU work is behind `Work`, so that the protocol runs in a test without one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence

from halox.paths.buffers import TransportBuffers
from halox.paths.launches import MovableChannel, MovableLaunches
from halox.runtime.world import Waiter, World


class Work(ABC):
    """GPU work of a pipeline. Stages are packed and unpacked in turn.

    Attributes
    ----------
    movable : sequence of MovableLaunches
        All launches over the arrays.
    """

    movable: Sequence[MovableLaunches] = ()

    @abstractmethod
    def check(self) -> None:
        """Raise `StateError` if the current stream cannot be used."""

    @abstractmethod
    def begin(self, slot: int) -> None:
        """Put the packing of all stages on the current stream, and order later unpacking after its present work."""

    @abstractmethod
    def is_packed(self, stage: int) -> bool:
        """Return whether the packing of a stage has ended."""

    @abstractmethod
    def unpack(self, slot: int, stage: int) -> None:
        """Put the unpacking of a stage on the other stream."""

    @abstractmethod
    def end(self) -> None:
        """Make the current stream wait for all unpacking."""

    @abstractmethod
    def wait_until_read(self) -> None:
        """Wait on the host for all unpacking put on the other stream before the last `end`."""

    @abstractmethod
    def wait_for_all(self) -> None:
        """Wait on the host for all packing and unpacking put on streams so far."""


class Pipeline(MovableChannel):
    """Moves arrays on this rank's GPU through transport buffers, fragment by fragment.

    `start` returns when all stages have been packed and posted. It waits for this rank's GPU, as far as its packing,
    and for no other rank (but a receiver that sends nothing back and has not read the message before the last). What
    has arrived by then is being unpacked already; `finish` waits for the rest.
    """

    def __init__(self, world: World, buffers: TransportBuffers, work: Work) -> None:
        self._world, self._buffers, self._work = world, buffers, work
        self._movable = work.movable
        self._waiter: Waiter = world.waiter()
        self._crowded = world.crowded
        self._epoch = 0
        self._unpacked = 0

    def check(self) -> None:
        """Refuse a stream that is being captured."""
        self._work.check()

    def start(self) -> None:
        """Pack everything, and post each stage as soon as it is packed."""
        buffers, work = self._buffers, self._work
        epoch = self._epoch + 1
        buffers.open(epoch)
        work.begin(epoch % buffers.slots)
        # The packing waits on the stream for the last unpacking, so that nothing is lost by this wait.
        work.wait_until_read()
        buffers.release(self._epoch)
        self._epoch, self._unpacked = epoch, 0
        buffers.expect(epoch)
        for stage in range(buffers.stages_out):
            # Without a limit: what the user has put on the stream before may take its time.
            while not work.is_packed(stage):
                if not self._unpack_next() and self._crowded:
                    os.sched_yield()
            buffers.post_stage(epoch, stage)

    def finish(self) -> None:
        """Put the unpacking of each further stage on a stream once it arrives; make the current stream wait."""
        buffers = self._buffers
        while self._unpacked < buffers.stages_in:
            self._waiter.until(
                self._unpack_next,
                lambda: (
                    f"rank {self._world.rank} has waited for messages with ranks "
                    f"{buffers.awaited(self._epoch)}"
                ),
                lambda: buffers.awaited(self._epoch),
            )
        self._work.end()
        buffers.complete(self._epoch)

    def _unpack_next(self) -> bool:
        """Have the next stage unpacked if it has arrived; return whether it has."""
        stage = self._unpacked
        if stage >= self._buffers.stages_in or not self._buffers.arrived(self._epoch, stage):
            return False
        self._work.unpack(self._epoch % self._buffers.slots, stage)
        self._unpacked += 1
        return True

    def close(self) -> None:
        """Wait for the GPU, which may be in the middle of an exchange, then close the buffers."""
        self._work.wait_for_all()
        self._buffers.close()

    def free(self) -> None:
        """Free the buffers."""
        self._buffers.free()
