"""Handshake in rounds between ranks that make something together, such as memory that they map of one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from halox.errors import HaloxError
from halox.runtime.world import World


class Participant(Protocol):
    """The part of this rank, under construction."""

    def abandon(self) -> None:
        """Release its resources, after an error that was raised on all ranks."""


Mine = TypeVar("Mine", bound=Participant)


def handshake(
    world: World,
    begin: Callable[[], Mine | None],
    rounds: Sequence[Callable[[Mine, Any], Any]],
    doing: str,
    peers: Callable[[Mine], Sequence[int]] | None = None,
) -> Any:
    """Make something in rounds: all ranks succeed in one before any enters the next; collective over the world.

    ``begin`` returns this rank's part, None on a rank that only takes part in the rounds. A round takes the part and
    the peers' records of the round before (None in the first), and returns records: by rank for the ``peers`` of the
    part, or one for all ranks. The last returns the result. Where one raises, a `HaloxError` is raised on all ranks,
    and parts are abandoned.
    """
    part: Mine | None = None
    told: Any = None

    def take(step: Callable[[Mine, Any], Any]) -> Any:
        nonlocal part
        if step is rounds[0]:
            part = begin()
        return None if part is None else step(part, told)

    try:
        for step in rounds[:-1]:
            if peers is None:
                told = world.gather_result(partial(take, step), doing)
            else:
                said = world.guarded(partial(take, step), doing)
                told = world.swap(said or {}, [] if part is None else peers(part), doing)
        return world.guarded(partial(take, rounds[-1]), doing)
    except HaloxError:
        if part is not None:
            part.abandon()
        raise
