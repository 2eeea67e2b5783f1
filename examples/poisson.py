"""Poisson's equation in a periodic box by Fourier transforms, compared with its exact solution.

Alone: ``python examples/poisson.py``; on four ranks:
``mpiexec -n 4 python -m mpi4py examples/poisson.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import halox

CELLS = (32, 24, 40)
LENGTHS = (2 * math.pi, math.pi, 3.0)
# The solution: periods of cosines along each axis, and their amplitudes.
WAVES = {(1, 2, 3): 1.0, (5, 0, -1): -0.5, (0, 7, 2): 0.25}


def solve(fft: halox.FFT, f: Any, lengths: Sequence[float]) -> Any:
    """Return p with -laplacian(p) = f and a mean of 0, in a box of these lengths."""
    squares = sum(k * k for k in fft.wavenumbers(lengths))
    s = fft.forward(f)
    s *= (squares > 0) / (squares + (squares == 0))  # 1 / squares, and 0 for the mean
    return fft.backward(s)


def main() -> float:
    """Run, and return the largest error."""
    with (
        halox.Grid(CELLS, halo=1, periodic=True) as grid,
        halox.FFT(grid, real=True) as fft,
    ):
        f, exact = grid.zeros("f8"), grid.zeros("f8")
        x, y, z = (
            length * i / n for length, i, n in zip(LENGTHS, grid.indices(), CELLS, strict=True)
        )
        for periods, amplitude in WAVES.items():
            kx, ky, kz = (
                2 * math.pi * m / length for m, length in zip(periods, LENGTHS, strict=True)
            )
            wave = amplitude * grid.xp.cos(kx * x + ky * y + kz * z)
            grid.interior(exact)[...] += wave
            grid.interior(f)[...] += (kx**2 + ky**2 + kz**2) * wave

        p = solve(fft, f, LENGTHS)
        grid.exchange(p)  # for stencils that use p next

        p -= exact
        error = float(grid.max(abs(p)))
        if grid.rank == 0:
            print(f"{grid.size} rank(s), {grid.device}: largest error {error:.1e}")
        return error


if __name__ == "__main__":
    if not main() <= 1e-12:
        raise SystemExit("the result is wrong")
