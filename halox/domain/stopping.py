"""`stopping`: agreement of all ranks to end a program, after a signal or near a wall-time limit."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from typing import Any

from halox.domain.domain import HasDomain, domain_of
from halox.errors import HaloxError, StateError
from halox.runtime.world import World
from halox.values import shown

_CALL = "stopping"

_worlds: list[World] = []
"""The ranks of ``MPI.COMM_WORLD``, after the first call without a grid."""


class _Sigterm:
    """Handler of SIGTERM, which notes the first signal; a second one has the effect that it had before."""

    received = False
    is_installed = False
    previous: Any = None

    def install(self) -> None:
        if self.is_installed:
            return
        if threading.current_thread() is not threading.main_thread():
            raise StateError(
                "stopping: only the main thread can catch SIGTERM; call it there first"
            )
        self.previous = signal.signal(signal.SIGTERM, self.note)
        self.is_installed = True

    def note(self, number: int, frame: Any) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, self.previous or signal.SIG_DFL)
        if callable(self.previous):
            self.previous(number, frame)


sigterm = _Sigterm()


def stopping(
    grid: HasDomain | None = None, *, limit_s: float | None = None, before_s: float = 60.0
) -> bool:
    """Whether the program should save and end: after a SIGTERM to any rank, or near the wall-time limit.

    Parameters
    ----------
    grid : Grid, optional
        Grid whose ranks make the call; by default all ranks of ``MPI.COMM_WORLD``.
    limit_s : float, optional
        Wall-time limit in seconds, from the start of the process. By default HALOX_WALL_TIME, or else the end of the
        Slurm job (SLURM_JOB_END_TIME), or else no limit.
    before_s : float
        Time before the limit from which the result is True, in seconds: time for the last steps and a save.

    Returns
    -------
    bool
        The same on all ranks: True if it is so for any rank.

    Raises
    ------
    HaloxError
        If a limit is not a number.
    StateError
        If the first call is not in the main thread.

    Notes
    -----
    Collective: one gather of a flag from each rank, which costs as much as a small allreduce. The first call replaces
    the handler of SIGTERM, so make it before the time loop: until then, SIGTERM ends the process. After the first
    signal the old handler is back, and a second signal ends the process.

    Examples
    --------
    >>> import halox
    >>> halox.stopping(limit_s=86400)
    False
    """
    world = _world(grid)

    def check() -> bool:
        sigterm.install()
        end = _end(limit_s)
        margin = _seconds("before_s", before_s)
        return sigterm.received or (end is not None and time.time() >= end - margin)

    with world.guard:
        world.begin(_CALL)
        return any(world.gather(lambda: (None, check()), _CALL)[1].distinct)


def _world(grid: HasDomain | None) -> World:
    if grid is None:
        if not _worlds or _worlds[0].closed or _worlds[0].failed:
            _worlds[:] = [World(None, _CALL)]
        return _worlds[0]
    return domain_of(grid, "; name other arguments, as in limit_s=3600").world


def _end(limit_s: object) -> float | None:
    """Return the time of the wall-time limit, in seconds since 1970; None without a limit."""
    if limit_s is not None:
        return _started() + _seconds("limit_s", limit_s)
    if text := os.environ.get("HALOX_WALL_TIME"):
        return _started() + _seconds("HALOX_WALL_TIME", text)
    if text := os.environ.get("SLURM_JOB_END_TIME"):
        return _seconds("SLURM_JOB_END_TIME", text)
    return None


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if math.isnan(seconds):
        raise HaloxError(f"{name}: expected a number of seconds, got {shown(value)}")
    return seconds


def _started() -> float:
    """Return the time when this process started, in seconds since 1970."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])  # see proc(5): starttime
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age
