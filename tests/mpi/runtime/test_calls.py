"""Collective calls that differ between ranks: all ranks raise an error that names the calls, on one node or several."""

from __future__ import annotations

import _thread
import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.cli import launcher
from halox.errors import ExchangeTimeoutError, HaloxError, MismatchError, StateError
from halox.runtime import status
from tests.mpi.bad_input import raised_by_all
from tests.mpi.conftest import agree, come_together, mapped_bytes
from tests.mpi.limits import short_waits
from tests.support import ROOT, becomes

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(2)]

Comm = MPI.Intracomm
Call = Callable[[halox.Grid, Any], Any]

several = pytest.mark.ranks(2, 3)


@pytest.fixture(params=["", "rank"], ids=["one node", "a node each"])
def node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("HALOX_NODE", request.param)
    return str(request.param)


def box(comm: Comm, **options: Any) -> halox.Grid:
    options = {"periodic": True, "device": "cpu", "proc_shape": (comm.size, 1)} | options
    return halox.Grid((4 * comm.size, 6), comm=comm.Dup(), **options)


def check_works(grid: halox.Grid) -> None:
    u = grid.full(float(grid.rank))
    grid.exchange(u)
    assert (u[0, 1:-1] == (grid.rank - 1) % grid.size).all()
    assert grid.sum(u) == 24.0 * sum(range(grid.size))


CALLS: dict[str, Call] = {
    "sum": lambda g, u: g.sum(u),
    "max": lambda g, u: g.max(u),
    "zeros": lambda g, u: g.zeros(),
    "exchange": lambda g, u: g.exchange(u),
    "accumulate": lambda g, u: g.accumulate(u),
    "plan": lambda g, u: g.plan(u),
    "close": lambda g, u: g.close(),
}
"""Calls, by the names that errors give them."""


@several
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [("sum", "exchange"), ("zeros", "accumulate"), ("sum", "max"), ("plan", "close")],
)
def test_first_calls(mine: str, theirs: str, node: str, comm: Comm) -> None:
    """Both calls begin with communication between all ranks: all raise at once, and the grid stays usable."""
    grid = box(comm)
    u = grid.zeros()
    call = CALLS[mine if comm.rank == 0 else theirs]
    error = raised_by_all(comm, MismatchError, f"rank 0: {mine}", lambda: call(grid, u))
    assert f"{theirs} (call 3)" in str(error)
    check_works(grid)
    grid.close()


@several
@pytest.mark.parametrize(
    ("mine", "theirs"), [("exchange", "sum"), ("exchange", "accumulate"), ("plan", "sum")]
)
@pytest.mark.parametrize("limit", ["60", "0"], ids=["limit", "no limit"])
@pytest.mark.part(3)
def test_calls_that_have_been_made_before(
    mine: str, theirs: str, limit: str, node: str, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for flags or messages detect the mismatch long before HALOX_TIMEOUT; the grid stays broken."""
    monkeypatch.setenv("HALOX_TIMEOUT", limit)
    grid = box(comm)
    u = grid.zeros()
    plan = grid.plan(u)
    for _ in range(2):
        grid.exchange(u)
        grid.accumulate(u)
        plan()
    began = time.monotonic()
    with pytest.raises(MismatchError):
        if comm.rank == 0 and mine == "plan":
            plan()
        else:
            CALLS[mine if comm.rank == 0 else theirs](grid, u)
    assert agree(time.monotonic() - began < 50, comm)
    with pytest.raises(HaloxError):
        grid.gather(u)
    come_together(comm)
    with box(comm) as another:
        check_works(another)


@several
def test_an_interrupt_of_one_rank(node: str, comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call; the other ranks then raise an error also without a limit, and a new grid works on all ranks."""
    monkeypatch.setenv("HALOX_TIMEOUT", "0")
    grid = box(comm)
    u = grid.zeros()
    if comm.rank == 0:
        threading.Timer(0.3, _thread.interrupt_main).start()
        with pytest.raises(KeyboardInterrupt):
            grid.sum(u)
    come_together(comm)
    with pytest.raises(StateError if comm.rank == 0 else ExchangeTimeoutError):
        for _ in range(2):  # rank 0 may have sent its part of the first sum
            grid.sum(u)
    come_together(comm)
    with box(comm) as another:
        check_works(another)


@pytest.mark.ranks(2)
def test_a_long_wait_is_told_once(
    comm: Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path(comm.bcast(tmp_path)) / f"told by {comm.rank}"
    told = file.with_name("told by 0")
    with box(comm) as grid, file.open("w", buffering=1) as stream, redirect_stderr(stream):
        u = grid.zeros()
        grid.exchange(u)
        come_together(comm)
        with monkeypatch.context() as patch:
            # Report only the wait for rank 1, however slow the machine is.
            patch.setattr(status, "_NOTICE_S", math.inf if comm.rank else 0.4)
            if comm.rank == 1:
                assert becomes(lambda: "halox:" in told.read_text())
                time.sleep(0.5)  # long enough for a second report
            grid.sum(u)
    said = [line for line in file.read_text().splitlines() if line.startswith("halox:")]
    assert len(said) == 1 - comm.rank, said
    if comm.rank == 0:
        assert "for rank 1 in sum (call 5)" in said[0] and "exchange (call 4)" in said[0], said


@pytest.mark.ranks(2)
def test_the_error_of_a_timeout_says_where_the_other_is(node: str, comm: Comm) -> None:
    grid = box(comm)
    u = grid.zeros()
    grid.exchange(u)
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError) as caught:
            grid.norm(u)
        where = "has not arrived" if node else "exchange (call 4)"
        assert "norm (call 5)" in str(caught.value) and where in str(caught.value)
        with pytest.raises(StateError):
            grid.norm(u)
        grid.close()
    come_together(comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [halox.FFT, lambda grid: halox.Exchange([], [], comm=grid)])
def test_a_rank_that_has_no_communicator_to_tell_the_others_by(
    make: Callable[[Any], Any], comm: Comm
) -> None:
    """A rank with a bad argument raises alone; the error of the other rank's timeout names the call."""
    grid = box(comm)
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=r"making an .* rank 1"):
            make(grid if make is halox.FFT else grid.comm)
    else:
        with pytest.raises(HaloxError):
            make(object())
    come_together(comm)


def test_the_log_of_calls(
    comm: Comm, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HALOX_DEBUG", "1")
    with box(comm) as grid:
        u = grid.zeros("f4")
        for _ in range(2):
            grid.exchange(u)
        grid.sum(u)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("halox ")]
    calls = [line.partition(": ")[2].partition(" (call")[0] for line in said]
    assert calls == [
        "making a grid",
        "zeros 'f4'",
        "exchange",
        *["exchange by plan 1"] * 2,
        "sum",
        "close",
    ], said
    assert all(f"rank {comm.rank} of {comm.size}" in line for line in said)


# Communicators


@pytest.mark.parametrize("frees_first", [False, True])
def test_all_objects_use_one_duplicate(frees_first: bool, node: str, comm: Comm) -> None:
    """It is freed with the user's communicator, or with the last object on it."""
    own = comm.Dup()
    first = halox.Grid((4 * comm.size,), comm=own, device="cpu", periodic=True)
    duplicate = first.comm
    for number in range(4):
        grid = halox.Grid((4 * comm.size,), comm=own, device="cpu", periodic=bool(number % 2))
        assert grid.comm == duplicate
        u = grid.full(comm.rank)
        grid.exchange(u)
        if number % 3:
            grid.close()
        del grid, u
        gc.collect()
    with halox.Allreduce(own, 3, "f8", device="cpu") as reduce:
        reduce(np.ones(3))
    with halox.Grid((4 * comm.size,), comm=duplicate, device="cpu") as on_duplicate:
        assert on_duplicate.comm == duplicate
    if frees_first:
        own.Free()
        u = first.full(comm.rank)
        first.exchange(u)
        assert u[0] == (comm.rank - 1) % comm.size
        first.close()
    else:
        first.close()
        own.Free()
    assert duplicate == MPI.COMM_NULL


@several
@pytest.mark.part(2)
def test_two_grids_in_another_order(node: str, comm: Comm) -> None:
    own = comm.Dup()
    grids = [halox.Grid((4 * comm.size,), comm=own, device="cpu") for _ in range(2)]
    fields = [grid.ones() for grid in grids]
    for grid, field in zip(grids, fields, strict=True):
        grid.exchange(field)
    order = (1, 0) if comm.rank == 1 else (0, 1)
    with pytest.raises(MismatchError, match="grid 2"):
        for number in order:
            grids[number].exchange(fields[number])
            grids[number].sum(fields[number])
    come_together(own)


@several
def test_a_grid_that_one_rank_makes_alone(node: str, comm: Comm) -> None:
    """The other ranks are in a call on another grid: the mismatch is found long before the time limit."""
    own = comm.Dup()
    grid = halox.Grid((4 * comm.size,), comm=own, device="cpu")
    with pytest.raises(MismatchError):
        if comm.rank == 0:
            halox.Grid((4 * comm.size,), comm=own, device="cpu")
        else:
            grid.sum(np.ones(grid.padded_shape))
    come_together(own)


@several
@pytest.mark.part(2)
def test_a_failed_call_ends_all_grids_on_the_communicator(node: str, comm: Comm) -> None:
    own = comm.Dup()
    first, second = (halox.Grid((4 * comm.size,), comm=own, device="cpu") for _ in range(2))
    u = second.ones()
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            first.sum(np.ones(first.padded_shape))
        with pytest.raises(StateError):
            second.sum(u)
    come_together(comm)
    if comm.rank != 0:
        # Between nodes the record of the failed call arrives: the grids differ.
        with pytest.raises((ExchangeTimeoutError, MismatchError), match="rank 0"):
            second.sum(u)
    come_together(comm)
    for grid in (first, second):
        grid.close()
    with halox.Grid((4 * comm.size,), comm=own, device="cpu") as another:
        assert another.sum(another.ones()) == 4 * comm.size


def test_a_closed_grid_returns_its_memory_beside_an_open_one(node: str, comm: Comm) -> None:
    own = comm.Dup()
    with halox.Grid((4 * comm.size,), comm=own, device="cpu", periodic=True) as small:
        u = small.ones()
        small.exchange(u)
        before = mapped_bytes()
        for _ in range(3):
            shape, blocks = (1 << 18, 4 * comm.size), (1, comm.size)
            with halox.Grid(shape, halo=1, comm=own, device="cpu", proc_shape=blocks) as large:
                v = large.ones()
                large.exchange(v)
                del v
                gc.collect()
        assert mapped_bytes() - before < 4 << 20
        small.exchange(u)


def test_nothing_is_printed_in_a_plain_run(tmp_path: Any) -> None:
    """The launcher runs with its defaults, without halox's settings; only a test on one rank starts it."""
    if MPI.COMM_WORLD.size > 1:
        return
    script = tmp_path / "quiet.py"
    script.write_text(QUIET)
    environment = launcher.environment(2) | {"PYTHONPATH": str(ROOT)}
    for name in ("OMPI_MCA_osc", "OMPI_MCA_btl"):
        environment.pop(name, None)
    done = subprocess.run(
        [launcher.find().path, "-n", "2", sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


QUIET = """
import halox
for number in range(100):
    with halox.Grid((8, 6), periodic=True, device="cpu") as grid:
        u = grid.ones()
        grid.exchange(u)
        assert grid.sum(u) == 48
"""
