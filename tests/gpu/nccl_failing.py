"""Exchanges by NCCL on two ranks. Rank 1 stops or dies, and rank 0 records the error that it gets.

Started by `tests.failing`. ``form`` is "stream" or "graph" for one more call after the fault, and "ahead" for calls
until the driver's launch queue is full. ``fault`` is "killed" or "stalled".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import cupy
from mpi4py import MPI

import halox
from halox.errors import ExchangeTimeoutError, PathError
from tests.failing import tell


def main(folder: Path, form: str, fault: str) -> None:
    comm = MPI.COMM_WORLD

    def end(text: str) -> NoReturn:
        tell(folder, f"said {comm.rank}", text)
        tell(folder, f"done {comm.rank}", None)
        os._exit(0)

    shape, procs = (8 * comm.size, 8, 8), (comm.size, 1, 1)
    grid = halox.Grid(shape, periodic=True, proc_shape=procs, device="gpu", path="nccl")
    try:
        plan = grid.plan(grid.zeros())
    except PathError as error:
        end(f"none: {error}")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        plan()
        call: Callable[[], object] = plan
        if form == "graph":
            stream.begin_capture()
            plan()
            graph = stream.end_capture()
            call = graph.launch
        for _ in range(3):
            call()
        stream.synchronize()
        comm.Barrier()
        if comm.rank == 1:
            if fault == "killed":
                os.kill(os.getpid(), 9)
            time.sleep(30)
            os._exit(0)
        begun = time.monotonic()
        # "ahead": the host enqueues calls until the driver's launch queue is full, and blocks in a launch.
        while form == "ahead" and time.monotonic() < begun + 60:
            try:
                plan()
            except ExchangeTimeoutError as error:
                end(f"after {time.monotonic() - begun:.1f} s: {error}")
        call()
        stream.synchronize()
        waited = time.monotonic() - begun
        try:
            plan()
            end("no error")
        except ExchangeTimeoutError as error:
            end(f"after {waited:.1f} s: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *json.loads(sys.argv[2]))
