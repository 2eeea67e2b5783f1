"""Run of a user's script or module on one rank of ``halox run``; if one rank fails, all ranks end.

`halox.cli.script` runs this file as a script in a new process. The file imports only the standard library, but not
halox, NumPy or mpi4py: the user's script may configure these (threads, ``mpi4py.rc``) before it imports them.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import signal
import stat
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mpi4py import MPI

NAME = "halox run"
OPEN_MPI_RANK = "OMPI_COMM_WORLD_RANK"
RANKS = (OPEN_MPI_RANK, "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""Environment variables with the rank of a process, set by launchers."""

STANDARD_INPUT = "HALOX_STANDARD_INPUT"
"""The same as `halox.cli.launcher.STANDARD_INPUT`."""

ALL_ALIKE = 2
"""Exit status if all ranks raise an error of halox; its errors are designed to be raised on all ranks."""

INTERRUPTED = 128 + signal.SIGINT
OTHERS_FAIL_TOO_S = 2.0
"""Seconds to wait for the other ranks to fail, too: errors of halox are designed to be raised on all ranks."""

_START_MPI_S = 1.5
_PASSED_ON_S = 0.3
_RANKS_NAMED = 8


class Ending(NamedTuple):
    """The failure of one rank's program, in plain values that can be sent between ranks.

    ``line`` is a summary in one line, such as "ZeroDivisionError: division by zero" or "sys.exit(3)". ``said`` is the
    text before the summary: the traceback, or the message given to ``sys.exit``. ``status`` is the exit status, not 0.
    ``by_exit`` is true after ``sys.exit``.
    """

    line: str
    said: str
    status: int
    by_exit: bool = False


def main(words: Sequence[str]) -> int:
    """Run a program and return the exit status of this rank.

    ``words`` contains the number of ranks; "file" or "module"; the name of the program; and the program's arguments,
    each with a prefix character that hides the argument from launchers.
    """
    ranks, kind, target, *arguments = words
    alone = int(ranks) == 1
    sys.argv[:] = [target, *(argument[1:] for argument in arguments)]
    if not alone and isinstance(sys.stdout, io.TextIOWrapper):
        # Printed text must be written before another rank's failure ends this rank.
        sys.stdout.reconfigure(line_buffering=True)
    take_input()
    try:
        run_module(target) if kind == "module" else run_file(target)
    except SystemExit as ended:
        if alone or not exit_status(ended.code):
            raise
        return fail(ending_of(ended))
    except KeyboardInterrupt as error:
        ending = ending_of(error)
        if not alone:
            return fail(ending)
        tell(ending.said)
        sys.excepthook = lambda *_: None
        raise  # for Python to end by the signal
    except BaseException as error:
        ending = ending_of(error)
        if not alone:
            return fail(ending)
        tell(ending.said)
        return ending.status
    return 0


def take_input() -> None:
    """Give rank 0 the input kept by `halox.cli.launcher.keep_input`; other ranks get an empty input."""
    kept, rank = os.environ.pop(STANDARD_INPUT, ""), launched_rank()
    if kept and rank is not None:
        offset, _, path = kept.partition(" ") if rank == 0 else ("0", "", os.devnull)
        with suppress(OSError):
            source = os.open(path, os.O_RDONLY)
            if stat.S_ISREG(os.fstat(source).st_mode):
                os.lseek(source, int(offset), os.SEEK_SET)
            os.dup2(source, 0)
            os.close(source)


def launched_rank() -> int | None:
    """Return the rank of this process from the launcher's variables, None if unknown."""
    found = next((os.environ[name] for name in RANKS if name in os.environ), "")
    return int(found) if found.isdecimal() else None


def run_file(path: str) -> None:
    """Run a script as Python itself would, as the module ``__main__``, which stays in ``sys.modules``."""
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    with io.open_code(os.path.abspath(path)) as file:
        source = file.read()
    module = ModuleType("__main__")
    module.__dict__.update(__file__=os.path.abspath(path), __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)


def run_module(name: str) -> None:
    """Run a module as ``python -m`` would."""
    sys.path.insert(0, os.getcwd())
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def exit_status(code: object) -> int:
    """Return the exit status of a process that calls ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def ending_of(error: BaseException) -> Ending:
    """Describe how an exception ends the program; calls the program's ``sys.excepthook``, if it has set one."""
    if isinstance(error, SystemExit):
        code = error.code
        said = "" if code is None or isinstance(code, int) else f"{code}\n"
        return Ending(f"sys.exit({code!r})", said, exit_status(code), by_exit=True)
    said, found = "", own_traceback(error.__traceback__)
    if sys.excepthook is sys.__excepthook__:
        said = "".join(traceback.format_exception(type(error), error, found))
    else:
        try:
            sys.excepthook(type(error), error, found)
        except Exception:
            said = traceback.format_exc()
    if isinstance(error, KeyboardInterrupt):
        return Ending("KeyboardInterrupt", said, INTERRUPTED)
    halox_error = getattr(sys.modules.get("halox.errors"), "HaloxError", ())
    return Ending(line_of(error), said, ALL_ALIKE if isinstance(error, halox_error) else 1)


def line_of(error: BaseException) -> str:
    """Return an exception's type and the first line of its text."""
    try:
        text = str(error).strip().partition("\n")[0]
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def own_traceback(found: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames of this file and of runpy at its start."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while found is not None and found.tb_frame.f_code.co_filename in ours:
        found = found.tb_next
    return found


def tell(text: str) -> None:
    """Flush standard output, and write a text to standard error at once."""
    # A stream may be closed, or its reader may have ended.
    with suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def story(endings: Sequence[tuple[int, Ending]], size: int, name: str = NAME) -> str:
    """Return the text about the failures of some ranks; equal failures are printed once."""
    alike: dict[tuple[str, int], list[int]] = {}
    for rank, ending in endings:
        alike.setdefault((ending.line, ending.status), []).append(rank)
    known = dict(endings)
    text = ""
    for (line, _), ranks in alike.items():
        ending = known[ranks[0]]
        text += ending.said
        if ending.by_exit:
            if len(ranks) < size:
                text += f"{name}: {_ranks(ranks, size)} ended by {line}\n"
        else:
            text += f"{name}: {_ranks(ranks, size)} failed: {line}\n"
    return text


def _ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) == size:
        return f"all {size} ranks"
    more = len(ranks) - _RANKS_NAMED
    listed = ", ".join(map(str, ranks[:_RANKS_NAMED]))
    return f"ranks {listed} and {more} more" if more > 0 else f"ranks {listed}"


def fail(ending: Ending) -> int:
    """End all ranks after a failure of this rank; return its status if each rank ends itself."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return _fail_without_mpi(ending, finished=mpi is not None and mpi.Is_finalized())
    comm = mpi.COMM_WORLD
    endings = all_endings(comm, ending)
    if endings is None:
        abort(comm, ending)
    elif comm.rank == 0:
        tell(story(list(enumerate(endings)), comm.size))
    # No rank ends before rank 0 has printed, since the end of the first rank may end all ranks.
    comm.Barrier()
    return ending.status


def abort(comm: MPI.Intracomm, ending: Ending, name: str = NAME) -> None:
    """Print this rank's failure, and end all ranks."""
    tell(story([(comm.rank, ending)], comm.size, name))
    # MPICH's launcher does not forward output that it has not read before the abort.
    time.sleep(_PASSED_ON_S)
    comm.Abort(1 if ending.status == ALL_ALIKE and not ending.by_exit else ending.status)


def all_endings(comm: MPI.Intracomm, ending: Ending) -> list[Ending] | None:
    """Return the failures of all ranks in rank order; None unless all ranks soon call this."""
    try:
        if not all_arrive(comm):
            return None
        return [Ending(*found) for found in comm.allgather(tuple(ending))]
    except Exception:
        return None  # MPI itself may have failed


def all_arrive(comm: MPI.Intracomm) -> bool:
    """Whether every rank soon calls this, since errors of halox are designed to be raised on all ranks."""
    arrived = comm.Ibarrier()
    deadline = time.monotonic() + OTHERS_FAIL_TOO_S
    while not (together := bool(arrived.Test())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return together


def _fail_without_mpi(ending: Ending, *, finished: bool) -> int:
    """Fail before MPI has started, or after it has ended; rank 0 prints first, or alone if its end ends all ranks."""
    rank = launched_rank() or 0
    if ending.by_exit:
        tell(ending.said)
        return ending.status
    if rank:
        time.sleep(OTHERS_FAIL_TOO_S)
    tell(story([(rank, ending)], 0))
    if finished or OPEN_MPI_RANK in os.environ:
        return ending.status
    # With MPICH's launcher, other ranks would wait for a rank that exits now, but not for a rank that ends by a signal.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _START_MPI_S)
    with suppress(ImportError):
        from mpi4py import MPI

        time.sleep(_PASSED_ON_S)
        MPI.COMM_WORLD.Abort(ending.status)
    return ending.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
