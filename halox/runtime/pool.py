"""Pool of released communicators, stored as an attribute of the user's communicator and reused on it.

A communicator is freed only together with the user's communicator, when no message can be on its way. If a rank freed
one earlier, MPI could give its context to a new communicator, and deliver late messages to that one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np

from halox.runtime.communicator import UNFINISHED, Communicator, node_name
from halox.runtime.dlpack import Array
from halox.runtime.status import ranks_text
from halox.runtime.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

_MOST_KEPT = 512
"""Largest number of communicators of a pool; others stay unused after their first object."""
_MOST_NAMED = 32


class _Kept:
    """Communicators made for one user communicator; their indices in ``all`` are equal on all ranks."""

    def __init__(self) -> None:
        self.all: list[Communicator | None] = []
        self.free: set[int] = set()
        self.is_gone = False

    def offered(self) -> Array:
        """Return, for each number, whether the communicator is free and has the current ``HALOX_NODE``, as bytes."""
        name = node_name()
        flags = np.zeros(_MOST_KEPT, np.uint8)
        for number in tuple(self.free):  # a finalizer may release another one meanwhile
            one = self.all[number]
            flags[number] = one is not None and one.node_name == name
        return flags

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
    number = int(common.argmax())
    known = kept.all[number] if common[number] else None
    if known is None:
        found, number = Communicator(mpi, parent, limit_s), len(kept.all)
    else:
        found = known
        kept.free.discard(number)
    number, errors = found.begin(limit_s, number, error)
    if known is None and number < _MOST_KEPT:
        kept.all += [None] * (number - len(kept.all)) + [found]

    def release() -> None:
        if found.watch.failed or found.watch.is_spoiled:  # late messages may arrive on it
            return
        if kept.is_gone:
            found.destroy()
        elif number < _MOST_KEPT:
            kept.free.add(number)

    return found, release, errors


def _common(
    mpi: ModuleType, parent: MPI.Intracomm, offered: Array, making: str, limit_s: float
) -> Array:
    """Return the flags that are set on all ranks; the first collective step of a constructor.

    With few ranks, each rank broadcasts its flags separately, so that a timeout can name the missing ranks.
    """
    rank, size = parent.rank, parent.size
    if size == 1:
        return offered
    flags = np.empty((size if size <= _MOST_NAMED else 2, _MOST_KEPT), np.uint8)
    requests = list["MPI.Request"]()

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
            flags[rank] = offered
            requests += [parent.Ibcast(flags[r], r) for r in range(size)]
        else:
            flags[0] = offered
            requests.append(parent.Iallreduce(flags[0], flags[1], mpi.BAND))
        Testall = mpi.Request.Testall
        Waiter(limit_s, True).until(lambda: Testall(requests), what)
    except BaseException:
        UNFINISHED.extend([*requests, flags])
        raise
    found: Array = flags.min(axis=0) if size <= _MOST_NAMED else flags[1]
    return found


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
