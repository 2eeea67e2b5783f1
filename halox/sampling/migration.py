"""Migration of particles: each goes to the rank that owns the nearest cell.

`halox.Particles` calls the steps of a `Migration` on the host, or on a GPU of the same steps in `device_migration`.
Begin with `settle`, the rules at the ends of the grid. Arrivals, or else the last particles, fill the rows of particles
that have left::

    before   a b C d E f      C and E leave, g arrives
    after    a b g d f
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from halox.decomposition import Decomposition
from halox.domain import Domain
from halox.errors import FieldError
from halox.runtime.arrays import Array
from halox.sampling.weights import owners
from halox.values import as_list, shown

MIGRATION = "a migration"

KEEP, REFLECT, ABSORB, WRAP = RULES = "keep", "reflect", "absorb", "wrap"
"""Fates of particles beyond an end of the grid; wrapping belongs to periodic axes."""

_FARTHEST = 2.0**53  # float64 does not hold all integers beyond
_ROWS = 1 << 15  # that are looked at together, so that they stay in the cache

Rules = tuple[tuple[str, str], ...]
"""The rule of the low and the high end of each axis."""


def rules_of(walls: object, grid: Decomposition) -> Rules:
    """Return the rules of all ends from the argument ``walls`` of `halox.Particles`; raises `FieldError`."""
    if grid.joined_sides:
        raise FieldError("grid: particles do not cross sides that connect= joins; leave it out")
    axes = [walls] * grid.ndim if isinstance(walls, str) else as_list(walls) or []
    pairs = [[axis, axis] if isinstance(axis, str) else as_list(axis) or [] for axis in axes]
    names = RULES[:3]
    if len(pairs) != grid.ndim or any(
        len(pair) != 2 or any(side not in names for side in pair) for pair in pairs
    ):
        raise FieldError(
            f"walls: expected {', '.join(map(repr, names))}, for all sides, one per axis, or (low, high) per axis, got "
            f"{shown(walls)}"
        )
    return tuple(
        (WRAP, WRAP) if wraps else (low, high)
        for (low, high), wraps in zip(pairs, grid.periodic, strict=True)
    )


def settle(x: Array, cells: Sequence[int], rules: Rules) -> tuple[Array, Array, Array]:
    """Apply the rules of the ends of the grid in place to positions of shape (n, axes).

    Return which components walls have mirrored, which particles are absorbed, and which have no place.

    Examples
    --------
    >>> x = np.array([[-1.25], [4.5], [np.inf]])
    >>> mirrored, absorbed, lost = settle(x, [4], (("reflect", "absorb"),))
    >>> x[0], mirrored[0], absorbed, lost
    (array([0.25]), array([ True]), array([False,  True, False]), array([False, False,  True]))
    """
    lost: Array = np.logical_not((abs(x) < _FARTHEST).all(axis=1))
    x[lost] = 0
    absorbed, mirrored = np.zeros(len(x), bool), np.zeros(x.shape, bool)
    for axis, (n, (low, high)) in enumerate(zip(cells, rules, strict=True)):
        turns = np.floor((x[:, axis] + 0.5) / n)
        rows = np.flatnonzero(turns)
        at, turns = x[rows, axis], turns[rows]
        folds = ((turns == -1) & (low == REFLECT)) | ((turns == 1) & (high == REFLECT))
        folds |= low == high and low in (WRAP, REFLECT)
        mirrors = folds & (low != WRAP) & (turns % 2 != 0)
        at -= np.where(folds, turns * n, 0)
        np.subtract(n - 1, at, out=at, where=mirrors)
        # Rounding must not put a particle beyond the end.
        np.clip(at, -0.5, np.nextafter(n, 0) - 0.5, out=at, where=folds)
        x[rows, axis], mirrored[rows, axis] = at, mirrors
        fates = high if low == REFLECT else low, low if high == REFLECT else high
        for beyond, fate in zip((turns < 0, turns > 0), fates, strict=True):
            absorbed[rows] |= beyond & ~folds & (fate == ABSORB)
            lost[rows] |= beyond & ~folds & (fate == KEEP)
    return mirrored, absorbed, lost


class Migration:
    """A migration of one rank's particles on the host. Arrays have a row for each, and spare rows; positions are first.

    `find` and `pack` change nothing, so that errors of one rank can be raised on all ranks before `keep` and `swap`.
    """

    def __init__(self, domain: Domain, rules: Rules) -> None:
        self._world, self._layout, self._rules = domain.world, domain.plain, rules

    def find(self, arrays: Sequence[Array], flips: Sequence[bool], n: int) -> tuple[Array, int]:
        """Return the numbers of particles that leave for each rank, and of all that leave or are absorbed.

        Arrays have ``n`` particles; ``flips`` tells for each whether walls change the signs of its components.
        Raises `FieldError` for positions that are not finite, or are beyond a wall that keeps its particles.
        """
        positions, rank, cut = arrays[0][:n], self._layout.rank, self._layout.decomposition
        self._arrays, self._before = arrays, n
        self._rows = rows = _outside(positions, self._layout.owned)
        x, *others = (array[rows] for array in arrays)
        mirrored, absorbed, lost = settle(x, cut.grid_shape, self._rules)
        if lost.any():
            row = rows[np.argmax(lost)]
            raise FieldError(
                f"position: particle {row} is at {shown(positions[row].tolist())}, which is not finite, 2**53 or more "
                'in magnitude, or beyond a wall; move it, or make the particles with walls="reflect" or "absorb"'
            )
        self._values = [x]
        for values, is_flipped in zip(others, flips[1:], strict=True):
            if is_flipped:
                np.negative(values, out=values, where=mirrored)
            self._values.append(values)
        ranks = owners(self._layout, np.floor(x + 0.5).astype("i8"))
        ranks[absorbed] = cut.ranks
        counts = np.bincount(ranks, minlength=cut.ranks + 1)
        counts[rank] = 0
        self._stay, leave = np.flatnonzero(ranks == rank), np.flatnonzero(ranks != rank)
        self._leave = leave[np.argsort(ranks[leave])]
        return counts[:-1], len(leave)

    def pack(self, arrays: Sequence[Array], counts: Array, incoming: Array) -> object:
        """Pack particles that leave for other ranks as rows of bytes, in order of the ranks, and allocate arrivals.

        The result goes to the `swap` of all ranks.
        """
        self._arrays, self._counts, self._incoming = arrays, counts, incoming
        sent = self._leave[: counts.sum()]
        self._sent = np.concatenate([as_rows(values[sent]) for values in self._values], axis=1)
        self._arrivals = np.empty((incoming.sum(), self._sent.shape[1]), np.uint8)
        return None

    def keep(self) -> None:
        """Settle particles that stay."""
        for array, values in zip(self._arrays, self._values, strict=True):
            array[self._rows[self._stay]] = values[self._stay]

    def swap(self, records: Sequence[object], places: Array) -> None:
        """Send the packed rows to their ranks, and store the arrivals in place of particles that leave.

        ``records`` and ``places`` are the results of `pack`, and the first rows for this rank, of all ranks.
        """
        sent, arrivals, holes = self._sent, self._arrivals, np.sort(self._rows[self._leave])
        self._world.ranks.swap_rows(sent, arrivals, self._counts, self._incoming, MIGRATION)
        n, m = self._before, len(arrivals)
        after = n - len(holes) + m
        last = np.arange(after, n)
        sources = last[~np.isin(last, holes)]
        targets = np.concatenate([holes, np.arange(n, after)])[: m + len(sources)]
        start = 0
        for rows in map(as_rows, self._arrays):
            end = start + rows.shape[1]
            rows[targets[m:]] = rows[sources]
            rows[targets[:m]] = arrivals[:, start:end]
            start = end


def row_bytes(array: Any) -> int:
    """Return the bytes of a particle in an array."""
    nbytes: int = array.dtype.itemsize * prod(array.shape[1:])
    return nbytes


def as_rows(array: Any) -> Any:
    """View a contiguous array as rows of bytes."""
    return array.reshape(-1).view("u1").reshape(len(array), row_bytes(array))


def _outside(positions: Array, owned: Sequence[slice]) -> Array:
    """Return the rows of the positions that are outside of a block, or not finite."""
    found = [np.zeros(0, "i8")]
    for first in range(0, len(positions), _ROWS):
        inside: Any = True
        for axis, cut in enumerate(owned):
            x = positions[first : first + _ROWS, axis] + 0.5
            inside = inside & (x >= cut.start) & (x < cut.stop)
        found.append(first + np.flatnonzero(~inside))
    return np.concatenate(found)
