"""The Fourier mini-app on a GPU: whole runs pass NAS verification, within the memory that was estimated."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from apps.nas_ft.benchmark import problem_grid
from apps.nas_ft.classes import CLASSES
from apps.nas_ft.memory import needed_bytes
from apps.nas_ft.options import Settings
from apps.nas_ft.solver import Solver
from tests import support
from tests.support import require

pytestmark = pytest.mark.gpu
require("gpu")

import cupy  # noqa: E402


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
