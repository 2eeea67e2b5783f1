"""Types of fields in a user's program: ``make types`` checks this file, which nothing runs.

mypy knows the arrays of a grid on the host. A call with a wrong argument is refused: its line ignores exactly that
error, and mypy reports an ignored error that does not occur.
"""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np

import halox


def step(grid: halox.Grid) -> None:
    grid.exchange(grid.zeros())


def accepted() -> None:
    cpu = halox.Grid((4, 4), device="cpu", halo=2, periodic=True)
    u = cpu.zeros()
    assert_type(u, np.ndarray[Any, Any])
    assert_type(cpu.full_like(u, 1), np.ndarray[Any, Any])
    assert_type(cpu.zeros(components=(2, ..., 3)), np.ndarray[Any, Any])
    assert_type(cpu.coords["x"], np.ndarray[Any, Any])
    assert_type(cpu.coarsen(2).zeros(), np.ndarray[Any, Any])
    halox.Points(cpu, {"x": [0.5], "y": u[0]})
    assert_type(cpu.interior(u), np.ndarray[Any, Any])
    declared: np.ndarray[Any, Any] = cpu.declare(np.ones(3))
    assert_type(halox.Grid((4, 4)).zeros(), Any)
    with halox.Grid(4, device="cpu") as grid:
        assert_type(grid.scatter(None), np.ndarray[Any, Any])
    step(cpu)
    plan = cpu.plan(u, declared)
    plan(u)
    cpu.histogram(u, np.ones(3), np.ones(2))


def refused() -> None:
    cpu = halox.Grid((4, 4), device="cpu")
    u = cpu.zeros()
    cpu.exchange(3)  # type: ignore[arg-type]
    halox.Grid((4, 4)).exchange([u])  # type: ignore[arg-type]
    cpu.sum(3)  # type: ignore[arg-type]
    cpu.plan(u)(3)  # type: ignore[arg-type]
    halox.Grid((4, 4), device="tpu")  # type: ignore[call-overload]
    halox.Grid((4, 4), halos=2)  # type: ignore[call-overload]
    halox.exchange(u)  # type: ignore[operator]
