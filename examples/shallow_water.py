"""Shallow water after a dam break: labelled fields and a checkpoint, compared with the exact solution.

Depth and flow are variables of an xarray Dataset, whose halos halox exchanges in place. Half-way the run saves the
Dataset as a Zarr checkpoint and continues from it, like a restart on another number of ranks. The scheme is Rusanov's,
of first order. The exact depth, a rarefaction and a bore, is taken from J. J. Stoker ("Water Waves", 1957).

Alone: ``python examples/shallow_water.py``; on four ranks, with a picture:
``halox run examples/shallow_water.py -n 4 --cells 800 40 --png shallow_water.png``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

import halox
import halox.xarray  # the accessor of datasets

GRAVITY = 9.81
DEEP, SHALLOW = 2.0, 1.0  # m, on both sides of the dam at x = 0
END = 6.0  # s
LENGTH = 100.0  # m


def stoker(x: Any, t: float) -> Any:
    """Return the exact depth at points x."""
    speed = np.sqrt(GRAVITY * DEEP)
    low = np.linspace(SHALLOW, DEEP, 100_001)[1:-1]  # candidates for the depth between the waves
    flow = 2 * (speed - np.sqrt(GRAVITY * low))  # behind the rarefaction, and behind the bore
    best = np.argmin(abs(flow - np.sqrt(GRAVITY / 2 * (1 / low + 1 / SHALLOW)) * (low - SHALLOW)))
    low, flow = low[best], flow[best]
    bore = low * flow / (low - SHALLOW)
    fan = (2 * speed - x / t) ** 2 / (9 * GRAVITY)
    cuts = [x < -speed * t, x < (flow - np.sqrt(GRAVITY * low)) * t, x < bore * t]
    return np.select(cuts, [DEEP, fan, low], SHALLOW)


def step(h: Any, q: Any, rate: float) -> tuple[Any, Any]:
    """Return depth and flow one step later, without the halo along x. ``rate`` is dt / dx."""
    flux = q, q * q / h + GRAVITY / 2 * h * h
    speed = abs(q / h) + (GRAVITY * h) ** 0.5
    fastest = np.maximum(speed[1:], speed[:-1])
    found = []
    for value, f in zip((h, q), flux, strict=True):
        between = (f[1:] + f[:-1]) / 2 - fastest / 2 * (value[1:] - value[:-1])
        found.append(value[1:-1] - rate * (between[1:] - between[:-1]))
    return found[0], found[1]


def main(arguments: Sequence[str] = ()) -> float:
    """Run, and return the mean error of the depth, divided by the difference in depth."""
    options = parse(arguments)
    nx, ny = options.cells
    dx = LENGTH / nx
    steps = int(np.ceil(END / (0.4 * dx / np.sqrt(GRAVITY * DEEP) / 1.5)))
    x = (np.arange(nx) + 0.5) * dx - LENGTH / 2
    with (
        tempfile.TemporaryDirectory() as own,
        halox.Grid((nx, ny), boundary=("edge", None), device=options.device) as grid,
    ):
        path = Path(grid.comm.bcast(own)) / "dam.zarr"
        start = xr.DataArray(np.where(x < 0, DEEP, SHALLOW), dims="x").expand_dims(y=ny, axis=1)
        fields = {"depth": grid.from_dataarray(start), "flow": grid.zeros()}
        for count in range(steps):
            state = xr.Dataset(
                {name: grid.dataarray(u, halo=True, coords={"x": x}) for name, u in fields.items()},
                attrs={"time": (count + 1) * END / steps},  # at the end of the step
            )
            state.halox.exchange(grid)
            h, q = fields["depth"], fields["flow"]
            h[1:-1, 1:-1], q[1:-1, 1:-1] = step(h[:, 1:-1], q[:, 1:-1], END / steps / dx)
            if count == steps // 2:
                state.halox.to_zarr(path, grid)
                with xr.open_zarr(path, chunks=None) as saved:
                    fields = {name: grid.from_dataarray(saved[name]) for name in fields}
        exact = grid.xp.asarray(stoker(x[grid.owned[0]], END)[:, None])
        whole = grid.gather(fields["depth"])
        fastest = grid.max("abs(flow / depth) + sqrt(g * depth)", g=GRAVITY, **fields)
        courant = float(fastest) * END / steps / dx
        grid.interior(fields["depth"])[...] -= exact
        error = float(grid.sum("abs(depth)", depth=fields["depth"])) / (nx * ny * (DEEP - SHALLOW))
        if grid.rank == 0:
            print(
                f"{grid.size} rank(s), {steps} steps: mean error {error:.1%} of the dam, Courant number {courant:.2f}"
            )
    if whole is not None and options.png:
        draw(options.png, x, whole[:, 0])
    if not error < 3 / nx**0.9:
        raise SystemExit("the result is wrong")
    return error


def draw(path: Path, x: Any, depth: Any) -> None:
    """Draw the computed and the exact depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.fill_between(x, depth, color="tab:blue", alpha=0.5, label="halox")
    axes.plot(x, stoker(x, END), "--", color="gray", lw=1, label="Stoker")
    axes.set(xlabel="x / m", ylabel="depth / m", title=f"{END:g} s after the dam has broken")
    axes.legend()
    figure.savefig(path)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cells", type=int, nargs=2, default=(400, 8), metavar="N")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a picture")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
