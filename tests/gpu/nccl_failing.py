"""Exchanges by NCCL on two ranks, the second of which stops: ``python -m tests.gpu.nccl_failing FORM FAULT``."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import cupy
from mpi4py import MPI

import halox
from halox.errors import ExchangeTimeoutError, PathError


def main(form: str, fault: str) -> None:
    comm = MPI.COMM_WORLD
    shape, procs = (8 * comm.size, 8, 8), (comm.size, 1, 1)
    grid = halox.Grid(shape, periodic=True, proc_shape=procs, device="gpu", path="nccl")
    try:
        plan = grid.plan(grid.zeros())
    except PathError as error:
        print("NONE", error, flush=True)
        return
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
        if form == "ahead":
            # The host goes on until the driver has no more room for launches, and waits there.
            with suppress(ExchangeTimeoutError):
                while time.monotonic() < begun + 60:
                    plan()
        call()
        stream.synchronize()
        waited = time.monotonic() - begun
        try:
            plan()
            print("NO ERROR", flush=True)
        except ExchangeTimeoutError as error:
            print(f"SAID after {waited:.1f} s: {error}", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
