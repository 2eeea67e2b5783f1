"""End of all ranks after an uncaught exception on one rank, which would wait for the other ranks in MPI_Finalize.

An exception that all ranks raise is printed by rank 0 alone. Other ranks first wait for a message of rank 0 that it has
raised the same one, and print their exception if none arrives in time.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from halox.runtime.finalizing import FORKED
from halox.runtime.status import ranks_text

if TYPE_CHECKING:
    from mpi4py import MPI

FORWARDING_S = 0.2  # launchers drop output that they have not read when they abort

PRIVATE: list[weakref.ref[Any]] = []
"""The last `World` on COMM_WORLD, whose communicator carries messages about exceptions; empty before the first."""

_TOGETHER_S = 1.0  # time within which ranks raise the same exception
_TAG = 5
_LAUNCHERS = ("<frozen runpy>", "mpi4py/run.py", "mpi4py/__main__.py", "halox/cli/recording.py")


@cache
def end_together(mpi: ModuleType) -> None:
    """Make `sys.excepthook` end all ranks after the previous hook has printed the exception; ``mpi`` is ``mpi4py.MPI``.

    If the program replaces this hook by another one, all ranks end when the interpreter does. An interactive session
    continues. Python does not call the hook for `SystemExit`.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        while traceback and traceback.tb_frame.f_code.co_filename.endswith(_LAUNCHERS):
            traceback = traceback.tb_next
        error = error.with_traceback(traceback)
        private = _private()
        is_first = private is None or private.rank == 0
        same = [] if is_first or continues() else _others_with(mpi, private, error)
        if not same:
            try:
                previous(kind, error, traceback)
            except BaseException:
                sys.__excepthook__(kind, error, traceback)
        if private is not None and is_first and not continues():
            same = _others_with(mpi, private, error)
        end(kind, same)

    def at_exit() -> None:
        # Python sets `last_value` before it calls any hook. pytest sets it too, but leaves the hook in place.
        error = getattr(sys, "last_value", None)
        if sys.excepthook is not hook and error is not None:
            end(type(error))

    def continues() -> bool:
        return bool(FORKED or hasattr(sys, "ps1") or sys.flags.interactive or mpi.Is_finalized())

    def end(kind: type[BaseException], same: Sequence[int] = ()) -> None:
        if continues():
            return
        comm = mpi.COMM_WORLD
        ranks = ranks_text(sorted([comm.rank, *same]))
        text = f"halox: {kind.__name__} on {ranks} of {comm.size}; all ranks end"
        try:
            if same and comm.rank:
                time.sleep(2 * _TOGETHER_S)  # rank 0 aborts before
            print(text, file=sys.stderr, flush=True)
            sys.stdout.flush()  # fails if its reader has ended
        finally:
            time.sleep(FORWARDING_S)
            comm.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)  # as a shell has it

    sys.excepthook = hook
    atexit.register(at_exit)


def _private() -> MPI.Intracomm | None:
    world = PRIVATE[0]() if PRIVATE else None
    return world.comm if world is not None and world.comm else None  # a freed one is false


def _others_with(mpi: ModuleType, comm: Any, error: BaseException) -> list[int]:
    """Return the ranks that raise the same exception: of all ranks on rank 0, of rank 0 on other ranks."""
    try:
        text = f"{type(error).__qualname__}: {error}"
        mine = np.frombuffer(blake2b(text.encode(), digest_size=8).digest())
        others = range(1, comm.size) if comm.rank == 0 else (0,)
        theirs = np.zeros((len(others), 1))
        for other in others:
            comm.Isend(mine, other, _TAG)
        requests = [comm.Irecv(row, other, _TAG) for row, other in zip(theirs, others, strict=True)]
        end = time.monotonic() + _TOGETHER_S
        while not mpi.Request.Testall(requests) and time.monotonic() < end:
            time.sleep(0.01)
        return [
            other
            for row, other in zip(theirs, others, strict=True)
            if row.tobytes() == mine.tobytes()
        ]
    except Exception:  # of MPI, or of the exception's text
        return []
