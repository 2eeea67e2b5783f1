"""`World.reduce`: sums of all ranks in one round, and the objects of all ranks only if some differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mpi4py import MPI

from halox.errors import HaloxError, MismatchError
from halox.runtime.communicator import Communicator
from halox.runtime.status import MOST_NUMBERS, SLOT_BYTES
from halox.runtime.world import World
from tests.mpi.conftest import agree

STEP = "a step of a test"


@pytest.fixture(params=["", "rank"])
def world(request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: Any) -> World:
    """Return the world of a call on all ranks, on one node or on a node per rank."""
    monkeypatch.setenv("HALOX_NODE", request.param)
    world = World(comm)
    world.begin("a call")
    return world


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the list of the objects that are read from the records of all ranks."""
    found: list[Any] = []
    for name in ("read", "_read_gathered"):
        real: Callable[..., Any] = getattr(Communicator, name)

        def noted(*given: Any, real: Callable[..., Any] = real) -> Any:
            found.append(real(*given))
            return found[-1]

        monkeypatch.setattr(Communicator, name, noted)
    return found


@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_equal_objects_are_not_read(comm: MPI.Intracomm, world: World, reads: list[Any]) -> None:
    numbers = [1, comm.rank, -(2**40) * comm.rank, 2**62]
    sums = [comm.allreduce(number) for number in numbers]
    sums[3] = (sums[3] + 2**63) % 2**64 - 2**63  # as 64 bits hold it
    for count in range(MOST_NUMBERS + 1):
        for alike in (None, "text", ("a", 1, None), "x" * 2 * SLOT_BYTES):
            assert world.reduce(alike, STEP, numbers[:count]) == (sums[:count], None)
    world.agree(None, STEP)
    world.compare({"argument": 3}, STEP)
    assert not reads
    world.close()


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.parametrize("length", [1, 300, SLOT_BYTES + 1, 3 * SLOT_BYTES])
def test_objects_of_which_one_differs(comm: MPI.Intracomm, world: World, length: int) -> None:
    odd = comm.size - 1
    mine = ("y" if comm.rank == odd else "x") * length
    wanted = ["x" * length] * odd + ["y" * length]
    for _ in range(3):
        assert world.reduce(mine, STEP, [comm.rank]) == ([sum(range(comm.size))], wanted)
        assert world.reduce(None if comm.rank else mine, STEP)[1] == ["x" * length] + [None] * odd
        assert world.gather(mine, STEP) == wanted
    world.close()


@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_an_error_is_raised_on_all_ranks(comm: MPI.Intracomm, world: World) -> None:
    wrong = HaloxError("wrong here; mend it") if comm.rank == comm.size // 2 else None
    where = "" if comm.size == 1 else f"[rank {comm.size // 2}] "
    for call in (
        lambda: world.reduce("alike", STEP, [1], wrong),
        lambda: world.agree(wrong, STEP),
        lambda: world.gather("mine", STEP, wrong),
    ):
        with pytest.raises(HaloxError) as caught:
            call()
        assert agree(str(caught.value) == f"{where}wrong here; mend it", comm)
    assert world.reduce("alike", STEP, [1]) == ([comm.size], None)
    world.close()


@pytest.mark.ranks(2, 3, 4, 8)
def test_ranks_in_different_calls_find_the_mismatch(comm: MPI.Intracomm, world: World) -> None:
    """Also where some ranks gather, and the other ranks reduce."""
    for gathers in (0, 1):
        is_first = comm.rank == 0
        world.begin("sum" if is_first else "max")
        step = world.gather if is_first == gathers else world.reduce
        with pytest.raises(MismatchError) as caught:
            step("alike", STEP)
        assert "rank 0: sum (call" in str(caught.value) and ": max (call" in str(caught.value)
        assert world.reduce("alike", STEP, [1]) == ([comm.size], None)
    world.close()
