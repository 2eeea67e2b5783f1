"""Private duplicate of a user's communicator, stored as its attribute and used by all halox objects on it.

The collective calls of all grids, exchanges and allreduces on a user's communicator are therefore one sequence. After a
failed call on a duplicate, the next object makes another one. A duplicate is freed only together with the user's
communicator, when no message can be on its way. If a rank freed one earlier, MPI could give its context to a new
communicator, and deliver late messages to that one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, cast

import numpy as np

from halox.errors import ExchangeTimeoutError, MismatchError
from halox.runtime.communicator import Communicator, node_name
from halox.runtime.finalizing import keep
from halox.runtime.status import code_of, ranks_text
from halox.runtime.waiting import Waiter

if TYPE_CHECKING:
    from mpi4py import MPI

_MOST_NAMED = 32


def duplicate_of(
    mpi: ModuleType, parent: MPI.Intracomm, making: str, limit_s: float, error: str = ""
) -> tuple[Communicator, list[str]]:
    """Return the private duplicate of a communicator, and the errors of all ranks, or one that all have; collective.

    The result for a private duplicate is the duplicate itself. Each rank passes its ``error``, or an empty text.
    ``making`` is the name of the constructing call, for errors.

    Raises `ExchangeTimeoutError` if a rank is missing after ``limit_s`` seconds; 0 means no limit. Raises
    `MismatchError` if another rank is in another call on the duplicate.
    """
    itself = cast("Communicator | None", parent.Get_attr(_keyvals(mpi)[1]))
    duplicates = _duplicates_for(mpi, parent) if itself is None else [itself]
    if itself is not None or (duplicates and not duplicates[-1].watch.failed):
        usable = _find_usable(duplicates, making, limit_s, error, is_fixed=itself is not None)
        if usable is not None:
            return usable
    _wait_for_all(mpi, parent, making, limit_s)
    duplicate = Communicator(mpi, parent, limit_s)
    duplicate.comm.Set_attr(_keyvals(mpi)[1], duplicate)
    duplicates.append(duplicate)
    duplicate.watch.call(code_of(making))
    return duplicate, duplicate.reduce(error, making)[1] or [error]


def _find_usable(
    duplicates: Sequence[Communicator], making: str, limit_s: float, error: str, *, is_fixed: bool
) -> tuple[Communicator, list[str]] | None:
    """Return an existing duplicate, chosen by all ranks on the latest one, and the errors of `duplicate_of`.

    ``is_fixed`` means that only the latest duplicate can be used. Returns None if a new duplicate is needed: no
    duplicate has the current ``HALOX_NODE`` of the ranks, or calls have failed.
    """
    latest = duplicates[-1]
    latest.guard.check_thread()
    latest.set_limit(limit_s)
    latest.watch.call(code_of(making))
    usable = [
        number
        for number, duplicate in enumerate(duplicates)
        if not duplicate.watch.failed and duplicate.node_name == node_name()
    ]
    try:
        answers = latest.reduce((error, usable), making)[1] or [(error, usable)]
    except (ExchangeTimeoutError, MismatchError):
        if is_fixed or not latest.watch.has_failed_before():
            raise
        return None  # the rank where a call has failed will not use this duplicate again
    errors = [text for text, _ in answers]
    if is_fixed:
        return latest, errors
    common = set(usable).intersection(*(numbers for _, numbers in answers))
    if not common:
        return None
    duplicate = duplicates[max(common)]
    duplicate.set_limit(limit_s)
    return duplicate, errors


def _wait_for_all(mpi: ModuleType, parent: MPI.Intracomm, making: str, limit_s: float) -> None:
    """Wait until all ranks construct an object on ``parent``; with few ranks a timeout names the missing ranks."""
    rank, size = parent.rank, parent.size
    if size == 1:
        return
    is_named = size <= _MOST_NAMED
    buffers = np.zeros((size if is_named else 0, 1), np.uint8)

    def missing() -> list[int]:
        return [r for r, request in enumerate(requests) if not request.Test()] if is_named else []

    def text() -> str:
        absent = missing()
        whom = ranks_text(absent) if absent else "other ranks"
        some = "" if len(absent) == 1 else " (one or more of them)"
        return f"rank {rank} has waited in {making} for {whom}{some} to do so with the same comm"

    # One broadcast from each rank: the broadcast of a missing rank stays incomplete.
    broadcasts = [parent.Ibcast(buffer, r) for r, buffer in enumerate(buffers)]
    requests = broadcasts or [parent.Ibarrier()]
    try:
        Waiter(limit_s, True).until(partial(mpi.Request.Testall, requests), text)
    except BaseException:
        keep(*requests, buffers)
        raise


def _duplicates_for(mpi: ModuleType, parent: MPI.Intracomm) -> list[Communicator]:
    """Return the duplicates of a user's communicator, equal on all its ranks: several only after failures.

    A change of ``HALOX_NODE`` during the program also makes another duplicate.
    """
    keyval = _keyvals(mpi)[0]
    duplicates = cast("list[Communicator] | None", parent.Get_attr(keyval))
    if duplicates is None:
        duplicates = []
        parent.Set_attr(keyval, duplicates)
    return duplicates


@cache
def _keyvals(mpi: ModuleType) -> tuple[int, int]:
    """Return the attribute key of users' communicators, and the attribute key of private duplicates."""

    def destroy(comm: object, keyval: int, duplicates: list[Communicator]) -> None:
        for duplicate in duplicates:
            duplicate.destroy()

    return int(mpi.Comm.Create_keyval(delete_fn=destroy)), int(mpi.Comm.Create_keyval())
