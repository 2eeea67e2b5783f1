"""Guard of the ranks of a launcher that halox starts: ends the ranks if the launcher is killed.

A launcher that fails, or handles a signal, ends its ranks, finally by SIGKILL. But if Open MPI's launcher is killed by
SIGKILL, its ranks continue. This file runs as a script, in a child of the process that becomes the launcher. It imports
only the standard library::

    halox run, then mpiexec -+- guard     watches the children of mpiexec
                             +- rank 0
                             +- rank 1
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

GRACE_S = 3.0
"""Seconds between SIGTERM and SIGKILL for ranks after the end of their launcher."""

_LOOK_S = 0.25


def start() -> None:
    """Start the guard of this process, which becomes a launcher next; does nothing without ``/proc``."""
    if not Path("/proc/self/task").exists():
        return
    # Ranks can run without a guard.
    with suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid())],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal must reach only the launcher and its ranks.
            start_new_session=True,
        )


def main(launcher: int) -> None:
    """Wait for the end of the launcher, the parent of this process, and end its remaining ranks."""
    ranks: set[int] = set()
    while True:
        found = _children(launcher) - {os.getpid()}
        if os.getppid() != launcher:
            break  # the launcher has ended, and ``found`` is outdated
        ranks = found
        time.sleep(_LOOK_S)
    _signal(ranks, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while any(map(_is_running, ranks)) and time.monotonic() < end:
        time.sleep(_LOOK_S)
    _signal(ranks, signal.SIGKILL)


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(child) for child in listed.read_text().split()}
    return found


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _signal(processes: Collection[int], number: signal.Signals) -> None:
    for pid in filter(_is_running, processes):
        with suppress(OSError):
            os.kill(pid, number)


if __name__ == "__main__":
    main(int(sys.argv[1]))
