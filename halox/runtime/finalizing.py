"""Callbacks before MPI is finalized; halox releases its MPI objects in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

_calls: list[Callable[[], None]] = []


def before_finalize(mpi: ModuleType, call: Callable[[], None]) -> None:
    """Register a callback for MPI_Finalize; callbacks run once, in order of registration. ``mpi`` is ``mpi4py.MPI``."""
    _watch(mpi)
    if call not in _calls:
        _calls.append(call)


@cache
def _watch(mpi: ModuleType) -> None:
    """Attach the callbacks to COMM_SELF: MPI_Finalize first deletes the attributes of COMM_SELF."""

    def finalized(comm: object, keyval: int, value: object) -> None:
        for call in _calls:
            call()

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=finalized), object())
