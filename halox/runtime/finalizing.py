"""Calls before MPI is finalized: what stands on MPI lets go of it while it is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

_calls: list[Callable[[], None]] = []


def before_finalize(mpi: ModuleType, call: Callable[[], None]) -> None:
    """Make a call as MPI is being finalized, once, after those that were given before; ``mpi`` is ``mpi4py.MPI``."""
    _watch(mpi)
    if call not in _calls:
        _calls.append(call)


@cache
def _watch(mpi: ModuleType) -> None:
    """Have MPI say that it is being finalized, which deletes COMM_SELF's attributes first."""

    def finalized(comm: object, keyval: int, value: object) -> None:
        for call in _calls:
            call()

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=finalized), object())
