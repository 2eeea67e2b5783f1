"""Times of exchanges as their ranks see them: many in a row, the slowest rank's, the median of some rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from halox.errors import HaloxError
from halox.paths.base import Carried, Channel, Key
from halox.runtime.world import World
from halox.values import as_int, shown

ROWS = 5
"""Rows of exchanges, of which the median counts."""

MOST_REPEATS = 1_000_000
"""Exchanges in a row at most, which take minutes."""

_MEASURING = "the measuring of a plan"


class Timer:
    """Measures the channels of a plan apart."""

    def __init__(self, world: World, device: int | None, carried: Sequence[Carried]) -> None:
        self._world, self._device = world, device
        # Not the channels: the plan lets go of them when it is closed.
        self._messages = [(one.name, one.messages) for one in carried]

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

        Collective; the arrays' contents are exchanged. One channel after the other, in an order that all ranks
        know, since a rank may have some that others have not.
        """
        mine = dict(zip((name for name, _ in self._messages), channels, strict=True))
        us = {
            name: exchange_us(self._world, mine.get(name), repeats, self._device)
            for name in sorted(set().union(*self._world.gather(set(mine), _MEASURING)))
        }
        return {message.key: us[name] for name, found in self._messages for message in found}


def exchange_us(
    world: World,
    exchange: Channel | Callable[[], None] | None,
    repeats: int,
    device: int | None = None,
    rows: int = ROWS,
) -> float:
    """Return the microseconds of one exchange among many, of the slowest rank, the same on all ranks.

    ``repeats`` exchanges in a row are timed, on a GPU until the stream is empty, in several rows after a barrier each,
    of which the median counts. A rank without a part in it gives None for the channel, or the call.

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

    run(1)  # what is done at a first call only
    mine = np.zeros(rows)
    for row in range(rows):
        world.gather(None, _MEASURING)
        if steps:
            mine[row] = run(repeats)
    slowest = np.max(world.gather(mine, _MEASURING), axis=0)
    return float(np.median(slowest))
