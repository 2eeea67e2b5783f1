"""Halo exchange on GPU arrays beside what users write by hand, on the ranks that run this.

``mpirun -n 2 python -m mpi4py -m tests.gpu.bench_exchange result.json``; ranks may share a GPU. Both x-faces
(the innermost axis: blocks of one float64) of N^3 cells a rank, halo 1, periodic, ranks in a row along x.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import halox

SIZES = (64, 128, 256, 512)
ROUNDS = 4


def slowest_medians_us(
    ways: dict[str, Callable[[], None]], comm: MPI.Intracomm, repeats: int
) -> dict[str, float]:
    """Median over repeats of the slowest rank's time, everything on the GPU included.

    The ways take turns, since ranks that share a GPU fall into step with its time slices for a while.
    """
    import cupy

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, call in ways.items():
            for _ in range(5):
                call()
            for _ in range(repeats // ROUNDS):
                cupy.cuda.get_current_stream().synchronize()
                comm.Barrier()
                start = time.perf_counter()
                call()
                cupy.cuda.get_current_stream().synchronize()
                times[name].append(time.perf_counter() - start)
    found = {}
    for name, mine in times.items():
        slowest = np.empty(len(mine))
        comm.Allreduce(np.array(mine), slowest, MPI.MAX)
        found[name] = statistics.median(slowest.tolist()) * 1e6
    return found


def hand_staged(u: Any, comm: MPI.Intracomm) -> Callable[[], None]:
    """Contiguous copy on the device, copy to the host, MPI, and back: what users write first."""
    import cupy

    n = u.shape[0] - 2
    inner = u[1:-1, 1:-1]
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received = np.empty((n, n)), np.empty((n, n))

    def call() -> None:
        first = cupy.ascontiguousarray(inner[:, :, 1]).get()
        last = cupy.ascontiguousarray(inner[:, :, n]).get()
        comm.Sendrecv(last, high, 0, received[0], low, 0)
        comm.Sendrecv(first, low, 1, received[1], high, 1)
        inner[:, :, 0] = cupy.asarray(received[0])
        inner[:, :, n + 1] = cupy.asarray(received[1])

    return call


_BY_HAND = r"""
extern "C" __global__ void pack(const double* u, double* low, double* high, int n) {
    long long m = n + 2;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < n * n; t += gridDim.x * blockDim.x) {
        long long row = ((t / n + 1) * m + t % n + 1) * m;
        low[t] = u[row + 1];
        high[t] = u[row + n];
    }
}
extern "C" __global__ void unpack(double* u, const double* low, const double* high, int n) {
    long long m = n + 2;
    for (int t = blockIdx.x * blockDim.x + threadIdx.x; t < n * n; t += gridDim.x * blockDim.x) {
        long long row = ((t / n + 1) * m + t % n + 1) * m;
        u[row] = low[t];
        u[row + n + 1] = high[t];
    }
}
"""


def hand_zero_copy(u: Any, comm: MPI.Intracomm) -> Callable[[], None]:
    """Pack kernel straight into mapped host memory, MPI, unpack kernel from it: the better hand-written way."""
    import cupy

    n = u.shape[0] - 2
    module = cupy.RawModule(code=_BY_HAND)
    pack, unpack = module.get_function("pack"), module.get_function("unpack")
    flags = cupy.cuda.runtime.hostAllocMapped
    pages = [cupy.cuda.PinnedMemory(n * n * 8, flags) for _ in range(4)]
    hosts = [np.frombuffer(cupy.cuda.PinnedMemoryPointer(p, 0), np.float64, n * n) for p in pages]
    pointers = [
        np.uint64(cupy.cuda.runtime.hostGetDevicePointer(p.ptr, 0))
        if hasattr(cupy.cuda.runtime, "hostGetDevicePointer")
        else np.uint64(p.ptr)
        for p in pages
    ]
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    blocks = (min(132 * 4, -(-n * n // 256)),)
    stream = cupy.cuda.get_current_stream()

    def call() -> None:
        pack(blocks, (256,), (u, pointers[0], pointers[1], np.int32(n)))
        stream.synchronize()
        comm.Sendrecv(hosts[1], high, 0, hosts[2], low, 0)
        comm.Sendrecv(hosts[0], low, 1, hosts[3], high, 1)
        unpack(blocks, (256,), (u, pointers[2], pointers[3], np.int32(n)))

    return call


def right(u: Any, grid: halox.Grid) -> bool:
    """Whether both x-halos hold the neighbours' values."""
    x, y, z = grid.indices(halo=True)
    wanted = x * 1.0 + y * 1e4 + z % grid.grid_shape[2] * 1e8
    return bool((u == wanted)[1:-1, 1:-1, :].all())


def benchmarks(comm: MPI.Intracomm) -> list[dict[str, Any]]:
    """Measure all sizes; the same list on every rank."""
    import cupy

    found: list[dict[str, Any]] = []
    for n in SIZES:
        with halox.Grid(
            (n, n, n * comm.size),
            periodic=(False, False, True),
            proc_shape=(1, 1, comm.size),
            comm=comm,
            device="gpu",
        ) as grid:
            u = grid.zeros("f8")
            x, y, z = grid.indices()
            ways = {
                "halox": lambda grid=grid, u=u: grid.exchange(u),
                "zero-copy pack by hand, mpi4py": hand_zero_copy(u, comm),
                "host-staged by hand, mpi4py": hand_staged(u, comm),
            }
            for name, call in ways.items():
                u[...] = -1
                grid.interior(u)[...] = x * 1.0 + y * 1e4 + z * 1e8
                call()
                ok = comm.allreduce(right(u, grid), op=MPI.LAND)
                if not ok:
                    raise SystemExit(f"{name} gives wrong halos at N = {n}")
            times = slowest_medians_us(ways, comm, 200 if n < 512 else 60)
            found.append(
                {
                    "name": f"exchange of both x-faces, {n}^3 float64 a rank, {comm.size} ranks",
                    "unit": "us",
                    "value": round(times["halox"], 2),
                    "baseline": round(times["zero-copy pack by hand, mpi4py"], 2),
                    "baseline_name": "zero-copy pack by hand, mpi4py",
                    "others": {
                        "host-staged by hand, mpi4py": round(
                            times["host-staged by hand, mpi4py"], 2
                        )
                    },
                    "bytes_sent": 2 * n * n * 8,
                    "path": sorted({f"{r.path}/{r.way}" for r in grid.explain(u).rows}),
                }
            )
    found.append(host_overhead(comm))
    cupy.cuda.Device().synchronize()
    return found


def host_overhead(comm: MPI.Intracomm) -> dict[str, Any]:
    """Host time of one cached exchange that has nobody to wait for: one rank, periodic, nothing but a launch."""
    import cupy

    with halox.Grid((32, 32, 32), periodic=True, comm=MPI.COMM_SELF, device="gpu") as grid:
        u = grid.zeros("f8")
        for _ in range(10):
            grid.exchange(u)
        times = []
        for _ in range(30):
            cupy.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            for _ in range(20):
                grid.exchange(u)
            times.append((time.perf_counter() - start) / 20)
        kernel = cupy.RawKernel(
            'extern "C" __global__ void nothing(long a, long b, int c, int d, int e) {}', "nothing"
        )
        zero = (np.int64(0), np.int64(0), np.int32(0), np.int32(0), np.int32(0))
        launches = []
        for _ in range(30):
            cupy.cuda.get_current_stream().synchronize()
            start = time.perf_counter()
            for _ in range(20):
                kernel((1,), (1,), zero)
            launches.append((time.perf_counter() - start) / 20)
    return {
        "name": "host time of one cached one-field exchange (one rank, 26 periodic neighbours, one launch)",
        "unit": "us",
        "value": round(statistics.median(times) * 1e6, 2),
        "baseline": round(statistics.median(launches) * 1e6, 2),
        "baseline_name": "launch of an empty CuPy RawKernel with five arguments",
    }


def main() -> None:
    """Measure, and write the figures on rank 0."""
    comm = MPI.COMM_WORLD
    found = benchmarks(comm)
    if comm.rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
