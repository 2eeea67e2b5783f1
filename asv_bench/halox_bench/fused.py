"""``python -m halox_bench.fused [CELLS ...]``: 5-point steps of float32 in CUDA graphs, fused and with exchanges.

On one GPU the rank is its own neighbour; on several, ``mpiexec -n N python -m mpi4py -m halox_bench.fused``. Prints a
row of JSON for each number of cells along an axis of a rank's square block: microseconds of a step on the slowest rank,
of the stencil alone (without any exchange), with an exchange, and fused, and the ratio of the last two.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import halox

CELLS = (256, 512, 1024, 2048)
STEPS = 20
ROWS = 9

SOURCE = r"""
__device__ float updated(const float* u, int x, int y, int row)
{
    const float* at = u + (long long)x * row + y;
    return at[0] + 0.2f * (at[-row] + at[row] + at[-1] + at[1] - 4 * at[0]);
}

extern "C" __global__ void alone(const float* u, float* next, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny)
        next[(long long)x * (ny + 2) + y] = updated(u, x, y, ny + 2);
}

extern "C" __global__ void fused(const halox::Halo<2> halo, int field, const float* u, int nx, int ny)
{
    const int y = 1 + blockIdx.x * blockDim.x + threadIdx.x;
    const int x = 1 + blockIdx.y * blockDim.y + threadIdx.y;
    if (x <= nx && y <= ny) {
        halo.wait({x, y});
        halo.store(field, {x, y}, updated(u, x, y, ny + 2));
    }
}
"""


def measured(cells: int, threads: tuple[int, int] = (64, 4)) -> dict[str, Any]:
    """Return the row of one block size; collective over all ranks."""
    import cupy
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with halox.Grid((cells * comm.size, cells), halo=1, periodic=True, device="gpu") as grid:
        u, v = grid.ones("f4"), grid.zeros("f4")
        module = cupy.RawModule(code=halox.device_header() + SOURCE)
        alone, fused = map(module.get_function, ("alone", "fused"))
        nx, ny = map(cupy.int32, grid.rank_shape)
        blocks = (-(-int(ny) // threads[0]), -(-int(nx) // threads[1]))
        exchange, both = grid.plan(u), grid.plan(u, v)
        halo = both.device
        both()

        def stencil(old: Any, new: Any) -> None:
            alone(blocks, threads, (old, new, nx, ny))

        def with_exchange(old: Any, new: Any) -> None:
            exchange(old)
            stencil(old, new)

        def in_kernel(old: Any, new: Any) -> None:
            fused(blocks, threads, (halo, cupy.int32(new is v), old, nx, ny))

        times = {}
        with cupy.cuda.Stream(non_blocking=True) as stream:
            for name, step in (
                ("stencil", stencil),
                ("exchange", with_exchange),
                ("fused", in_kernel),
            ):

                def two_steps(step: Callable[[Any, Any], None] = step) -> None:
                    step(u, v)
                    step(v, u)

                times[name] = graph_us(two_steps, stream, comm)
        return {
            "cells": cells,
            "ranks": comm.size,
            **{f"{name}_us": round(us, 2) for name, us in times.items()},
            "fused_over_exchange": round(times["fused"] / times["exchange"], 3),
        }


def graph_us(two_steps: Callable[[], object], stream: Any, comm: Any) -> float:
    """Return the microseconds of a step in replays of a graph, on the slowest rank: the median of some rows."""
    import cupy

    two_steps()
    stream.synchronize()
    stream.begin_capture()
    for _ in range(STEPS // 2):
        two_steps()
    graph = stream.end_capture()
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    rows = []
    for _ in range(ROWS):
        graph.launch(stream)
        stream.synchronize()
        comm.Barrier()
        graph.launch(stream)  # the ranks meet in here
        begin.record(stream)
        for _ in range(20):
            graph.launch(stream)
        end.record(stream)
        end.synchronize()
        rows.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / (20 * STEPS))
    slowest: float = max(comm.allgather(median(rows)))
    return slowest


def main(words: list[str]) -> None:
    """Print the rows of some block sizes."""
    from mpi4py import MPI

    for cells in map(int, words or CELLS):
        row = measured(cells)
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
