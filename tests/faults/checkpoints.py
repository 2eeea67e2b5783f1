"""A time loop that saves every few steps and continues from its last checkpoint; one rank dies during a save.

``python -m tests.faults.checkpoints PATH STEPS DIES_AT``; rank 0 prints the step from which it continues.
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import halox
from halox.io.checkpoint import chunks

CELLS = (40, 36)
EVERY = 5
_MODULUS = 1_000_003


def begin() -> np.ndarray:
    """Return the whole field at step 0."""
    return np.arange(CELLS[0] * CELLS[1]).reshape(CELLS) ** 2 % _MODULUS


def serially(steps: int) -> np.ndarray:
    """Return the whole field after some steps, computed by NumPy alone."""
    u = begin()
    for _ in range(steps):
        around = [np.roll(u, by, axis) for axis in (0, 1) for by in (-1, 1)]
        u = (u + sum(around)) % _MODULUS
    return u


def main(path: str, steps: int, dies_at: int) -> None:
    """Run until step ``steps``; the last rank kills itself during the save of step ``dies_at``."""
    chunks.SHARD_BYTES, chunks.CHUNK_BYTES = 1000, 300
    with halox.Grid(CELLS, halo=1, periodic=True) as grid:
        u, first = grid.scatter(begin() if grid.rank == 0 else None), 0
        if grid.allreduce(int(os.path.exists(path)), op="min"):
            first = grid.load(path, u=u).attrs["step"]
        if grid.rank == 0:
            print(first, flush=True)
        for step in range(first + 1, steps + 1):
            grid.exchange(u)
            around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
            u[1:-1, 1:-1] = (u[1:-1, 1:-1] + around) % _MODULUS

            def die(done: int, total: int, step: int = step) -> None:
                if step == dies_at and grid.rank == grid.size - 1 and 0 < done < total:
                    os.kill(os.getpid(), signal.SIGKILL)

            if step % EVERY == 0:
                grid.save(path, u=u, attrs={"step": step}, coords={"x": range(40)}, progress=die)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
