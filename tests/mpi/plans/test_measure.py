"""Measurement of plans, and agreement of all ranks on the cost constants."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError
from halox.paths.base import Channel, ChannelMessages
from halox.paths.costs import ProtocolCost
from halox.paths.messages import Message, Part
from halox.plans import calibration
from halox.plans.calibration import Fingerprint, agreed_costs
from halox.plans.costs import Costs
from halox.plans.measuring import exchange_us, measure
from halox.runtime.world import World
from tests.mpi.bad_input import raised_by_all
from tests.mpi.conftest import agree

pytestmark = pytest.mark.usually(3)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give this rank a separate cache folder."""
    with tempfile.TemporaryDirectory() as name:
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        yield Path(name)


@pytest.mark.parametrize("node", ["", "rank"])
def test_plans_are_measured_and_exchange_as_ever(
    node: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_NODE", node)
    n = comm.size
    with halox.Grid(
        (4 * n, 40), halo=1, periodic=True, proc_shape=(n, 1), comm=comm, device="cpu"
    ) as grid:
        u = grid.full(-1.0)
        plan = grid.plan(u)
        assert all(row.measured_us is None for row in plan.explain().rows)

        def check(value: int, act: Callable[[], Any]) -> Any:
            grid.interior(u)[...] = value + comm.rank
            found = act()
            low, high = (comm.rank - 1) % n, (comm.rank + 1) % n
            assert (u[0] == value + low).all() and (u[-1] == value + high).all()
            return found

        report = check(0, lambda: plan.measure(repeats=5))
        assert report == plan.explain()
        assert all(row.measured_us is not None and row.measured_us > 0 for row in report.rows)
        # Messages of one channel share the time of the slowest rank, so that all ranks show the same time.
        times: dict[str, set[float]] = {}
        for rows in comm.allgather([(r.path, r.protocol, r.measured_us) for r in report.rows]):
            for path, how, us in rows:
                times.setdefault(f"{path}/{how}", set()).add(us)
        assert all(len(found) == 1 for found in times.values()), times
        check(100, plan)


def test_accumulation_is_measured_without_harm(comm: MPI.Intracomm) -> None:
    """From the second call on the halos are zero: the repeated calls add nothing."""
    with halox.Grid((3 * comm.size,), halo=1, periodic=True, comm=comm, device="cpu") as grid:
        u, v = grid.ones("f8"), grid.ones("f8")
        grid.accumulate(v)
        plan = halox.Plan(grid._plans.make("add", (u,), True, keep=True))
        plan.measure(repeats=3)
        assert np.array_equal(u, v)


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
    found = measure(world, None, carried, 4)
    assert set(found) == {to_all.key, to_half.key} and min(found.values()) > 0
    for channel in (everyone, mine):
        assert channel.started == channel.finished == 1 + 5 * 4
    halves.Free()
    world.close()


def test_the_slowest_rank_counts(comm: MPI.Intracomm) -> None:
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


@pytest.mark.ranks(2, 3)
def test_all_ranks_choose_by_the_file_of_rank_0(comm: MPI.Intracomm, folder: Path) -> None:
    # Each rank has a cache folder with a different table; the folder of the last rank is empty.
    if comm.rank < comm.size - 1:
        calibration.save(HERE, table(10.0 + comm.rank))
    world = World(comm)
    assert agreed_costs(world, HERE) == table(10.0)
    assert agreed_costs(world, Fingerprint("none", "none", "", "")) == Costs.default()
    world.close()


@pytest.mark.ranks(2, 3)
def test_a_bad_file_warns_on_rank_0_only_and_can_be_made_an_error_of_all(
    comm: MPI.Intracomm, folder: Path
) -> None:
    (folder / "halox").mkdir()
    calibration.tuning_file(HERE).write_text("not JSON")
    world = World(comm)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert agreed_costs(world, HERE) == Costs.default()
    assert agree(len(caught) == (1 if comm.rank == 0 else 0), comm)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        raised_by_all(comm, HaloxError, "halox tune", lambda: agreed_costs(world, HERE))
    world.close()
