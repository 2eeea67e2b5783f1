"""The Taylor-Green vortex: the incompressible Navier-Stokes equations in Fourier space, compared with known solutions.

The box is 2 pi long each way, and the state is the Fourier coefficients of the velocity u. For the nonlinear term,
velocity and vorticity are transformed to points, multiplied there, u x curl u, and the product is transformed back.
With 3/2 as many points as cells along each axis (``dealias=True``) the product has no aliasing errors. Its gradient
part is removed, since the pressure balances it. A Runge-Kutta scheme of fourth order integrates the equations, with
the decay by viscosity as an exact factor.

In two dimensions a mean flow carries the vortices, which keep their shape while their energy decays as exp(-4 nu t);
the velocity is compared at every point. In three dimensions they break up. For early times G. I. Taylor and A. E. Green
("Mechanism of the production of small eddies from large ones", Proc. R. Soc. London A 158, 499, 1937) give the mean
square of the vorticity as a power series in time; enstrophy and energy are compared with it up to t = 0.5.

Alone: ``python examples/taylor_green.py``; on two ranks, in three dimensions, with a picture:
``mpiexec -n 2 python -m mpi4py examples/taylor_green.py --dim 3 --steps 1000 --png taylor_green.png``.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import halox

MEAN_FLOW = (0.25, 0.125)  # in two dimensions
CYCLES = ((1, 2), (2, 0), (0, 1))  # the other two axes, in the order of a cross product
EARLY = 0.5  # end of the comparison in three dimensions

# The enstrophy over its first value, by Taylor and Green: rows are powers of t, columns powers of nu.
SERIES = (
    (1,),
    (0, -6),
    (5 / 48, 0, 18),
    (0, -5 / 3, 0, -36),
    (50 / (99 * 64), 0, 1835 / (9 * 16), 0, 54),
    (0, -361 / (44 * 32), 0, -761 / 12, 0, -324 / 5),
)


class Flow:
    """Right-hand side, steps and averages of a flow, all in Fourier space; its fields have shape (dim, ...)."""

    def __init__(self, fft: halox.FFT, nu: float, dt: float) -> None:
        self.fft, self.dt = fft, dt
        xp = self.xp = fft.grid.xp
        k = self.k = fft.wavenumbers()
        self.squares = sum(a * a for a in k)
        self.half_decay = xp.exp(-nu * dt / 2 * self.squares)
        # Of an even number of cells, the wave with two cells a period has no derivative: left out.
        n = fft.grid.grid_shape[0]
        self.kept = math.prod(2 * abs(a) < n for a in k)
        # Along the last axis there are waves k >= 0 only; those with k > 0 count twice.
        self.weights = (self.squares > 0) * (1 + (k[-1] > 0))

    def curl(self, u: Any) -> Any:
        """Return the vorticity, which has one component in two dimensions."""
        k = self.k
        pairs = [(b, c) for b, c in CYCLES if max(b, c) < len(k)]
        return self.xp.stack([1j * (k[b] * u[c] - k[c] * u[b]) for b, c in pairs])

    def divergence(self, u: Any) -> Any:
        return sum(a * b for a, b in zip(self.k, u, strict=True))

    def tendency(self, u: Any) -> Any:
        """Return u x curl u without its gradient part."""
        v = [*self.fft.backward(u), 0]
        w = [0, 0, *self.fft.backward(self.curl(u))][-3:]
        product = self.xp.stack([v[b] * w[c] - v[c] * w[b] for b, c in CYCLES[: len(u)]])
        f = self.fft.forward(product)
        f *= self.kept
        pressure = self.divergence(f) / self.xp.maximum(self.squares, 1)
        for a, component in zip(self.k, f, strict=True):
            component -= a * pressure
        return f

    def step(self, u: Any) -> Any:
        """Return the velocity one time step later."""
        decay, dt = self.half_decay, self.dt
        f1 = self.tendency(u)
        f2 = self.tendency(decay * (u + dt / 2 * f1))
        f3 = self.tendency(decay * u + dt / 2 * f2)
        f4 = self.tendency(decay * (decay * u + dt * f3))
        return decay * (decay * (u + dt / 6 * f1) + dt / 3 * (f2 + f3)) + dt / 6 * f4

    def averages(self, u: Any) -> tuple[float, float]:
        """Return energy and enstrophy per volume, the mean flow left out."""
        density = self.weights / 2 * (abs(u) ** 2).sum(axis=0)
        return float(self.fft.grid.sum(density)), float(self.fft.grid.sum(self.squares * density))


def vortex(points: halox.Grid, nu: float, t: float) -> Any:
    """Return the velocity at the points: at time 0, and in two dimensions at any."""
    sin, cos = points.xp.sin, points.xp.cos
    x = [2 * math.pi * i / n for i, n in zip(points.indices(), points.grid_shape, strict=True)]
    if len(x) == 3:
        u = sin(x[0]) * cos(x[1]) * cos(x[2])
        return points.xp.stack([u, -cos(x[0]) * sin(x[1]) * cos(x[2]), 0 * u])
    a, b = (each - mean * t for each, mean in zip(x, MEAN_FLOW, strict=True))
    decay = math.exp(-2 * nu * t)
    return points.xp.stack(
        [MEAN_FLOW[0] + decay * cos(a) * sin(b), MEAN_FLOW[1] - decay * sin(a) * cos(b)]
    )


def known(dim: int, nu: float, t: float) -> tuple[float, float]:
    """Return energy and enstrophy: exactly in two dimensions, by the series in three."""
    if dim == 2:
        return math.exp(-4 * nu * t) / 4, math.exp(-4 * nu * t) / 2
    terms = [sum(c * nu**p for p, c in enumerate(row)) * t**n for n, row in enumerate(SERIES)]
    integral = sum(term * t / (n + 1) for n, term in enumerate(terms))
    return 1 / 8 - 2 * nu * 3 / 8 * integral, 3 / 8 * sum(terms)  # d energy / dt = -2 nu enstrophy


def tolerance(dim: int, nu: float, t: float, dt: float) -> float:
    """Return the largest error to expect: of rounding, time steps, and the terms that the series lacks."""
    missing = (5e-4 + 5 * nu**2) * t**6 if dim == 3 else 0
    return 1e-13 + 1e-4 * dt**4 * t + missing


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the largest error."""
    options = parse(arguments)
    dim, nu, dt = options.dim, 1 / options.re, options.dt
    with (
        halox.Grid((options.cells,) * dim, halo=0, periodic=True, device=options.device) as grid,
        halox.FFT(grid, real=True, norm="forward", dealias=True) as fft,
    ):
        flow, points = Flow(fft, nu, dt), fft.physical
        u = fft.forward(vortex(points, nu, 0))
        curve = [(0.0, *flow.averages(u))]
        begin = time.perf_counter()
        for step in range(1, options.steps + 1):
            u = flow.step(u)
            curve.append((step * dt, *flow.averages(u)))
        ms = (time.perf_counter() - begin) / max(options.steps, 1) * 1e3

        errors = [  # with their times
            (abs(value - exact), t)
            for t, *values in curve
            for value, exact in zip(values, known(dim, nu, t), strict=True)
            if dim == 2 or t <= EARLY
        ]
        t, energy, enstrophy = curve[-1]
        if dim == 2:
            errors.append((float(points.max(abs(fft.backward(u) - vortex(points, nu, t)))), t))
        error = max(errors)[0]
        divergence = float(fft.grid.max(abs(flow.divergence(u))))
        vorticity = None
        if options.png:
            vorticity = points.gather((fft.backward(flow.curl(u)) ** 2).sum(axis=0) ** 0.5)
        if grid.rank == 0:
            print(
                f"{grid.size} rank(s), {grid.device}: {len(curve) - 1} steps to t = {t:.4g}, {ms:.1f} ms each\n"
                f"energy {energy:.12g}, enstrophy {enstrophy:.12g}; "
                f"largest error {error:.1e}, divergence {divergence:.1e}"
            )
        if vorticity is not None:  # on rank 0
            draw(options, vorticity, curve)
        if not (divergence < 1e-14 and all(e <= tolerance(dim, nu, t, dt) for e, t in errors)):
            raise SystemExit("the result is wrong")
        return error


def draw(options: argparse.Namespace, vorticity: Any, curve: list[tuple[float, ...]]) -> None:
    """Draw the vorticity in a plane, and energy and enstrophy over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    if options.dim == 3:
        vorticity = vorticity[0]
    image = left.imshow(vorticity.T, origin="lower", extent=(0, 2, 0, 2), cmap="inferno")
    figure.colorbar(image, ax=left, label="|vorticity|")
    first, second, plane = ("x", "y", "") if options.dim == 2 else ("y", "z", ", plane x = 0")
    left.set(xlabel=f"{first} / pi", ylabel=f"{second} / pi")
    left.set_title(f"t = {curve[-1][0]:.4g}{plane}")
    times, *columns = zip(*curve, strict=True)
    early = [t for t in times if options.dim == 2 or t <= 2]
    dashed = zip(*(known(options.dim, 1 / options.re, t) for t in early), strict=True)
    for name, values, exact in zip(("energy", "enstrophy"), columns, dashed, strict=True):
        right.plot(times, [value / values[0] for value in values], label=f"{name} / first {name}")
        right.plot(early, [value / values[0] for value in exact], "k--", lw=1)
    source = "exact" if options.dim == 2 else "Taylor and Green, 1937"
    right.set(title=f"Re = {options.re:.0f}; dashed: {source}", xlabel="t", ylim=(0, None))
    right.legend()
    figure.savefig(options.png)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dim", type=int, choices=(2, 3), default=2)
    parser.add_argument("--cells", type=int, default=32, metavar="N", help="along each axis")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dt", type=float, help="time step; by default 0.01 or 1 / N")
    parser.add_argument("--re", type=float, default=100, help="Reynolds number, 1 / nu")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    options = parser.parse_args(arguments)
    if options.cells < 16:
        parser.error("--cells: at least 16, to resolve the flow")
    if options.dt is None:
        options.dt = min(0.01, 1 / options.cells)
    if not 0 < options.dt <= 2 / options.cells:
        parser.error(f"--dt: more than 0, at most 2 / N = {2 / options.cells:.3g}")
    if not options.re >= 20:
        parser.error("--re: at least 20, for the series")
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
