"""Transfers without packing between two ranks: layouts, every method's bytes, keys with and without caches."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.exchange.typed import Exchange
from halox.paths.scatter_gather.mlx5_umr import Mlx5Umr
from halox.paths.scatter_gather.process_vm import ProcessVm
from halox_bench.pingpong.baselines import BY_HAND, MPI_TYPES, ByHand, MpiTypes
from halox_bench.ranks import busy
from halox_bench.ranks.bench import Options
from halox_bench.ranks.busy import beside_work
from halox_bench.ranks.clock import RanksClock, Stage, Timing
from halox_bench.scatter_gather import targets
from halox_bench.scatter_gather.cases import ScatterGatherCase, select, vector
from halox_bench.scatter_gather.run import NO_CACHE, ScatterGatherBench, Uncached, keyed, mapping_us
from tests.unit import fake_verbs

pytestmark = pytest.mark.ranks(2)

BRIEF = Timing(batches=1, batch_s=1e-5)
OPTIONS = Options("cpu", timing=BRIEF)
SMALL = ["vector-1KiB/16", "stencil-?", "MILC_su3_zd/8x8*", "NAS_MG_y/512*", "SPECFEM3D_mt/*x32"]

PAPER = {
    **{f"vector-{b}KiB/{n}": (n, 1024 * b, 2048 * b) for b in (1, 2, 4) for n in (16, 32, 64, 128)},
    "stencil-x/128^3": (16384, 8, 1024),
    "stencil-y/128^3": (128, 1024, 131072),
    "stencil-z/128^3": (1, 131072, 0),
    "MILC_su3_zd/8x8x16x32": (64, 768, 12288),
    "MILC_su3_zd/8x16x16x32": (64, 1536, 24576),
    "MILC_su3_zd/16x16x32x32": (64, 3072, 98304),
    "MILC_su3_zd/16x32x32x32": (64, 6144, 196608),
    "NAS_MG_y/512x66x66": (64, 4080, 8 * 512 * 66),
    "NAS_MG_y/1024x66x66": (64, 8176, 8 * 1024 * 66),
    "NAS_MG_y/2048x66x120": (118, 16368, 8 * 2048 * 66),
    **{f"SPECFEM3D_mt/1024x2x{n}": (n, 4096, 8192) for n in (32, 64, 128)},
}
"""Blocks, bytes of each, and bytes from one to the next, of the paper's section V."""


def test_layouts_are_the_papers() -> None:
    cases = {case.name: case for case in select()}
    assert [*cases] == [*PAPER]
    for name, (count, block, stride) in PAPER.items():
        case = cases[name]
        blocks = case.sides[0].datatype.blocks()
        assert (blocks.n_blocks, case.n, case.block_bytes) == (count, count, block)
        assert (blocks.lengths == block).all() and (np.diff(blocks.offsets) == stride).all()
        assert case.nbytes == count * block == case.sides[1].datatype.size


@pytest.mark.parametrize("name", SMALL)
def test_datatypes_name_the_places_that_slicing_does(name: str) -> None:
    for case in select([name]):
        for side, places in zip(case.sides, case.places(), strict=True):
            blocks = side.datatype.blocks()
            starts = np.repeat(blocks.offsets // 8, blocks.lengths // 8)
            within = np.arange(places.size) - np.repeat(
                np.cumsum(blocks.lengths // 8) - blocks.lengths // 8, blocks.lengths // 8
            )
            np.testing.assert_array_equal(starts + within, places)
            packed = np.empty(case.nbytes, np.uint8)
            numbers = np.arange(side.elements)
            side.by_hand.pack([numbers.view(np.uint8)], packed)
            np.testing.assert_array_equal(packed.view(np.int64), places)


@pytest.mark.parametrize("name", SMALL)
def test_every_method_is_right(name: str, comm: MPI.Intracomm) -> None:
    for case in select([name]):
        bench = ScatterGatherBench(comm, "host", OPTIONS)
        rows = bench.measure(case)
        names = ["selected", "host", "scatter_gather", MPI_TYPES, BY_HAND, NO_CACHE]
        assert [row.name for row in rows] == names, bench.left_out
        assert all(row.checked and row.us for row in rows), [row.error for row in rows]
        own = rows[2]
        assert own.path == "scatter_gather/process_vm" and own.keys and own.map_us
        said = own.as_dict()
        assert said["half_us"] == own.us and said["adapter_keys"] == case.adapter_keys()
        assert not bench.left_out


def test_what_is_impossible_is_left_out_with_the_reason(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_NODE", "rank")
    bench = ScatterGatherBench(comm, "host", OPTIONS)
    rows = bench.measure(vector(1024, 16))
    assert [row.name for row in rows] == ["selected", "host", MPI_TYPES, BY_HAND]
    assert "on different nodes" in bench.left_out["scatter_gather"]


def test_wrong_bytes_are_seen(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MpiTypes, "back", lambda self: None)
    monkeypatch.setattr(Exchange, "__call__", lambda self: None)
    receive = ByHand._receive

    def beside(self: Any) -> None:
        receive(self)
        self._memory[-1] ^= 1

    monkeypatch.setattr(ByHand, "_receive", beside)
    rows = ScatterGatherBench(comm, "host", OPTIONS).measure(vector(1024, 16))
    assert len(rows) == 5 and all(row.failed and row.us is None for row in rows)
    assert all("wrong result" in row.error for row in rows)


def pair(case: ScatterGatherCase, comm: MPI.Intracomm, path: str) -> tuple[Uncached, Any]:
    """The case there and back, uncached if called as such; and the array."""
    from halox.exchange.typed import Recv, Send

    side, other = case.sides[comm.rank], 1 - comm.rank
    array = np.zeros(side.elements)
    what = array, side.datatype, other
    ways: Any = [([Send(*what)], []), ([], [Recv(*what)])]
    return Uncached(comm, ways[:: 1 if comm.rank == 0 else -1], path), array


def test_keys_are_mapped_once_or_in_every_transfer(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped, sent = [0], [0]
    plain, export = ProcessVm.map, ProcessVm.export

    def counted(self: Any, *what: Any) -> None:
        mapped[0] += 1
        plain(self, *what)

    def exported(self: Any, key: Any) -> Any:
        sent[0] += 1
        return export(self, key)

    monkeypatch.setattr(ProcessVm, "map", counted)
    monkeypatch.setattr(ProcessVm, "export", exported)
    trip, _ = pair(vector(4096, 64), comm, "scatter_gather")
    n_keys = sum(channel.n_keys for k in (0, 1) for channel in keyed(trip, k))
    assert n_keys == 2 * 2, "half for each end"
    made = mapped[0]
    assert made == n_keys
    for plan in trip.plans * 3:
        plan()
    assert (mapped[0], sent[0]) == (made, n_keys), "kept"
    for times in (1, 2, 3):
        trip()
        assert mapped[0] - made == sent[0] - n_keys == times * n_keys, "mapped and sent anew"
    assert mapping_us(keyed(trip, 0), 3) > 0
    trip()
    trip.close()


@pytest.mark.parametrize(
    "name", ["vector-1KiB/16", "stencil-y", "MILC_su3_zd/16x16*", "NAS_MG_y/512*"]
)
def test_keys_of_an_adapter(
    name: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case counts as many keys as the engine makes over a stand-in; they are mapped once, or in every transfer."""
    (case,) = select([name])
    monkeypatch.setenv("HALOX_NODE", "rank")
    mapped = [0]
    plain = Mlx5Umr.map

    def counted(self: Any, *what: Any) -> None:
        mapped[0] += 1
        plain(self, *what)

    monkeypatch.setattr(Mlx5Umr, "map", counted)
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    own = comm.Dup()
    wire = fake_verbs.install(monkeypatch, (comm.rank + 1,), folder)
    trip, array = pair(case, own, "scatter_gather/mlx5_umr")
    n_keys = case.adapter_keys()
    assert [channel.n_keys for k in (0, 1) for channel in keyed(trip, k)] == [n_keys] * 2
    assert mapped[0] == 2 * n_keys
    here, elsewhere = case.places()[comm.rank], np.arange(array.size)
    for transfers in (0, 1, 2):
        array[:] = elsewhere + 1e7 * comm.rank + transfers
        (trip if transfers else lambda: [plan() for plan in trip.plans])()
        assert mapped[0] == 2 * n_keys * (1 + transfers)
        if comm.rank == 1:  # what rank 0 had, and what it has again
            there = case.places()[0]
            np.testing.assert_array_equal(array[here], there + transfers)
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
    found = targets.measure(comm, "host")
    assert not [one["failed"] for one in found if "failed" in one]
    assert [one["target"] for one in found] == [2.0, 3.0, 1.5, 1.5]
    assert found[0]["map_us"] > 0 and "process_vm" in found[0]["path"]
