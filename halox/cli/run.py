"""``halox run``: one mini-app, on ranks that it starts or that already run.

Other subcommands on several ranks also use `ranks`, which provides the communicator, and `together`, which handles
errors of the ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halox.cli import catalogue, launcher, report, script, view
from halox.cli.progress import TerminalProgress
from halox.errors import HaloxError
from halox.runtime.world import load_mpi
from halox.tables import text_table

if TYPE_CHECKING:
    from mpi4py import MPI

EXIT_ERROR = 2
"""Exit status if all ranks raise the same error of halox."""

_ALL_FAIL_S = 2.0


def show_list(*, as_json: bool) -> None:
    """Print the name and summary of every app; as text, also the usage for scripts."""
    summaries = {name: catalogue.load(name).summary for name in catalogue.names()}
    if as_json:
        print(report.as_json(summaries))
    else:
        print("\n".join(text_table(list(summaries.items()), {0, 1})))
        print(f"\n{script.USAGE}")


def run(args: argparse.Namespace, words: Sequence[str]) -> int:
    """Run the app ``args.app`` and return the exit status; ``words`` is the command line for ranks to start."""
    comm = ranks(getattr(args, "ranks", None), words)
    return together(comm, lambda: _run_here(args, comm))


def ranks(asked: int | None, words: Sequence[str], name: str = "halox run") -> MPI.Intracomm:
    """Return the communicator of the requested number of ranks, or of the ranks that already run.

    If several ranks are requested but no launcher runs, this process becomes the launcher of the command line
    ``words``, and the function does not return. Raises `HaloxError` if a launcher has started another number of ranks,
    and the errors of `launcher.fitting`.
    """
    present = launcher.running_ranks()
    started = os.environ.get(launcher.STARTED_BY_HALOX)
    if present is None and started is None and asked is not None and asked > 1:
        launcher.start(asked, ["-m", "halox", *words], safe_path=True)
    os.environ.update(launcher.mpi_defaults())
    comm: MPI.Intracomm = load_mpi().COMM_WORLD
    if started is not None and started != str(comm.size):
        raise HaloxError(
            f"{started} ranks were started, but MPI.COMM_WORLD has {comm.size}: the mpiexec found belongs to another "
            "MPI library than the one that mpi4py loads; `halox info` shows both"
        )
    if started is None and asked is not None and asked != comm.size:
        raise HaloxError(launcher.wrong_size(asked, comm.size, name))
    return comm


def together(comm: MPI.Intracomm, work: Callable[[], int], name: str = "halox run") -> int:
    """Do work on all ranks and return its status, which is the same on all ranks; collective.

    An error that all ranks raise is printed once, with status 2. Any other error ends all ranks.
    """
    try:
        status = work()
    except Exception as error:
        if comm.size == 1:
            raise
        if not (isinstance(error, HaloxError) and _all_arrive(comm)):
            # A surrounding launcher may run halox without mpi4py's runner, which does the same.
            from mpi4py.run import set_abort_status

            set_abort_status(1)
            raise
        if comm.rank == 0:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
        status = EXIT_ERROR
    if status and comm.size > 1:
        # Finalize MPI, else the launcher reports the nonzero status as a crash.
        load_mpi().Finalize()
    return status


def _all_arrive(comm: MPI.Intracomm) -> bool:
    """Whether all ranks call this within `_ALL_FAIL_S`; errors of halox are designed to be raised on all ranks."""
    arrived = comm.Ibarrier()
    end = time.monotonic() + _ALL_FAIL_S
    while not (is_complete := bool(arrived.Test())) and time.monotonic() < end:
        time.sleep(0.01)
    return is_complete


def _run_here(args: argparse.Namespace, comm: MPI.Intracomm) -> int:
    """Run the app on this rank; all ranks return the same status."""
    path: Path | None = getattr(args, "png", None)
    if path is not None:
        check_picture(path)
    progress = TerminalProgress(comm.rank)
    results = catalogue.load(args.app).run(args, comm, progress)
    progress.clear()
    verified, failed = False, ""
    if comm.rank == 0:
        figures: dict[str, Any] = dict(results or {})
        picture = figures.pop("picture", None)
        if path is not None:
            try:
                draw(picture, path)
                figures["picture"] = str(path)
            except HaloxError as error:
                failed = str(error)
        verified = _show(figures, as_json=args.json)
    verified, failed = comm.bcast((verified, failed))
    if failed:
        raise HaloxError(failed)
    return 0 if verified else 1


def check_picture(path: Path) -> None:
    """Raise HaloxError before the run if its picture cannot be drawn; the same on all ranks of a node."""
    view.check_packages("--png", "matplotlib")
    if path.suffix != ".png":
        raise HaloxError(f"--png: expected the name of a file that ends in .png, got {path}")
    if not path.absolute().parent.is_dir():
        raise HaloxError(f"--png {path}: there is no such folder")


def draw(picture: Mapping[str, Any], path: Path) -> None:
    """Draw the picture that an app returned, with the code of ``halox view``.

    ``picture`` has ``values``, an array of two axes, with the first axis along x; ``dims``, the names of the axes;
    ``blocks``, the sizes of the blocks along each axis; ``ranks``, the rank of each block by its coordinates; ``what``
    and ``where``, the names of the values and of the run; and ``log``, if colours are logarithmic.
    """
    starts = [[0, *accumulate(sizes[:-1])] for sizes in picture["blocks"]]
    frame = view.Frame(
        picture["values"],
        f"{picture['what']}\n{picture['where']}",
        picture["dims"],
        picture["values"].shape,
        picture["blocks"],
        [(starts[0][i], starts[1][j], f"rank {r}") for (i, j), r in picture["ranks"].items()],
    )
    view.draw([frame], path, bool(picture.get("log")))


def _show(figures: Mapping[str, object], *, as_json: bool) -> bool:
    if not figures:
        raise HaloxError("the app returned no figures on rank 0")
    print(report.as_json(figures) if as_json else report.as_text(figures), flush=True)
    return bool(figures["verified"])
