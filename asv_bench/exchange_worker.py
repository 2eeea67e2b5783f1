"""Runs on the ranks for ``benchmarks/exchange.py``, with arguments N x|y|z REPETITIONS."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
from mpi4py import MPI

import halox

ROUNDS = 12


def slowest_us(exchanges: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Time of one exchange: a block of many on its slowest rank, the median over blocks.

    The exchanges take turns in blocks, so that the machine's other work and the placement of ranks
    on cores, which settles in the first seconds, bear on all alike. A block is timed as a whole: where
    ranks share cores, a single exchange's time on one rank depends on whose turn it was.
    """
    comm = MPI.COMM_WORLD
    each = max(1, repetitions // ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in exchanges}
    for _ in range(ROUNDS):
        for name, exchange in exchanges.items():
            exchange()
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(each):
                exchange()
            taken = time.perf_counter() - begin
            times[name].append(comm.allreduce(taken, MPI.MAX) / each)
    return {name: median(found) * 1e6 for name, found in times.items()}


def with_mpi4py(field: np.ndarray, axis: int) -> Callable[[], None]:
    """The same exchange as one writes it with mpi4py: subarray types, Isend and Irecv."""
    comm = MPI.COMM_WORLD
    peers = ((comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size)

    def face(start: int) -> MPI.Datatype:
        sizes = list(field.shape)
        subsizes = [1 if a == axis else n - 2 for a, n in enumerate(sizes)]
        starts = [start if a == axis else 1 for a in range(len(sizes))]
        return MPI.DOUBLE.Create_subarray(sizes, subsizes, starts).Commit()

    last = field.shape[axis] - 2
    sends = (face(1), face(last))
    receives = (face(0), face(last + 1))

    def exchange() -> None:
        requests = [
            comm.Irecv([field, 1, receives[side]], peers[side], tag=1 - side) for side in (0, 1)
        ]
        requests += [comm.Isend([field, 1, sends[side]], peers[side], tag=side) for side in (0, 1)]
        MPI.Request.Waitall(requests)

    return exchange


def main() -> None:
    n, axis, repetitions = int(sys.argv[1]), "zyx".index(sys.argv[2]), int(sys.argv[3])
    ranks = MPI.COMM_WORLD.size
    shape = tuple(n * ranks if a == axis else n for a in range(3))
    along = tuple(a == axis for a in range(3))
    parts = tuple(ranks if cut else 1 for cut in along)
    halo = tuple((1, 1) for _ in range(3))
    with halox.Grid(
        shape, halo=halo, periodic=along, proc_shape=parts, corners=False, device="cpu"
    ) as grid:
        field = grid.zeros("f8")
        grid.interior(field)[...] = grid.rank + 1
        plan = grid.plan(field)
        other = field.copy()
        theirs = with_mpi4py(other, axis)
        plan()
        theirs()
        if not np.array_equal(field, other):
            raise RuntimeError("the two exchanges do not agree")
        figures = {
            **slowest_us({"halox_us": plan, "mpi4py_us": theirs}, repetitions),
            "bytes_sent": plan.bytes_sent,
        }
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
