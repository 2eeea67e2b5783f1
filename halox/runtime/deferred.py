"""Lock for state that finalizers also change; their actions are deferred while the lock is held."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock


class Deferred:
    """Lock for state that finalizers change; a finalizer may run at any point, on any thread.

    ``with lock:`` excludes other threads. A finalizer cannot wait for the lock, since the thread that it interrupts may
    hold it. So the finalizer passes an action to `do`, which runs the action at once, or when the lock is released.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._waiting: deque[Callable[[], object]] = deque()

    def do(self, act: Callable[[], object]) -> None:
        """Call a function as soon as no thread holds the lock; does not block."""
        self._waiting.append(act)
        self._run_waiting()

    def __enter__(self) -> None:
        """Acquire the lock; blocks. Not reentrant."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._run_waiting()

    def _run_waiting(self) -> None:
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                if self._waiting:  # another thread may have emptied the queue
                    self._waiting.popleft()()
            finally:
                self._lock.release()
