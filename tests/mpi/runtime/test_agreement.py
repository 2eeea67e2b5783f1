"""Agreement of ranks: objects of all ranks, sums, an error of one rank on all ranks, and handshakes of peers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, HaloxError, MismatchError, raising
from halox.runtime.handshake import handshake
from halox.runtime.status import MOST_NUMBERS, SLOT_BYTES
from halox.runtime.world import World
from tests.mpi.bad_input import raised_by_all
from tests.mpi.conftest import agree

pytestmark = [pytest.mark.ranks(1, 2, 3, 4, 8), pytest.mark.usually(1, 3)]

STEP = "a step of a test"


@pytest.fixture(params=["", "rank"], ids=["one node", "a node each"])
def world(
    request: pytest.FixtureRequest, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setenv("HALOX_NODE", request.param)
    made = World(comm)
    made.begin("a call")
    yield made
    made.close()


def test_places_of_ranks(comm: MPI.Intracomm, world: World) -> None:
    is_apart = len(world.node_ranks) < comm.size
    assert [*world.node_ranks] == ([comm.rank] if is_apart else [*range(comm.size)])
    assert world.nodes == (tuple(range(comm.size)) if is_apart else (0,) * comm.size)
    assert world.machine_rank == comm.rank


def gathered(world: World, mine: object) -> list[object]:
    return [*world.gather(lambda: (None, mine), STEP)[1]]


def total(world: World, *numbers: int) -> list[int]:
    return world.total(lambda: (None, numbers), STEP)[1]


def test_objects_of_any_size(world: World) -> None:
    for size in (0, 1, 200, SLOT_BYTES, SLOT_BYTES + 1, 100_000):
        each = [bytes([rank]) * (size * (rank + 1)) for rank in range(world.size)]
        assert gathered(world, each[world.rank]) == each
        assert gathered(world, None) == [None] * world.size


def test_sums(comm: MPI.Intracomm, world: World) -> None:
    numbers = [1, comm.rank, -(2**40) * comm.rank, 2**62]
    sums = [comm.allreduce(number) for number in numbers]
    sums[3] = (sums[3] + 2**63) % 2**64 - 2**63  # as 64 bits hold it
    for count in range(MOST_NUMBERS + 1):
        assert total(world, *numbers[:count]) == sums[:count]


def test_equal_objects(world: World) -> None:
    """The objects of the other ranks are then not read, so that the cost does not grow with the ranks."""
    for alike in (None, "text", ("a", 1, None), "x" * 2 * SLOT_BYTES):
        _, records = world.gather(lambda: (None, alike), STEP)  # noqa: B023
        assert [*records.distinct] == [alike] and [*records] == [alike] * world.size


@pytest.mark.parametrize("length", [1, 300, SLOT_BYTES + 1])
def test_objects_of_which_one_differs(length: int, world: World) -> None:
    if world.size == 1:
        return
    odd = world.size - 1
    mine = ("y" if world.rank == odd else "x") * length
    wanted = ["x" * length] * odd + ["y" * length]
    for _ in range(3):
        assert gathered(world, mine) == wanted
        assert gathered(world, None if world.rank else mine) == ["x" * length] + [None] * odd


@pytest.mark.parametrize("text", ["wrong here; mend it", "x" * 9000])
@pytest.mark.parametrize("of_all", [False, True])
def test_an_error(text: str, of_all: bool, comm: MPI.Intracomm, world: World) -> None:
    wrong = HaloxError(text) if of_all or comm.rank == comm.size // 2 else None

    def build(result: Any) -> Any:
        raising(wrong)()
        return None, result

    for call in (
        lambda: world.total(lambda: build([1]), STEP),
        lambda: world.total(lambda: build([1]), STEP, alike={"a": 1}),
        lambda: world.attempt(raising(wrong), STEP),
        lambda: world.attempt(lambda: build({"a": 1}), STEP, alike=True),
        lambda: world.gather(lambda: build("mine"), STEP),
    ):
        raised_by_all(comm, HaloxError, text, call)
    assert total(world, 1) == [comm.size]


def test_errors_of_many_ranks_are_told_in_short(comm: MPI.Intracomm, world: World) -> None:
    with pytest.raises(HaloxError) as caught:
        world.attempt(raising(ValueError(f"mine is {comm.rank}")), STEP)
    assert str(caught.value).count("mine is") == min(comm.size, 3)


def test_ranks_in_different_calls(comm: MPI.Intracomm, world: World) -> None:
    """Also where some ranks gather, and the other ranks sum numbers."""
    for gathers in (0, 1) if comm.size > 1 else ():
        is_first = comm.rank == 0
        world.begin("sum" if is_first else "max")
        step = gathered if is_first == gathers else total
        raised_by_all(comm, MismatchError, "rank 0: sum", lambda: step(world, 1))  # noqa: B023
        assert total(world, 1) == [comm.size]


@pytest.mark.parametrize("odd", ["gather", "total"])
def test_ranks_in_different_methods(odd: str, world: World) -> None:
    """One rank gathers where the others only attempt: all raise, and the next step is right."""
    if world.size > 1:
        with pytest.raises(MismatchError, match=odd):
            if world.rank == 1:
                getattr(world, odd)(lambda: (None, [5]), "a test")
            else:
                world.attempt(lambda: None, "a test")
    assert [*world.gather(lambda: (None, world.rank), "a test")[1]] == [*range(world.size)]


@pytest.mark.ranks(2, 3)
def test_a_small_allreduce_takes_one_round(comm: MPI.Intracomm) -> None:
    """One round compares the arguments and moves the values, also for fields."""
    with halox.Grid((4, 3 * comm.size), comm=comm, device="cpu") as grid:
        ones, u, fields = np.ones(SLOT_BYTES // 8), grid.ones(), []
        for call in (
            lambda: grid.allreduce(ones),
            lambda: grid.sum(u),
            lambda: grid.norm(u),
            lambda: grid.dot(u, u),
            lambda: fields.append(grid.zeros_like(u)),
        ):
            call()
            before = grid._world.ranks.rounds
            call()
            assert grid._world.ranks.rounds == before + 1


class Part:
    """A part under construction, which may raise in a round."""

    def __init__(self, world: World, fails: int = -1) -> None:
        self.world, self.fails, self.is_abandoned = world, fails, False
        self.peers = [rank for rank in range(2) if rank != world.rank]

    def abandon(self) -> None:
        self.is_abandoned = True

    def step(self, number: int) -> None:
        if number == self.fails:
            raise FieldError(f"round {number} of rank {self.world.rank}")

    def first(self, told: Any) -> Any:
        self.step(0)
        return {peer: ("first", self.world.rank, peer) for peer in self.peers}

    def second(self, told: Any) -> Any:
        self.step(1)
        assert told == {peer: ("first", peer, self.world.rank) for peer in self.peers}
        return {peer: 100 + self.world.rank for peer in self.peers}

    def last(self, told: Any) -> Any:
        self.step(2)
        return told


ROUNDS: Sequence[Any] = (Part.first, Part.second, Part.last)


@pytest.mark.ranks(2, 3, 4)
def test_handshakes(world: World) -> None:
    """Peers swap records while the other ranks only take part; without peers all ranks gather."""
    part = Part(world) if world.rank < 2 else None
    found = handshake(world, lambda: part, ROUNDS, STEP, peers=lambda part: part.peers)
    assert found == ({1 - world.rank: 101 - world.rank} if part else None)
    rounds: Sequence[Any] = (lambda part, told: part.world.rank, lambda part, told: sum(told))
    assert handshake(world, lambda: Part(world), rounds, STEP) == sum(range(world.size))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_a_handshake_that_fails(fails: int, world: World) -> None:
    part = Part(world, fails if world.rank == 1 else -1) if world.rank < 2 else None
    with pytest.raises(FieldError):
        handshake(world, lambda: part, ROUNDS, STEP, peers=lambda part: part.peers)
    assert agree(part is None or part.is_abandoned, world.comm)
