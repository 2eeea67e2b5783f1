"""A rank ends, or is interrupted, at a stage of a save or load of a ``.npy`` file; the other rank gets an error.

``python -m tests.faults.npy_stages FOLDER STAGES``, run by `tests.failing`. Rank 0 and another rank have a grid of
their own at each stage, of which the other rank is the first or the last::

    stage 0    rank 0 -- rank 1, which fails
    stage 1    rank 0 -- rank 2, which fails
    ...
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import halox
from halox.errors import CheckpointError, HaloxError
from tests import failing
from tests.mpi.limits import short_waits, sleeping_waits

STAGES = [
    ("save", "Open", "last"),
    ("save", "Set_view", "first"),
    ("save", "Write", "first"),
    ("save", "Write", "last"),
    ("save", "Sync", "first"),
    ("save", "Close", "last"),
    ("load", "Open", "first"),
    ("load", "Read", "last"),
    ("load", "Close", "first"),
]
"""Call, the function of `MPI.File` in which a rank fails, and that rank's place in the grid."""

Stage = tuple[str, str, str, str]
"""One of `STAGES`, and "kill" or "interrupt"."""

USUAL: list[Stage] = [
    ("save", "Write", "first", "kill"),
    ("save", "Close", "last", "interrupt"),
    ("load", "Read", "last", "kill"),
]
"""Stages outside the whole matrix."""

CELLS = (6, 8)


def failing_file(name: str, how: str) -> type[MPI.File]:
    """Return a class of files whose function of that name kills or interrupts the rank."""

    def fail(*_: Any) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt

    return type("Failing", (MPI.File,), {name: fail})


def make_call(grid: halox.Grid, call: str, path: Path) -> None:
    """Save other values than those in the file, or load it."""
    if call == "save":
        grid.save(path, u=grid.full(2.0))
    else:
        grid.load(path)


def survive(folder: Path, stage: int, call: str, comm: MPI.Intracomm) -> list[Any]:
    """Return the error of the call, whether the file is as it was, and whether it can be saved afterwards."""
    path = folder / f"{stage}.npy"
    np.save(path, np.ones(CELLS))
    failing.tell(folder, f"stage {stage}", None)
    grid, error = halox.Grid(CELLS, comm=comm, device="cpu"), ""
    try:
        with sleeping_waits(), short_waits():
            make_call(grid, call, path)
    except HaloxError as caught:
        error = type(caught).__name__
    is_kept = bool((np.load(path) == 1).all())
    with halox.Grid(CELLS, comm=MPI.COMM_SELF, device="cpu") as alone:
        save_at_last(alone, path)
    return [error, is_kept, bool((np.load(path) == 2).all())]


def save_at_last(grid: halox.Grid, path: Path) -> None:
    """Save as soon as the rank that fails has released its lock; the time limit of the job bounds the wait."""
    while True:
        try:
            return make_call(grid, "save", path)
        except CheckpointError:
            time.sleep(0.02)


def main(folder: Path, stages: list[Stage]) -> None:
    """Go through the stages, or fail in one."""
    world = MPI.COMM_WORLD
    comms = []
    for stage, (_, _, place, _) in enumerate(stages):
        key = -world.rank if place == "first" else world.rank
        comms.append(world.Split(0 if world.rank in (0, stage + 1) else MPI.UNDEFINED, key))
    if world.rank == 0:
        for stage, (call, *_) in enumerate(stages):
            failing.tell(folder, f"found {stage}", survive(folder, stage, call, comms[stage]))
        failing.tell(folder, "done 0", None)
    else:
        stage = world.rank - 1
        call, name, _, how = stages[stage]
        failing.wait_for(folder, [f"stage {stage}"])
        grid = halox.Grid(CELLS, comm=comms[stage], device="cpu")
        MPI.File = failing_file(name, how)
        with suppress(KeyboardInterrupt, HaloxError):  # the latter if this rank was late
            make_call(grid, call, folder / f"{stage}.npy")
        failing.wait_for(folder, ["done 0"])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
