"""Handshakes: peers swap records, and all ranks raise the error of one rank in any round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from mpi4py import MPI

from halox.errors import FieldError
from halox.runtime.handshake import handshake
from halox.runtime.world import World
from tests.mpi.conftest import agree

pytestmark = pytest.mark.ranks(2, 3, 4)


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
        assert told is None
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


def test_peers_swap_and_others_keep_them_company(comm: MPI.Intracomm) -> None:
    world = World(comm)
    part = Part(world) if comm.rank < 2 else None
    found = handshake(world, lambda: part, ROUNDS, "a test", peers=lambda part: part.peers)
    assert found == ({1 - comm.rank: 101 - comm.rank} if part else None)
    world.close()


def test_without_peers_all_gather(comm: MPI.Intracomm) -> None:
    world = World(comm)
    rounds: Sequence[Any] = (lambda part, told: part.world.rank, lambda part, told: sum(told))
    found = handshake(world, lambda: Part(world), rounds, "a test")
    assert found == sum(range(comm.size))
    world.close()


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_all_raise_and_abandon(fails: int, comm: MPI.Intracomm) -> None:
    world = World(comm)
    part = Part(world, fails if comm.rank == 1 else -1) if comm.rank < 2 else None
    with pytest.raises(FieldError):
        handshake(world, lambda: part, ROUNDS, "a test", peers=lambda part: part.peers)
    assert agree(part is None or part.is_abandoned, comm)
    world.close()
