"""Stages of a distributed transform: divisions of the cells among ranks in which the transformed axes are whole.

In each stage every rank transforms the axes along which it has whole lines. Between two stages, a transpose moves the
division of one or more axes to other axes, if possible to axes that are whole and already transformed. Messages then
stay within the rows of the process grid along the moved axis::

    pencils (p, q, 1)    axis 2 is whole      transform it
            (p, 1, q)    q moves 1 -> 2       transform axis 1     messages within the q ranks of a row
            (1, p, q)    p moves 0 -> 1       transform axis 0     messages within the p ranks of a column

A search finds the best sequence. It has the fewest moves to axes that are already divided (blocks need one), then the
fewest transposes, then axis 0 as the last axis. Begin at `find_stages`, which `FFT` calls; `divide_stages` gives the
cells of each stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import chain, combinations, groupby, product
from typing import TypeAlias

import numpy as np

from halox.decomposition import AxisPartition, Decomposition, Placement
from halox.errors import DecompositionError

AxisMoves: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of axes: the division of the first axis moves to the second axis."""

Preference: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Stage:
    """A stage of a sequence: ranks per axis, and the axes transformed.

    Attributes
    ----------
    parts : tuple of int
        Ranks per axis.
    moves : tuple of (int, int)
        Moves of the transpose from the previous stage.
    axes : tuple of int
        Axes transformed in this stage, in ascending order.
    """

    parts: tuple[int, ...]
    moves: AxisMoves
    axes: tuple[int, ...]


@dataclass(frozen=True)
class DividedStage:
    """A stage with the divisions of its cells.

    Attributes
    ----------
    before, after : Decomposition
        Divisions of the cells before and after the transforms of this stage. They are the same object if the
        transforms do not change the extents, except in the first stage. Their axes are in ``order``.
    order : tuple of int
        For each axis of the divisions, the axis of the user's grid.
    axes : tuple of int
        Transformed axes of the user's grid, the halved axis last.
    """

    before: Decomposition
    after: Decomposition
    order: tuple[int, ...]
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Schedule:
    """The parts of a transform that do not depend on the fields.

    Attributes
    ----------
    stages : sequence of DividedStage
        A transpose leads from the cells after each stage to the cells before the next stage.
    half : int or None
        Axis with about half the coefficients, for a real transform.
    norm : str
    points, padded : tuple of int
        Points per axis of the spectral and of the physical resolution.
    """

    stages: Sequence[DividedStage]
    half: int | None
    norm: str
    points: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def dealias(self) -> bool:
        """Whether physical fields have more points than spectra."""
        return self.points != self.padded


def find_stages(
    cells: Sequence[int],
    modes: Sequence[int],
    parts: Sequence[int],
    axes: Sequence[int],
    first: int | None = None,
) -> list[Stage]:
    """Return the stages of a forward transform.

    ``cells`` and ``modes`` are the extents of each axis before and after its transform, and ``parts`` the ranks along
    each axis. ``axes`` are the axes to transform; ``first`` must be transformed before all other axes. Raises
    `DecompositionError` if every sequence of divisions leaves a rank without cells.

    Examples
    --------
    >>> [stage.parts for stage in find_stages((8, 8, 8), (8, 8, 8), (2, 3, 1), (0, 1, 2))]
    [(2, 3, 1), (2, 1, 3), (1, 2, 3)]
    >>> [stage.axes for stage in find_stages((8, 8), (8, 5), (1, 4), (0, 1), first=1)]
    [(), (1,), (0,)]
    """
    return _Search(tuple(cells), tuple(modes), frozenset(axes), first).run(tuple(parts))


def fewest_transposes(
    cells: Sequence[int], modes: Sequence[int], ranks: int, axes: Sequence[int], first: int | None
) -> list[Stage] | None:
    """Return the stages on the process grid that takes the fewest transposes; None if no process grid has stages.

    The arguments are those of `find_stages`. Of equal process grids, the one with the shortest rows of ranks is chosen,
    then the one with the smallest blocks, then the one with more ranks along the outermost axes.

    Examples
    --------
    >>> [stage.parts for stage in fewest_transposes((256, 256), (256, 256), 4, (0, 1), None)]
    [(4, 1), (1, 4)]
    """
    divisors = [[p for p in range(1, min(ranks, n) + 1) if ranks % p == 0] for n in cells]
    grids = [parts for parts in product(*divisors) if math.prod(parts) == ranks]

    def cut_axes(parts: tuple[int, ...]) -> int:
        return sum(parts[axis] > 1 for axis in axes)

    # Cuts of further transformed axes save no transpose.
    for _, group in groupby(sorted(grids, key=cut_axes), key=cut_axes):
        found = []
        for parts in group:
            with suppress(DecompositionError):
                stages = find_stages(cells, modes, parts, axes, first)
                block = math.prod(-(-n // p) for n, p in zip(cells, parts, strict=True))
                found.append(((len(stages), sum(parts), block, [-p for p in parts]), stages))
        if found:
            return min(found)[1]
    return None


def divide_stages(
    stages: Sequence[Stage],
    physical: Decomposition,
    modes: Sequence[int],
    half: int | None,
    *,
    turns: bool,
) -> list[DividedStage]:
    """Return the stages with the divisions of their cells.

    ``physical`` is the division of the physical fields, ``modes`` has the extents of each axis after its transform, and
    ``half`` is the halved axis. With ``turns``, intermediate stages store their transformed axes innermost.
    """
    order = natural = tuple(range(physical.ndim))
    sizes: list[Sequence[int]] = [axis.sizes for axis in physical.axes]
    placement, current = physical.placement, physical
    divided: list[DividedStage] = []
    for number, stage in enumerate(stages):
        if number:
            placement = moved_placement(placement, stage.moves)
            for axis, (old, new) in enumerate(
                zip(stages[number - 1].parts, stage.parts, strict=True)
            ):
                if new != old:
                    sizes[axis] = AxisPartition.even(sum(sizes[axis]), new, periodic=False).sizes
            inner = stage.axes if turns and number < len(stages) - 1 else ()
            order = _reordered(natural, inner)
            current = _divided(sizes, order, placement)
        before = current
        for axis in stage.axes:
            sizes[axis] = (modes[axis],)
        if number == 0 or before.grid_shape != tuple(sum(sizes[axis]) for axis in order):
            current = _divided(sizes, order, placement)
        axes = sorted(stage.axes, key=lambda axis: axis == half)
        divided.append(DividedStage(before, current, order, tuple(axes)))
    return divided


def _divided(
    sizes: Sequence[Sequence[int]], order: tuple[int, ...], placement: Placement
) -> Decomposition:
    axes = tuple(AxisPartition.from_blocks(sizes[axis], periodic=False) for axis in order)
    return Decomposition(axes, turned_placement(placement, order))


def _reordered(natural: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the order with some axes innermost. Outermost axes stay there, since their lines form one batch."""
    if axes == natural[: len(axes)]:
        return natural
    return (*(axis for axis in natural if axis not in axes), *axes)


def moved_parts(parts: Sequence[int], moves: AxisMoves) -> tuple[int, ...]:
    """Return the ranks per axis after moves."""
    moved = list(parts)
    for source, target in moves:
        moved[target] *= parts[source]
        moved[source] = 1
    return tuple(moved)


def moved_placement(placement: Placement, moves: AxisMoves) -> Placement:
    """Return the placement after moves: the ranks of a row stay in one row."""
    merged = [[axis] for axis in range(len(placement.proc_shape))]
    for source, target in moves:
        merged[target].append(source)
        merged[source] = []
    parts = moved_parts(placement.proc_shape, moves)
    return _placed(placement, parts, list(chain.from_iterable(merged)))


def turned_placement(placement: Placement, order: Sequence[int]) -> Placement:
    """Return the same ranks on the same blocks with the axes in another order."""
    return _placed(placement, tuple(placement.proc_shape[axis] for axis in order), order)


def _placed(placement: Placement, parts: tuple[int, ...], order: Sequence[int]) -> Placement:
    """Return the placement on a process grid ``parts``, its axes merged from axes in another order."""
    count = len(placement.rank_of)
    ranks = np.fromiter(placement.rank_of, int, count).reshape(placement.proc_shape)
    turned = ranks.transpose(order).ravel()
    in_order = np.array_equal(turned, np.arange(count))
    return replace(
        placement, proc_shape=parts, rank_of=range(count) if in_order else tuple(turned.tolist())
    )


@dataclass(frozen=True)
class _Search:
    """Search for the cheapest sequence of stages (Dijkstra); the attributes are the arguments of `find_stages`.

    A node of the search is a division with the set of axes that have been transformed.
    """

    cells: tuple[int, ...]
    modes: tuple[int, ...]
    axes: frozenset[int]
    first: int | None

    def run(self, parts: tuple[int, ...]) -> list[Stage]:
        """Return the best sequence in which no axis has more ranks than cells."""
        ready = self.ready(parts, frozenset())
        # A cost is the numbers of merges and of transposes, then the preference of each transpose. No two sequences
        # have the same cost.
        cost: tuple[int, int, tuple[Preference, ...]] = (0, 0, ())
        queue = [(cost, [Stage(parts, (), tuple(sorted(ready)))], ready)]
        visited = set()
        while queue:
            (merges, transposes, order), stages, done = heappop(queue)
            here = stages[-1].parts
            if done == self.axes:
                return stages
            if (here, done) in visited:
                continue
            visited.add((here, done))
            for moves in self.candidates(here, done):
                there = moved_parts(here, moves)
                ready = self.ready(there, done)
                stage = Stage(there, moves, tuple(sorted(ready)))
                cost = merges + _merges(here, moves), transposes + 1, (*order, _preference(moves))
                if all(p <= n for p, n in zip(there, self.extents(done), strict=True)):
                    heappush(queue, (cost, [*stages, stage], done | ready))
        raise DecompositionError(
            f"proc_shape={parts} of grid_shape={self.cells}: the transform along axes {tuple(sorted(self.axes))} needs "
            "divisions in which these are whole, and some ranks have no cells; give the grid another proc_shape, fewer "
            "ranks or more cells"
        )

    def ready(self, parts: tuple[int, ...], done: frozenset[int]) -> frozenset[int]:
        """Return the axes that can be transformed in a division."""
        if self.first is not None and self.first not in done and parts[self.first] > 1:
            return frozenset()
        return frozenset(axis for axis in self.axes - done if parts[axis] == 1)

    def extents(self, done: frozenset[int]) -> tuple[int, ...]:
        """Return the extents of all axes when the axes ``done`` have been transformed."""
        pairs = zip(self.cells, self.modes, strict=True)
        return tuple(
            after if axis in done else before for axis, (before, after) in enumerate(pairs)
        )

    def candidates(self, parts: tuple[int, ...], done: frozenset[int]) -> Iterator[AxisMoves]:
        """Yield the moves that make one or more of the remaining axes whole."""
        cut = [axis for axis in sorted(self.axes - done) if parts[axis] > 1]
        for sources in chain.from_iterable(combinations(cut, n + 1) for n in range(len(cut))):
            others = [axis for axis in range(len(parts)) if axis not in sources]
            for targets in product(others, repeat=len(sources)):
                yield tuple(zip(sources, targets, strict=True))


def _merges(parts: tuple[int, ...], moves: AxisMoves) -> int:
    """Return the number of moves to an axis that is divided already."""
    targets = [target for _, target in moves]
    return sum(parts[target] > 1 for target in targets) + len(targets) - len(set(targets))


def _preference(moves: AxisMoves) -> Preference:
    """Return the place of moves among others, the lowest first.

    The last axes become whole first, so that axis 0 is transformed last, since its lines form one batch. Their division
    moves to the first axes, to keep lines along the last axis long.
    """
    return tuple(-source for source, _ in reversed(moves)), tuple(target for _, target in moves)
