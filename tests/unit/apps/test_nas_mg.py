"""The parts of the multigrid mini-app on one rank: operators, random numbers, cycle, checks, options."""

from __future__ import annotations

import argparse
import itertools
from argparse import Namespace
from functools import partial
from typing import Any

import numpy as np
import pytest

import halox
from apps import nas_random_numbers
from apps.nas_mg import cycle, options, random_numbers
from apps.nas_mg.benchmark import Solver
from apps.nas_mg.classes import CLASSES, FIRST_NORMS
from apps.nas_mg.device_kernels import DeviceKernels
from apps.nas_mg.hierarchy import Hierarchy, finest_grid
from apps.nas_mg.host_kernels import HostKernels
from tests import support
from tests.unit.apps.apps_on_cpu import MULTIGRID, FakeCupy

# Published 1-based (x, y, z) of the ten largest random numbers, largest first, and the ten smallest, smallest first.
CHARGES = {
    "S": (
        "(8,2,21) (20,30,32) (3,1,4) (5,23,4) (2,17,22) (22,32,7) (13,16,13) (31,5,26) (29,1,29) (18,27,18)",
        "(1,12,3) (14,9,18) (6,15,1) (5,29,16) (13,3,2) (6,18,9) (21,20,12) (27,16,32) (9,26,23) (8,15,27)",
    ),
    "A": (
        "(53,208,39) (242,171,13) (202,17,197) (201,82,208) (114,122,206) (211,6,247) (44,193,233) "
        "(175,245,163) (4,117,174) (56,119,166)",
        "(222,41,239) (153,161,35) (81,183,254) (249,169,156) (198,6,202) (91,62,204) (16,204,31) "
        "(100,155,58) (101,137,111) (210,153,97)",
    ),
}
LARGEST = 5.6673957039446e-02, 2.0223500301609e-02, 2.9748567774337e-03, 1.1217668764697e-03
WEIGHTS = 0.7, -0.3, 0.2, 0.1


@pytest.fixture(scope="module")
def device_kernels() -> DeviceKernels:
    support.require("cxx")
    return DeviceKernels(FakeCupy(MULTIGRID))


# Points of blocks, or of coarse ones; on the host the last two are several pieces of planes and of rows.
SHAPES = [(1, 4, 3), (12, 7, 9), (3, 6, 66), (30, 31, 40), (2, 180, 150)]


@pytest.fixture(params=["host", "device as C++"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "device as C++":
        return request.getfixturevalue("device_kernels")
    return HostKernels()


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(shape) - 0.5


def by_27_points(u: np.ndarray, weights: tuple[float, ...]) -> np.ndarray:
    """Apply a stencil by its definition; an offset's weight depends on the number of its nonzero components."""
    total = np.zeros(tuple(n - 2 for n in u.shape))
    for offset in itertools.product((-1, 0, 1), repeat=3):
        moved = tuple(slice(1 + o, n - 1 + o) for o, n in zip(offset, u.shape, strict=True))
        total += weights[sum(map(abs, offset))] * u[moved]
    return total


@pytest.mark.parametrize("planes", [None, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_stencil(
    kernels: Any, shape: tuple[int, ...], planes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each thread walks along a few planes, here also along 4 of 12."""
    if planes is not None:
        monkeypatch.setattr("apps.nas_mg.device_kernels.planes_per_thread", lambda *_: planes)
    shape = tuple(n + 2 for n in shape)
    u, v, r = random(shape), random(shape, 1), np.zeros(shape)
    inside = (slice(1, -1),) * 3
    expected = v[inside] + by_27_points(u, WEIGHTS)
    kernels.stencil(u, v, r, WEIGHTS)()
    np.testing.assert_allclose(r[inside], expected, rtol=1e-13, atol=1e-14)
    kernels.stencil(u, v, v, WEIGHTS)()
    np.testing.assert_allclose(v[inside], expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("shape", SHAPES)
def test_restriction_and_prolongation(kernels: Any, shape: tuple[int, ...]) -> None:
    """Into and from a part of an array, as of a gathered level."""
    fine = random(tuple(2 * n + 2 for n in shape))
    part = tuple(slice(a, a + n + 2) for a, n in zip((1, 2, 4), shape, strict=True))
    whole = random(tuple(n + 7 for n in shape), 1)
    expected = whole.copy()
    averages = by_27_points(fine, (1 / 2, 1 / 4, 1 / 8, 1 / 16))
    expected[part][1:-1, 1:-1, 1:-1] = averages[1::2, 1::2, 1::2]
    kernels.restrict(fine, whole[part])()
    np.testing.assert_allclose(whole, expected, rtol=1e-13, atol=1e-14)

    interpolated = whole[part]
    for axis in range(3):
        low, high = np.delete(interpolated, -1, axis), np.delete(interpolated, 0, axis)
        interpolated = np.stack([low, (low + high) / 2], axis + 1)
        interpolated = interpolated.reshape(*low.shape[:axis], -1, *low.shape[axis + 1 :])
    for add in (True, False):
        expected = interpolated + add * fine
        kernels.prolong(whole[part], fine, add=add)()
        np.testing.assert_allclose(fine, expected, rtol=1e-13, atol=1e-14)


class TestRandomNumbers:
    @pytest.mark.parametrize("first", [17, 10**12 + 7])
    def test_jump_ahead(self, first: int) -> None:
        x = 314159265 * pow(5**13, first, 2**46) % 2**46
        expected = []
        for _ in range(50):
            expected.append(x)
            x = x * 5**13 % 2**46
        assert nas_random_numbers.numbers(first, 50).tolist() == expected

    @pytest.mark.parametrize(
        ("name", "parts"), [("S", (1, 1, 1)), ("S", (2, 2, 2)), *support.full(("A", (4, 1, 2)))]
    )
    def test_charges(self, name: str, parts: tuple[int, ...]) -> None:
        points = CLASSES[name].points
        found = [
            random_numbers.extremes(
                points,
                [
                    slice(at * points // p, (at + 1) * points // p)
                    for at, p in zip(place, parts, strict=True)
                ],
            )
            for place in np.ndindex(*parts)
        ]

        class Comm:
            def allgather(self, mine: Any) -> Any:
                return found

        everything = (slice(0, points),) * 3
        for places, expected in zip(
            random_numbers.charges(points, everything, Comm()), CHARGES[name], strict=True
        ):
            text = " ".join(f"({x},{y},{z})" for z, y, x in (places + 1).tolist())
            assert text == expected


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
    def test_operations(self) -> None:
        # From the tables of the original benchmark.
        expected = {"S": 7.602176e6, "W": 4.865393e8, "A": 3.892314e9, "B": 1.946157e10}
        expected |= {"C": 1.556926e11, "D": 3.113851e12}
        for name, operations in expected.items():
            assert CLASSES[name].operations == pytest.approx(operations, rel=1e-6)

    def test_first_norms_end_at_the_official_ones(self) -> None:
        for name in ("S", "W", "A"):
            assert CLASSES[name].is_verified(FIRST_NORMS[name][-1])

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
