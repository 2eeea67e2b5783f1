"""A path is one object, registered once: the toy path is selected, explained, listed, tuned and used."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import paths
from halox.cli import info, probing, tune
from halox.cli import paths as matrix
from halox.errors import ExchangeTimeoutError, HaloxError, PathError
from halox.paths.base import (
    Build,
    Candidate,
    ChannelMessages,
    Job,
    MessageEnds,
    Protocol,
)
from halox.paths.messages import Message
from halox.plans.calibration import Fingerprint, load, tuning_file
from halox.plans.costs import Costs
from halox.plans.making import NODE_MEMORY_IS_FULL
from tests.limits import fill_shared_memory
from tests.mpi.conftest import agree
from tests.mpi.paths.toy_path import ToyPath

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture(autouse=True)
def toy() -> Iterator[ToyPath]:
    yield from registered(ToyPath())


def registered(path: ToyPath) -> Iterator[ToyPath]:
    paths.register(path)
    yield path
    del paths.PATHS[path.name]
    paths.HOST_PATHS.pop(path.name, None)


def grid_of(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    return halox.Grid(
        (4 * comm.size, 6),
        periodic=True,
        proc_shape=(comm.size, 1),
        comm=comm,
        device="cpu",
        **options,
    )


@pytest.mark.parametrize("wish", ["toy", "toy/bytes"])
def test_it_is_exchanged_over_when_asked_for(wish: str, toy: ToyPath, comm: MPI.Intracomm) -> None:
    with grid_of(comm, path=wish) as grid:
        u, v = grid.full(-1.0, "f8"), grid.full(-1, "i2")
        plan = grid.plan(u, v)
        for step in range(3):
            grid.interior(u)[...] = grid.interior(v)[...] = 10 * comm.rank + step
            plan()
            low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            assert (u[0] == 10 * low + step).all() and (u[-1] == 10 * high + step).all()
            assert (v[0] == 10 * low + step).all() and (v[-1] == 10 * high + step).all()
            assert (u[1:-1] == 10 * comm.rank + step).all()
        assert [channel.starts for channel in toy.made] == [3]
        rows = plan.explain().rows
        far = [row for row in rows if row.peer != comm.rank]
        assert {(row.path, row.protocol) for row in far} == {("toy", "bytes")}
        assert {row.path for row in rows if row.peer == comm.rank} <= {"local"}
        send = next(row for row in far if row.direction == "send")
        said = f"somebody wants to play, toy of rank {comm.rank} to toy of rank {send.peer}"
        assert send.reason == said and "toy/bytes" in str(plan.explain())
        assert all(row.measured_us for row in plan.measure(2).rows if row.path == "toy")


def test_it_is_left_alone_otherwise(comm: MPI.Intracomm) -> None:
    with grid_of(comm) as grid:
        rows = grid.plan(grid.zeros("f8")).explain().rows
        assert {row.path for row in rows} <= {"host", "local"}
        assert all("toy" not in row.why_not for row in rows), "it is possible, but slower"


def test_it_says_why_it_cannot(comm: MPI.Intracomm) -> None:
    with grid_of(comm, path="toy") as grid:
        with pytest.raises(PathError) as caught:
            grid.accumulate(grid.zeros("f8"))
        assert "take one of host/" in str(caught.value)


def test_it_has_a_name(comm: MPI.Intracomm) -> None:
    for name in ("toy/bricks", "pigeon"):
        with pytest.raises(PathError):
            grid_of(comm, path=name)


def test_it_is_listed(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    for why_no_gpu in ("no GPU", None):
        assert info.summaries_of_paths(why_no_gpu)["toy"] == ToyPath.summary
    monkeypatch.setenv("HALOX_PATH", "toy")
    hops = matrix.collect(comm)
    if hops is not None:
        figures = matrix.figures_of(comm.size, hops)
        for a in range(comm.size):
            for b in range(comm.size):
                assert figures["rows"][a][str(b)] == ("local/copy" if a == b else "toy/bytes")


def test_it_is_tuned(
    comm: MPI.Intracomm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``halox tune`` measures the path and stores its constants, which then predict costs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(comm.bcast(tmp_path)))
    monkeypatch.setattr(probing, "LARGE_BYTES", 1 << 18)
    monkeypatch.setattr(probing, "_ROW_US", 100.0)
    args = argparse.Namespace(device="cpu", dry_run=False, json=True)
    assert probing.tuned_protocols("host") == ["toy/bytes"]
    assert "toy/bytes" not in probing.tuned_protocols("gpu")
    assert tune.tune_on_ranks(args, comm) == 0
    said = capsys.readouterr().out
    if comm.rank == 0:
        figures = json.loads(said)
        assert [(row["protocol"], row["constants"]) for row in figures["rows"]] == [
            ("toy/bytes", "after")
        ]
        fingerprint = Fingerprint(
            figures["gpu"], figures["driver"], figures["topology"], figures["mpi"]
        )
        costs = load(fingerprint)
        assert costs is not None and tuning_file(fingerprint).exists()
        assert not Costs.default().knows("toy", "bytes") and costs.knows("toy", "bytes")
        assert (
            0
            < costs.predict("toy", "bytes", 1 << 10, 8)
            < costs.predict("toy", "bytes", 1 << 24, 8)
        )
    comm.Barrier()


class CarryingPath(ToyPath):
    name = "carrying"
    protocols = (Protocol("bytes", fallback="toy/bytes"),)

    def carries_copies(self, job: Job, copies: Job) -> bool:
        assert job.messages and copies.messages and not set(job.peers) & set(copies.peers)
        return True

    def channels(self, build: Build, agreed: Any) -> list[ChannelMessages]:
        assert build.links[self.name] is not None
        messages = {m.key for job in (build.job(self), build.carried(self)) for m in job.messages}
        job = build.whole.only(lambda m: m.key in messages)
        return [self.channel(build, job)]


@pytest.fixture
def carrying() -> Iterator[ToyPath]:
    yield from registered(CarryingPath())


def test_its_channel_carries_messages_of_a_rank_to_itself(
    carrying: ToyPath, comm: MPI.Intracomm
) -> None:
    with grid_of(comm, path="carrying") as grid:
        u = grid.full(-1.0, "f8")
        plan = grid.plan(u)
        grid.interior(u)[...] = comm.rank
        plan()
        assert agree(bool((u[1:-1, [0, -1]] == comm.rank).all()), comm)
        rows = plan.explain().rows
        assert {(row.peer == comm.rank, row.path) for row in rows} == {
            (True, "local"),
            (False, "carrying"),
        }
        (channel,) = carrying.made
        assert {m.key for m in channel.job.messages} == {row.key for row in rows}


def test_another_path_replaces_it_if_shared_memory_is_full(
    carrying: ToyPath, toy: ToyPath, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_shared_memory(monkeypatch)
    with grid_of(comm.Dup(), path="carrying") as grid:  # without shared memory yet
        plan = grid.plan(np.zeros(grid.padded_shape))
        rows = [row for row in plan.explain().rows if row.peer != comm.rank]
        assert {(row.path, row.reason) for row in rows} == {("toy", NODE_MEMORY_IS_FULL)}
        (channel,) = toy.made
        assert {m.key for m in channel.job.messages} == {row.key for row in rows}
        assert not carrying.made


def test_it_works_beside_other_paths(comm: MPI.Intracomm) -> None:
    with grid_of(comm) as grid:
        u = grid.full(float(comm.rank), "f8")
        toy, host = grid.plan(u, path="toy"), grid.plan(u, path="host")
        for plan in (toy, host, toy):
            u[0] = u[-1] = -1.0
            plan.start()
            plan.finish()
            assert agree(bool((u[0] == (comm.rank - 1) % comm.size).all()), comm)


class WrongPath(ToyPath):
    """Raises on the last rank in the method ``step``."""

    name = "wrong"
    step = ""

    def describe(self, message: Message, arrays: Any, context: Any, *, relocatable: bool) -> str:
        self.fail("describe")
        return super().describe(message, arrays, context, relocatable=relocatable)

    def candidates(self, ends: MessageEnds) -> list[Candidate] | str:
        self.fail("candidates")
        return super().candidates(ends)

    def channels(self, build: Build, agreed: Any) -> list[ChannelMessages]:
        self.fail("channels")
        return super().channels(build, agreed)

    def fail(self, step: str) -> None:
        if step == self.step and MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
            raise ZeroDivisionError("of the path")


@pytest.mark.parametrize("step", ["describe", "candidates", "channels"])
def test_an_error_of_its_code_on_one_rank_is_raised_on_all(step: str, comm: MPI.Intracomm) -> None:
    path = WrongPath()
    for _ in registered(path):
        path.step = step
        with grid_of(comm, path="wrong") as grid:
            u = grid.ones()
            with pytest.raises(HaloxError, match="ZeroDivisionError: of the path") as raised:
                grid.exchange(u)
            assert not isinstance(raised.value, ExchangeTimeoutError)
            path.step = ""
            grid.exchange(u)
