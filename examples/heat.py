"""Heat equation on a periodic plane: explicit steps, compared with the exact solution of the scheme.

Alone: ``python examples/heat.py``; on four ranks:
``mpiexec -n 4 python -m mpi4py examples/heat.py``.
"""

from __future__ import annotations

import math

import halox

CELLS = (192, 128)
WAVES = (2, 3)
STEPS = 500
RATE = 0.2  # diffusivity * time step / cell size squared; stable up to 0.25


def main() -> float:
    """Run, and return the largest error."""
    with halox.Grid(CELLS, halo=1, periodic=True) as grid:
        u, new = grid.zeros("f8"), grid.zeros("f8")
        angles = [
            2 * math.pi * waves / cells * index
            for waves, cells, index in zip(WAVES, CELLS, grid.indices(), strict=True)
        ]
        wave = grid.xp.cos(angles[0]) * grid.xp.cos(angles[1])
        grid.interior(u)[...] = wave

        for _ in range(STEPS):
            grid.exchange(u)
            around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
            new[1:-1, 1:-1] = u[1:-1, 1:-1] + RATE * (around - 4 * u[1:-1, 1:-1])
            u, new = new, u

        # A wave keeps its shape under the scheme; each step damps it by the same factor.
        damping = 1 - 4 * RATE * sum(
            math.sin(math.pi * waves / cells) ** 2
            for waves, cells in zip(WAVES, CELLS, strict=True)
        )
        grid.interior(new)[...] = abs(grid.interior(u) - damping**STEPS * wave)
        error = float(grid.max(new))
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {STEPS} steps: largest error {error:.1e}")
        return error


if __name__ == "__main__":
    if main() > 1e-12:
        raise SystemExit("the result is wrong")
