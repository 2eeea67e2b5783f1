"""Actions of finalizers, put off while what they change is in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock


class Deferred:
    """Lock of what finalizers change, which the collector runs in the middle of anything, on any thread.

    ``with deferred:`` keeps other threads out. A finalizer cannot wait for it, since its own thread may be inside: it
    asks for an action by `do`, which runs at once, or at the end of the block that is under way.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[Callable[[], object]] = deque()

    def do(self, act: Callable[[], object]) -> None:
        """Call a function, as soon as no thread is inside; does not wait."""
        self._waiting.append(act)
        self._settle()

    def __enter__(self) -> None:
        """Wait until no thread is inside, and keep others out; not to be entered again inside."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Let others in, and do what has been put off."""
        self._lock.release()
        self._settle()

    def _settle(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                if self._waiting:  # still: another thread may have been here
                    self._waiting.popleft()()
            finally:
                self._lock.release()
