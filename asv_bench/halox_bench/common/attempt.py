"""Work that may fail on some ranks only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Found = TypeVar("Found")


def attempt(comm: Any, work: Callable[[], Found]) -> tuple[Found | None, Exception | None]:
    """Call a function on all ranks; a failure on any rank is a failure on all.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or None
        None for this process alone.
    work : callable
        Must return, or raise, on every rank.

    Returns
    -------
    result : object or None
    error : Exception or None
        This rank's error, or a `RuntimeError` with the text of the first rank's error.
    """
    result: Found | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as caught:
        error = caught
    said = [] if comm is None else comm.allgather(error and f"{type(error).__name__}: {error}")
    first = next(((rank, text) for rank, text in enumerate(said) if text), None)
    if first is None and error is None:
        return result, None
    return None, error or RuntimeError("rank {}: {}".format(*first or ()))
