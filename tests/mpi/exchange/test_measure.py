"""Measurement of plans, and agreement of all ranks on the cost constants."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ClosedError, HaloxError, StateError
from halox.exchange import calibration
from halox.exchange.calibration import Fingerprint, agreed_costs
from halox.exchange.costs import Costs
from halox.exchange.measuring import Timer, exchange_us
from halox.paths.base import Channel, ChannelMessages
from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message, Part
from halox.runtime.world import World
from tests.mpi.conftest import agree


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this rank a separate cache folder."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        yield Path(name)


@pytest.fixture(params=["shared memory", "MPI"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "MPI":
        monkeypatch.setenv("HALOX_NODE", "rank")
    return str(request.param)


@pytest.mark.parametrize("periodic", [True, False])
def test_plans_are_measured_and_exchange_as_ever(
    way: str, periodic: bool, comm: MPI.Intracomm
) -> None:
    n = comm.size
    with halox.Grid(
        (4 * n, 40), halo=1, periodic=periodic, proc_shape=(n, 1), comm=comm, device="cpu"
    ) as grid:
        u = grid.zeros("f8")
        u[...] = -1
        grid.interior(u)[...] = comm.rank
        plan = grid.plan(u)
        assert all(row.measured_us is None for row in plan.explain().rows)
        report = plan.measure(repeats=5)
        assert report == plan.explain()
        assert all(row.measured_us is not None and row.measured_us > 0 for row in report.rows)
        low, high = (comm.rank - 1) % n, (comm.rank + 1) % n
        inner = (1, slice(1, -1))
        if periodic or comm.rank > 0:
            assert (u[0, inner[1]] == low).all()
        else:
            assert (u[0, inner[1]] == -1).all()
        if periodic or comm.rank < n - 1:
            assert (u[-1, inner[1]] == high).all()
        # Messages of one channel share the time of the slowest rank, so that all ranks show the same time.
        times: dict[str, set[float]] = {}
        for rows in comm.allgather([(r.path, r.protocol, r.measured_us) for r in report.rows]):
            for path, how, us in rows:
                times.setdefault(f"{path}/{how}", set()).add(us)
        assert all(len(found) == 1 for found in times.values()), times
        # The plan still works.
        grid.interior(u)[...] = 100 + comm.rank
        plan()
        if periodic:
            assert (u[0, inner[1]] == 100 + low).all() and (u[-1, inner[1]] == 100 + high).all()


def test_accumulation_is_measured_without_harm(comm: MPI.Intracomm) -> None:
    """From the second call on the halos are zero: the repeated calls add nothing."""
    with halox.Grid((3 * comm.size,), halo=1, periodic=True, comm=comm, device="cpu") as grid:
        u, v = grid.ones("f8"), grid.ones("f8")
        grid.accumulate(v)
        plan = grid._plan("add", (u,), True, keep=True)
        plan.measure(repeats=3)
        assert np.array_equal(u, v)


def test_misuse(comm: MPI.Intracomm) -> None:
    with halox.Grid((4 * comm.size, 4), periodic=True, comm=comm, device="cpu") as grid:
        plan = grid.plan(grid.zeros())
        for wrong in (0, -1, 2.5, True, None):
            with pytest.raises(HaloxError, match="repeats must be an int >= 1"):
                plan.measure(repeats=wrong)  # type: ignore[arg-type]
        if comm.size > 1:
            with pytest.raises(HaloxError, match="repeats must be an int >= 1"):
                plan.measure(repeats=0 if comm.rank == 1 else 3)
            with pytest.raises(HaloxError, match="differ between ranks"):
                plan.measure(repeats=3 + comm.rank)
        plan()
        plan.start()
        with pytest.raises(StateError):
            plan.measure()
        plan.finish()
        plan.close()
        with pytest.raises(ClosedError):
            plan.measure()


class Counting(Channel):
    """Channel that counts its calls; finish waits for all ranks that have the channel."""

    def __init__(self, comm: Any) -> None:
        self.comm, self.started, self.finished = comm, 0, 0

    def start(self) -> None:
        self.started += 1

    def finish(self) -> None:
        self.comm.Barrier()
        self.finished += 1


def test_channels_that_only_some_ranks_have(comm: MPI.Intracomm) -> None:
    """Each rank measures its channels at the same time as all ranks that have them."""
    world = World(comm)
    halves = comm.Split(comm.rank % 2)
    everyone, mine = Counting(comm), Counting(halves)
    part = Part(0, halox.datatypes.contiguous(8, "f8"))
    to_all = Message(0, "send", (part,), 1)
    to_half = Message(0, "send", (part,), 2)
    name = f"half {comm.rank % 2}"
    carried = [ChannelMessages(name, mine, (to_half,)), ChannelMessages("all", everyone, (to_all,))]
    if comm.rank % 2:  # in another order
        carried = carried[::-1]
    found = Timer(world, None, carried).measure([one.channel for one in carried], 4)
    assert set(found) == {to_all.key, to_half.key} and min(found.values()) > 0
    for channel in (everyone, mine):
        assert channel.started == channel.finished == 1 + 5 * 4
    halves.Free()
    world.close()


def test_the_slowest_rank_counts(comm: MPI.Intracomm) -> None:
    import time

    world = World(comm)

    def call() -> None:
        time.sleep(0.004 if comm.rank == comm.size - 1 else 0.0)

    us = exchange_us(world, call, 3, rows=3)
    assert us >= 4000 and len(set(comm.allgather(us))) == 1
    world.close()


HERE = Fingerprint("NVIDIA H200", "580", "8 GPU(s) a node", "Open MPI")


def table(latency_us: float) -> Costs:
    one = ProtocolCost(latency_us, 0.0, (1.0, 2.0, 3.0, 4.0))
    return Costs.default().updated({"peer/ll": one}, f"file of {latency_us:g}")


def test_all_ranks_choose_by_the_file_of_rank_0(comm: MPI.Intracomm, folder: Path) -> None:
    if comm.size == 1:
        return
    # Each rank has a cache folder with a different table; the folder of the last rank is empty.
    if comm.rank < comm.size - 1:
        calibration.save(HERE, table(10.0 + comm.rank))
    world = World(comm)
    found = agreed_costs(world, HERE)
    assert found == table(10.0)
    assert agreed_costs(world, Fingerprint("none", "none", "", "")) == Costs.default()
    world.close()


def test_a_bad_file_warns_on_rank_0_only_and_can_be_made_an_error_of_all(
    comm: MPI.Intracomm, folder: Path
) -> None:
    if comm.size == 1:
        return
    os.makedirs(folder / "halox")
    calibration.tuning_file().write_text("not JSON")
    world = World(comm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert agreed_costs(world, HERE) == Costs.default()
    assert agree(len(caught) == (1 if comm.rank == 0 else 0), comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(HaloxError, match="halox tune"):
            agreed_costs(world, HERE)
    world.close()


def test_the_file_is_not_read_by_a_rank_alone(comm: MPI.Intracomm, folder: Path) -> None:
    calibration.save(HERE, table(1.0))
    world = World(MPI.COMM_SELF)
    assert agreed_costs(world, HERE) == Costs.default()
    world.close()
