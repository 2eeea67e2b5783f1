"""Construction of an object by several ranks in rounds, such as memory that the ranks map from each other.

Channels of paths, and reductions on GPUs, are made in this way: in each round the ranks exchange addresses or handles
that the next round needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from halox.errors import HaloxError
from halox.runtime.world import World


class Participant(Protocol):
    """Part of one rank in the object under construction."""

    def abandon(self) -> None:
        """Release the resources of this part, after an error that all ranks have raised."""


Mine = TypeVar("Mine", bound=Participant)


def handshake(
    world: World,
    begin: Callable[[], Mine | None],
    rounds: Sequence[Callable[[Mine, Any], Any]],
    step: str,
    peers: Callable[[Mine], Sequence[int]] | None = None,
) -> Any:
    """Construct an object in rounds; all ranks complete a round before any enters the next. Collective.

    ``begin`` returns this rank's part, or None if this rank only takes part in the collectives. Each round takes the
    part and the records of the previous round (None in the first round), and returns new records. With ``peers``, a
    round returns a mapping from peer ranks to records; ``peers(part)`` are the ranks to receive from. Without
    ``peers``, it returns one record, which all ranks receive. The last round returns the result. If a round raises on
    any rank, all ranks raise a `HaloxError` and abandon their parts.
    """
    part: Mine | None = None
    records: Any = None

    def run_round(round_: Callable[[Mine, Any], Any]) -> Any:
        nonlocal part
        if round_ is rounds[0]:
            part = begin()
        return None if part is None else round_(part, records)

    def shared(round_: Callable[[Mine, Any], Any]) -> tuple[None, Any]:
        return None, run_round(round_)

    try:
        for round_ in rounds[:-1]:
            if peers is None:
                _, records = world.gather(partial(shared, round_), step)
            else:
                sent = world.attempt(partial(run_round, round_), step)
                records = world.swap(sent or {}, [] if part is None else peers(part), step)
        return world.attempt(partial(run_round, rounds[-1]), step)
    except HaloxError:
        if part is not None:
            part.abandon()
        raise


def connect(
    world: World,
    peers: Sequence[int],
    begin: Callable[[], Mine],
    records: Callable[[Mine], Mapping[int, Any]],
    open_: Callable[[Mine, Any], Mine],
) -> Mine | None:
    """Construct a channel by one `handshake`: each rank sends a record to each of its peers, and opens theirs.

    A rank without peers returns None. Collective.
    """
    channel: Mine | None = handshake(
        world,
        lambda: begin() if peers else None,
        (lambda mine, _: records(mine), open_),
        "the making of a plan",
        peers=lambda _: peers,
    )
    return channel
