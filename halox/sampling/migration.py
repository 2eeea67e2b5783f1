"""Migration of particles on the host: each goes to the rank that owns the nearest cell.

`halox.Particles` calls `find`, which changes nothing, `take`, which packs the particles that leave, and `put`, which
stores the particles that arrive. `halox.sampling.device_migration` has the same steps on a GPU. Begin with `settled`,
the rules at the ends of the grid. Arrivals, or else the last particles, fill the rows of particles that have left::

    before   a b C d E f      C and E leave, g arrives
    after    a b g d f
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from halox.decomposition import Decomposition
from halox.domain import Domain
from halox.errors import FieldError
from halox.io.message_queue import MessageQueue
from halox.runtime.arrays import Array
from halox.runtime.world import World
from halox.sampling.weights import owners
from halox.values import as_list, shown

MIGRATION = "a migration"

KEEP, REFLECT, ABSORB, WRAP = RULES = "keep", "reflect", "absorb", "wrap"
"""Fates of particles beyond an end of the grid; wrapping belongs to periodic axes. Kernels know them by number."""

FARTHEST = 2.0**53
"""Positions are smaller in magnitude: float64 does not hold all integers beyond."""

_ROWS = 1 << 15  # that are looked at together, so that they stay in the cache
_MESSAGE_BYTES = 1 << 30  # below the limit of MPI's counts

Rules = tuple[tuple[str, str], ...]
"""The rule of the low and the high end of each axis."""


def rules_of(walls: object, grid: Decomposition) -> Rules:
    """Return the rules of all ends from the argument ``walls`` of `halox.Particles`; raises `FieldError`.

    Examples
    --------
    >>> from halox.decomposition import decompose
    >>> rules_of(("keep", ("absorb", "reflect")), decompose((4, 4), 1, periodic=(True, False)))
    (('wrap', 'wrap'), ('absorb', 'reflect'))
    """
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


class Settled(NamedTuple):
    """Positions in the grid, and which components walls have mirrored, which particles are absorbed, which wrong."""

    positions: Array
    mirrored: Array
    absorbed: Array
    wrong: Array


def settled(positions: Array, cells: Sequence[int], rules: Rules) -> Settled:
    """Apply the rules of the ends of the grid to positions of shape (n, axes).

    Examples
    --------
    >>> found = settled(np.array([[-1.25], [4.5]]), [4], (("reflect", "absorb"),))
    >>> found.positions[0], found.mirrored[0], found.absorbed
    (array([0.25]), array([ True]), array([False,  True]))
    """
    wrong: Array = ~(abs(positions) < FARTHEST).all(axis=1)
    absorbed = np.zeros(len(positions), bool)
    positions = np.where(wrong[:, None], 0, positions)
    mirrored = np.zeros(positions.shape, bool)
    for axis, (n, rule) in enumerate(zip(cells, rules, strict=True)):
        x, (low, high), last = positions[:, axis], rule, np.nextafter(n, 0) - 0.5
        if rule in ((WRAP, WRAP), (REFLECT, REFLECT)):
            turns = np.floor((x + 0.5) / n)
            x -= turns * n
            mirror = (turns % 2 != 0) & (low == REFLECT)
            np.copyto(x, n - 1 - x, where=mirror)
            np.clip(x, -0.5, last, out=x)
        else:
            mirror = ((x + 0.5 < 0) & (low == REFLECT)) | ((x + 0.5 >= n) & (high == REFLECT))
            np.copyto(x, (-1 if low == REFLECT else 2 * n - 1) - x, where=mirror)
            if high == REFLECT:
                np.minimum(x, last, out=x, where=mirror)
            for outside, end in ((x + 0.5 < 0, low), (x + 0.5 >= n, high)):
                absorbed |= outside & (end == ABSORB)
                wrong |= outside & (end == KEEP)
        mirrored[:, axis] = mirror
    return Settled(positions, mirrored, absorbed, wrong)


def refused(row: int, position: Sequence[float]) -> FieldError:
    """Return the error of a particle that has no cell."""
    return FieldError(
        f"position: particle {row} is at {shown([*position])}, which is not finite, 2**53 or more in magnitude, or "
        'beyond a wall; move it into the grid, or make the particles with walls="reflect" or "absorb"'
    )


class HostMigration:
    """Migrations of the particles of one rank, whose arrays have a row for each particle; positions come first."""

    def __init__(self, domain: Domain, rules: Rules) -> None:
        self._domain, self._rules = domain, rules

    def find(self, positions: Array) -> tuple[Array, int]:
        """Return the numbers of particles that leave for each rank, and of all that leave or are absorbed.

        Raises `FieldError` for positions that are not finite, or are beyond a wall that keeps its particles.
        """
        layout = self._domain.plain
        self._rows = _outside(positions, layout.owned)
        found = settled(positions[self._rows], self._domain.grid_shape, self._rules)
        if found.wrong.any():
            row = self._rows[np.argmax(found.wrong)]
            raise refused(row, positions[row].tolist())
        ranks = owners(layout, np.floor(found.positions + 0.5).astype("i8"))
        ranks[found.absorbed] = -1
        self._found, self._ranks = found, ranks
        self._holes = self._rows[ranks != layout.rank]
        counts = np.bincount(ranks[ranks >= 0], minlength=self._domain.world.size)
        counts[layout.rank] = 0
        return counts, len(self._holes)

    def take(self, arrays: Sequence[Array], flips: Sequence[Array], sent: Array) -> None:
        """Settle positions outside of the block, and pack the rows that leave into ``sent``, in order of the ranks."""
        arrays[0][self._rows] = self._found.positions
        at, axes = np.nonzero(self._found.mirrored)
        for array in flips:
            array[self._rows[at], axes] *= -1
        order = np.argsort(self._ranks, kind="stable")
        ranks = self._ranks[order]
        leavers = self._rows[order[(ranks >= 0) & (ranks != self._domain.plain.rank)]]
        for rows, columns in _columns(arrays):
            sent[:, columns] = rows[leavers]

    def put(self, arrays: Sequence[Array], arrivals: Array, n: int) -> None:
        """Store arrivals in place of the particles that have left or were absorbed, of ``n`` before."""
        holes = self._holes
        new = n - len(holes) + len(arrivals)
        rest, last = holes[len(arrivals) :], np.arange(new, n)
        targets = np.concatenate([holes[: len(arrivals)], np.arange(n, new)])
        sources = last[~np.isin(last, rest)]
        for rows, columns in _columns(arrays):
            rows[targets] = arrivals[:, columns]
            rows[rest[rest < new]] = rows[sources]


def row_bytes(array: Any) -> int:
    """Return the bytes of a particle in an array."""
    nbytes: int = array.dtype.itemsize * prod(array.shape[1:])
    return nbytes


def _columns(arrays: Sequence[Array]) -> Iterator[tuple[Array, slice]]:
    """Yield arrays as bytes, shape (rows, bytes), and their columns in packed rows."""
    start = 0
    for array in arrays:
        end = start + row_bytes(array)
        yield array.reshape(-1).view(np.uint8).reshape(len(array), end - start), slice(start, end)
        start = end


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


def swap_rows(world: World, sent: Array, received: Array, counts: Array, incoming: Array) -> None:
    """Send rows of bytes to other ranks, and receive rows, both in order of the ranks; collective, blocks."""
    with MessageQueue(world, 1 << 62, MIGRATION) as queue:
        for rank, part in _parts(received, incoming):
            queue.receive(part, rank)
        for rank, part in _parts(sent, counts):
            queue.send(part, rank)


def _parts(rows: Array, counts: Array) -> Iterator[tuple[int, Array]]:
    most, end = max(1, _MESSAGE_BYTES // max(1, rows.shape[1])), 0
    for rank, count in enumerate(counts.tolist()):
        start, end = end, end + count
        for first in range(start, end, most):
            yield rank, rows[first : min(first + most, end)]
