"""Helpers of several mini-apps: option types, errors on all ranks, shapes of GPU thread blocks, and a timer."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

import halox

Result = TypeVar("Result")

Progress = Callable[[str, int, int], None]
"""``progress(what, done, total)``, as ``halox run`` passes it."""

Kernel = Callable[[], None]
"""An operation on given arrays, ready to run."""

_THREADS_X = 64
_THREADS = 128


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add ``--device``."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: auto"
    )


def at_least(least: int) -> Callable[[str], int]:
    """Return an `argparse` type that accepts whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return parse


def on_all_ranks(comm: Any, work: Callable[[], Result], doing: str) -> Result:
    """Return ``work()``, or raise on all ranks if it raises on any; collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    work : callable
        Local: makes no collective call.
    doing : str
        Name of the work, for the text of errors that halox did not raise.

    Raises
    ------
    halox.errors.HaloxError
        With the text of the first rank that failed.
    """
    result, text, error = None, "", None
    try:
        result = work()
    except Exception as caught:
        error = caught
        is_own = isinstance(caught, halox.errors.HaloxError)
        text = str(caught) if is_own else f"{doing} failed: {type(caught).__name__}: {caught}"
    failed = next((text for text in comm.allgather(text) if text), "")
    if failed:
        raise halox.errors.HaloxError(failed) from error
    return result  # type: ignore[return-value]


def shared_cores(comm: Any) -> list[str]:
    """Return a line that says so if the ranks of this machine share cores, else nothing; collective.

    Examples
    --------
    >>> from mpi4py import MPI
    >>> shared_cores(MPI.COMM_SELF)
    []
    """
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    ranks, cores = node.size, len(set().union(*node.allgather(os.sched_getaffinity(0))))
    node.Free()
    if ranks <= cores:
        return []
    number = "1 core" if cores == 1 else f"{cores} cores"
    return [
        f"{ranks} ranks share {number} here: in its exchanges a rank waits while others compute"
    ]


def block(columns: int) -> tuple[int, int]:
    """Return the shape (x, y) of a thread block, for a number of points along x.

    Examples
    --------
    >>> block(512), block(20), block(2)
    ((64, 2), (32, 4), (2, 64))
    """
    along_x = min(_THREADS_X, 1 << (columns - 1).bit_length())
    return along_x, _THREADS // along_x


class Timer:
    """Times between marks, on the host's clock or by events in the current CUDA stream.

    Parameters
    ----------
    xp : module
        Module of the arrays, ``grid.xp``. NumPy work is timed by the host's clock. CuPy work is
        timed by events, so that the host does not wait between marks.
    """

    def __init__(self, xp: Any = np) -> None:
        self._xp = xp
        self._on_host = xp is np

    def mark(self) -> Any:
        """Return a mark: the current time, or an event recorded in the current stream."""
        if self._on_host:
            return time.perf_counter()
        event = self._xp.cuda.Event()
        event.record()
        return event

    def seconds(self, intervals: Iterable[tuple[Any, Any]]) -> list[float]:
        """Return the lengths of intervals between pairs of marks; on a GPU, wait for the last mark."""
        if self._on_host:
            return [end - begin for begin, end in intervals]
        intervals = list(intervals)
        if intervals:
            intervals[-1][1].synchronize()
        elapsed_ms = self._xp.cuda.get_elapsed_time
        return [float(elapsed_ms(begin, end)) / 1e3 for begin, end in intervals]
