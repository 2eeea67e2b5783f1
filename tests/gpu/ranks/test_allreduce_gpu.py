"""Reductions by one kernel among GPUs: the same bits as NumPy's in the order of the ranks, in streams and in graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.engine.allreduce_plan import plan_oneshot, plan_scattered, plan_wide
from halox.engine.arrays import describe
from halox.transports.allreduce import make_array_reduction, make_field_reduction
from tests.mpi.conftest import agree
from tests.support import require
from tests.unit.reduction_oracle import expected, same, sample
from tests.unit.test_operations import PAIRS

require("gpu")

import cupy  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4, 8)]

PLANS = {"oneshot": plan_oneshot, "wide": plan_wide, "scattered": plan_scattered}
REPLAYS = 1000


@pytest.fixture
def grid(comm: MPI.Intracomm) -> Iterator[halox.Grid]:
    """A grid whose ranks have a GPU each and can signal to one another; skips where they cannot."""
    with halox.Grid((8 * comm.size, 20, 12), halo=1, comm=comm, device="gpu") as found:
        around = found._surroundings
        around.use_device(found.device_id)
        around.look_around()
        pairs = [(a, b) for a in range(comm.size) for b in range(a)]
        reasons = [around.topology.why_no_signals(a, b) for a, b in pairs]
        if any(reasons):
            pytest.skip(next(filter(None, reasons)))
        yield found


def made(grid: halox.Grid, algorithm: str, dtype: Any, op: str, elements: int) -> Any:
    plan = PLANS[algorithm](np.dtype(dtype), op, elements, grid.size)
    return make_array_reduction(grid._world, grid._surroundings.device_arena, plan)


@pytest.mark.parametrize("algorithm", PLANS)
def test_all_operations(grid: halox.Grid, algorithm: str, comm: MPI.Intracomm) -> None:
    elements = 3001
    stream = cupy.cuda.get_current_stream()
    for op, dtype in PAIRS:
        if algorithm == "wide" and np.dtype(dtype).itemsize > 8:
            continue
        values = [sample(dtype, op, elements, rank) for rank in range(comm.size)]
        array = cupy.asarray(values[comm.rank])
        out = cupy.empty_like(array)
        reduction = made(grid, algorithm, dtype, op, elements)
        reduction(array.data.ptr, out.data.ptr, stream)
        reduction(array.data.ptr, array.data.ptr, stream)
        found = out.get()
        wanted = expected(op, values)
        # A GPU rounds products of complex numbers by fused additions.
        ok = same(found, wanted) or (op == "prod" and np.allclose(found, wanted, equal_nan=True))
        ok &= array.get().tobytes() == found.tobytes()
        ok &= len(set(comm.allgather(found.tobytes()))) == 1
        assert agree(ok, comm), (op, dtype)
        reduction.close()


@pytest.mark.parametrize("elements", [1, 2, 255, 257, 40_000, (1 << 20) + 3])
@pytest.mark.parametrize("algorithm", PLANS)
def test_sizes_and_epochs(
    grid: halox.Grid, algorithm: str, elements: int, comm: MPI.Intracomm
) -> None:
    """In place, and in calls that follow one another without the host."""
    reduction = made(grid, algorithm, "f8", "max", elements)
    stream = cupy.cuda.get_current_stream()
    base = cupy.arange(elements, dtype="f8")
    array, wrong = cupy.empty(elements), cupy.zeros(1, "i8")
    for epoch in range(200):
        array[...] = base + (epoch + comm.rank)
        reduction(array.data.ptr, array.data.ptr, stream)
        wrong += (array != base + (epoch + comm.size - 1)).sum()
    assert agree(int(wrong.get()[0]) == 0, comm)
    reduction.close()


@pytest.mark.parametrize("algorithm", PLANS)
def test_in_a_graph(grid: halox.Grid, algorithm: str, comm: MPI.Intracomm) -> None:
    elements = 5000
    reduction = made(grid, algorithm, "i8", "sum", elements)
    array, total = cupy.full(elements, comm.rank, "i8"), cupy.zeros(elements, "i8")
    sums = cupy.zeros(elements, "i8")
    sums += total + 1 - 1  # compiled before the capture
    array += 1
    cupy.cuda.runtime.deviceSynchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        reduction(array.data.ptr, total.data.ptr, stream)
        sums += total
        array += 1
        graph = stream.end_capture()
        for _ in range(REPLAYS):
            graph.launch(stream)
        stream.synchronize()
    ranks = comm.size * (comm.size + 1) // 2
    wanted = REPLAYS * ranks + comm.size * REPLAYS * (REPLAYS - 1) // 2
    assert agree(bool((sums == wanted).all()), comm)
    reduction.close()


@pytest.mark.parametrize("name", ["sum", "min", "max", "norm", "dot"])
def test_numbers_of_a_field(grid: halox.Grid, name: str, comm: MPI.Intracomm) -> None:
    """Against the grid's own reductions, by way of the host; the same bits 1000 times."""
    rng = np.random.default_rng(comm.rank)
    u, v = grid.zeros("f8"), grid.zeros("f8")
    for field in (u, v):
        field[...] = cupy.asarray(rng.normal(size=field.shape))
    fields = (u, v) if name == "dot" else (u,)
    cells = [describe(grid.interior(field)) for field in fields]
    arena = grid._surroundings.device_arena
    reduction = make_field_reduction(grid._world, arena, name, *cells)
    stream, out = cupy.cuda.get_current_stream(), cupy.zeros(REPLAYS)
    for call in range(REPLAYS):
        reduction(0, out[call:].data.ptr, stream)
    found = out.get()
    ok = len({one.tobytes() for one in found}) == 1
    ok &= bool(np.isclose(found[0], getattr(grid, name)(*fields), rtol=1e-13))
    ok &= len(set(comm.allgather(found.tobytes()))) == 1
    assert agree(ok, comm)
    reduction.close()
