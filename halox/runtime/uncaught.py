"""End of all ranks after an uncaught exception on one rank, which would wait for the other ranks in MPI_Finalize."""

from __future__ import annotations

import atexit
import sys
import time
from functools import cache
from types import ModuleType
from typing import Any

from halox.runtime.finalizing import FORKED

FORWARDING_S = 0.2  # launchers drop output that they have not read when they abort


@cache
def end_together(mpi: ModuleType) -> None:
    """Make `sys.excepthook` end all ranks after the previous hook has printed the exception; ``mpi`` is ``mpi4py.MPI``.

    If the program replaces this hook by another one, all ranks end when the interpreter does. An interactive session
    continues. Python does not call the hook for `SystemExit`.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
        try:
            previous(kind, error, traceback)
        except BaseException:
            sys.__excepthook__(kind, error, traceback)
        end(kind)

    def at_exit() -> None:
        # Python sets `last_value` before it calls any hook. pytest sets it too, but leaves the hook in place.
        error = getattr(sys, "last_value", None)
        if sys.excepthook is not hook and error is not None:
            end(type(error))

    def end(kind: type[BaseException]) -> None:
        if FORKED or hasattr(sys, "ps1") or sys.flags.interactive or mpi.Is_finalized():
            return
        comm = mpi.COMM_WORLD
        text = f"halox: {kind.__name__} on rank {comm.rank} of {comm.size}; all ranks end"
        try:
            print(text, file=sys.stderr, flush=True)
            sys.stdout.flush()  # fails if its reader has ended
        finally:
            time.sleep(FORWARDING_S)
            comm.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)  # as a shell has it

    sys.excepthook = hook
    atexit.register(at_exit)
