"""The grids of all levels, their fields and their communication.

Level k has ``2**k`` points per direction. On the fine levels each rank owns a block. Levels with few
points are gathered: every rank holds the whole level and repeats all the work on it, since
communication would take longer::

    level 9   512^3    blocks, halos by grid.plan
    ...
    level 5    32^3    blocks, halos by grid.plan
             -------- downwards each rank computes its block and sends it to all other ranks
    level 4    16^3    whole on every rank: a grid of one rank, periodic halos by grid.plan
    ...      -------- upwards each rank reads its part of the whole, without communication
    level 1     2^3

A level with fewer points than ranks is always gathered, so it needs no special case.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import halox


@dataclass(frozen=True)
class Level:
    """The fields of one level, float64 with one layer of ghosts, and their exchanges.

    Attributes
    ----------
    number : int
        k, for ``2**k`` points per direction.
    u, r : array
        Correction (on the finest level the solution) and residual.
    u_block, r_block : array
        Parts of u and r that the next finer level reads and writes: on the first gathered level this
        rank's block with ghosts, otherwise the whole arrays.
    exchange_u, exchange_r : halox.Plan
        Fill the ghosts.
    gather_r : callable or None
        A `halox.Exchange` that must follow every write to ``r_block``.
    is_whole : bool
        Whether every rank holds all of the level.
    """

    number: int
    u: Any
    r: Any
    u_block: Any
    r_block: Any
    exchange_u: halox.Plan
    exchange_r: halox.Plan
    gather_r: Callable[[], None] | None
    is_whole: bool


class Hierarchy:
    """All levels on one rank.

    Parameters
    ----------
    finest : halox.Grid
        A cube of ``2**k`` points per direction, cut evenly, periodic, with halo 1.
    gather : int
        Levels of at most this many points per direction are gathered; see `is_gathered`.

    Attributes
    ----------
    levels : list of Level
        The coarsest first.
    v : array
        The right-hand side, on the finest level.
    finest : halox.Grid

    Notes
    -----
    Collective, and so is `close`. On a GPU the fields are made on the current stream.
    """

    def __init__(self, finest: halox.Grid, gather: int) -> None:
        self.finest = finest
        self._stack = ExitStack()
        self.v, u, r = finest.zeros(), finest.zeros(), finest.zeros()
        number = finest.grid_shape[0].bit_length() - 1
        plans = finest.plan(u), finest.plan(r)
        levels = [Level(number, u, r, u, r, *plans, None, is_whole=False)]
        grid: Any = finest
        for k in range(number - 1, 0, -1):
            whole = is_gathered(k, finest.proc_shape, gather)
            grid = self._stack.enter_context(grid.coarsen(2, whole=whole))
            u, r = grid.zeros(), grid.zeros()
            blocks, plans = (grid.aligned(u), grid.aligned(r)), (grid.plan(u), grid.plan(r))
            collect = grid.collector(r) if grid.is_whole else None
            levels.append(Level(k, u, r, *blocks, *plans, collect, is_whole=whole))
        self.levels = levels[::-1]

    def close(self) -> None:
        """Close the grids of this hierarchy, except ``finest``, which belongs to the caller."""
        self._stack.close()

    def __enter__(self) -> Hierarchy:
        """Return the hierarchy."""
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Close the hierarchy, unless an exception propagates: other ranks may not call `close` then."""
        if kind is None:
            self.close()


def is_gathered(number: int, proc_shape: tuple[int, ...], gather: int) -> bool:
    """Whether every rank holds the whole of a level below the finest.

    Parameters
    ----------
    number : int
        The level; it has ``2**number`` points per direction.
    proc_shape : tuple of int
        Ranks per direction.
    gather : int
        Levels of at most this many points per direction are gathered, and levels with less than
        two points per rank. On one rank no level counts as gathered, since all levels are whole.

    Examples
    --------
    >>> [is_gathered(k, (2, 2, 1), 4) for k in (1, 2, 3)]
    [True, True, False]
    >>> is_gathered(3, (8, 4, 4), 0), is_gathered(4, (8, 4, 4), 0)
    (True, False)
    """
    points = 1 << number
    return math.prod(proc_shape) > 1 and (points <= gather or points < 2 * max(proc_shape))


def finest_grid(points: int, proc_shape: tuple[int, ...], comm: Any, device: Any) -> halox.Grid:
    """Return the grid of the finest level, with the ranks in order, x fastest."""
    return halox.Grid(
        (points,) * 3,
        halo=1,
        periodic=True,
        proc_shape=proc_shape,
        comm=comm,
        device=device,
        placement=False,
    )
