"""Exchanges in which a rank accesses its peers' arrays in place, and returns only when its peers have finished.

No cell is copied twice. In return a rank must not leave an exchange before its peers have finished with its cells, so
that the exchange needs two flags, while a packed message needs one::

    A: cells final | ready=e | ...... move B's cells | read=e | wait for B's read=e | return
    B: cells final | ready=e | move A's cells | read=e | ...... wait for A's read=e | return

While a rank waits in one exchange, it also moves the cells of its other exchanges that have been started and whose
peers are ready. So each rank may finish its exchanges in any order (`halox.runtime.waiting`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from halox.paths.base import Channel
from halox.paths.node import NodeLink
from halox.runtime.waiting import STARTED_STEPS


class InPlaceChannel(Channel):
    """Base of channels that move cells from array to array; a subclass adds only `_move`.

    This rank accesses arrays of the ranks ``waits_for``. The ranks ``waited_for`` access this rank's arrays. The
    channel owns ``link``.
    """

    timeline = (
        ("_ready.wait", "wait"),
        ("_move", "copy"),
        ("_read.wait", "wait"),
    )

    def __init__(self, link: NodeLink, waits_for: Sequence[int], waited_for: Sequence[int]) -> None:
        self._world, self._link = link.world, link
        self._epoch = 0
        self._copied = 0
        # The epoch whose cells must be moved, if any. The thread that removes the entry moves them.
        self._to_copy: list[int] = []
        self._ready = link.flag("ready", waits_for)
        self._read = link.flag("read", waited_for)

    @abstractmethod
    def _move(self) -> None:
        """Move the cells of the peers; the peers are ready."""

    def start(self) -> None:
        self.run()
        self._to_copy.append(self._epoch)
        STARTED_STEPS[self] = self._help

    def run(self) -> None:
        """Let the neighbours read; `finish` follows before this rank waits for anything else."""
        self._epoch += 1
        self._ready.signal(self._epoch)

    def finish(self) -> None:
        """Copy the neighbours' cells, and wait until the neighbours have also read this rank's cells."""
        epoch = self._epoch
        was_started = STARTED_STEPS.pop(self, None) is not None
        self._ready.wait(epoch)
        if not was_started:
            self._move()
            self._read.signal(epoch)
        else:
            self._copy()
            if self._copied < epoch:
                self._world.waiter().until(
                    lambda: self._copied == epoch,
                    lambda: f"rank {self._world.rank} has waited for another thread to copy",
                )
        self._read.wait(epoch)

    def _help(self) -> None:
        """Copy, if the neighbours are ready and nobody has copied yet."""
        if self._to_copy and self._ready.passed(self._epoch):
            self._copy()

    def _copy(self) -> None:
        try:
            epoch = self._to_copy.pop()
        except IndexError:  # another call makes the copy
            return
        self._move()
        self._read.signal(epoch)
        self._copied = epoch

    def close(self) -> None:
        """Leave an exchange that is under way: signal "read", so that the neighbours do not wait for this rank."""
        STARTED_STEPS.pop(self, None)
        if self._to_copy:
            self._to_copy.clear()
            self._read.signal(self._epoch)

    def free(self) -> None:
        self._link.close()
