"""Messages there and back between two ranks: layouts, every method's bytes, phases, keys with and without caches."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.exchange.typed import Exchange
from halox.packing.host import HostPacker
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox_bench.common.targets import measured
from halox_bench.pack.cases import select
from halox_bench.ranks import busy
from halox_bench.ranks.bench import Options
from halox_bench.ranks.busy import beside_work
from halox_bench.ranks.clock import RanksClock, Stage, Timing
from halox_bench.trips import baselines, cases, targets
from halox_bench.trips import run as trips_run
from halox_bench.trips.baselines import BY_HAND, HALOX_PACK, MPI_PACK, MPI_TYPES, REFERENCE
from halox_bench.trips.cases import TripCase
from halox_bench.trips.kinds import ScatterGatherBench, adapter_keys
from halox_bench.trips.oracle import TripOracle, places
from halox_bench.trips.run import NO_CACHE, PreparedTrip, TripBench, Uncached
from tests.mpi.capturing import Capturing
from tests.unit import fake_verbs

pytestmark = [pytest.mark.ranks(2), pytest.mark.usually(2)]

BRIEF = Timing(batches=1, batch_s=1e-5)
OPTIONS = Options("cpu", timing=BRIEF)
PHASED = [BY_HAND, MPI_PACK, HALOX_PACK]
OURS = ["selected", "host", "scatter_gather"]
NAMES = [*OURS, MPI_TYPES, *PHASED, REFERENCE]

SMALL = {
    **{"WRF": "8x8", "MILC": "8x8x8x8", "NAS_LU": "12", "NAS_MG": "34x18x18", "FFT2": "256"},
    **{"LAMMPS_full": "1907-1662", "LAMMPS_atomic": "1217-114", "SPECFEM3D_mt": "c3"},
    "SPECFEM3D": "c1",
}


def of_ddtbench(pattern: str) -> TripCase:
    size = next(size for start, size in SMALL.items() if pattern.startswith(start))
    return cases.of_ddtbench(select([f"{pattern}/{size}"])[0])


DDTBENCH = [of_ddtbench(pattern.name) for pattern in cases.PATTERNS]
PINGPONGS = [cases.pingpong(pattern, n) for pattern in cases.PINGPONGS for n in (1, 7, 40)]
STRIDED = [
    *(cases.vector(1024, 16), *(cases.stencil(axis, 8) for axis in "xyz")),
    *(cases.specfem3d_mt(64, 2, 8), cases.both_ways(1024, 4, one_way=True)),
]

PAPER = {
    **{f"vector-{b}KiB/{n}": (n, 1024 * b, 2048 * b) for b in (1, 2, 4) for n in (16, 32, 64, 128)},
    "stencil-x/128^3": (16384, 8, 1024),
    "stencil-y/128^3": (128, 1024, 131072),
    "stencil-z/128^3": (1, 131072, 0),
    "MILC_su3_zdown/8x8x16x32": (64, 768, 12288),
    "MILC_su3_zdown/8x16x16x32": (64, 1536, 24576),
    "MILC_su3_zdown/16x16x32x32": (64, 3072, 98304),
    "MILC_su3_zdown/16x32x32x32": (64, 6144, 196608),
    "NAS_MG_y/512x66x66": (64, 4080, 8 * 512 * 66),
    "NAS_MG_y/1024x66x66": (64, 8176, 8 * 1024 * 66),
    "NAS_MG_y/2048x66x120": (118, 16368, 8 * 2048 * 66),
    **{f"SPECFEM3D_mt/1024x2x{n}": (n, 4096, 8192) for n in (32, 64, 128)},
}
"""Blocks, bytes of each, and bytes from one to the next, of section V of Suresh et al."""


def test_layouts_are_the_papers() -> None:
    found = {case.name: case for pattern in cases.WITHOUT_PACKING for case in pattern.make()}
    assert [*found] == [*PAPER]
    for name, (count, block, stride) in PAPER.items():
        case = found[name]
        blocks = case.directions(0)[0].sends[1].blocks()
        assert (blocks.n_blocks, case.more["blocks"], case.more["block_bytes"]) == (
            *(count, count),
            block,
        )
        assert (blocks.lengths == block).all() and (np.diff(blocks.offsets) == stride).all()
        assert case.nbytes == count * block == case.directions(1)[0].receives[0].size


@pytest.mark.parametrize("case", [*DDTBENCH, *PINGPONGS, *STRIDED], ids=lambda case: case.name)
def test_datatypes_travel_as_the_layouts_by_hand(case: TripCase, comm: MPI.Intracomm) -> None:
    slab = np.arange(case.slab_bytes // case.word, dtype=f"u{case.word}")
    for direction in case.directions(comm.rank):
        for messages, layout in (
            (direction.sends, direction.packed),
            (direction.receives, direction.unpacked),
        ):
            if layout is not None:
                found = np.empty(case.nbytes, np.uint8)
                at = 0
                for made in messages.values():
                    HostPacker(slab.view(np.uint8), made).pack(found[at : at + made.size])
                    at += made.size
                np.testing.assert_array_equal(found.view(slab.dtype), places(case, layout))


def test_a_transpose_is_one() -> None:
    case = cases.pingpong("transpose", 3)
    (there, _), (here, _) = case.directions(0), case.directions(1)
    matrix, turned, packed = np.arange(9.0), np.zeros(9), np.zeros(72, np.uint8)
    HostPacker(matrix, there.sends[1]).pack(packed)
    HostPacker(turned, here.receives[0]).unpack(packed)
    assert np.array_equal(turned.reshape(3, 3), matrix.reshape(3, 3).T)


@pytest.mark.parametrize("case", [*DDTBENCH, *PINGPONGS, *STRIDED], ids=lambda case: case.name)
def test_every_method_is_right(case: TripCase, comm: MPI.Intracomm) -> None:
    rows = TripBench(comm, "host", OPTIONS).measure(case)
    assert [row.name for row in rows] == NAMES
    assert all(row.checked and row.us for row in rows), [row.error for row in rows]
    in_place = ("vector-contiguous", "transpose", "SPECFEM3D_mt/64", "stencil-z")
    phased = [row.name for row in rows if hasattr(row, "pack_us") and hasattr(row, "unpack_us")]
    assert phased == (PHASED[1:] if case.name.startswith(in_place) else PHASED)
    assert {row.name for row in rows if hasattr(row, "communicate_us")} == {*PHASED, REFERENCE}
    assert comm.allgather(rows[0].us) == [rows[0].us] * 2, "one figure for all ranks"


@pytest.mark.parametrize(
    "case",
    [
        *map(of_ddtbench, ("LAMMPS_atomic", "NAS_MG_x", "MILC_su3_zdown", "FFT2")),
        cases.pingpong("triangle", 7),
    ],
    ids=lambda case: case.name,
)
def test_wrong_bytes_are_seen(
    case: TripCase, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed() -> set[str]:
        rows = [row for row in TripBench(comm, "host", OPTIONS).measure(case) if row.failed]
        assert all("wrong result" in row.error and row.us is None for row in rows)
        return {row.name for row in rows}

    move = baselines.Packed.go

    def beside(self: Any, direction: int) -> None:
        move(self, direction)
        if isinstance(self, baselines.MpiPacked) and comm.rank == 1 and direction == 1:
            self._slab[-1] ^= 1

    monkeypatch.setattr(baselines.Packed, "go", beside)
    assert failed() == {MPI_PACK}
    monkeypatch.setattr(baselines.Packed, "go", move)
    # Methods that move nothing, in one direction or both.
    there = baselines.MpiTypes.go
    monkeypatch.setattr(
        baselines.MpiTypes, "go", lambda self, direction: direction or there(self, direction)
    )
    monkeypatch.setattr(Exchange, "__call__", lambda self: None)
    assert failed() == {*OURS, MPI_TYPES}


def test_the_transpose_of_fft2_is_one(comm: Any) -> None:
    """Both ranks' rows together, seen as a matrix, against NumPy's transpose."""
    case, n, rows = of_ddtbench("FFT2"), 256, 128
    whole = np.arange(2 * n * n, dtype="f8").view("c16").reshape(n, n)
    slab = np.zeros(case.slab_bytes, np.uint8)
    matrix, turned = (part.view("c16").reshape(rows, n) for part in case.of_slab(slab))
    mine = slice(rows * comm.rank, rows * (comm.rank + 1))
    matrix[:] = whole[mine]
    trip = baselines.HaloxPacked(comm, case, slab, None)
    trip.go(0)
    np.testing.assert_array_equal(turned, whole.T[mine])
    matrix[:] = 0
    trip.go(1)
    np.testing.assert_array_equal(matrix, whole[mine])


def test_keys(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.vector(1024, 16)
    rows = ScatterGatherBench(comm, "host", OPTIONS).measure(case)
    assert [row.name for row in rows] == [*NAMES, NO_CACHE]
    assert all(row.checked and row.us for row in rows), [row.error for row in rows]
    own = rows[2]
    assert own.path == "scatter_gather/process_vm" and own.keys and own.map_us
    assert {row.adapter_keys for row in rows} == {adapter_keys(case)}
    monkeypatch.setenv("HALOX_NODE", "rank")
    rows = ScatterGatherBench(comm, "host", OPTIONS).measure(case)
    (refused,) = [row for row in rows if row.us is None]
    assert refused.name == "scatter_gather" and "on different nodes" in refused.error


def test_both_ways_at_once(comm: MPI.Intracomm) -> None:
    case = cases.both_ways(1024, 4, one_way=False)
    rows = TripBench(comm, "host", Options("cpu", None, (), timing=BRIEF)).measure(case)
    assert [row.name for row in rows] == OURS
    assert all(row.checked and row.us for row in rows), [row.error for row in rows]


@pytest.mark.parametrize("trouble", ["", "refuse", "spoil"])
def test_graphs_and_busy_gpus(
    trouble: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = Options("cpu", ("host",), (), timing=BRIEF, busy=True)
    bench = TripBench(comm, "host", options)
    stage = Capturing()
    bench.stage, bench.clock = stage, RanksClock(comm, stage, BRIEF)
    monkeypatch.setattr(bench, "free", lambda: None)
    times = {0.25: 8.0, 0.5: float("inf")}
    monkeypatch.setattr(trips_run, "times_us", lambda *given, **named: times)
    stage.refuse = "the host is needed" if trouble == "refuse" else ""
    make = PreparedTrip.make

    def remember(self: PreparedTrip) -> None:
        stage.spoil = self.arrays if trouble == "spoil" and comm.rank == 0 else None
        make(self)

    monkeypatch.setattr(PreparedTrip, "make", remember)
    rows = bench.measure(cases.pingpong("triangle", 7))
    assert [(row.name, row.mode, row.held) for row in rows] == [
        *((name, mode, 0.0) for mode in ("stream", "graph") for name in ("selected", "host")),
        *((name, "stream", share) for name in ("selected", "host") for share in (0.25, 0.5)),
    ]
    for row in rows:
        assert row.failed is (trouble == "spoil" and row.mode == "graph")
        assert bool(row.us) is not (row.held == 0.5 or (bool(trouble) and row.mode == "graph"))
    assert [row.us for row in rows if row.held == 0.25] == [4.0, 4.0], "half of a round trip"


def uncached(case: TripCase, comm: MPI.Intracomm, path: str) -> tuple[Uncached, Any, TripOracle]:
    slab = np.zeros(case.slab_bytes, np.uint8)
    trip = Uncached(comm, slab, case.directions(comm.rank), path)
    return trip, slab, TripOracle(case, comm.rank)


def expect_trips(trip: Uncached, slab: Any, oracle: TripOracle, comm: MPI.Intracomm) -> None:
    for direction in range(2):
        oracle.fill(slab, direction)
        trip.go(direction)
        assert comm.allreduce(oracle.wrong(slab, direction, (direction,))) == 0


def test_keys_of_a_network_adapter(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = [0]
    plain = Mlx5Umr.map

    def counted(self: Any, *what: Any) -> None:
        mapped[0] += 1
        plain(self, *what)

    monkeypatch.setattr(Mlx5Umr, "map", counted)
    monkeypatch.setenv("HALOX_NODE", "rank")
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    own = comm.Dup()
    wire = fake_verbs.install(monkeypatch, (comm.rank + 1,), folder)
    case = cases.vector(1024, 64)
    trip, slab, oracle = uncached(case, own, "scatter_gather/mlx5_umr")
    n_keys = adapter_keys(case)
    assert [channel.n_keys for k in (0, 1) for channel in trip.keyed(k)] == [n_keys] * 2
    assert mapped[0] == 2 * n_keys
    expect_trips(trip, slab, oracle, own)
    assert mapped[0] == 4 * n_keys
    comm.barrier()
    trip.close()
    wire.close()
    comm.barrier()
    own.Free()
    if comm.rank == 0:
        shutil.rmtree(folder)


class FakeWork:
    """Work of the host: it takes a thousandth of a second, or a quarter more beside others."""

    def __init__(self, device: int) -> None:
        self.has_ended, self.begun = False, 0

    def launch(self) -> None:
        self.begun += 1

    def us(self) -> float:
        return 1250.0 if self.begun % 2 == 1 and self.begun > 1 else 1000.0


def test_calls_beside_work(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "Work", FakeWork)
    stage = Stage()
    calls = [0]

    def call() -> None:
        calls[0] += 1
        comm.Barrier()

    found = beside_work(comm, stage, RanksClock(comm, stage, BRIEF), call)
    assert found.loss == 0.25 and found.is_covered
    assert found.call_us > 0 and found.call_beside_us > 0 and calls[0] > 5
    # Work that has ended before any call has: the figure is a lower bound.
    monkeypatch.setattr(
        FakeWork, "__init__", lambda self, device: vars(self).update(begun=0, has_ended=True)
    )
    assert not beside_work(comm, stage, RanksClock(comm, stage, BRIEF), call).is_covered


def test_targets_of_hosts(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "TIMING", BRIEF)
    monkeypatch.setattr(targets, "HOST_BLOCKS", (4096,))
    groups = targets.without_packing(None, comm, "host")
    found = measured(groups, 60.0, lambda *_: None, comm)
    assert not [one["failed"] for one in found if "failed" in one]
    assert [one["target"] for one in found] == [2.0, 3.0, 1.5, 1.5]
    assert found[0]["map_us"] > 0 and "process_vm" in found[0]["path"]
    (first, second) = targets.over_mpi_pack(comm, of_ddtbench("NAS_LU_y"))
    assert first["target"] == second["target"] == 0.95 and second["value"] > 0
