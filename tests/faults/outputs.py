"""A time loop that appends records to an output, and continues from the last complete one; one rank kills itself.

``python -m tests.faults.outputs PATH RECORDS DIES_AFTER_MS``; rank 0 prints the number of records at the beginning, and
the number after each `halox.Output.wait`. The time of a record is its number.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy as np

import halox
from halox.io.checkpoint import chunks

CELLS = (23, 10)


def whole(record: int) -> np.ndarray:
    """Return the whole field of a record."""
    return np.arange(CELLS[0] * CELLS[1]).reshape(CELLS) * 7 + 1000 * record


def positions(record: int) -> np.ndarray:
    """Return the positions of the particles of a record, of which there may be none."""
    return np.arange(record * 17 % 40, dtype=float)[:, None] * [0.5, 0.2]


def main(path: str, last: int, dies_after_ms: int) -> None:
    """Append up to record ``last``; the last rank kills itself after some milliseconds, unless they are negative."""
    chunks.SHARD_BYTES, chunks.CHUNK_BYTES = 400, 200
    with halox.Grid(CELLS, halo=1) as grid:
        u = grid.zeros(int)
        i, j = grid.indices()
        p = halox.Particles(grid, [])
        with halox.Output(grid, path, u=u, p=p, mode="a") as out:
            if grid.rank == 0:
                print(out.records, flush=True)
            if grid.rank == grid.size - 1 and dies_after_ms >= 0:
                die = (os.kill, (os.getpid(), signal.SIGKILL))
                threading.Timer(dies_after_ms / 1000, *die).start()
            for record in range(out.records, last):
                grid.interior(u)[...] = (i * CELLS[1] + j) * 7 + 1000 * record
                p = halox.Particles(grid, positions(record) if grid.rank == 0 else [])
                out.append(time=record, p=p)
                if record % 8 == 7:
                    out.wait()
                    if grid.rank == 0:
                        print(out.records, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
