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
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import halox
from halox import datatypes


class Gather:
    """Allgather of the blocks of a level, into arrays that hold the whole level.

    Parameters
    ----------
    grid : halox.Grid
        The ranks.
    whole : array
        The whole level with one layer of ghosts; contains this rank's block.
    block_shape : tuple of int
        Points of every rank's block.

    Attributes
    ----------
    bytes_sent : int
        Bytes that this rank sends to other ranks in each call.

    Notes
    -----
    Collective, as are a call and `close`.
    """

    def __init__(self, grid: halox.Grid, whole: Any, block_shape: tuple[int, ...]) -> None:
        def block(coords: tuple[int, ...]) -> Any:
            starts = [1 + place * n for place, n in zip(coords, block_shape, strict=True)]
            return datatypes.subarray(whole.shape, block_shape, starts, "f8")

        everyone = grid.comm.allgather(tuple(grid.coords))
        others = [rank for rank in range(grid.size) if rank != grid.rank]
        mine = block(everyone[grid.rank])
        self._exchange = halox.Exchange(
            [halox.Send(whole, mine, rank) for rank in others],
            [halox.Recv(whole, block(everyone[rank]), rank) for rank in others],
            comm=grid.comm,
        )
        self.bytes_sent = len(others) * math.prod(block_shape) * whole.itemsize

    def __call__(self) -> None:
        """Gather once."""
        self._exchange()

    def close(self) -> None:
        """Close the exchange."""
        self._exchange.close()


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
        Arrays that the next finer level reads and writes: u and r themselves, or on the first
        gathered level this rank's block of them, with ghosts.
    exchange_u, exchange_r : halox.Plan
        Fill the ghosts.
    gather_r : Gather or None
        Must follow every write to ``r_block``.
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
    gather_r: Gather | None
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
        self.v = finest.zeros()
        number = finest.grid_shape[0].bit_length() - 1
        levels = [_level(number, finest)]
        for k in range(number - 1, 0, -1):
            whole = is_gathered(k, finest.proc_shape, gather)
            grid = self._stack.enter_context(_grid(finest, 1 << k, whole=whole))
            if whole and not levels[-1].is_whole:
                found = self._first_gathered(k, grid)
            else:
                found = _level(k, grid, is_whole=whole)
            levels.append(found)
        self.levels = levels[::-1]

    def _first_gathered(self, number: int, grid: halox.Grid) -> Level:
        """Create the largest level that every rank holds whole."""
        finest = self.finest
        shape = tuple(
            n // parts for n, parts in zip(grid.grid_shape, finest.proc_shape, strict=True)
        )
        place = tuple(
            slice(at * n, at * n + n + 2) for at, n in zip(finest.coords, shape, strict=True)
        )
        u, r = grid.zeros(), grid.zeros()
        gather = Gather(finest, r, shape)
        self._stack.callback(gather.close)
        plans = grid.plan(u), grid.plan(r)
        return Level(number, u, r, u[place], r[place], *plans, gather, is_whole=True)

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


def _grid(finest: halox.Grid, points: int, *, whole: bool) -> halox.Grid:
    """Return the grid of a coarser level, divided like the finest level, or whole on every rank."""
    if not whole:
        return finest_grid(points, finest.proc_shape, finest.comm, finest.device)
    from mpi4py import MPI

    return finest_grid(points, (1, 1, 1), MPI.COMM_SELF, finest.device)


def _level(number: int, grid: halox.Grid, *, is_whole: bool = False) -> Level:
    u, r = grid.zeros(), grid.zeros()
    return Level(number, u, r, u, r, grid.plan(u), grid.plan(r), None, is_whole)
