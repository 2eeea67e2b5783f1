"""Copies that neighbours wait for, made by a rank while it waits for something else.

An exchange that reads the neighbours' arrays in place ends when they have read this rank's cells too. If they did so in
their `finish` alone, two plans that are finished in another order on each rank would wait for each other for ever::

    A: p.start | q.start | p.finish: waits for B to read ............ | q.finish
    B: p.start | q.start | q.finish: waits for A to read ............ | p.finish

So a rank that waits makes the copies of the other exchanges that it has started, as soon as their neighbours have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from halox.transports.node import Gate
from halox.world import World


class Helper(ABC):
    """An exchange that is under way."""

    @abstractmethod
    def help(self) -> None:
        """Do now what neighbours may wait for, if it can be done; does not wait."""


UNDER_WAY: dict[Helper, Helper | None] = {}
"""Exchanges between `start` and `finish` that neighbours wait for. Empty in most programs: ask that first."""


def help_until(world: World, ready: Callable[[], bool], what: Callable[[], str]) -> None:
    """Return once ``ready()`` is true, as `Waiter.until`, and meanwhile help the neighbours."""

    def helping() -> bool:
        if ready():
            return True
        for helper in list(UNDER_WAY):
            helper.help()
        return False

    world.waiter().until(helping, what)


def help_at(world: World, gate: Gate, epoch: int, what: str) -> None:
    """Return once every peer's flag has reached an epoch, and meanwhile help the neighbours.

    Parameters
    ----------
    world : World
    gate : Gate
    epoch : int
    what : str
        What the peers are to do, for the text of a timeout.
    """
    help_until(
        world,
        lambda: gate.passed(epoch),
        lambda: f"rank {world.rank} has waited for rank {gate.missing(epoch)[0]} {what}",
    )
