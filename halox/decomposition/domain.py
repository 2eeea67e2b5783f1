"""Decomposition of the grid: coordinates, blocks and neighbours of every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from halox.decomposition.normalise import (
    normalise_blocks,
    normalise_grid_shape,
    normalise_halo,
    normalise_periodic,
    normalise_proc_shape,
)
from halox.decomposition.parity import check_checkerboard, check_extents_even
from halox.decomposition.partition import AxisPartition
from halox.decomposition.placement import Placement, place
from halox.decomposition.procgrid import counted_halo, proc_shapes
from halox.errors import DecompositionError

if TYPE_CHECKING:
    from halox.decomposition.connections import Joined


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Neighbouring rank, and its direction: -1, 0 or +1 per axis, or any displacements of parts."""

    direction: tuple[int, ...]
    rank: int


@dataclass(frozen=True)
class Decomposition:
    """Grid cut along each axis into blocks, with one rank per block; equal on all ranks.

    Raises `DecompositionError` if the process grid of ``placement`` differs from the parts of ``axes``.

    Examples
    --------
    >>> domain = decompose((10, 8), 4, periodic=(True, False))
    >>> domain.proc_shape, domain.coords_of(3)
    ((2, 2), (1, 1))
    >>> domain.rank_at((2, 0)), domain.rank_at((0, 2))
    (0, None)
    """

    axes: tuple[AxisPartition, ...]  # cuts of each grid axis
    placement: Placement  # ranks of the blocks
    joined: Joined | None = None  # the joined sides

    def __post_init__(self) -> None:
        """Raise `DecompositionError` for a placement on another process grid."""
        if self.placement.proc_shape != self.proc_shape:
            raise DecompositionError(
                f"placement: expected one for proc_shape={self.proc_shape}, as the axes are cut, "
                f"got one for proc_shape={self.placement.proc_shape}"
            )

    @property
    def ndim(self) -> int:
        return len(self.axes)

    @property
    def grid_shape(self) -> tuple[int, ...]:
        """Cells of the global grid per axis."""
        return tuple(axis.cells for axis in self.axes)

    @property
    def proc_shape(self) -> tuple[int, ...]:
        """Ranks per axis."""
        return tuple(axis.parts for axis in self.axes)

    @property
    def periodic(self) -> tuple[bool, ...]:
        """Whether each axis is periodic."""
        return tuple(axis.periodic for axis in self.axes)

    @property
    def joined_sides(self) -> tuple[tuple[int, int], ...]:
        """The axis and the number of each side that is joined by a connection."""
        return self.joined.walls if self.joined is not None else ()

    @property
    def ranks(self) -> int:
        return math.prod(self.proc_shape)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Coordinates of ``rank`` in the process grid."""
        return self.placement.coords_of(rank)

    def rank_at(self, coords: Sequence[int]) -> int | None:
        """Rank at ``coords``, wrapped along periodic axes; None outside the process grid."""
        index = 0
        for axis, coord in zip(self.axes, coords, strict=True):
            parts = axis.parts
            if not 0 <= coord < parts:
                if not axis.periodic:
                    return None
                coord %= parts
            index = index * parts + coord
        return self.placement.rank_of[index]

    def owned(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Half-open global range of cells that ``rank`` owns, per axis."""
        coords = self.coords_of(rank)
        return tuple(axis.owned(part) for axis, part in zip(self.axes, coords, strict=True))

    def rank_shape(self, rank: int) -> tuple[int, ...]:
        """Cells that ``rank`` owns, per axis."""
        return tuple(stop - start for start, stop in self.owned(rank))

    def neighbours(
        self, rank: int, corners: bool = True, steps: Sequence[Iterable[int]] = ()
    ) -> tuple[Neighbour, ...]:
        """Neighbours of ``rank``, in lexicographic order of their directions.

        There are at most ``3**ndim - 1`` neighbours. Without ``corners``, corners and edges are left out, and there
        are at most ``2 * ndim`` neighbours. The same rank appears once for each of its directions. A rank is its own
        neighbour along a periodic axis that is not divided. ``steps`` are other displacements than -1, 0 and 1, per
        axis.

        Examples
        --------
        >>> domain = decompose(10, 2, periodic=True)
        >>> domain.neighbours(0)
        (Neighbour(direction=(-1,), rank=1), Neighbour(direction=(1,), rank=1))
        """
        coords = self.coords_of(rank)
        neighbours = []
        for direction in product(*map(sorted, steps or [(-1, 0, 1)] * self.ndim)):
            axes = sum(map(bool, direction))
            if axes == 1 or (axes and corners):
                there = self.rank_at([c + d for c, d in zip(coords, direction, strict=True)])
                if there is not None:
                    neighbours.append(Neighbour(direction, there))
        return tuple(neighbours)


def decompose(
    grid_shape: int | Sequence[int],
    ranks: int,
    *,
    halo: object = 0,
    periodic: bool | Sequence[bool] = False,
    proc_shape: int | Sequence[int | None] | None = None,
    blocks: Sequence[Sequence[int] | None] | None = None,
    nodes: Sequence[int] | npt.NDArray[np.int32] | None = None,
    placement: Placement | None = None,
    checkerboard: bool = False,
    block_cells: int = 0,
) -> Decomposition:
    """Divide a grid among ranks: process grid, cuts and placement in one call.

    The arguments are documented at `halox.Grid`. ``nodes`` has the node of each rank: ranks are then placed so that
    few bytes cross between nodes. A given ``placement`` takes precedence over ``nodes``. The process grid that is
    chosen minimises the cells sent, with ``block_cells`` more for each contiguous block of memory.

    Raises `DecompositionError` if an argument is malformed, or if no process grid that agrees with ``proc_shape`` fits
    the ranks and the grid. With ``checkerboard``, also raises `DecompositionError` if an extent is odd, or a block
    along the last axis begins at an odd cell.

    Examples
    --------
    >>> domain = decompose((512, 512, 512), 8, halo=1, periodic=True)
    >>> domain.proc_shape, domain.rank_shape(7)
    ((2, 2, 2), (256, 256, 256))
    """
    shape = normalise_grid_shape(grid_shape)
    wraps = normalise_periodic(periodic, len(shape))
    widths = normalise_halo(halo, len(shape))
    cuts = normalise_blocks(blocks, shape)
    units = (1,) * len(shape)
    if checkerboard:
        check_extents_even(shape)
        units = (*units[:-1], 2)
    given = normalise_proc_shape(proc_shape, len(shape)) or (0,) * len(shape)
    _, ((_, procs), *_) = proc_shapes(ranks, shape, widths, wraps, given, cuts, units, block_cells)
    axes = tuple(
        AxisPartition.even(cells, parts, wrap, unit)
        if cut is None
        else AxisPartition.from_blocks(cut, wrap)
        for cells, parts, wrap, cut, unit in zip(shape, procs, wraps, cuts, units, strict=True)
    )
    divided = Decomposition(axes, Placement.by_rank(procs) if placement is None else placement)
    if checkerboard:
        check_checkerboard(axes)
    if placement is not None or nodes is None:
        return divided
    # Only the ratio between the faces matters, so one field of 8 bytes per cell is enough.
    block = [max(axis.sizes) for axis in axes]
    face_bytes = [
        8 * sum(width) * math.prod(block) // cells
        for width, cells in zip(counted_halo(widths), block, strict=True)
    ]
    return Decomposition(axes, place(procs, wraps, face_bytes, nodes))
