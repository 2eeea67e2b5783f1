"""The allreduce benchmark between ranks: every method is right, no wrong result is timed, set-up is timed whole."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.collectives.algorithms import HOST_ALGORITHMS
from halox.errors import PathError
from halox.grid import Grid
from halox.runtime.gpu import memory
from halox_bench.allreduce import baselines, targets
from halox_bench.allreduce import run as allreduce_run
from halox_bench.allreduce.baselines import MPI as BY_MPI
from halox_bench.allreduce.cases import AllreduceCase, AllreduceOracle
from halox_bench.allreduce.run import AllreduceBench, make_reduction
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import RanksClock, Timing
from tests.mpi.bench_nccl import Nccl
from tests.mpi.capturing import Capturing
from tests.unit import bench_gpu

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(2)]

BRIEF = Timing(batches=1, batch_s=1e-5)
OPTIONS = Options("cpu", timing=BRIEF)
NAMES = ["selected", *HOST_ALGORITHMS, BY_MPI]

CASES = [
    AllreduceCase(1, "f8", "sum"),
    AllreduceCase(70_000, "f4", "sum"),
    AllreduceCase(33, "b1", "logical_xor"),
    AllreduceCase(5, "b1", "min"),
    AllreduceCase(17, "c16", "prod"),
    AllreduceCase(7, "c16", "sum"),
    AllreduceCase(9, "u1", "bitwise_or"),
    AllreduceCase(12, "i8", "logical_and"),
    AllreduceCase(2000, "i2", "max"),
]


def in_bench(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Capturing]:
    """A bench that has graphs, of NumPy arrays and without baselines."""
    bench = AllreduceBench(comm, Options("cpu", baselines=(), timing=BRIEF))
    stage = Capturing()
    bench.stage, bench.clock = stage, RanksClock(comm, stage, BRIEF)
    monkeypatch.setattr(bench, "free", lambda: None)
    return bench, stage


class Wrapped:
    """In the place of halox's allreduce."""

    def __init__(self, reduce: Any, *, captures: bool = False) -> None:
        self._reduce, self.algorithm, self.captures = reduce, reduce.algorithm, captures
        self.close = reduce.close

    def __call__(self, array: Any, out: Any) -> Any:
        return self._reduce(array, out=out)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_is_right(case: AllreduceCase, comm: MPI.Intracomm) -> None:
    rows = AllreduceBench(comm, OPTIONS).measure(case)
    assert [row.name for row in rows] == NAMES
    for row in rows:
        assert row.checked and row.us is not None and row.us > 0, row.error
        assert set(row.beside) == {BY_MPI} and row.nbytes == case.nbytes
        if row.kind == "algorithm":
            assert row.path == row.name and set(row.pays_after) == {BY_MPI}
    assert rows[0].path in NAMES
    figures = [(row.us, *map(row.details.get, ("setup_us", "first_setup_us"))) for row in rows]
    assert comm.allgather(figures) == [figures] * comm.size, "one figure for all ranks"


def test_one_wrong_value_on_one_rank_leaves_no_figure(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = allreduce_run.make_reduction

    class Spoilt(Wrapped):
        def __call__(self, array: Any, out: Any) -> Any:
            super().__call__(array, out)
            if comm.rank == comm.size - 1 and self.algorithm == "hierarchical":
                out[-1] += 1
            return out

    monkeypatch.setattr(allreduce_run, "make_reduction", lambda *given: Spoilt(right(*given)))
    rows = AllreduceBench(comm, OPTIONS).measure(AllreduceCase(100, "i4", "sum"))
    (spoilt,) = [row for row in rows if row.failed]
    assert spoilt.name == "hierarchical" and spoilt.us is None and not spoilt.checked
    assert "wrong result: 1 values, in call 1" in spoilt.error
    assert all(row.us for row in rows if row is not spoilt), "the others go on"


def test_set_up_is_the_slowest_rank_s_with_the_first_call(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, made = allreduce_run.make_reduction, []

    class SlowOnce(Wrapped):
        def __call__(self, array: Any, out: Any) -> Any:
            if not hasattr(self, "called") and comm.rank == 0:
                time.sleep(0.01)
            self.called = True
            return super().__call__(array, out)

    def make(*given: Any) -> Any:
        made.append(given)
        if len(made) == 1 and comm.rank == comm.size - 1:
            time.sleep(0.02)
        return SlowOnce(right(*given))

    monkeypatch.setattr(allreduce_run, "make_reduction", make)
    rows = AllreduceBench(comm, OPTIONS).measure(AllreduceCase(1, "f8", "sum"))
    assert rows[0].first_setup_us is not None and rows[0].first_setup_us >= 30e3 * 0.99
    assert all(row.details.get("setup_us", 10e3) >= 10e3 for row in rows)
    assert len(made) == 2 * (len(NAMES) - 1)


@pytest.mark.parametrize("trouble", ["", "refuse", "spoil"])
def test_graphs_and_single_values(
    trouble: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = allreduce_run.make_reduction

    def make(*given: Any) -> Any:
        return Wrapped(right(*given), captures=given[2] != "hierarchical")

    monkeypatch.setattr(allreduce_run, "make_reduction", make)
    bench, stage = in_bench(comm, monkeypatch)
    stage.refuse = "the host is needed" if trouble == "refuse" else ""
    arrays = np.zeros(1), np.zeros(1)
    monkeypatch.setattr(bench, "_arrays", lambda case: arrays)
    stage.spoil = arrays[1] if trouble == "spoil" and comm.rank == 0 else None
    rows = bench.measure(AllreduceCase(1, "f8", "sum"))
    assert [(row.name, row.mode) for row in rows] == [
        *(("selected", "stream"), ("host", "stream"), ("hierarchical", "stream")),
        *(("selected", "graph"), ("host", "graph")),
        *(("selected", "value"), ("host", "value"), ("hierarchical", "value")),
    ]
    for row in rows:
        assert bool(row.us) is (not trouble or row.mode != "graph"), row.error
        assert row.failed is (trouble == "spoil" and row.mode == "graph")
    if trouble == "refuse":
        assert "the host is needed" in rows[3].error


def test_a_wrong_value_on_the_host_is_seen(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = allreduce_run.make_reduction
    stale = np.array([-7.0])

    class Late(Wrapped):
        def __call__(self, array: Any, out: Any) -> Any:
            super().__call__(array, out)
            return stale

    monkeypatch.setattr(allreduce_run, "make_reduction", lambda *given: Late(right(*given)))
    rows = in_bench(comm, monkeypatch)[0].measure(AllreduceCase(1, "f8", "sum"))
    (failed,) = [row for row in rows if row.failed]
    assert failed.mode == "value" and "wrong value on the host by selected" in failed.error


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU made of host memory."""
    cp = bench_gpu.fake_cupy(1 << 18)
    cp.cuda.get_current_stream = bench_gpu.Stream
    cp.cuda.runtime.memcpyDeviceToHost, cp.cuda.runtime.memcpyHostToDevice = 2, 1
    monkeypatch.setattr(baselines, "cupy", lambda: cp)
    for module in (baselines, memory):
        monkeypatch.setattr(module, "pinned", bench_gpu.pinned)
    return cp


@pytest.mark.parametrize("name", ["HostStaged", "GpuAware", "ByNccl"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.usefixtures("host_memory")
def test_hand_written_allreduces_of_gpus(
    case: AllreduceCase, name: str, comm: MPI.Intracomm
) -> None:
    arrays = [bench_gpu.empty(case.elements, case.dtype) for _ in range(2)]
    wire = (Nccl(comm),) if name == "ByNccl" else ()
    try:
        baseline = getattr(baselines, name)(*wire, comm, case, *arrays)
    except PathError as error:
        unknown = case.op.startswith(("logical", "bitwise")) or (case.dtype, case.op) in (
            ("i2", "max"),
            ("c16", "prod"),
        )
        assert name == "ByNccl" and unknown and f"no {case.op} of" in str(error)
        return
    oracle = AllreduceOracle(case, comm.rank, comm.size)
    for step in (1, 2):
        oracle.fill(*arrays, step)
        baseline()
        assert oracle.wrong(arrays[1], step) == 0
        if case.elements == 1:
            assert baseline.value() == arrays[1][0]


class HostGrid(Grid):
    """A grid of NumPy arrays on any device."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{**named, "device": "cpu"})


def targets_on(stage: Any, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The targets of ranks with a GPU each, on a stage in its place."""
    clock = RanksClock(comm, stage, BRIEF)
    bench = SimpleNamespace(stage=stage, clock=clock, shared_gpu=False, free=lambda: None)
    monkeypatch.setattr(targets, "AllreduceBench", lambda comm, options: bench)
    return targets.Targets(comm)


@pytest.mark.parametrize("with_halo", [False, True])
def test_norm_over_reading(
    with_halo: bool, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, host_memory: Any
) -> None:
    class Careless(HostGrid):
        def norm(self, field: Any, out: Any = None) -> Any:
            inside = super().norm(field, out)
            if with_halo:
                inside += field[0, 0, 0]
            return inside

    stage = Capturing()
    host_memory.cuda.runtime.memcpyDeviceToDevice = 3
    stage.stream, stage.xp = bench_gpu.Stream(), host_memory
    monkeypatch.setattr(targets, "Grid", Careless)
    monkeypatch.setattr(targets, "NORM_CELLS", 8)
    norm = targets_on(stage, comm, monkeypatch).norm()
    if with_halo:
        with pytest.raises(RuntimeError, match=f"norm of {512 * comm.size} ones"):
            next(norm)
        return
    found, *others = norm
    assert found["target"] == 1.15 and found["value"] > 0
    assert [other["target"] for other in others] == [1.1, 1.05]
    speed = 8**4 / found["baseline"] / 1e3
    # Of a time of three decimals, beside a figure of one.
    rounded = 0.05 + speed * 0.0005 / (found["baseline"] - 0.0005)
    assert speed == pytest.approx(found["copy_gb_per_s"], rel=0, abs=1.001 * rounded)


@pytest.mark.parametrize("spoilt", [False, True])
def test_grid_over_persistent(
    spoilt: bool, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Counting(HostGrid):
        def allreduce(self, array: Any, op: str = "sum", out: Any = None) -> Any:
            calls.append(out is array)
            found = super().allreduce(array, op, out)
            if spoilt and len(calls) == 4:
                found[-1] += 1
            return found

    def on_cpu(comm: Any, case: AllreduceCase, algorithm: Any, device: str) -> Any:
        assert case.nbytes == 8192
        return make_reduction(comm, case, algorithm, "cpu")

    stage = Capturing()
    stage.xp = SimpleNamespace(ones=np.ones)
    monkeypatch.setattr(targets, "Grid", Counting)
    monkeypatch.setattr(targets, "make_reduction", on_cpu)
    figures = targets_on(stage, comm, monkeypatch).over_persistent()
    if spoilt:
        with pytest.raises(RuntimeError, match="8KiB f8 sum ones, grid, new: wrong result"):
            next(figures)
        return
    in_place, new = figures
    assert "8KiB float64 in place" in in_place["name"] and "without out" in new["name"]
    assert in_place["target"] == 1.3 and new["target"] is None
    for one in (in_place, new):
        assert one["value"] == pytest.approx(one["us"] / one["baseline"], rel=0.1)
    assert set(calls) == {True, False}
