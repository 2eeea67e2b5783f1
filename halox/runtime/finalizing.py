"""Callbacks at MPI_Finalize, while MPI still works; halox closes its worlds in one of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

_callbacks: list[Callable[[], None]] = []


def before_finalize(mpi: ModuleType, call: Callable[[], None]) -> None:
    """Register a callback for MPI_Finalize; callbacks run once, in order of registration. ``mpi`` is ``mpi4py.MPI``."""
    _attach(mpi)
    if call not in _callbacks:
        _callbacks.append(call)


@cache
def _attach(mpi: ModuleType) -> None:
    """Attach the callbacks to COMM_SELF: MPI_Finalize first deletes the attributes of COMM_SELF."""

    def finalized(comm: object, keyval: int, value: object) -> None:
        for callback in _callbacks:
            callback()

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=finalized), object())
