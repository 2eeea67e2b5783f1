"""The path by NCCL with one GPU per rank: one-way messages, components in any order, reductions.

The other modules of this folder test NCCL together with the other paths of `tests.gpu.ranks.paths`.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from mpi4py import MPI

import halox
from halox.errors import MismatchError
from halox.runtime.nccl_ranks import why_no_nccl
from tests.gpu.ranks.paths import NCCL, along
from tests.mpi.conftest import agree
from tests.mpi.ways import Way, fill, wrong_cells
from tests.support import require
from tests.unit.reductions.reduction_oracle import expected, same, sample

require("gpu")

import cupy  # noqa: E402

from tests.gpu.ranks.stepping import Stepper  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4)]


@pytest.fixture
def apart(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat each rank as a separate node; skips, with the reason, if the ranks cannot use NCCL."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    with halox.Grid((4 * comm.size, 4), comm=comm, device="gpu") as grid:
        why = _why(grid)
    if why is not None:
        pytest.skip(why)


def _why(grid: halox.Grid) -> str | None:
    context: Any = grid.domain.context
    context.use_device(grid.device_id)
    return why_no_nccl(context)


def test_two_ranks_on_one_gpu(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """halox refuses before it calls NCCL, which does not support ranks that share a GPU."""
    count = cupy.cuda.runtime.getDeviceCount()
    if comm.size <= count:
        pytest.skip("each rank has a GPU")
    with (
        halox.Grid((4 * comm.size, 4), comm=comm, device="gpu") as grid,
        pytest.raises(halox.errors.PathError),
    ):
        grid.plan(grid.zeros(), path="nccl")


def test_one_way(apart: None, comm: MPI.Intracomm) -> None:
    """The first rank only sends, and the last rank only receives."""
    divided = {"halo": ((1, 0), 0), "proc_shape": (comm.size, 1)}
    with halox.Grid((4 * comm.size, 6), comm=comm, device="gpu", **divided) as grid:
        u = grid.full(-1.0)
        plan = grid.plan(u, path="nccl")
        errors = []
        for step in range(4):
            grid.interior(u)[...] = 10 * comm.rank + step
            try:
                plan()
            except halox.HaloxError as error:
                errors.append(str(error))
            wanted = 10 * (comm.rank - 1) + step if comm.rank else -1
            assert agree(not errors and bool((u[0] == wanted).all()), comm), errors


@along(NCCL)
def test_components_in_another_order(way: Way, comm: MPI.Intracomm) -> None:
    """A component axis that is last in the array but first in memory, exchanged with a field of another dtype."""
    with way.box(comm, n=10, halo=1) as grid:
        stored = cupy.full((3, *grid.padded_shape), -1, "f4")
        u, v = cupy.moveaxis(stored, 0, -1), grid.full(-1.0, "c16")
        factors = (997, 31, 7)
        numbers = sum(
            i % n * f
            for i, n, f in zip(grid.indices(halo=True), grid.grid_shape, factors, strict=True)
        )
        plan = grid.plan(u, v)
        assert way.check_taken(plan, comm)
        for step in range(3):
            for component in range(3):
                grid.interior(stored[component])[...] = grid.interior(
                    numbers + (step + 5 * component)
                )
            grid.interior(v)[...] = grid.interior(numbers * 1j + step)
            plan()
            right = all(bool((stored[c] == numbers + (step + 5 * c)).all()) for c in range(3))
            assert agree(right and bool((v == numbers * 1j + step).all()), comm), step


@pytest.mark.parametrize("form", ["stream", "graph"])
def test_plans_in_another_order(form: str, apart: None, comm: MPI.Intracomm) -> None:
    """Odd ranks exchange two equal fields in a different order than even ranks: an error, and no silent mix-up."""
    planes: dict[str, Any] = {"halo": (1, 0, 0), "proc_shape": (comm.size, 1, 1), "path": "nccl"}
    shape = (8 * comm.size, 64, 64)
    with (
        warnings.catch_warnings(record=True),
        halox.Grid(shape, comm=comm, device="gpu", **planes) as grid,
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        fields = [grid.full(float(number)) for number in (1, 2)]
        plans = [grid.plan(u) for u in fields]
        calls: list[Any] = []
        for plan in plans:
            plan()
            stream.begin_capture()
            plan()
            graph = stream.end_capture()
            calls.append(plan if form == "stream" else graph.launch)
        stream.synchronize()
        assert agree(all(bool((u == n).all()) for n, u in enumerate(fields, 1)), comm)
        for call in calls if comm.rank % 2 else calls[::-1]:
            call()
        stream.synchronize()
        comm.Barrier()
        with pytest.raises(MismatchError):
            plans[0]()
        comm.Barrier()
    with NCCL[1].box(comm) as grid:
        u = grid.zeros("f8")
        for step in range(2):
            fill(grid, u, step)
            grid.exchange(u)
            assert agree(int(wrong_cells(grid, u, step)) == 0, comm)


@pytest.mark.parametrize(
    ("op", "dtype", "elements"),
    [
        *(("sum", "f8", elements) for elements in (1, 1000, 300_001)),
        *(("max", "f4", 1000), ("bitwise_xor", "u2", 300_001)),
    ],
)
def test_allreduce_across_nodes(
    op: str, dtype: str, elements: int, apart: None, comm: MPI.Intracomm
) -> None:
    """The result equals NumPy's reduction in the order of the nodes, in a stream and in a graph."""
    values = [sample(dtype, op, elements, rank) for rank in range(comm.size)]
    wanted = expected(op, values)
    given = cupy.asarray(values[comm.rank])
    out = cupy.zeros_like(given)
    with (
        halox.Allreduce(comm, elements, dtype, op, "hierarchical", device="gpu") as reduce,
        cupy.cuda.Stream(non_blocking=True) as stream,
    ):
        assert reduce.captures
        reduce(given, out)
        assert agree(same(out.get(), wanted), comm)
        stream.begin_capture()
        reduce(given, out)
        graph = stream.end_capture()
        for _ in range(3):
            out.fill(0)
            graph.launch(stream)
            assert agree(same(out.get(), wanted), comm)


@pytest.mark.ranks(4)
def test_nodes_of_two_in_one_graph(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph with peer kernels within nodes, NCCL between nodes, and a reduction over all ranks."""
    monkeypatch.setenv("HALOX_NODE", f"pair {comm.rank // 2}")
    with halox.Grid(
        (8, 8, 32), halo=1, periodic=True, proc_shape=(1, 1, 4), comm=comm, device="gpu"
    ) as grid:
        why = _why(grid)
        if why is not None:
            pytest.skip(why)
        stepper = Stepper(grid)
        plan = grid.plan(stepper.u)
        taken = {row.path for row in plan.explain().rows if row.peer != comm.rank}
        if "peer" not in taken:
            pytest.skip(f"no peer access: {taken}")
        assert taken == {"peer", "nccl"}
        value, total = cupy.full(3, comm.rank + 1.0), cupy.zeros(3)
        with (
            halox.Allreduce(comm, 3, "f8", device="gpu") as reduce,
            cupy.cuda.Stream(non_blocking=True) as stream,
        ):
            assert (reduce.algorithm, reduce.captures) == ("hierarchical", True)
            cupy.cuda.runtime.deviceSynchronize()
            stream.begin_capture()
            stepper.advance()
            plan()
            stepper.check()
            reduce(value, total)
            graph = stream.end_capture()
            for _ in range(200):
                graph.launch(stream)
            stream.synchronize()
            assert agree(stepper.found() == (200, 0) and bool((total == 10).all()), comm)
