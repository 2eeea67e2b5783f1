"""Counts of Python calls; as a program, the calls of making a grid and a plan on eight ranks and on all ranks.

tests/test_ranks.py starts the program on many ranks, with each rank as a node and with all ranks on one node.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import numpy as np
from mpi4py import MPI

import halox
from halox.runtime import waiting


def calls_of(action: Callable[[], Any]) -> Counter[CodeType]:
    """Count the Python calls of an action, except calls while the rank waits, which vary."""
    found: Counter[CodeType] = Counter()
    waits = 0
    until = waiting.Waiter.until.__code__

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal waits
        if event == "call" and not waits:
            found[frame.f_code] += 1
        if frame.f_code is until:
            waits += (event == "call") - (event == "return")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(before)
    return found


def making_calls(comm: MPI.Intracomm) -> dict[str, Counter[CodeType]]:
    """Count the calls of making objects of a grid; each rank has two neighbours."""

    def grid() -> halox.Grid:
        return halox.Grid(
            (8 * comm.size, 8),
            halo=((1, 1), (0, 0)),
            periodic=(True, False),
            proc_shape=(comm.size, 1),
            comm=comm,
            device="cpu",
        )

    def make() -> None:
        with grid() as made:
            made.plan(np.zeros(made.padded_shape))

    make()  # imports modules, and makes the communicator
    found = {"grid and plan": calls_of(make)}
    with grid() as kept:
        u, fields = kept.zeros(), []
        for _ in range(2):  # the first time imports modules
            found["field"] = calls_of(lambda: fields.append(kept.zeros()))
            found["plan"] = calls_of(lambda: kept.plan(u))
            found["operator"] = calls_of(lambda: kept.linear_operator(print, u))
            found["FFT"] = calls_of(lambda: halox.FFT(kept, axes=1).close())
    return found


def compare_calls(comm: MPI.Intracomm, few: int) -> tuple[int, int]:
    """Count the calls on ``few`` ranks and on all ranks; raise AssertionError if they differ by more than a tenth."""
    part = comm.Split(comm.rank // few, comm.rank)
    on_few, on_all = making_calls(part), making_calls(comm)
    part.Free()
    for name, calls in on_all.items():
        more = (calls - on_few[name]).most_common(12)
        details = name, [(n, code.co_qualname) for code, n in more]
        assert calls.total() <= 1.1 * on_few[name].total(), details
    return on_few["grid and plan"].total(), on_all["grid and plan"].total()


def main() -> None:
    comm = MPI.COMM_WORLD
    for node in ("", "rank"):
        os.environ["HALOX_NODE"] = node
        few, every = compare_calls(comm, 8)
        if comm.rank == 0:
            print(
                f"HALOX_NODE={node!r}: {few} calls on 8 ranks, {every} on {comm.size}", flush=True
            )


if __name__ == "__main__":
    main()
