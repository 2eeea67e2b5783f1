"""The benchmarks between ranks: every method is right, and a wrong result is never timed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox import paths
from halox.errors import HaloxError
from halox.exchange.plan import Plan
from halox_bench.common.attempt import attempt
from halox_bench.common.rows import STREAM
from halox_bench.exchange import run as exchange_run
from halox_bench.exchange.baselines import (
    BY_HAND,
    MPI_NEIGHBOUR,
    MPI_TYPES,
    ByHand,
    MpiNeighbour,
    MpiTypes,
)
from halox_bench.exchange.cases import ExchangeCase
from halox_bench.exchange.run import ExchangeBench, PreparedExchange
from halox_bench.ranks import clock
from halox_bench.ranks.bench import Options
from halox_bench.ranks.clock import RanksClock, Stage, Timing
from tests.mpi.capturing import Capturing
from tests.mpi.toy_path import ToyPath

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(2)]

BRIEF = Timing(batches=1, batch_s=1e-5)
OPTIONS = Options("cpu", timing=BRIEF)
OURS = ("selected", "host", "scatter_gather")

CASES = [
    ExchangeCase((6,), "x", 3),
    ExchangeCase((4, 6), "all"),
    ExchangeCase((4, 5, 6), "x", 2, "f4"),
    ExchangeCase((4, 5, 6), "z", fields=2),
    ExchangeCase((4, 5, 6), "faces", 1, "c16", 2),
    ExchangeCase((4, 5, 6), "all", 2, "i1", 2, outer=True),
    ExchangeCase((3, 4, 3, 4), "all", 1, "c8", 1, (3,)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_method_is_right(case: ExchangeCase, comm: MPI.Intracomm) -> None:
    rows = ExchangeBench(comm, OPTIONS).measure(case)
    assert [row.name for row in rows] == [*OURS, BY_HAND, MPI_TYPES, MPI_NEIGHBOUR]
    for row in rows:
        assert row.checked and row.us is not None and row.us > 0, row.error
        assert set(row.beside) == {BY_HAND, MPI_TYPES, MPI_NEIGHBOUR}
        assert row.proc_shape == case.proc_shape(comm.size)
    assert len(set(comm.allgather(rows[0].us))) == 1, "one figure for all ranks"


@pytest.mark.ranks(2, 3)
def test_every_registered_path_is_measured(comm: MPI.Intracomm) -> None:
    paths.register(ToyPath())
    try:
        rows = ExchangeBench(comm, OPTIONS).measure(ExchangeCase((4, 6), "x"))
    finally:
        del paths.PATHS["toy"]
    assert [row.name for row in rows] == [
        *OURS,
        "toy",
        BY_HAND,
        MPI_TYPES,
        MPI_NEIGHBOUR,
    ]
    toy = rows[3]
    assert toy.us and toy.checked and toy.kind == "path" and toy.path.startswith("toy/")


def spoil_last(comm: MPI.Intracomm, array: np.ndarray) -> None:
    if comm.rank == comm.size - 1:
        array[(-1,) * array.ndim] += 1


@pytest.mark.parametrize("baseline", [ByHand, MpiTypes, MpiNeighbour])
def test_one_wrong_value_on_one_rank_leaves_no_figure(
    baseline: Any, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Callable[..., None] = baseline.__init__
    exchange: Callable[[Any], None] = baseline.__call__

    def remember(self: Any, comm: Any, near: Any, fields: Any) -> None:
        made(self, comm, near, fields)
        self.fields = fields

    def wrong(self: Any) -> None:
        exchange(self)
        spoil_last(comm, self.fields[0])

    monkeypatch.setattr(baseline, "__init__", remember)
    monkeypatch.setattr(baseline, "__call__", wrong)
    rows = ExchangeBench(comm, OPTIONS).measure(ExchangeCase((4, 4, 4), "all"))
    (spoilt,) = [row for row in rows if row.name == baseline.name]
    assert spoilt.failed and spoilt.us is None and not spoilt.checked
    assert "wrong result: 1 values" in spoilt.error
    assert all(row.us for row in rows if row is not spoilt), "the others go on"
    assert all(baseline.name not in row.beside for row in rows)


def test_halox_is_checked_as_well(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plan, "__call__", lambda self: None)
    rows = ExchangeBench(comm, OPTIONS).measure(ExchangeCase((4, 4), "x"))
    failed = {row.name for row in rows if row.failed}
    assert failed == set(OURS)
    assert STREAM in {row.mode for row in rows if row.us}


def test_values_of_the_exchange_before_are_wrong(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange: Callable[[Any], None] = MpiTypes.__call__

    def only_once(self: Any) -> None:
        if not getattr(self, "done", False):
            exchange(self)
        self.done = True

    monkeypatch.setattr(MpiTypes, "__call__", only_once)
    rows = ExchangeBench(comm, OPTIONS).measure(ExchangeCase((4, 4), "x"))
    (spoilt,) = [row for row in rows if row.name == MPI_TYPES]
    assert spoilt.failed and "in exchange 2 of" in spoilt.error


def test_large_cases_are_left_out(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_run, "MOST_HOST_BYTES", 1000)
    (row,) = ExchangeBench(comm, OPTIONS).measure(ExchangeCase((64, 64), "x"))
    assert row.us is None and not row.failed and "left out" in row.error


def test_the_slowest_rank_counts(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now))
    slow = 5e-3 if comm.rank == comm.size - 1 else 1e-4
    found = RanksClock(comm, Stage(), Timing(batches=3, batch_s=1e-3)).measure(
        {"slow": lambda: work(slow), "quick": lambda: work(2e-4)}
    )
    assert found == pytest.approx({"slow": 5000, "quick": 200})
    assert comm.allgather(found["slow"]) == [found["slow"]] * comm.size


def test_a_failure_on_one_rank_fails_on_all(comm: MPI.Intracomm) -> None:
    def work() -> int:
        if comm.rank == comm.size - 1:
            raise HaloxError("not here")
        return 1

    result, error = attempt(comm, work)
    assert result is None and "not here" in str(error)
    assert attempt(comm, lambda: 2) == (2, None)


@pytest.mark.parametrize("trouble", ["", "refuse", "spoil"])
def test_graphs(trouble: str, comm: MPI.Intracomm) -> None:
    bench = ExchangeBench(comm, Options("cpu", ("host",), (), timing=BRIEF))
    bench.stage = stage = Capturing()
    bench.clock = RanksClock(comm, stage, BRIEF)
    with PreparedExchange(bench, ExchangeCase((4, 5), "all")) as prepared:
        stage.refuse = "the host is needed" if trouble == "refuse" else ""
        stage.spoil = prepared.own_arrays[0] if trouble == "spoil" and comm.rank == 0 else None
        rows = prepared.rows()
    assert [(row.name, row.mode) for row in rows] == [
        (name, mode) for mode in ("stream", "graph") for name in ("selected", "host")
    ]
    assert all(row.us for row in rows if row.mode == "stream")
    for row in rows[2:]:
        assert bool(row.us) is (not trouble) and row.failed is (trouble == "spoil")
        if trouble == "refuse":
            assert "the host is needed" in row.error
        elif trouble == "spoil":
            assert "wrong result: 1 values" in row.error
