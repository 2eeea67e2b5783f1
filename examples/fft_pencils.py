"""A Poisson equation in a periodic box by three-dimensional Fourier transforms, compared with its exact solution.

Each rank owns pencils of the box: whole lines along one axis, which is transformed in place. Two transposes make each
of the other two axes whole on every rank, as the last axis, whose lines are contiguous in memory.

Alone: ``python examples/fft_pencils.py``; on four ranks:
``mpiexec -n 4 python -m mpi4py examples/fft_pencils.py``.
"""

from __future__ import annotations

import math

import halox

CELLS = (32, 24, 40)  # along x, y, z; the box is 2 pi long each way


def pencils(order: tuple[int, int, int], proc_shape: tuple[int | None, ...]) -> halox.Grid:
    """Return a grid with the axes in the given order, the last one whole on every rank."""
    return halox.Grid([CELLS[axis] for axis in order], halo=0, proc_shape=proc_shape)


def main() -> float:
    """Run, and return the largest error."""
    with (
        pencils((0, 1, 2), (None, None, 1)) as xyz,
        pencils((0, 2, 1), xyz.proc_shape) as xzy,
        pencils((1, 2, 0), xyz.proc_shape) as yzx,
        halox.Transpose(xyz, xzy, axes=(0, 2, 1)) as z_to_y,
        halox.Transpose(xzy, yzx, axes=(2, 1, 0)) as y_to_x,
    ):
        xp = xyz.xp
        a, b, c = (grid.zeros("c16") for grid in (xyz, xzy, yzx))

        # -laplacian(p) = f
        x, y, z = (2 * math.pi * i / n for i, n in zip(xyz.indices(), CELLS, strict=True))
        exact = xp.cos(x) * xp.sin(2 * y) * xp.cos(3 * z) + xp.sin(5 * x + y)
        f = 14 * xp.cos(x) * xp.sin(2 * y) * xp.cos(3 * z) + 26 * xp.sin(5 * x + y)

        a[...] = xp.fft.fft(f)
        z_to_y.forward(a, b)
        b[...] = xp.fft.fft(b)
        y_to_x.forward(b, c)
        c[...] = xp.fft.fft(c)

        # Wave numbers of this rank's cells: 0, 1, ..., n / 2, ..., -2, -1.
        ky, kz, kx = (
            (i + n // 2) % n - n // 2 for i, n in zip(yzx.indices(), yzx.grid_shape, strict=True)
        )
        squares = kx**2 + ky**2 + kz**2
        c /= xp.maximum(squares, 1)  # the mean of f is zero

        c[...] = xp.fft.ifft(c)
        y_to_x.backward(c, b)
        b[...] = xp.fft.ifft(b)
        z_to_y.backward(b, a)
        a[...] = xp.fft.ifft(a)

        error = float(xyz.max(abs(a - exact)))
        if xyz.rank == 0:
            print(f"{xyz.size} rank(s), pencils on {xyz.proc_shape}: largest error {error:.1e}")
        return error


if __name__ == "__main__":
    if main() > 1e-12:
        raise SystemExit("the result is wrong")
