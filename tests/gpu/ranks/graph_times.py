"""A script: time of an exchange by copy engines as a normal call, and as a replayed graph.

``mpirun -n 2 python -m mpi4py tests/gpu/ranks/graph_times.py``
"""

from __future__ import annotations

import time
from statistics import median

import cupy
from mpi4py import MPI

import halox

comm = MPI.COMM_WORLD
for n in (32, 128, 256):
    with halox.Grid(
        (n * comm.size, n, n),
        proc_shape=(comm.size, 1, 1),
        periodic=(True, False, False),
        comm=comm,
        device="gpu",
        path="scatter_gather/copy_engine",
    ) as grid:
        u = grid.zeros("f8")
        plan = grid.plan(u)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            plan()
            stream.begin_capture()
            plan()
            graph = stream.end_capture()
            for name, call in (("call", plan), ("replay", lambda: graph.launch(stream))):
                found = []
                for _ in range(7):
                    stream.synchronize()
                    comm.Barrier()
                    begin = time.perf_counter()
                    for _ in range(50):
                        call()
                    stream.synchronize()
                    found.append(comm.allreduce(time.perf_counter() - begin, MPI.MAX) / 50)
                if comm.rank == 0:
                    print(f"{n}^3 {name}: {median(found) * 1e6:.1f} us", flush=True)
