"""Threads beside the one that reads or writes a file: one computes checksums, one waits for the disk."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

ASIDE_BYTES = 256 << 10
"""Fewest bytes for which another thread is worth its start."""

_SYNCED_LATER = 2


class Aside:
    """Calls for many bytes, made by another thread while this one is in the system; it is started when it is needed.

    A process without a core to spare makes them itself: one that is bound to a core, or where there are fewer than two
    for each of so many ranks on its node.
    """

    def __init__(self, node_ranks: int) -> None:
        cores = len(os.sched_getaffinity(0))
        if cores == os.cpu_count():  # ranks are not bound
            cores //= node_ranks
        self._thread = ThreadPoolExecutor(1) if cores > 1 else None

    @contextmanager
    def call(self, nbytes: int, action: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
        """Make a call during the block, whose result the yielded function returns; before it, for few bytes.

        google-crc32c keeps the interpreter's lock, so that the block ought to be one system call, which does not.
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
        pending.result()  # raises what the call has raised


class Syncer:
    """Writes files through to the disk, and closes them, while the next ones are written."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1)
        self._pending: deque[Future[None]] = deque()

    def take(self, handle: int) -> None:
        """Take a file that has been written; raises OSError of former ones."""
        self._pending.append(self._thread.submit(_sync_and_close, handle))
        while len(self._pending) > _SYNCED_LATER:
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all files are on the disk; raises OSError, that of the first one."""
        wait(self._pending)
        while self._pending:
            self._pending.popleft().result()


def _sync_and_close(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
