"""Times of exchanges as their ranks see them: many in a row, the slowest rank's, the median of some rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from halox.errors import HaloxError
from halox.exchange.report import Key
from halox.paths.base import Channel
from halox.paths.messages import Message
from halox.runtime.world import World
from halox.values import as_int, shown

STRETCHES = 5
"""Rows of exchanges, of which the median counts."""

MOST_REPEATS = 1_000_000
"""Exchanges in a row at most, which take minutes."""

_MEASURING = "the measuring of a plan"


@dataclass(frozen=True)
class Cargo:
    """What one channel of a plan carries.

    Attributes
    ----------
    name : str
        Of the channel; the same on all ranks that have it, another for every other channel of the plan.
    messages : tuple of Message
        This rank's.
    """

    name: str
    messages: tuple[Message, ...]


class Stopwatch:
    """Measures the channels of a plan apart.

    Parameters
    ----------
    world : World
        The ranks.
    device : int or None
        The GPU that the plan's arrays are on.
    cargoes : sequence of Cargo or None
        For each channel what it carries; None for one that carries nothing.
    """

    def __init__(self, world: World, device: int | None, cargoes: Sequence[Cargo | None]) -> None:
        self._world, self._device, self._cargoes = world, device, tuple(cargoes)

    def check(self, repeats: object) -> int:
        """Return the number of exchanges; raise on all ranks unless all ask for the same; collective."""
        self._world.begin("measure")
        wrong = None
        number = as_int(repeats)
        if number is None or number < 1:
            wrong = HaloxError(f"repeats must be an int >= 1, got {shown(repeats)}")
        elif number > MOST_REPEATS:
            wrong = HaloxError(f"repeats must be {MOST_REPEATS} at most, got {shown(repeats)}")
        asked: list[int] = self._world.gather(number, _MEASURING, wrong)
        if len(set(asked)) > 1:
            raise HaloxError(f"repeats differ between ranks: {asked}; give the same on all ranks")
        return asked[0]

    def measure(self, channels: Sequence[Channel], repeats: int) -> dict[Key, float]:
        """Return for each message the microseconds of an exchange of the channel that carries it.

        Notes
        -----
        Collective; the arrays' contents are exchanged. One channel after the other, in an order that all ranks
        know, since a rank may have some that others have not.
        """
        mine = {
            cargo.name: (channel, cargo)
            for channel, cargo in zip(channels, self._cargoes, strict=True)
            if cargo is not None
        }
        names = sorted(set().union(*self._world.gather(set(mine), _MEASURING)))
        found: dict[Key, float] = {}
        for name in names:
            channel, cargo = mine.get(name, (None, None))
            call = None if channel is None else _exchange_of(channel)
            us = exchange_us(self._world, call, repeats, self._device)
            if cargo is not None:
                found |= {message.key: us for message in cargo.messages}
        return found


def exchange_us(
    world: World,
    call: Callable[[], None] | None,
    repeats: int,
    device: int | None = None,
    stretches: int = STRETCHES,
) -> float:
    """Return the microseconds of one call among many.

    Parameters
    ----------
    world : World
    call : callable or None
        What is timed; None on a rank that has no part in it.
    repeats : int
        Calls in a row between two looks at the clock; on a GPU the row ends when the stream is empty.
    device : int or None
        The GPU whose current stream the calls use.
    stretches : int
        Rows, each after a barrier, of which the median counts.

    Returns
    -------
    float
        The slowest rank's, the same on all ranks.

    Notes
    -----
    Collective over the world.
    """
    wait = _nothing if device is None else _stream_is_empty
    if call is not None:
        call()  # what is done at a first call only
        wait()
    mine = np.zeros(stretches)
    for stretch in range(stretches):
        world.gather(None, _MEASURING)
        if call is None:
            continue
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        wait()
        mine[stretch] = (time.perf_counter() - begin) / repeats * 1e6
    slowest = np.max(world.gather(mine, _MEASURING), axis=0)
    return float(np.median(slowest))


def _exchange_of(channel: Channel) -> Callable[[], None]:
    def exchange() -> None:
        channel.start_at_once()
        channel.finish()

    return exchange


def _nothing() -> None:
    """Wait for nothing: calls on the host are done when they return."""


def _stream_is_empty() -> None:
    from halox.runtime.gpu.cuda import cupy

    cupy().cuda.get_current_stream().synchronize()
