"""Steps whose kernels store into the neighbours' halos, and the same steps with exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

import halox

SOURCE = r"""
struct Alone {
    WORD* target;
    int shape[AXES];
    __device__ bool wait(const int (&)[AXES]) const { return true; }
    __device__ void store(int, const int (&cell)[AXES], WORD value) const
    {
        long long at = 0;
        for (int k = 0; k < AXES; ++k)
            at = at * shape[k] + cell[k];
        target[at] = value;
    }
};

// A thread per cell. Integers that wrap around make any wrong cell visible, also of edges and corners.
template <class Halo>
__device__ void step(const Halo& halo, int field, const WORD* from, const int (&shape)[AXES])
{
    int total = 1, cell[AXES];
    for (int k = 0; k < AXES; ++k)
        total *= shape[k] - 2 * WIDTH;
    int left = blockIdx.x * blockDim.x + threadIdx.x;
    if (left < total) {
        for (int k = AXES; k-- > 0;) {
            cell[k] = WIDTH + left % (shape[k] - 2 * WIDTH);
            left /= shape[k] - 2 * WIDTH;
        }
        halo.wait(cell);
        WORD value = 0;
        for (int part = 0; part < (AXES == 2 ? 25 : 125); ++part) {
            long long at = 0;
            bool used = true;
            for (int k = 0, rest = part; k < AXES; ++k, rest /= 5) {
                const int distance = rest % 5 - 2;
                used = used && distance <= WIDTH && -distance <= WIDTH;
                at = at * shape[k] + cell[k] + distance;
            }
            if (used)
                value = value * 3 + from[at];
        }
        halo.store(field, cell, value);
    }
}

struct Shape {
    int n[AXES];
};

extern "C" __global__ void fused(const halox::Halo<AXES> halo, int field, const WORD* from, const Shape shape)
{
    step(halo, field, from, shape.n);
}

extern "C" __global__ void alone(WORD* target, const WORD* from, const Shape shape)
{
    Alone halo;
    halo.target = target;
    for (int k = 0; k < AXES; ++k)
        halo.shape[k] = shape.n[k];
    step(halo, 0, from, shape.n);
}

extern "C" __global__ void astray(const halox::Halo<AXES> halo, int index)
{
    int cell[AXES] = {};
    cell[0] = index;
    halo.store(0, cell, (WORD)1);
}

extern "C" __global__ void spin(long long cycles)
{
    const long long start = clock64();
    while (clock64() - start < cycles) { }
}
"""
WORDS = {"u4": "unsigned int", "u8": "unsigned long long", "i2": "short"}
THREADS = 128


class Steps:
    """Two fields for fused steps, and two for steps with exchanges, with the same contents."""

    def __init__(self, grid: halox.Grid, dtype: str = "u4", *, debug: bool = False) -> None:
        self.grid = grid
        width = grid.halo[0][0]
        defines = f"#define WORD {WORDS[dtype]}\n#define AXES {len(grid.grid_shape)}\n#define WIDTH {width}\n"
        module = cupy.RawModule(
            code=defines + halox.device_header(debug=debug) + SOURCE, options=("-std=c++17",)
        )
        names = ("fused", "alone", "astray", "spin")
        self.kernels = {name: module.get_function(name) for name in names}
        self.fields, self.others = ([grid.zeros(dtype) for _ in range(2)] for _ in range(2))
        self.plan, self.exchange = grid.plan(*self.fields), grid.plan(self.others[0])
        self.halo = self.plan.device_handle
        shape = self.fields[0].shape
        self._shape = np.array([(shape,)], [("n", "i4", (len(grid.grid_shape),))])
        self.blocks = -(-grid.interior(self.fields[0]).size // THREADS)

    def fill(self, seed: int = 0) -> None:
        """Fill the first fields, and their halos."""
        rng = np.random.default_rng((seed, self.grid.rank))
        inside = self.grid.interior(self.fields[0])
        values = rng.integers(0, 1 << 15, inside.shape).astype(inside.dtype)
        for field in (self.fields[0], self.others[0]):
            self.grid.interior(field)[...] = cupy.asarray(values)
        self.plan()
        self.exchange()

    def fused(self, number: int) -> None:
        arguments = self.halo, np.int32((number + 1) % 2), self.fields[number % 2], self._shape
        self.kernels["fused"]((self.blocks,), (THREADS,), arguments)

    def alone(self, number: int) -> None:
        source, target = self.others[number % 2], self.others[(number + 1) % 2]
        self.kernels["alone"]((self.blocks,), (THREADS,), (target, source, self._shape))
        self.exchange(target)

    def spin(self, us: float) -> None:
        self.kernels["spin"]((1,), (1,), (np.int64(us * 1500),))

    def same(self) -> bool:
        """Whether all fields have the same cells, halos included, after the neighbours' last step."""
        cupy.cuda.runtime.deviceSynchronize()
        self.grid.comm.Barrier()  # all ranks have ended their steps
        pairs = zip(self.fields, self.others, strict=True)
        return all(bool((a == b).all()) for a, b in pairs) and bool((self.fields[1] != 0).any())


def graph_of(steps: Steps, numbers: Sequence[int], stream: Any) -> Any:
    """Capture fused steps."""
    stream.begin_capture()
    for number in numbers:
        steps.fused(number)
    return stream.end_capture()
