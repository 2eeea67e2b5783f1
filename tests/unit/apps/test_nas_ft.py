"""The parts of the Fourier mini-app on one rank: random numbers, evolution, checksums, memory, checks, options."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halox
from apps import memory
from apps.nas_ft import initial, options
from apps.nas_ft.benchmark import problem_grid
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.device_kernels import DeviceKernels
from apps.nas_ft.host_kernels import HostKernels
from apps.nas_ft.solver import Solver, sampled
from apps.nas_random_numbers import numbers
from tests import support
from tests.unit.apps.apps_on_cpu import FOURIER, FakeCupy

FIRST = (0.7945219111887383 + 0.8690652738745399j, 0.6476317284643329 + 0.7855626502289539j)
LAST = 0.15137998948144116 + 0.22246235021385985j
"""Of class C."""

# Shapes of grids and of blocks: single points, odd sizes, rows longer than a thread block; on the host the last two are
# several pieces of rows and of planes.
SHAPES = [(1, 1, 1), (3, 5, 70), (40, 3, 6), (2, 129, 17), (3, 300, 101), (60, 20, 41)]


class OnNumpy(DeviceKernels):
    """The GPU kernels on NumPy arrays; NumPy replaces CuPy's copies and sums."""

    def copy(self, values: np.ndarray, target: Any) -> None:
        target[...] = values

    def sums(self, samples: Any) -> np.ndarray:
        return samples.sum(axis=1)


@pytest.fixture(scope="module")
def device() -> FakeCupy:
    support.require("cxx")
    return FakeCupy(FOURIER)


@pytest.fixture(params=["host", "device as C++"])
def kernels(request: pytest.FixtureRequest) -> Any:
    if request.param == "device as C++":
        return OnNumpy(request.getfixturevalue("device"))
    return HostKernels()


def guarded(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return a field of NaN, and its memory with guards before and after it."""
    n = int(np.prod(shape))
    memory = np.full(n + 16, complex(np.nan, np.nan))
    return memory[8 : n + 8].reshape(shape), memory


def random(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).random((2, *shape)) - 0.5
    return found[0] + 1j * found[1]


def initial_values(kernels: Any, shape: Any, owned: tuple[slice, ...]) -> np.ndarray:
    u, around = guarded(tuple(part.stop - part.start for part in owned))
    kernels.initial(u, initial.factors(shape, owned))()
    assert np.isnan(around[:8]).all() and np.isnan(around[-8:]).all()
    return u


class TestInitialValues:
    def test_first_and_last_points(self, kernels: Any) -> None:
        shape = CLASSES["C"].shape
        first = initial_values(kernels, shape, (slice(0, 1), slice(0, 1), slice(0, 2)))
        assert first.ravel().tolist() == list(FIRST)
        last = initial_values(kernels, shape, tuple(slice(n - 1, n) for n in shape))
        assert last.item() == LAST

    @pytest.mark.parametrize("shape", SHAPES)
    def test_blocks_of_the_stream(self, kernels: Any, shape: tuple[int, int, int]) -> None:
        grid_shape = tuple(n + 3 for n in shape)
        stream = numbers(1, 2 * int(np.prod(grid_shape))) / 2**46
        whole = stream.view(np.complex128).reshape(grid_shape)
        for start in ((0, 0, 0), (3, 1, 2), (0, 3, 3)):
            owned = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
            assert np.array_equal(initial_values(kernels, grid_shape, owned), whole[owned])


@pytest.mark.parametrize("shape", SHAPES[1::2])
def test_evolution_and_samples(kernels: Any, shape: tuple[int, int, int]) -> None:
    u, factors = random(shape), [np.random.default_rng(n).random(n) for n in shape]
    expected, step = u.copy(), np.zeros(1, np.int64)
    offsets = sampled(shape, tuple(slice(0, n) for n in shape))
    samples = np.zeros((3, len(offsets)), complex)
    evolve, sample = kernels.evolve(u, factors, step), kernels.sample(u, offsets, samples, step)
    z, y, x = np.ix_(*factors)
    for number in (1, 2):
        evolve()
        sample()
        expected *= z * y * x
        np.testing.assert_allclose(u, expected, rtol=1e-14)
        assert step[0] == number and np.array_equal(samples[number - 1], u.ravel()[offsets])
    assert not samples[2].any()
    np.testing.assert_allclose(kernels.sums(samples), samples.sum(axis=1), rtol=1e-13)


def test_a_block_without_points_of_the_checksum(kernels: Any) -> None:
    # Sampled points have z = 5 j mod 5 = 0; plane 1 has none.
    offsets = sampled((5, 5, 5), (slice(1, 2), slice(0, 5), slice(0, 5)))
    assert len(offsets) == 0
    samples = np.empty((2, 0), np.complex128)
    kernels.sample(random((1, 5, 5)), offsets, samples, np.array([1]))()
    assert kernels.sums(samples).tolist() == [0, 0]


@pytest.mark.parametrize("on", ["host", "device as C++"])
def test_official_checksums(
    on: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/mpi/test_nas_ft.py has the other classes."""
    support.require("mpi")
    from mpi4py import MPI

    if on != "host":
        kernels = OnNumpy(request.getfixturevalue("device"))
        monkeypatch.setattr("apps.nas_ft.solver.HostKernels", lambda: kernels)
    problem = CLASSES["S"]
    settings = options.Settings(problem, (1, 1, 1), 1, False, "cpu")
    with problem_grid(settings, MPI.COMM_SELF) as grid, Solver(grid, problem) as solver:
        for _ in range(2):  # a second run must not depend on the first
            solver.start()
            solver.forward()
            for _ in range(problem.iterations):
                solver.iterate()
            found = solver.checksums()
            assert max(problem.errors(found)) < 3e-13 and problem.is_verified(found)


class TestClasses:
    def test_operations(self) -> None:
        # From the tables of the original benchmark.
        expected = {"S": 1.771670e8, "W": 3.726727e8, "A": 7.136444e9, "B": 9.205359e10}
        expected |= {"C": 3.963882e11}
        for name, operations in expected.items():
            assert CLASSES[name].operations == pytest.approx(operations, rel=1e-6)

    def test_sizes(self) -> None:
        # Points along x, y and z, and iterations.
        expected = {"S": (64, 64, 64, 6), "W": (128, 128, 32, 6), "A": (256, 256, 128, 6)}
        expected |= {"B": (512, 256, 256, 20), "C": (512, 512, 512, 20)}
        expected |= {"D": (2048, 1024, 1024, 25)}
        found = {p.name: (*p.shape[::-1], p.iterations) for p in CLASSES.values()}
        assert found == expected
        for problem in CLASSES.values():
            assert len(problem.checksums) == problem.iterations
            assert max(problem.shape) < 65536  # CUDA's limit on blocks along y and z

    def test_every_iteration_counts(self) -> None:
        problem = CLASSES["C"]
        for number in range(problem.iterations):
            found = problem.checksums
            found[number] *= 1 + 3e-12j
            assert not problem.is_verified(found)
            found[number] = complex("nan")
            assert not problem.is_verified(found)
        assert problem.is_verified(problem.checksums * (1 + 5e-13))


class TestOptions:
    @staticmethod
    def settings(ranks: int, *words: str) -> options.Settings:
        parser = argparse.ArgumentParser()
        options.add_arguments(parser)
        return options.settings(parser.parse_args(words), ranks)

    @pytest.mark.parametrize(
        ("ranks", "words", "expected"),
        [
            (1, "", (1, 1, 1)),
            (96, "", (8, 12, 1)),
            (4096, "", (64, 64, 1)),
            (5, "--decomposition 2d", (1, 5, 1)),
            (4096, "--class W", (32, 128, 1)),
        ],
    )
    def test_process_grids(self, ranks: int, words: str, expected: tuple[int, ...]) -> None:
        assert self.settings(ranks, *words.split()).proc_shape == expected

    @pytest.mark.parametrize(
        ("ranks", "words"),
        [(65, "--decomposition 1d"), (67, ""), (67, "--decomposition 2d"), (8192, "--class W")],
    )
    def test_ranks_that_do_not_fit(self, ranks: int, words: str) -> None:
        with pytest.raises(halox.errors.DecompositionError, match=str(ranks)):
            self.settings(ranks, *words.split())


V2 = {"memory.max": "1000000", "memory.current": "700000", "memory.stat": "inactive_file 50000"}
V2 |= {"job/memory.max": "max", "job/memory.current": "123"}
V1 = {
    "memory/job/memory.limit_in_bytes": "1000000",
    "memory/job/memory.usage_in_bytes": "1200000",
    "memory/job/memory.stat": "cache 7\ntotal_inactive_file 300000",
    "memory/memory.limit_in_bytes": "9223372036854771712",  # means "unlimited"
    "memory/memory.usage_in_bytes": "5",
    "memory/memory.stat": "cache 7",
}


@pytest.mark.parametrize(
    ("groups", "files", "free"),
    [
        (None, {}, 4000 << 10),
        ("0::/", {}, 4000 << 10),
        ("0::/", V2, 350000),
        ("0::/job", V2, 350000),
        ("0::/job", {f"job/{name}": text for name, text in V2.items()}, 350000),
        ("5:cpu,cpuacct:/job\n4:memory:/job\n0::/job", V1, 100000),
    ],
)
def test_free_memory_within_control_groups(
    groups: str | None, files: dict[str, str], free: int, tmp_path: Path
) -> None:
    """Of a folder with the /proc and /sys files of a machine."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    files["proc/meminfo"] = "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    4000 kB\n"
    if groups is not None:
        files["proc/self/cgroup"] = groups
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.host_free_bytes(tmp_path) == free
    assert 0 < memory.host_free_bytes() < 1 << 50
