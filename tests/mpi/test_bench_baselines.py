"""The hand-written exchanges of GPU arrays, on a GPU made of host memory: kernels as C++, NCCL by MPI."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import PathError
from halox.runtime.gpu import cuda, memory
from halox_bench.common import byhand
from halox_bench.exchange import baselines_gpu
from halox_bench.exchange.cases import ExchangeCase, Neighbourhood
from halox_bench.exchange.oracle import Oracle
from halox_bench.pack.cases import select
from halox_bench.trips import baselines, cases
from halox_bench.trips.oracle import TripOracle
from tests.mpi.bench_nccl import Nccl
from tests.support import require
from tests.unit import bench_gpu
from tests.unit.cpu_kernels import SHIM, shared_library

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(2)]

require("cxx")


@cache
def library(code: str) -> ctypes.CDLL:
    return shared_library(f'#include "{SHIM}"\n{code}\n{bench_gpu.ENTRIES["byhand"]}', "-O1")


class RawModule:
    def __init__(self, code: str, options: Any) -> None:
        self._library = library(code)

    def get_function(self, name: str) -> Any:
        def launch(grid: Any, block: Any, arguments: Any) -> None:
            given = [
                ctypes.c_void_p(a.data.ptr) if isinstance(a, np.ndarray) else ctypes.c_uint(int(a))
                for a in arguments
            ]
            call = getattr(self._library, f"run_{name}")
            call(ctypes.c_uint(grid[0]), ctypes.c_uint(block[0]), *given)

        return launch


@pytest.fixture(autouse=True)
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    bench_gpu.install(monkeypatch)
    cp = bench_gpu.fake_cupy(1 << 18)
    cp.RawModule = RawModule
    cp.cuda.get_current_stream = lambda: bench_gpu.Stream()
    for module in (baselines_gpu, baselines, byhand, cuda):
        monkeypatch.setattr(module, "cupy", lambda: cp)
    for module in (byhand, memory):
        monkeypatch.setattr(module, "pinned", bench_gpu.pinned)
    monkeypatch.setattr(baselines_gpu, "multiprocessors", lambda device: 4)


CASES = [
    ExchangeCase((6,), "x", 3, "f4"),
    ExchangeCase((4, 5, 6), "x"),
    ExchangeCase((4, 5), "y"),
    ExchangeCase((4, 5, 6), "all", 2, "i1", 2),
    ExchangeCase((3, 4, 3, 4), "faces", 1, "c8", 1, (3,)),
]


@pytest.mark.parametrize("name", ["host", "device", "nccl"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exchanges(case: ExchangeCase, name: str, comm: MPI.Intracomm) -> None:
    places = [tuple(map(int, at)) for at in np.ndindex(*case.proc_shape(comm.size))]
    near = Neighbourhood(case, dict(enumerate(places)), comm.rank)
    fields = []
    for _ in range(case.fields):
        count = int(np.prod(case.padded_shape))
        fields.append(bench_gpu.empty(count, case.dtype).reshape(case.padded_shape))
    oracle = Oracle(near)
    baseline: Any = (
        baselines_gpu.ByNccl(Nccl(comm), comm, near, fields, 0)
        if name == "nccl"
        else baselines_gpu.ByMpi(comm, near, fields, 0, host=name == "host")
    )
    for step in range(3):
        oracle.fill(fields, step)
        assert oracle.wrong(fields, step) > 0
        baseline()
        wrong = oracle.wrong(fields, step)
        assert comm.allreduce(wrong) == 0
    baseline.close()


TRIPS = [
    *(cases.pingpong(pattern, 24) for pattern in cases.PINGPONGS),
    cases.stencil("y", 8),
    *(
        cases.of_ddtbench(select([name])[0])
        for name in (
            *("WRF_x_vec/8x8", "NAS_LU_y/12", "NAS_MG_x/34x18x18", "LAMMPS_atomic/1217-114"),
            *("SPECFEM3D_mt/c3", "FFT2/256"),
        )
    ),
]


@pytest.mark.parametrize("way", ["host", "device", "nccl"])
@pytest.mark.parametrize("case", TRIPS, ids=lambda case: case.name)
@pytest.mark.ranks(2)
def test_trips(case: cases.TripCase, way: str, comm: MPI.Intracomm) -> None:
    slab = bench_gpu.empty(case.slab_bytes, "u1")
    oracle = TripOracle(case, comm.rank)
    if way == "nccl":
        if case.pattern == "FFT2":
            with pytest.raises(PathError):
                baselines.KernelsAndNccl(Nccl(comm), comm, case, slab, 0)  # type: ignore[arg-type]
            return
        trip: Any = baselines.KernelsAndNccl(Nccl(comm), comm, case, slab, 0)  # type: ignore[arg-type]
    else:
        trip = baselines.Kernels(comm, case, slab, 0, host=way == "host")
    for step in range(2):
        for direction in range(2):
            oracle.fill(slab, step)
            assert comm.allreduce(oracle.wrong(slab, step, (direction,))) > 0
            trip.go(direction)
            assert comm.allreduce(oracle.wrong(slab, step, (direction,))) == 0


def test_segments_are_aligned_and_apart(comm: MPI.Intracomm) -> None:
    case = ExchangeCase((3, 5), "all", 1, "i1", 3)
    places = [tuple(map(int, at)) for at in np.ndindex(*case.proc_shape(comm.size))]
    near = Neighbourhood(case, dict(enumerate(places)), comm.rank)
    found = baselines_gpu.Segments(near.sends)
    ends = [at + p.box.nbytes for at, p in zip(found.offsets, near.sends, strict=True)]
    assert all(at % 16 == 0 for at in found.offsets)
    assert all(end <= at for end, at in zip(ends, found.offsets[1:], strict=False))
    spans = sorted(found.spans.values())
    assert [at for at, _ in spans] == [0, *np.cumsum([n for _, n in spans])[:-1]]
    assert sum(n for _, n in spans) == found.nbytes
