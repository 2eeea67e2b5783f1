"""Channel of the ``peer`` path: one kernel per exchange, among GPUs that map one another's memory.

The kernel packs into the peers' memory, signals there, waits for the messages of the peers, and unpacks them.
(``paths/peer/kernels/peer.cu`` states its protocol, and why no order of its blocks can deadlock.) The host only
launches the kernel::

    rank A  ...user's kernels | pack -> B's staging memory, flag | wait for B's flag, unpack | user's kernels...
    rank B  ...user's kernels | pack -> A's staging memory, flag | wait for A's flag, unpack | user's kernels...

There are three protocols. ``ll``: packets of data and epoch, which need no flag, for small messages. ``staging``:
packed, with a flag per chunk. ``direct``: stored straight into the receiver's array, if both ends have long runs and
the array is in memory that the receiver has exported.

Double buffers. A rank's launch for epoch e + 2 writes the slot of epoch e in its peer's memory. This launch follows the
rank's launch for e + 1, which consumed the messages of the peer's launch for e + 1. The peer's launch for e + 1 began
after its launch for e had ended, and with it the last use of the slot. If a peer sends nothing back, the launch waits
instead until the peer has signalled that it has begun epoch e + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from halox.paths.launches import WORD, check_no_capture, clearing_of
from halox.paths.launches import View as LaunchView
from halox.paths.peer.negotiation import LaunchSet, Negotiation
from halox.paths.stream_channel import StreamChannel
from halox.runtime.gpu.streams import Stream

View = tuple[LaunchSet, Sequence[int], Sequence[LaunchView]]
"""Launches, the shifts of the arrays in the kernel's table, and the views of the launches before and after it."""


class PeerChannel(StreamChannel):
    """All messages that one launch moves, from a completed negotiation.

    For other arrays, the launch's parameters hold the distances of these arrays from the arrays of its table. The
    distances must be multiples of the longest word, since the words of the segments depend on the remainders. Arrays at
    other distances are moved through buffers.
    """

    def __init__(self, agreed: Negotiation) -> None:
        super().__init__(agreed.device)
        self._agreed = agreed
        self._home = [array.pointer for array in agreed.job.arrays]
        self.is_movable = agreed.is_movable
        self._unbuffered = self._current = agreed.prepared()
        self._clear = clearing_of(agreed.job, agreed.device)
        self._unbuffered.after.extend(self._clear)
        self._buffered: LaunchSet | None = None
        self._leaves_copies = False
        assert agreed.failure is not None
        self._failure, self._failed = agreed.failure, agreed.failure.words

    def views(self, memories: Sequence[int]) -> View:
        shifts = [(new - old) % (1 << 64) for new, old in zip(memories, self._home, strict=True)]
        launches = self._unbuffered
        if any(shift % WORD for shift in shifts):
            if self._buffered is None:
                check_no_capture()
                self._buffered = self._agreed.through_buffers()
                self._buffered.after.extend(self._clear)
            launches = self._buffered
        return (
            launches,
            shifts,
            [movable.view(memories) for movable in (*launches.before, *launches.after)],
        )

    def bind(self, views: View) -> None:
        self._current, shifts, around = views
        if self._current is self._unbuffered:
            self._current.shift(shifts)
        for launches, view in zip(
            (*self._current.before, *self._current.after), around, strict=True
        ):
            launches.bind(view)

    def start_copied(self) -> None:
        current = self._current
        self._leaves_copies = current.copies is not None
        self.start()
        self._leaves_copies = False
        if current.copies is not None:
            current.copies.launch(self._current_stream().ptr)

    def _enter(self, stream: Stream, is_concurrent: bool) -> None:
        if self._failed[0]:
            self._failure.was_raised = True
            raise self._agreed.error()
        pointer = stream.ptr
        if self._order.last is not stream:
            self._order.follow(stream)
        current = self._current
        for part in current.before:
            part.launch(pointer)
        beside = current.remote if self._leaves_copies else current.concurrent
        (beside if is_concurrent else current.alone).launch(pointer)
        for part in current.after:
            if part is not current.copies or not self._leaves_copies:
                part.launch(pointer)

    def close(self) -> None:
        """Wait for the last launch; warn if an exchange has failed since the last call.

        The memory stays unchanged: the peers' launches may still store into it, and wait there for this rank's signals.
        """
        super().close()
        self.has_failed = self._failure.close(self._agreed.error)

    def free(self) -> None:
        """Release the memory, after the peers' last launches have ended, too."""
        self._agreed.abandon()
