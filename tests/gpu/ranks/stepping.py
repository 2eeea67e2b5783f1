"""A field that kernels fill and check without the host, so that whole steps can be captured or enqueued far ahead."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np

import halox

SOURCE = r"""
extern "C" {

// Ends a step: the next one is another number.
__global__ void tick(long long* step) { *step += 1; }

// Owned cells hold their number and the step's.
__global__ void fill(double* u, const double* numbers, const bool* owned, const long long* step, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && owned[i])
        u[i] = numbers[i] + *step;
}

// All cells must, those of the halo too.
__global__ void check(const double* u, const double* numbers, const long long* step, unsigned long long* wrong, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n && u[i] != numbers[i] + *step)
        atomicAdd(wrong, 1ull);
}

__global__ void spin(long long cycles)
{
    long long start = clock64();
    while (clock64() - start < cycles) { }
}

}
"""


class Stepper:
    """A field ``u`` of a periodic grid, the step number and the number of wrong cells, all in GPU memory."""

    def __init__(self, grid: halox.Grid) -> None:
        module = cupy.RawModule(code=SOURCE)
        kernels = (module.get_function(name) for name in ("tick", "fill", "check", "spin"))
        self._tick, self._fill, self._check, self._spin = kernels
        self.u = grid.full(-1.0, "f8")
        shape = grid.grid_shape
        x, y, z = (i % n for i, n in zip(grid.indices(halo=True), shape, strict=True))
        self._numbers = cupy.ascontiguousarray((((x * shape[1]) + y) * shape[2] + z).astype("f8"))
        self._owned = cupy.zeros(self.u.shape, bool)
        grid.interior(self._owned)[...] = True
        assert self._numbers.shape == self.u.shape
        self.step, self.wrong = cupy.zeros(1, "i8"), cupy.zeros(1, "u8")
        self._n = np.int32(self.u.size)
        self._blocks = (-(-self.u.size // 128),)
        cupy.cuda.runtime.deviceSynchronize()

    def advance(self) -> None:
        """Enqueue the next step on the current stream: increments the step and fills the owned cells for it."""
        self._tick((1,), (1,), (self.step,))
        self._fill(self._blocks, (128,), (self.u, self._numbers, self._owned, self.step, self._n))

    def check(self) -> None:
        """Enqueue a count of the cells, halo included, that do not have the values of this step."""
        self._check(self._blocks, (128,), (self.u, self._numbers, self.step, self.wrong, self._n))

    def spin(self, milliseconds: float) -> None:
        """Keep the current stream busy."""
        self._spin((1,), (1,), (np.int64(milliseconds * 1.5e6),))

    def found(self) -> tuple[int, int]:
        """Synchronize the GPU, and return the step and the number of wrong cells."""
        cupy.cuda.runtime.deviceSynchronize()
        return int(self.step[0]), int(self.wrong[0])

    def is_at(self, step: int) -> bool:
        """Whether all cells have the values of a step, checked without the kernels of this class."""
        return bool((self.u == self._numbers + step).all())

    def broken(self) -> Any:
        """Corrupt one cell, and return whether `check` counts it; restores the cell and the count."""
        corner = (0,) * self.u.ndim
        kept, before = float(self.u[corner]), int(self.wrong[0])
        self.u[corner] = -1
        self.check()
        self.u[corner] = kept
        found = int(self.wrong[0]) - before
        self.wrong[0] = before
        return found == 1
