"""Callbacks at MPI_Finalize, and objects that must live until then.

A program that does not call MPI_Finalize reaches it only after the end of the interpreter. Until then MPI may write to
the buffers of its requests, and other ranks may read memory of this rank. So such objects are values of an attribute of
COMM_SELF: MPI holds a reference to them, which the end of the interpreter does not remove.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from functools import cache
from types import ModuleType

FORKED: list[bool] = []
"""Not empty in a process that was forked from an MPI rank, if there are several ranks: it must not call MPI."""

_callbacks: list[Callable[[], None]] = []
_kept: dict[int, object] = {}
_kept_at_exit: weakref.WeakSet[object] = weakref.WeakSet()


def before_finalize(mpi: ModuleType, call: Callable[[], None]) -> None:
    """Register a callback for MPI_Finalize; callbacks run once, in order of registration. ``mpi`` is ``mpi4py.MPI``."""
    _attach(mpi)
    if call not in _callbacks:
        _callbacks.append(call)


def keep(*objects: object) -> None:
    """Keep objects alive until MPI_Finalize, for example incomplete requests and their buffers."""
    _kept.update((id(kept), kept) for kept in objects)


def drop(kept: object) -> None:
    """End `keep` of an object."""
    _kept.pop(id(kept), None)


def keep_at_exit(buffers: object) -> None:
    """Keep an object until MPI_Finalize if it is alive at the end of the interpreter."""
    _kept_at_exit.add(buffers)


@atexit.register
def _keep_all() -> None:
    keep(*_kept_at_exit)


@cache
def _attach(mpi: ModuleType) -> None:
    """Set the attribute of COMM_SELF: MPI_Finalize first deletes the attributes of COMM_SELF."""

    def finalized(comm: object, keyval: int, value: object) -> None:
        for callback in _callbacks:
            callback()

    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=finalized), _kept)
