"""Loops of plans on a GPU, whose bodies launch a kernel for each region, also in a CUDA graph.

One rank has no messages to hide: ``tests/gpu/ranks`` has loops with rims.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

import halox
from tests.support import require

require("gpu")

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

pytestmark = pytest.mark.gpu

OPTIONS: dict[str, Any] = {"periodic": True, "comm": MPI.COMM_SELF, "device": "gpu"}
CELLS = (40, 70)

SOURCE = r"""
extern "C" __global__ void smooth(
    const double* u, double* result, int row, int x, int y, int height, int width)
{
    const int j = blockIdx.x * blockDim.x + threadIdx.x;
    const int i = blockIdx.y;
    if (i >= height || j >= width)
        return;
    const long long at = (long long)(x + i) * row + y + j;
    result[at] = 0.5 * u[at] + 0.125 * (u[at - row] + u[at + row] + u[at - 1] + u[at + 1]);
}
"""


class Smoother:
    """A step that launches one kernel for a region."""

    def __init__(self) -> None:
        self._kernel = cupy.RawKernel(SOURCE, "smooth", options=("--fmad=false",))

    def __call__(self, new: Any, old: Any, cells: Any) -> None:
        height, width = map(int, cells.shape)
        row = np.int32(old.shape[1])
        blocks = (-(-width // 64), height)
        self._kernel(blocks, (64,), (old, new, row, *cells.start, *cells.shape))


def smoothed(whole: np.ndarray, steps: int) -> np.ndarray:
    """Return the cells of the whole grid after some steps."""
    for _ in range(steps):
        around = np.roll(whole, 1, 0) + np.roll(whole, -1, 0)
        around = around + np.roll(whole, 1, 1) + np.roll(whole, -1, 1)
        whole = 0.5 * whole + 0.125 * around
    return whole


def begin(grid: halox.Grid) -> tuple[np.ndarray, Any, Any]:
    """Return the initial cells, a field with them, and another field."""
    whole = np.random.default_rng(3).random(CELLS)
    u, new = grid.full(np.nan), grid.full(np.nan)
    grid.interior(u)[...] = cupy.asarray(whole)
    return whole, u, new


def run_pairs_of_steps(
    plan: halox.Plan, u: Any, new: Any, pairs: int, captured: bool = True
) -> None:
    """Run overlapped steps from ``u`` to ``new`` and back; the last four pairs in a CUDA graph if ``captured``."""
    smooth = Smoother()

    def two_steps() -> None:
        for old, result in ((u, new), (new, u)):
            for cells in plan.overlap(old, width=1):
                smooth(result, old, cells)

    with cupy.cuda.Stream(non_blocking=True) as stream:
        cupy.cuda.Device().synchronize()
        for _ in range(
            pairs - 4
        ):  # the first one compiles the kernel, and makes the plan of the second field
            two_steps()
        if captured:
            stream.begin_capture()
            try:
                two_steps()
            finally:
                graph = stream.end_capture()
        for _ in range(4):
            if captured:
                graph.launch(stream)
            else:
                two_steps()
        stream.synchronize()


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("overlap", ["auto", True, False])
def test_overlapped_steps(overlap: Literal["auto"] | bool, own: bool) -> None:
    with halox.Grid(CELLS, halo=1, **OPTIONS) as grid:
        whole, u, new = begin(grid)
        if not own:
            u, new = u.copy(), new.copy()
        plan, smooth = grid.plan(u, overlap=overlap), Smoother()
        for _ in range(24):
            for cells in plan.overlap(u, width=1):
                smooth(new, u, cells)
            u, new = new, u
        assert np.array_equal(grid.interior(u).get(), smoothed(whole, 24))
        cupy.cuda.get_current_stream().synchronize()
        list(plan.overlap(u, width=1))
        text = str(plan.explain())
        assert "off, no other rank sends halo cells" in text, text


def test_several_steps_for_each_exchange() -> None:
    with halox.Grid(CELLS, halo=3, **OPTIONS) as grid:
        whole, u, new = begin(grid)
        plan, smooth = grid.plan(u, every=3), Smoother()
        for _ in range(4):
            for cells in plan.steps(u):
                smooth(new, u, cells)
                u, new = new, u
        assert np.array_equal(grid.interior(u).get(), smoothed(whole, 12))


def test_an_overlapped_step_in_a_graph() -> None:
    with halox.Grid(CELLS, halo=1, **OPTIONS) as grid:
        whole, u, new = begin(grid)
        run_pairs_of_steps(grid.plan(u), u, new, pairs=7)
        assert np.array_equal(grid.interior(u).get(), smoothed(whole, 14))
