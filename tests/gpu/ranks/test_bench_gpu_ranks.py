"""The benchmarks between ranks on GPUs: every available method gives correct values and has a figure."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from halox.errors import PathError
from halox_bench.allreduce import targets
from halox_bench.allreduce.baselines import HOST_STAGED
from halox_bench.allreduce.baselines import NCCL as NCCL_ALLREDUCE
from halox_bench.allreduce.cases import AllreduceCase
from halox_bench.allreduce.run import AllreduceBench
from halox_bench.common.machine import why_not_gpu_aware
from halox_bench.exchange.baselines_gpu import NCCL
from halox_bench.exchange.baselines_gpu import ZERO_COPY as ZERO_COPY_EXCHANGE
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.run import ExchangeBench
from halox_bench.milc.cases import MilcCase
from halox_bench.milc.run import MilcBench
from halox_bench.pack.cases import select
from halox_bench.ranks import busy
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import Timing
from halox_bench.transpose.baselines import COPY
from halox_bench.transpose.baselines_gpu import NCCL as NCCL_TRANSPOSE
from halox_bench.transpose.cases import TransposeCase
from halox_bench.transpose.run import TransposeBench
from halox_bench.trips import cases
from halox_bench.trips import targets as trip_targets
from halox_bench.trips.baselines import GPU_TYPES, HALOX_PACK, ZERO_COPY
from halox_bench.trips.kinds import ScatterGatherBench
from halox_bench.trips.run import NO_CACHE, TripBench
from tests.support import require

require("gpu")

import cupy  # noqa: E402

pytestmark = pytest.mark.gpu

BRIEF = Timing(batches=2, batch_s=1e-4)
CASES = [
    ExchangeCase((64, 64, 64), "x"),
    ExchangeCase((12, 10, 14), "all", 2, "f4", 3),
    ExchangeCase((8, 6, 4, 10), "faces", 1, "c8", 1, (3,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_exchange(case: ExchangeCase, comm: MPI.Intracomm) -> None:
    options = Options("gpu", timing=BRIEF, no_gpu_aware=why_not_gpu_aware(comm, "gpu"))
    bench = ExchangeBench(comm, options)
    rows = bench.measure(case)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {(row.name, row.mode) for row in rows if row.us and row.checked}
    assert {("selected", "stream"), (ZERO_COPY_EXCHANGE, "stream"), ("staged", "stream")} <= timed
    if not bench.shared_gpu and comm.size > 1:
        refused = {row.name: row.error for row in rows if row.us is None}
        assert ("peer", "graph") in timed and ("selected", "graph") in timed, refused
        assert (NCCL, "stream") in timed or "NCCL" in refused[NCCL]
    (staged,) = [row for row in rows if row.name == "staged" and row.mode == "graph"]
    if comm.size > 1:
        # A path that needs the host cannot be captured, and its row contains the reason.
        assert staged.us is None and "captured" in staged.error
    else:
        assert staged.us  # all messages are this rank's own


def bench_in(place: str, comm: Any, make: Any = TripBench, **options: Any) -> TripBench | None:
    """Return the bench of two ranks with arrays in a place, or None if the place needs more GPUs than there are."""
    chosen = Options("gpu", timing=BRIEF, no_gpu_aware="not tried here", **options)
    try:
        found: TripBench = make(comm, place, chosen)
    except PathError as error:
        assert place == "2gpus" and "GPUs" in str(error)
        return None
    return found


TRIPS = [
    *(cases.pingpong(pattern, n) for pattern in cases.PINGPONGS for n in (16, 300)),
    *(
        cases.of_ddtbench(select([name])[0])
        for name in ("WRF_x_vec/8x8", "LAMMPS_atomic/1217-114", "FFT2/256")
    ),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["1gpu", "2gpus"])
@pytest.mark.parametrize("case", TRIPS, ids=lambda case: case.name)
def test_trips(case: cases.TripCase, place: str, comm: Any) -> None:
    bench = bench_in(place, comm)
    if bench is None:
        return
    rows = bench.measure(case)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {(row.name, row.mode) for row in rows if row.us}
    assert {(name, "stream") for name in ("selected", ZERO_COPY, HALOX_PACK)} <= timed
    assert {row.name for row in rows if hasattr(row, "pack_us")} == {ZERO_COPY, HALOX_PACK}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["1gpu", "2gpus"])
@pytest.mark.parametrize(
    "case",
    [cases.vector(1024, 16), cases.stencil("y"), cases.specfem3d_mt(1024, 2, 32)],
    ids=lambda case: case.name,
)
def test_scatter_gather(case: cases.TripCase, place: str, comm: Any) -> None:
    bench = bench_in(place, comm, ScatterGatherBench, busy=place == "2gpus")
    if bench is None:
        return
    rows = bench.measure(case)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {row.name: row for row in rows if row.us and row.mode == "stream" and not row.held}
    assert {"selected", "scatter_gather", NO_CACHE, "staged", ZERO_COPY} <= {*timed}
    own = timed["scatter_gather"]
    assert own.path == "scatter_gather/copy_engine" and own.keys and own.map_us
    (types,) = [row for row in rows if row.name == GPU_TYPES]
    assert "not tried here" in types.error
    if place == "2gpus":
        assert "scatter_gather" in {row.name for row in rows if row.held == 0.5 and row.us}


@pytest.mark.ranks(2)
def test_transfers_beside_a_kernel_that_fills_the_gpu(
    comm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are correct on one GPU and on two, and every figure is measured."""
    monkeypatch.setattr(busy, "_SAMPLES", 1)
    monkeypatch.setattr(trip_targets, "MESSAGE_BYTES", 1 << 16)
    place = "2gpus" if cupy.cuda.runtime.getDeviceCount() > 1 else "1gpu"
    options = Options("gpu", ("scatter_gather",), (), graph=False, timing=BRIEF)
    found = [*trip_targets.beside_kernel(TripBench(comm, place, options, mapped=True))]
    assert found[0]["value"] > -0.5 and found[1]["value"] > 0
    assert "scatter_gather/copy_engine" in found[0]["name"] and len(found) >= 4


ALLREDUCES = [
    AllreduceCase(1, "f8", "sum"),
    AllreduceCase(1001, "c8", "sum"),
    AllreduceCase(1 << 18, "f4", "max"),
    AllreduceCase(333, "b1", "logical_or"),
]


def allreduce_bench(comm: MPI.Intracomm) -> AllreduceBench:
    why = why_not_gpu_aware(comm, "gpu")
    return AllreduceBench(comm, Options("gpu", timing=BRIEF, no_gpu_aware=why))


@pytest.mark.parametrize("case", ALLREDUCES, ids=lambda case: case.name)
def test_allreduce(case: AllreduceCase, comm: MPI.Intracomm) -> None:
    bench = allreduce_bench(comm)
    rows = bench.measure(case)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {(row.name, row.mode) for row in rows if row.us and row.checked}
    assert {("selected", "stream"), ("host", "stream"), (HOST_STAGED, "stream")} <= timed
    assert (("selected", "value") in timed) is (case.elements == 1)
    refused = {row.name: row.error for row in rows if row.us is None}
    assert all(refused.values())
    if comm.size > 1 and not bench.shared_gpu:
        kernel = "reduce_scatter_allgather" if case.nbytes > 1 << 16 else "oneshot"
        assert {(kernel, "stream"), (kernel, "graph"), ("selected", "graph")} <= timed, refused
        known = (NCCL_ALLREDUCE, "stream") in timed
        assert known or "NCCL" in refused[NCCL_ALLREDUCE]
    for row in rows:
        if row.kind != "baseline" and row.us:
            assert row.setup_us and set(row.pays_after) >= {HOST_STAGED}


TRANSPOSES = [
    TransposeCase((33, 40), (1, 0), "u1", division="slabs"),
    TransposeCase((20, 33, 40), (2, 1, 0), "c16", (), "pencils", "backward"),
    TransposeCase((20, 33, 40), (1, 2, 0), "f4", (3,), "slabs"),
    TransposeCase((6, 8, 10, 12), (2, 0, 3, 1), "f8", (), "pencils"),
]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("case", TRANSPOSES, ids=lambda case: case.name)
def test_transpose(case: TransposeCase, comm: MPI.Intracomm) -> None:
    bench = TransposeBench(comm, Options("gpu", timing=BRIEF))
    rows = bench.measure(case)
    assert not [row for row in rows if row.failed], [row.error for row in rows if row.failed]
    timed = {(row.name, row.mode) for row in rows if row.us and row.checked}
    assert {
        ("selected", "stream"),
        (COPY, "stream"),
        (COPY, "graph"),
        ("staged", "stream"),
    } <= timed
    refused = {row.name: row.error for row in rows if row.us is None}
    if not bench.shared_gpu:
        assert ("selected", "graph") in timed, refused
        assert (NCCL_TRANSPOSE, "stream") in timed or "NCCL" in refused[NCCL_TRANSPOSE]


def test_figures_that_check_their_results(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures of a norm and of a grid's allreduce, at small sizes."""
    monkeypatch.setattr(targets, "NORM_CELLS", 48)
    norm, *_ = targets.Targets(comm).norm()
    assert norm["value"] > 0
    if not allreduce_bench(comm).shared_gpu:
        in_place, new = targets.Targets(comm).over_persistent()
        assert in_place["value"] > 0 and new["value"] > 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("operator", ["improved", "naive"])
def test_milc(operator: str, comm: MPI.Intracomm) -> None:
    bench = MilcBench(comm, Options("gpu", timing=BRIEF))
    found = [
        row
        for one in bench.suited([MilcCase((8, 8, 8, 12), operator, "single")])
        for row in bench.measure(one)
    ]
    assert not [row.error for row in found if row.error]
    assert [row.ranks for row in found] == [1] if comm.size == 1 else [1, 2, 2]
    assert all(row.us and row.checked for row in found)
    if not bench.shared_gpu:
        assert {row.mode for row in found} == {"graph"}
