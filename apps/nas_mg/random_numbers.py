"""The right-hand side: ten charges of +1 and ten of -1, placed by the benchmark's random numbers.

The point with linear index g, counted from 0 with x fastest, has the random number x[g + 1]. The power of ``a`` for
this number is a product of one factor per coordinate, so that each rank computes only the numbers of its own points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..nas_random_numbers import MASK, MULTIPLIER, SEED, powers

CHARGES = 10
"""Number of points with +1, and of points with -1."""

_NUMBERS_AT_ONCE = 1 << 15

Candidates = np.ndarray
"""Rows of (number, linear index), uint64."""


def extremes(points: int, owned: Sequence[slice]) -> tuple[Candidates, Candidates]:
    """Return the ten largest and the ten smallest numbers of a block, best first.

    Parameters
    ----------
    points : int
        Points of the grid per direction.
    owned : sequence of slice
        Ranges of the block along z, y and x.

    Returns
    -------
    largest, smallest : ndarray
        Rows of (number, linear index of the point): ten, or all points of a smaller block.
    """
    z, y, x = owned
    factors_x = powers(MULTIPLIER, x.start + 1, x.stop - x.start, 1) * np.uint64(SEED) & MASK
    factors_y = powers(MULTIPLIER, points * y.start, y.stop - y.start, points)
    factors_z = powers(MULTIPLIER, points**2 * z.start, z.stop - z.start, points**2)
    lines = ((factors_z[:, None] * factors_y) & MASK).reshape(-1)
    starts = (
        points * (points * np.arange(z.start, z.stop)[:, None] + np.arange(y.start, y.stop))
    ).reshape(-1) + x.start

    chunk = max(1, _NUMBERS_AT_ONCE // len(factors_x))
    room = np.empty((chunk, len(factors_x)), np.uint64)
    largest = smallest = np.empty((0, 2), np.uint64)
    for begin in range(0, len(lines), chunk):
        some = lines[begin : begin + chunk]
        found = np.multiply(some[:, None], factors_x, room[: len(some)])
        np.bitwise_and(found, MASK, found)
        for is_largest in (True, False):
            known = largest if is_largest else smallest
            limit = int(known[-1, 0]) if len(known) == CHARGES else None
            if limit is not None and (found.max() < limit if is_largest else found.min() > limit):
                continue
            near = np.ones(found.shape, bool)
            if limit is not None:
                near = found > limit if is_largest else found < limit
            line, column = np.nonzero(near)
            index = (starts[begin + line] + column).astype(np.uint64)
            new = np.stack([found[line, column], index], axis=1)
            known = best(np.concatenate([known, new]), is_largest=is_largest)
            largest, smallest = (known, smallest) if is_largest else (largest, known)
    return largest, smallest


def best(candidates: Candidates, *, is_largest: bool) -> Candidates:
    """Return the ten largest or smallest candidates, best first; all numbers differ."""
    order = np.argsort(candidates[:, 0])
    return candidates[order[::-1][:CHARGES] if is_largest else order[:CHARGES]]


def charges(points: int, owned: Sequence[slice], comm: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the coordinates of the charges +1 and -1 in the whole grid.

    Parameters
    ----------
    points, owned
        The same as for `extremes`.
    comm : mpi4py.MPI.Intracomm

    Returns
    -------
    plus, minus : ndarray of int, shape (10, 3)
        Coordinates (z, y, x), counted from 0; the largest or the smallest number first. Identical on all ranks.

    Notes
    -----
    Collective.
    """
    everyone = comm.allgather(extremes(points, owned))
    return tuple(  # type: ignore[return-value]
        coordinates(best(np.concatenate(found), is_largest=is_largest)[:, 1], points)
        for found, is_largest in zip(zip(*everyone, strict=True), (True, False), strict=True)
    )


def coordinates(index: np.ndarray, points: int) -> np.ndarray:
    """Return the coordinates (z, y, x) of points from their linear indices."""
    return np.stack(np.unravel_index(index.astype(np.int64), (points,) * 3), axis=1)
