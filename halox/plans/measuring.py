"""Measured times of exchanges: many exchanges in a row, the slowest rank's time, the median of several rows.

`Plan.measure` uses `measure`, and ``halox tune`` uses `exchange_us`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from halox.errors import HaloxError, raising
from halox.paths.base import Channel, ChannelMessages, Key
from halox.runtime.world import World
from halox.values import as_int, shown

ROWS = 5
"""Rows of exchanges; the result is their median."""

MOST_REPEATS = 1_000_000
"""Most exchanges in a row; they take minutes."""

_MEASURING = "the measuring of a plan"


def check_repeats(world: World, repeats: object) -> int:
    """Return the number of exchanges; raise on all ranks unless all ranks ask for the same; collective."""
    world.begin("measure")

    def read() -> tuple[int, dict[str, object]]:
        number = as_int(repeats)
        if number is None or number < 1:
            raise HaloxError(f"repeats must be an int >= 1, got {shown(repeats)}")
        if number > MOST_REPEATS:
            raise HaloxError(f"repeats must be {MOST_REPEATS} at most, got {shown(repeats)}")
        return number, {"repeats": number}

    return world.attempt(read, _MEASURING, alike=True)


def measure(
    world: World, device: int | None, carried: Sequence[ChannelMessages], repeats: int
) -> dict[Key, float]:
    """Return, for each message, the microseconds of an exchange of the channel that carries it.

    Collective; the exchanges move the arrays' contents. The channels are measured in sequence. All ranks use the same
    order of names, since a rank may lack channels that other ranks have.
    """
    mine = {each.name: each.channel for each in carried if each.channel.is_measured}
    _, names = world.gather(lambda: (None, sorted(mine)), _MEASURING)
    us = {
        name: exchange_us(world, mine.get(name), repeats, device)
        for name in sorted(set[str]().union(*names.distinct))
    }
    return {message.key: us[each.name] for each in carried for message in each.messages}


def exchange_us(
    world: World,
    exchange: Channel | Callable[[], None] | None,
    repeats: int,
    device: int | None = None,
    rows: int = ROWS,
) -> float:
    """Return the microseconds of one exchange among many, on the slowest rank; the same on all ranks.

    The time of ``repeats`` exchanges in a row is measured, on a GPU until the stream is empty. Each of the ``rows``
    rows starts after a barrier, and the median counts. A rank that takes no part gives None for the channel or the
    call.

    Collective over the world.
    """
    steps: tuple[Callable[[], None], ...] = ()
    if isinstance(exchange, Channel):
        steps = (exchange.run, exchange.finish)
    elif exchange is not None:
        steps = (exchange,)

    def run(times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            for step in steps:
                step()
        if device is not None and steps:
            from halox.runtime.gpu.cuda import cupy

            cupy().cuda.get_current_stream().synchronize()
        return (time.perf_counter() - begin) / times * 1e6

    run(1)  # the first call does additional work
    mine = np.zeros(rows)
    for row in range(rows):
        world.attempt(raising(None), _MEASURING)
        if steps:
            mine[row] = run(repeats)
    slowest = np.max(world.gather(lambda: (None, mine), _MEASURING)[1].distinct, axis=0)
    return float(np.median(slowest))
