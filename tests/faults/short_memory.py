"""Exchanges with too little shared memory: ``python -m tests.faults.short_memory HOW RESULT`` on ranks.

HOW is ``told``, where patched functions report little free space, or ``full``, where a file fills /dev/shm and leaves
a rest: too little for any field, enough for the field of one rank, or just enough for the fields of both ranks.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

_LEFT = 64 << 10
_SHAPE = (300, 600)
_FIELD = 302 * 602 * 8
_RESTS = {"nothing": _LEFT, "one": _FIELD * 3 // 2, "both": 2 * _FIELD + (16 << 10)}


def say_that_there_is_little() -> None:
    """Patch both functions that ask for space in shared memory: they report that little is left."""
    statvfs, fallocate = os.statvfs, os.posix_fallocate

    def told(path: Any) -> Any:
        found = list(statvfs(path))
        found[3] = found[4] = _LEFT // found[1]  # f_bfree and f_bavail, in blocks
        return os.statvfs_result(found)

    def allocated(handle: int, offset: int, length: int) -> None:
        if length > _LEFT:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(handle, offset, length)

    os.statvfs, os.posix_fallocate = told, allocated


def fill(rest: int) -> None:
    """Fill /dev/shm, and leave a rest of so many bytes."""
    with open("/dev/shm/halox-test-ballast", "wb") as ballast:
        status = os.statvfs("/dev/shm")
        os.posix_fallocate(ballast.fileno(), 0, status.f_bavail * status.f_frsize - rest)


def main(how: str, place: str) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    comm.Barrier()
    found = {}
    if how == "told":
        say_that_there_is_little()
        found["nothing"] = exchanged(comm)
    else:
        for name, rest in _RESTS.items():
            own = comm.Dup()
            if comm.rank == 0:
                fill(rest)
            comm.Barrier()
            found[name] = exchanged(own)
            comm.Barrier()
    everywhere = comm.gather(found)
    if everywhere is not None:
        Path(place).write_text(json.dumps(everywhere))


def exchanged(comm: Any) -> dict[str, Any]:
    """Exchange and reduce fields of the grid and of NumPy; return the results and the reasons for the paths."""
    import halox

    shape = (_SHAPE[0] * comm.size, _SHAPE[1])
    g = halox.Grid(shape, periodic=True, proc_shape=(comm.size, 1), comm=comm, device="cpu")
    rows, columns = g.indices(halo=True)
    wanted = (rows % shape[0]) * 1000.0 + columns % shape[1]
    told: dict[str, Any] = {"right": [], "reasons": []}
    # The last field, with three components, is larger than every rest.
    for u in (g.zeros(), np.zeros(g.padded_shape), g.zeros(components=3)):
        for _ in range(3):
            u[...] = -1.0
            u[g.layout(u).interior] = wanted[1:-1, 1:-1]
            g.exchange(u)
            told["right"].append(bool((u == wanted).all()))
        rows_out = [row for row in g.explain(u).rows if row.peer != comm.rank]
        told["reasons"] += [f"{row.path}/{row.protocol}: {row.reason}" for row in rows_out]
        told["right"].append(bool(g.sum(u) == g.allreduce(float(u[..., 1:-1, 1:-1].sum()))))
    reduce = halox.Allreduce(comm, 100_000, "f8", device="cpu")
    told["right"].append(bool((reduce(np.ones(100_000)) == comm.size).all()))
    reduce.close()
    g.close()
    return told


if __name__ == "__main__":
    main(*sys.argv[1:])
