"""Threads beside the thread that reads or writes a file: one computes checksums, one waits for the disk."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

ASIDE_BYTES = 256 << 10
"""Minimum bytes for which a call in another thread is worthwhile."""

_SYNCED_LATER = 2


class Aside:
    """Runs calls on many bytes in a second thread, during a system call of this thread; started when needed.

    A process without a spare core makes the calls itself: a process that is bound to one core, or a node with fewer
    than two cores per rank.
    """

    def __init__(self, node_ranks: int) -> None:
        cores = len(os.sched_getaffinity(0))
        if cores == os.cpu_count():  # ranks are not bound
            cores //= node_ranks
        self._thread = ThreadPoolExecutor(1) if cores > 1 else None

    @contextmanager
    def call(self, nbytes: int, action: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Run a call during the block, or before it for few bytes; the yielded function returns the call's result.

        google-crc32c holds the interpreter's lock (GIL). So the block should be a single system call, which releases
        the lock.
        """
        if self._thread is None or nbytes < ASIDE_BYTES:
            result = action()
            yield lambda: result
            return
        pending = self._thread.submit(action)
        try:
            yield pending.result
        finally:
            wait([pending])
        pending.result()  # raises the error of the call


class Syncer:
    """Syncs files to the disk and closes them, while the next files are written."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def take(self, handle: int) -> None:
        """Take over a written file; raises OSError of earlier files."""
        self._pending.append(self._thread.submit(_sync_and_close, handle))
        while len(self._pending) > _SYNCED_LATER:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all files are on the disk; raises the first OSError."""
        wait(self._pending)
        while self._pending:
            self._pending.popleft().result()


def _sync_and_close(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
