"""Commands that run beside the tests, one after another, on a thread of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

QUIET_S = 1800.0
"""How long a command may say nothing: longer than the ranks' own limit on a test."""

_running: list[subprocess.Popen[bytes]] = []
_starting = threading.Lock()


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its status, None if it was ended for its silence, and all it said."""

    status: int | None
    said: str


def run(command: Sequence[str], environment: Mapping[str, str]) -> Ended:
    """Run a command from the root of the checkout for as long as it makes progress, which is to say anything."""
    with tempfile.TemporaryFile() as said:
        with _starting:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _running.append(process)
        status, size, since = None, -1, time.monotonic()
        while status is None:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(1.0)
            now, last = time.monotonic(), size
            size = os.fstat(said.fileno()).st_size
            if size != last:
                since = now
            if status is None and now - since > QUIET_S:
                _end(process)
                break
        with _starting:
            _running.remove(process)
        said.seek(0)
        return Ended(status, said.read().decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks if it is let."""
    for number, patience_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return


class Beside:
    """Calls in the order in which they were added, each begun when the one before has ended."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._results: dict[str, Future[Any]] = {}

    def add(self, name: str, call: Callable[[], Any]) -> None:
        self._results[name] = self._pool.submit(call)

    def result(self, name: str) -> Any:
        return self._results[name].result()

    def stop(self) -> None:
        """Let nothing run on when the tests have ended early."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with _starting:
            for process in _running:
                _end(process)
