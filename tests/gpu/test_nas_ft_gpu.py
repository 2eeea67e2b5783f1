"""The Fourier mini-app on a GPU: its kernels agree with NumPy, and whole runs pass NAS verification."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from apps.nas_ft import initial
from apps.nas_ft.benchmark import problem_grid
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.device_kernels import DeviceKernels
from apps.nas_ft.host_kernels import HostKernels
from apps.nas_ft.memory import needed_bytes
from apps.nas_ft.options import Settings
from apps.nas_ft.solver import Solver, sampled
from tests import support
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy  # noqa: E402

SHAPES = [(2, 2, 2), (1, 5, 3), (33, 30, 70), (16, 255, 130)]


@pytest.fixture(scope="module")
def kernels() -> DeviceKernels:
    return DeviceKernels(cupy)


def values(shape: tuple[int, ...]) -> np.ndarray:
    parts = np.random.default_rng(1).random((2, *shape)) - 0.5
    return parts[0] + 1j * parts[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_initial_values_equal_numpy(kernels: DeviceKernels, shape: tuple[int, int, int]) -> None:
    grid_shape = (shape[0] + 4, shape[1] + 4, shape[2] + 4)
    factors = initial.factors(grid_shape, tuple(slice(3, 3 + n) for n in shape))
    u = np.empty(shape, np.complex128)
    there = cupy.full(shape, np.nan, np.complex128)
    tables = tuple(cupy.empty(table.shape, np.uint64) for table in factors)
    run = kernels.initial(there, tables)
    for table, target in zip(factors, tables, strict=True):
        kernels.copy(table, target)
    run()
    HostKernels().initial(u, factors)()
    assert np.array_equal(there.get(), u)


@pytest.mark.parametrize("shape", SHAPES)
def test_evolution_equals_numpy(kernels: DeviceKernels, shape: tuple[int, int, int]) -> None:
    factors = tuple(np.random.default_rng(n).random(n) for n in shape)
    u, step = values(shape), np.zeros(1, np.int64)
    there, step_there = cupy.asarray(u), cupy.zeros(1, np.int64)
    evolve = kernels.evolve(there, tuple(map(cupy.asarray, factors)), step_there)
    evolve_here = HostKernels().evolve(u, factors, step)
    for number in (1, 2):
        evolve()
        evolve_here()
        np.testing.assert_allclose(there.get(), u, rtol=1e-14, atol=0)
        assert step_there.get().tolist() == step.tolist() == [number]


def test_samples_equal_numpy(kernels: DeviceKernels) -> None:
    shape = (30, 20, 50)
    u = values(shape)
    offsets = sampled(shape, tuple(slice(0, n) for n in shape))
    samples = cupy.zeros((3, len(offsets)), np.complex128)
    kernels.sample(cupy.asarray(u), cupy.asarray(offsets), samples, cupy.array([2]))()
    assert np.array_equal(samples.get()[1], u.ravel()[offsets])
    assert not samples.get()[[0, 2]].any()
    np.testing.assert_allclose(kernels.sums(samples)[1], u.ravel()[offsets].sum(), rtol=1e-13)


def verified(*words: str) -> dict[str, Any]:
    figures = support.verified("nas_ft", "--device", "gpu", *words)
    assert figures["device"] == "gpu"
    assert figures["relative_error"] <= 1e-12
    return figures


@pytest.mark.parametrize(
    ("name", "ranks", "decomposition"),
    [
        *(("S", 1, "auto"), ("C", 1, "auto")),
        *(("S", 2, "1d"), ("W", 3, "1d"), ("S", 3, "2d"), ("A", 4, "2d")),
    ],
)
def test_official_verification(name: str, ranks: int, decomposition: str) -> None:
    figures = verified("--class", name, "-n", str(ranks), "--decomposition", decomposition)
    assert figures["ranks"] == ranks


def test_memory_is_no_more_than_estimated() -> None:
    pool = cupy.get_default_memory_pool()
    settings = Settings(CLASSES["B"], (1, 1, 1), 1, False, "gpu")
    with problem_grid(settings, MPI.COMM_SELF) as grid:
        pool.free_all_blocks()
        before = pool.total_bytes()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream, Solver(grid, settings.problem, stream) as solver:
            solver.start()
            solver.forward()
            solver.iterate()
            solver.checksums()
            # All memory comes from CuPy's pool: the fields of the rank and cuFFT's work area.
            used = pool.total_bytes() - before
            assert solver.u.nbytes + solver.spectrum.nbytes <= used
            assert used <= needed_bytes(grid.grid_shape, grid.proc_shape, "gpu")


@pytest.mark.parametrize(("name", "ranks"), [("S", 1), ("B", 1), ("S", 2), ("A", 2)])
def test_graphs(name: str, ranks: int) -> None:
    if ranks > cupy.cuda.runtime.getDeviceCount():
        pytest.skip(f"{ranks} GPUs are needed: ranks that share a GPU exchange by the host")
    assert verified("--class", name, "-n", str(ranks), "--graph", "--passes", "2")["graph"] is True


@pytest.mark.parametrize("app", ["nas_ft", "nas_mg"])
def test_paths_that_cannot_be_captured_are_named(app: str) -> None:
    words = f"run {app} --device gpu -n 2 --graph --class S"
    ended = support.halox(*words.split(), HALOX_PATH="staged")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "staged" in ended.stderr and "Traceback" not in ended.stderr


def test_class_d_fits_or_says_how_much_it_needs() -> None:
    free, _ = cupy.cuda.runtime.memGetInfo()
    if free > 100 << 30:
        pytest.skip("class D fits, and takes minutes: halox run nas_ft --class D")
    ended = support.halox("run", "nas_ft", "--device", "gpu", "--class", "D")
    assert ended.returncode == 2, ended.stdout + ended.stderr
    assert "class D" in ended.stderr and "Traceback" not in ended.stderr
