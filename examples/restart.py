"""Heat equation with records in time, stopped half-way and restarted from a checkpoint, on any number of ranks.

Alone: ``python examples/restart.py``; up to step 300, and then up to 500 on another number of ranks, with the command
``mpiexec -n 4 python -m mpi4py examples/restart.py run.zarr 300``. Every 50 steps, run-records.zarr gets a record of
every second point. A run that is told to stop (SIGTERM, or near HALOX_WALL_TIME) saves first.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI

import halox

CELLS = (192, 128)
RATE = 0.2  # diffusivity * time step / cell size squared; stable up to 0.25


def run(path: Path, steps: int) -> float:
    """Run up to step ``steps``, from the checkpoint if there is one, and save; return the largest error."""
    records = path.with_name(f"{path.stem}-records.zarr")
    with halox.Grid(CELLS, halo=1, periodic=True) as grid:
        i, j = grid.indices()
        kx, ky = 4 * math.pi / CELLS[0], 6 * math.pi / CELLS[1]
        wave = grid.xp.cos(kx * i) * grid.xp.cos(ky * j)
        u, new, first = grid.zeros("f8"), grid.zeros("f8"), 0
        grid.interior(u)[...] = wave
        if grid.allreduce(int(path.exists()), op="min"):
            first = grid.load(path, u=u).attrs["step"]
            if first > steps:
                raise SystemExit(
                    f"{path} is at step {first}; give as many steps or more, or another path"
                )
        coarse = (slice(None, None, 2),) * 2
        with halox.Output(grid, records, u=u, mode="a", time=first, region=coarse) as out:
            for step in range(first, steps):
                if halox.stopping(grid):
                    steps = step
                    break
                grid.exchange(u)
                around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
                new[1:-1, 1:-1] = u[1:-1, 1:-1] + RATE * (around - 4 * u[1:-1, 1:-1])
                u, new = new, u
                if (step + 1) % 50 == 0:
                    out.append(time=step + 1, u=u)
        grid.save(path, u=u, attrs={"step": steps})
        damping = 1 - 4 * RATE * (math.sin(kx / 2) ** 2 + math.sin(ky / 2) ** 2)
        grid.interior(new)[...] = abs(grid.interior(u) - damping**steps * wave)
        error = float(grid.max(new))
        if grid.rank == 0:
            print(f"{grid.size} rank(s), steps {first} to {steps}: largest error {error:.1e}")
        return error


def main(arguments: Sequence[str] = ()) -> float:
    """Run once with the given path, or without arguments twice with a temporary checkpoint."""
    options = parse(arguments)
    if options.path:
        return run(options.path, options.steps)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(MPI.COMM_WORLD.bcast(own))
        error = max(run(folder / "run.zarr", steps) for steps in (300, 500))
        MPI.COMM_WORLD.Barrier()
    return error


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("path", type=Path, nargs="?", help="checkpoint to begin or to continue")
    parser.add_argument("steps", type=int, nargs="?", help="steps from the beginning on")
    options = parser.parse_args(arguments)
    if options.path and options.steps is None:
        parser.error("steps: give the number of steps after the path, as in run.zarr 300")
    return options


if __name__ == "__main__":
    if not main(sys.argv[1:]) <= 1e-12:
        raise SystemExit("the result is wrong")
