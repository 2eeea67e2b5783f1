"""Halos at walls on a GPU, on one rank: values, graphs, and functions of the user."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from tests.mpi.test_boundaries import has_the_bits_of_single_steps
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu


def test_one_launch_fills_walls_and_periodic_halos() -> None:
    """Two fields, one of which has no walls; messages are measured as those of any path."""
    sides = {"boundary": (None, ("antisymmetric", "extrapolate"), None), "periodic": (1, 0, 1)}
    with halox.Grid((9, 8, 7), halo=2, comm=MPI.COMM_SELF, device="gpu", **sides) as grid:
        u, v = grid.zeros("f8"), grid.zeros("f8", boundary=None, components=2)
        whole, others = np.random.default_rng(1).integers(-9, 10, (2, 2, 9, 8, 7))
        grid.interior(u)[...] = cupy.asarray(whole[0])
        grid.interior(v)[...] = cupy.asarray(others)
        plan = grid.plan(u, v)
        assert len(plan._runner._channels) == 1
        assert all(row.measured_us is not None for row in plan.measure(repeats=2).rows)
        wrapped = np.pad(whole[0], ((2, 2), (0, 0), (2, 2)), mode="wrap")
        low, high = wrapped[:, 1::-1], wrapped[:, -1:]
        beyond = high + np.array([1, 2]).reshape(1, 2, 1) * (high - wrapped[:, -2:-1])
        assert np.array_equal(u.get(), np.concatenate((-low, wrapped, beyond), axis=1))
        expected = np.pad(others, ((0, 0), (2, 2), (0, 0), (2, 2)), mode="wrap")
        assert np.array_equal(v.get()[:, :, 2:-2], expected)


@pytest.mark.parametrize("sides", ["reflect", ("antisymmetric", 2.0), None])
def test_several_steps_for_one_exchange(sides: Any) -> None:
    assert has_the_bits_of_single_steps(sides, MPI.COMM_SELF, "gpu")


def test_in_a_graph() -> None:
    """A captured step fills the walls in every replay."""
    grid = halox.Grid(
        (20, 30), halo=2, boundary=("reflect", "extrapolate"), comm=MPI.COMM_SELF, device="gpu"
    )
    u = grid.zeros()
    grid.interior(u)[...] = cupy.arange(600.0).reshape(20, 30)
    plan = grid.plan(u)
    plan()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        u *= 2
        plan()
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
        stream.synchronize()
    inner = 8 * np.arange(600.0).reshape(20, 30)
    expected = np.pad(inner, ((2, 2), (0, 0)), mode="reflect")
    expected = np.pad(expected, ((0, 0), (2, 2)), mode="reflect", reflect_type="odd")
    assert np.array_equal(u.get(), expected)
    grid.close()


def test_a_function() -> None:
    """The function works on views of CuPy arrays; other walls of the field are filled as well."""

    def inflow(slab: Any, axis: int, side: str, indices: tuple[Any, ...], field: Any) -> None:
        assert all(isinstance(one, cupy.ndarray) for one in (slab, indices[0], field))
        slab[...] = indices[1] + grid.interior(field)[:1]

    with halox.Grid(
        (4, 5), boundary=((inflow, "edge"), None), comm=MPI.COMM_SELF, device="gpu"
    ) as grid:
        u = grid.ones("f4")
        u[-1] = 7
        grid.exchange(u)
        assert np.array_equal(u.get()[0, 1:-1], 1 + np.arange(5)) and u.get()[-1, 1:-1].max() == 1
