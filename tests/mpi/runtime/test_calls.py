"""Collective calls that differ between ranks: all ranks raise an error that names the calls, on one node or several."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.cli import launcher
from halox.errors import ExchangeTimeoutError, HaloxError, MismatchError, StateError
from halox.runtime import status
from halox.runtime.world import World
from tests.mpi.conftest import agree
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
    "gather": lambda g, u: g.gather(u),
    "allreduce": lambda g, u: g.allreduce(1.0),
    "plan": lambda g, u: g.plan(u),
    "close": lambda g, u: g.close(),
}
"""Calls, by the names that errors give them."""


@several
@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("sum", "exchange"),
        ("zeros", "exchange"),
        ("sum", "max"),
        ("exchange", "accumulate"),
        ("gather", "allreduce"),
        ("plan", "close"),
    ],
)
def test_first_calls(mine: str, theirs: str, node: str, comm: Comm) -> None:
    """Both calls begin with communication between all ranks: all raise at once, and the grid stays usable."""
    grid = box(comm)
    u = grid.zeros()
    others = "rank 1" if comm.size == 2 else "ranks 1, 2"
    text = rf"rank 0: {mine} \(call 3\), {others}: {theirs} \(call 3\)"
    with pytest.raises(MismatchError, match=text):
        CALLS[mine if comm.rank == 0 else theirs](grid, u)
    check_works(grid)
    grid.close()


@several
@pytest.mark.parametrize("theirs", ["sum", "accumulate", "zeros"])
def test_calls_that_have_been_made_before(
    theirs: str, node: str, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that wait for flags or messages detect the mismatch long before HALOX_TIMEOUT; the grid stays broken."""
    monkeypatch.setenv("HALOX_TIMEOUT", "60")
    grid = box(comm)
    u = grid.zeros()
    for _ in range(2):
        grid.exchange(u)
        grid.accumulate(u)
    began = time.monotonic()
    with pytest.raises(MismatchError):
        CALLS["exchange" if comm.rank == 0 else theirs](grid, u)
    assert agree(time.monotonic() - began < 50, comm)
    with pytest.raises(HaloxError):
        grid.gather(u)
    comm.Barrier()
    with box(comm) as another:
        check_works(another)


@several
def test_fields_in_another_order(node: str, comm: Comm) -> None:
    with box(comm) as grid:
        u, v = grid.zeros(), grid.zeros()
        text = r"argument 0 is field number 1 of the grid on rank 0, number 2 on rank \d"
        with pytest.raises(MismatchError, match=text):
            grid.exchange(u if comm.rank == 0 else v)
        grid.exchange(u)
        grid.exchange(v)
        check_works(grid)


@several
def test_a_plan_on_one_rank_alone(node: str, comm: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_TIMEOUT", "60")
    grid = box(comm)
    u = grid.zeros()
    plan = grid.plan(u)
    plan()
    with pytest.raises(MismatchError):
        plan() if comm.rank == 0 else grid.norm(u)


@several
def test_plans_started_in_another_order(node: str, comm: Comm) -> None:
    """Ranks may start their plans in different orders."""
    with box(comm) as grid:
        fields = [grid.full(comm.rank + 0.5 * n) for n in range(2)]
        plans = [grid.plan(field) for field in fields]
        for _ in range(20):
            order = plans if comm.rank == 0 else plans[::-1]
            for plan in order:
                plan.start()
            for plan in plans:
                plan.finish()
        left = (comm.rank - 1) % comm.size
        assert agree(all((f[0, 1:-1] == left + 0.5 * n).all() for n, f in enumerate(fields)), comm)


@pytest.mark.ranks(2)
def test_a_long_wait_is_told_once(
    node: str,
    comm: Comm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    has_told = Path(comm.bcast(tmp_path)) / "has told"
    tell = status.CallWatch._print_notice

    def tell_and_note(self: status.CallWatch, *given: Any) -> None:
        tell(self, *given)
        has_told.touch()

    with box(comm) as grid:
        u = grid.zeros()
        grid.exchange(u)
        comm.Barrier()
        with monkeypatch.context() as patch:
            # Report only the wait for rank 1, however slow the machine is.
            patch.setattr(status, "_NOTICE_S", math.inf if comm.rank else 1.0)
            patch.setattr(status.CallWatch, "_print_notice", tell_and_note)
            if comm.rank == 1:
                assert becomes(has_told.exists)
                time.sleep(1)  # long enough for a second report
            grid.sum(u)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("halox:")]
    told = comm.allgather(said)
    assert [len(lines) for lines in told] == [1, 0], told
    assert "rank 0 has waited" in told[0][0] and "for rank 1 in sum (call 5)" in told[0][0], told
    if not node:
        assert "the last call of rank 1 is exchange (call 4)" in told[0][0], told


@pytest.mark.ranks(2)
def test_the_error_of_a_timeout_says_where_the_other_is(node: str, comm: Comm) -> None:
    grid = box(comm)
    u = grid.zeros()
    grid.exchange(u)
    if comm.rank == 0:
        where = (
            r"rank 1 has not arrived" if node else r"the last call of rank 1 is exchange \(call 4\)"
        )
        text = rf"in norm \(call 5\), {where}"
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
            grid.norm(u)
        with pytest.raises(StateError):
            grid.norm(u)
        grid.close()
    comm.Barrier()


@pytest.mark.ranks(2)
def test_a_rank_that_has_no_communicator_to_tell_the_others_by(comm: Comm) -> None:
    """A rank with a bad argument raises alone; the error of the other rank's timeout names the call and the object."""
    own, grid = comm.Dup(), box(comm)
    makings: dict[str, Callable[[Any], Any]] = {
        "making an Exchange for rank 1 to do so with the same comm": lambda none: halox.Exchange(
            [], [], comm=none or own
        ),
        r"the making of an FFT of this grid for rank 1 .*in making an FFT \(call 2\)": lambda none: (
            halox.FFT(none or grid)
        ),
    }
    for text, make in makings.items():
        if comm.rank == 0:
            with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
                make(None)
        else:
            refused = "comm must be .*, got int" if "Exchange" in text else "grid must be .*, got 3"
            with pytest.raises(HaloxError, match=refused):
                make(3)
        comm.Barrier()


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


# Objects and errors that ranks send one another


def test_objects_of_any_size(node: str, comm: Comm) -> None:
    world = World(comm)
    for size in (0, 1, 200, 3000, 3584, 10_000, 100_000):
        mine = bytes([comm.rank]) * (size * (comm.rank + 1))
        found = world.gather(mine, "a test")
        assert found == [bytes([r]) * (size * (r + 1)) for r in range(comm.size)]
        assert world.gather(None, "a test") == [None] * comm.size
    world.close()


def test_errors_of_many_ranks_are_told_in_short(comm: Comm) -> None:
    world = World(comm)
    with pytest.raises(HaloxError) as caught:
        world.agree(ValueError(f"mine is {comm.rank}"), "a test")
    text = str(caught.value)
    assert text.count("mine is") == min(comm.size, 3)
    assert ("more errors" in text) == (comm.size > 3)
    world.close()


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("HALOX_TIMEOUT", "soon", "expected a number of seconds >= 0, 0 for no limit"),
        ("HALOX_DEBUG", "off", "expected 1 .* 0 or nothing"),
    ],
)
def test_a_wrong_variable_on_one_rank(
    name: str, text: str, allowed: str, comm: Comm, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(name, text)
    with pytest.raises(HaloxError, match=f"{name}='{text}': {allowed}"):
        halox.Grid((4 * comm.size,), comm=comm, device="cpu")


# Communicators


def halox_mappings() -> int:
    """Return the bytes of halox's shared memory that this process maps."""
    total = 0
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            if "/halox-" in line:
                start, end = (int(part, 16) for part in line.split()[0].split("-"))
                total += end - start
    return total


def test_all_objects_use_one_duplicate(node: str, comm: Comm) -> None:
    own = comm.Dup()
    first = halox.Grid((4 * comm.size,), comm=own, device="cpu")
    duplicate = first.comm
    for number in range(20):
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
    first.close()
    own.Free()
    assert duplicate == MPI.COMM_NULL


def test_a_communicator_may_be_freed_before_its_grid(node: str, comm: Comm) -> None:
    own = comm.Dup()
    grid = halox.Grid((4 * comm.size,), comm=own, device="cpu", periodic=True)
    duplicate = grid.comm
    own.Free()
    u = grid.full(comm.rank)
    grid.exchange(u)
    assert u[0] == (comm.rank - 1) % comm.size
    grid.close()
    assert duplicate == MPI.COMM_NULL


@several
def test_two_grids_in_another_order(node: str, comm: Comm) -> None:
    own = comm.Dup()
    grids = [halox.Grid((4 * comm.size,), comm=own, device="cpu") for _ in range(2)]
    fields = [grid.ones() for grid in grids]
    for grid, field in zip(grids, fields, strict=True):
        grid.exchange(field)
    order = (1, 0) if comm.rank == 1 else (0, 1)
    with pytest.raises(MismatchError) as caught:
        for number in order:
            grids[number].exchange(fields[number])
            grids[number].sum(fields[number])
    assert "numbered in the order of their construction" in str(caught.value)
    own.Barrier()


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
    own.Barrier()


@several
def test_a_communicator_that_has_failed_is_not_used_again(comm: Comm) -> None:
    own = comm.Dup()
    grid = halox.Grid((4 * comm.size,), comm=own, device="cpu")
    failed = grid._world.ranks
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            grid.sum(np.ones(grid.padded_shape))
    comm.Barrier()
    del grid
    with halox.Grid((4 * comm.size,), comm=own, device="cpu") as another:
        assert another._world.ranks is not failed
        u = another.ones()
        another.exchange(u)
        assert another.sum(u) == 4 * comm.size


@several
def test_a_failed_call_ends_all_grids_on_the_communicator(node: str, comm: Comm) -> None:
    own = comm.Dup()
    first, second = (halox.Grid((4 * comm.size,), comm=own, device="cpu") for _ in range(2))
    u = second.ones()
    if comm.rank == 0:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            first.sum(np.ones(first.padded_shape))
        with pytest.raises(StateError):
            second.sum(u)
    comm.Barrier()
    if comm.rank != 0:
        # Between nodes the record of the failed call arrives: the grids differ.
        text = "rank 0, where a call has failed|rank 0: sum on grid 1 .* sum on grid 2"
        with pytest.raises((ExchangeTimeoutError, MismatchError), match=text):
            second.sum(u)
    comm.Barrier()
    for grid in (first, second):
        grid.close()
    with halox.Grid((4 * comm.size,), comm=own, device="cpu") as another:
        assert another.sum(another.ones()) == 4 * comm.size


def test_a_closed_grid_returns_its_memory_beside_an_open_one(node: str, comm: Comm) -> None:
    own = comm.Dup()
    with halox.Grid((4 * comm.size,), comm=own, device="cpu", periodic=True) as small:
        u = small.ones()
        small.exchange(u)
        before = halox_mappings()
        for _ in range(3):
            shape, blocks = (1 << 20, 4 * comm.size), (1, comm.size)
            with halox.Grid(shape, halo=1, comm=own, device="cpu", proc_shape=blocks) as large:
                v = large.ones()
                large.exchange(v)
                del v
                gc.collect()
        assert halox_mappings() - before < 16 << 20
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
