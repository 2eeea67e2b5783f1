"""The parts of the multigrid mini-app on one rank: operators, random numbers, cycle, checks, options."""

from __future__ import annotations

import argparse
from argparse import Namespace
from functools import partial

import pytest

import halox
from apps.nas_mg import cycle, options
from apps.nas_mg.benchmark import Solver
from apps.nas_mg.classes import CLASSES, FIRST_NORMS
from apps.nas_mg.device_kernels import DeviceKernels
from apps.nas_mg.hierarchy import Hierarchy, finest_grid
from tests import support
from tests.unit.apps.apps_on_cpu import MULTIGRID, FakeCupy

LARGEST = 5.6673957039446e-02, 2.0223500301609e-02, 2.9748567774337e-03, 1.1217668764697e-03


@pytest.fixture(scope="module")
def device_kernels() -> DeviceKernels:
    support.require("cxx")
    return DeviceKernels(FakeCupy(MULTIGRID))


@pytest.mark.parametrize(
    ("name", "on"), [("S", "host"), ("S", "device as C++"), *support.full(("W", "host"))]
)
def test_official_norms(name: str, on: str, request: pytest.FixtureRequest) -> None:
    """The norm after every iteration, and the last one, which is official."""
    support.require("mpi")
    from mpi4py import MPI

    problem = CLASSES[name]
    settings = Namespace(problem=problem, reproducible=False)
    with (
        finest_grid(problem.points, (1, 1, 1), MPI.COMM_SELF, "cpu") as grid,
        Hierarchy(grid, options.GATHER) as hierarchy,
    ):
        solver = Solver(hierarchy, settings)
        iterate = solver.iterate
        if on != "host":
            kernels = request.getfixturevalue("device_kernels")
            steps = cycle.iteration(hierarchy, kernels, problem.smoother)
            iterate = partial(cycle.run, steps)
        for _ in range(2):  # a second run must not depend on the first
            solver.start()
            solver.first_residual()
            assert solver.norm() == pytest.approx((20 / problem.points**3) ** 0.5, rel=1e-15)
            assert solver.largest() == 1
            for number, expected in enumerate(FIRST_NORMS[name]):
                iterate()
                assert solver.norm() == pytest.approx(expected, rel=1e-11)
                if name == "S":
                    assert solver.largest() == pytest.approx(LARGEST[number], rel=1e-11)
        assert problem.is_verified(solver.norm())


class TestClasses:
    def test_not_a_number_is_never_verified(self) -> None:
        assert not CLASSES["S"].is_verified(float("nan"))


class TestOptions:
    @staticmethod
    def settings(ranks: int, *words: str) -> options.Settings:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        return options.settings(parser.parse_args(words), ranks)

    def test_process_grids_are_the_originals(self) -> None:
        # The original's grids, along x, y, z: 1 x 1 x 2, 1 x 2 x 2, 2 x 2 x 2, 2 x 2 x 4, 2 x 4 x 4, ...
        expected = {2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2), 16: (4, 2, 2), 32: (4, 4, 2)}
        expected |= {64: (4, 4, 4), 128: (8, 4, 4)}
        for ranks, shape in expected.items():
            assert options.process_grid(ranks) == shape

    @pytest.mark.parametrize("ranks", [3, 6, 8**5])
    def test_ranks_that_do_not_do(self, ranks: int) -> None:
        with pytest.raises(halox.errors.DecompositionError, match=str(ranks)):
            self.settings(ranks)
