"""Checks of points, statistics and random fields of a GPU grid against a grid on the host, for one rank or several."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
from mpi4py import MPI

import halox

SHAPE = (17, 14, 12)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"components": 2, "staggered": 0, "halo": 2},
    {"components": (..., 2, 3), "staggered": (1, 2)},
]
OPTIONS: dict[str, Any] = {"boundary": "edge", "periodic": (False, True, False)}


def check_points(comm: MPI.Intracomm) -> list[str]:
    """Return the cases whose values or sources on GPUs differ from those on the host of one rank; all are exact."""
    rng = np.random.default_rng(3)
    fractional = rng.integers(0, 16 * 11, (200, 3)) / 16
    fractional[::3] //= 1
    wrong = []
    with (
        halox.Grid(SHAPE, comm=comm, device="gpu", **OPTIONS) as grid,
        halox.Grid(SHAPE, comm=MPI.COMM_SELF, device="cpu", **OPTIONS) as host,
    ):
        for indices in (fractional, np.floor(fractional)):
            points, right = halox.Points(grid, indices), halox.Points(host, indices)
            for dtype in ("f8", "f4", "c16", *(("i4", "u1") if indices is not fractional else ())):
                for layout in LAYOUTS:
                    v = host.zeros(dtype, **layout)
                    host.interior(v)[...] = rng.integers(0, 9, host.interior(v).shape)
                    u = grid.scatter(host.gather(v) if comm.rank == 0 else None, **layout)
                    found, expected = [], []
                    sources = rng.integers(0, 9, (len(points), *_components(host, v))).astype(dtype)
                    for mine, field, ones, values in (
                        (grid, u, points, cupy.asarray(sources)),
                        (host, v, right, sources),
                    ):
                        mine.exchange(field)
                        result = found if mine is grid else expected
                        result += [ones.get(field), ones.get(field)]
                        for _ in range(70):  # two chunks
                            ones.record(field)
                        result.append(ones.collect())
                        ones.add(field, values)
                        result.append(mine.gather(field))
                    same = all(
                        (a is None and comm.rank > 0) or np.array_equal(_host(a), b)
                        for a, b in zip(found, expected, strict=True)
                    )
                    if not same or not isinstance(found[0], cupy.ndarray):
                        wrong.append(f"{dtype} {layout} {indices[1]}")
    return wrong


def check_statistics(comm: MPI.Intracomm) -> list[str]:
    """Return the calls whose results differ from those of NumPy."""
    wrong = []
    with halox.Grid(SHAPE, comm=comm, device="gpu") as grid:
        for dtype in ("f8", "f4", "f2", "i2", "c16"):
            for layout in LAYOUTS:
                u = grid.full(3, dtype, **layout)
                shape = grid.layout(u).global_shape
                whole = np.random.default_rng(1).integers(0, 9, shape).astype(dtype)
                if dtype[0] == "c":
                    whole = whole + 1j * whole[::-1]
                else:
                    whole[-1, 2:] = 100
                first = len(grid.layout(u).spec.components_before)
                cuts = (slice(None),) * first + grid.layout(u).owned
                grid.interior(u)[...] = cupy.asarray(whole[cuts])
                wide = whole.astype("c16" if dtype[0] == "c" else "f8")
                results: list[tuple[str, Any, Any]] = []
                if dtype != "f2":
                    results.append(("std", grid.std(u), wide.std()))
                    results.append(("mean", grid.mean(u), wide.mean()))
                results.append(("axis", grid.mean(u, axis=(0, 2)), wide.mean((first, first + 2))))
                if dtype[0] != "c":
                    index = np.unravel_index(whole.argmax(), shape)
                    results.append(("argmax", grid.argmax(u), index))
                    if dtype != "f2":
                        largest = grid.max(u, axis=1)
                        results.append(("max over y", largest, whole.max(axis=first + 1)))
                        rows = cupy.arange(shape[first], dtype="f4")
                        found = grid.sum("u * r", u=u, r=("x", rows))
                        lines = wide.sum(tuple(n for n in range(whole.ndim) if n != first))
                        results.append(("profile", found, lines @ np.arange(len(rows))))
                    results.append(("histogram", *_histograms(grid, u, whole)))
                wrong += [
                    f"{name} {dtype} {layout}"
                    for name, found, right in results
                    if not np.allclose(_host(found), right, rtol=1e-13)
                ]
        u = grid.zeros()
        u[...] = cupy.arange(u.size).reshape(u.shape) % 7 + 1e9
        if (
            not abs(grid.std(u) / (_host(grid.interior(u)) - 1e9).std() - 1) < 1e-12
            and comm.size == 1
        ):
            wrong.append("std of a large mean")
        own = grid.interior(u)
        own[...] -= 1e9
        own[tuple(n // 2 for n in own.shape)] = 1e9
        if comm.size == 1 and not np.isclose(grid.std(u), _host(own).std(), rtol=1e-12):
            wrong.append("std with an outlier in the middle")
        grid.interior(u)[(0,) * 3] = cupy.nan
        if grid.argmin(u) != (0, 0, 0) or not np.isnan(grid.std(u)):
            wrong.append("NaN")
    return wrong


def check_random(comm: MPI.Intracomm) -> list[str]:
    """Return the fields that differ from those on the host; normal numbers may differ in the last bits."""
    wrong = []
    with (
        halox.Grid(SHAPE, comm=comm, device="gpu", periodic=True) as grid,
        halox.Grid(SHAPE, comm=comm, device="cpu", periodic=True) as host,
    ):
        for dtype in ("f4", "f8", "c8", "c16"):
            for layout in LAYOUTS:
                for dist in ("uniform", "normal"):
                    found = _host(grid.random(2**40, dist, out=grid.zeros(dtype, **layout)))
                    right = host.random(2**40, dist, dtype, **layout)
                    tolerance = 0 if dist == "uniform" else 1e-6 if dtype in ("f4", "c8") else 1e-13
                    if not np.allclose(found, right, rtol=tolerance, atol=tolerance):
                        wrong.append(f"{dtype} {layout} {dist}")
    return wrong


def _histograms(grid: halox.Grid, u: Any, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found, right = (grid.histogram(u, 7), np.histogram(whole, 7))
    return np.concatenate(found), np.concatenate(right)


def _components(grid: halox.Grid, u: Any) -> tuple[int, ...]:
    spec = grid.layout(u).spec
    return spec.components_before + spec.components_after


def _host(array: Any) -> Any:
    return array.get() if isinstance(array, cupy.ndarray) else array
