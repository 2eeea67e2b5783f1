"""Pool of released communicators, stored as an attribute of the user's communicator and reused on it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np

from halox.runtime.communicator import UNFINISHED, Communicator, node_name
from halox.runtime.status import ranks_text
from halox.runtime.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

_MOST_KEPT = 62  # bits of a word
_MOST_NAMED = 32


class _Kept:
    """Communicators made for one user communicator; their indices in ``all`` are equal on all ranks."""

    def __init__(self) -> None:
        self.all: list[Communicator | None] = []
        self.free: set[int] = set()
        self.is_gone = False

    def offered(self) -> int:
        """Return the numbers of the free communicators with the current ``HALOX_NODE``, as a bit mask."""
        name = node_name()
        found = 0
        for number in tuple(self.free):  # a finalizer may release another one meanwhile
            one = self.all[number]
            if one is not None and one.node_name == name:
                found |= 1 << number
        return found

    def destroy(self) -> None:
        """Free the unused communicators; the others are freed on release."""
        self.is_gone = True
        for number in sorted(self.free):
            one = self.all[number]
            if one is not None:
                one.destroy()
        self.free.clear()


def acquire(
    mpi: ModuleType, parent: MPI.Intracomm, making: str, limit_s: float, error: str = ""
) -> tuple[Communicator, Callable[[], None], list[str]]:
    """Return an unused communicator over the ranks of ``parent``; collective over ``parent``.

    Also returns a function that releases the communicator, and the errors of all ranks. The release function is local
    and harmless when repeated. Each rank passes its ``error``, or an empty text. ``making`` names the purpose in the
    text of a timeout. Raises `ExchangeTimeoutError` if a rank is missing after ``limit_s`` seconds; 0 means no limit.
    """
    kept = _kept_by(mpi, parent)
    common = _common(mpi, parent, kept.offered(), making, limit_s)
    first = (common & -common).bit_length() - 1
    known = kept.all[first] if common else None
    found = Communicator(mpi, parent, limit_s) if known is None else known
    kept.free.discard(first)
    number, errors = found.begin(limit_s, len(kept.all) if known is None else first, error)
    if known is None and number < _MOST_KEPT:
        kept.all += [None] * (number - len(kept.all)) + [found]

    def release() -> None:
        if found.watch.failed or found.watch.is_spoiled:  # late messages may arrive on it
            return
        if kept.is_gone or number >= _MOST_KEPT:
            found.destroy()
        else:
            kept.free.add(number)

    return found, release, errors


def _common(
    mpi: ModuleType, parent: MPI.Intracomm, offered: int, making: str, limit_s: float
) -> int:
    """Return the bits that are set on all ranks; the first collective step of a constructor.

    With few ranks, each rank broadcasts its bits separately, so that a timeout can name the missing ranks.
    """
    rank, size = parent.rank, parent.size
    bits = np.full(size, -1, "i8")
    bits[rank] = offered
    if size == 1:
        return offered
    total, requests = np.empty(1, "i8"), list["MPI.Request"]()

    def missing() -> list[int]:
        return (
            [r for r, one in enumerate(requests) if not one.Test()] if size <= _MOST_NAMED else []
        )

    def what() -> str:
        away = missing()
        whom = ranks_text(away) if away else "other ranks"
        some = "" if len(away) == 1 else " (one or more of them)"
        return f"rank {rank} has waited in {making} for {whom}{some} to do so with the same comm"

    try:
        if size <= _MOST_NAMED:
            requests += [parent.Ibcast(bits[r : r + 1], r) for r in range(size)]
        else:
            requests.append(parent.Iallreduce(bits[rank : rank + 1], total, mpi.BAND))
        Testall = mpi.Request.Testall
        Waiter(limit_s, True).until(lambda: Testall(requests), what)
    except BaseException:
        UNFINISHED.extend([*requests, bits, total])
        raise
    return int(np.bitwise_and.reduce(bits if size <= _MOST_NAMED else total))


def _kept_by(mpi: ModuleType, parent: MPI.Intracomm) -> _Kept:
    """Return the pool stored on a user's communicator; create it at the first use."""
    keyval = _keyval(mpi)
    kept = cast("_Kept | None", parent.Get_attr(keyval))
    if kept is None:
        kept = _Kept()
        parent.Set_attr(keyval, kept)
    return kept


@cache
def _keyval(mpi: ModuleType) -> int:
    return int(mpi.Comm.Create_keyval(delete_fn=lambda comm, keyval, kept: kept.destroy()))
