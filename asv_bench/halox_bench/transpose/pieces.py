"""Blocks of all ranks on both sides of a transpose, and the common boxes of each pair of ranks.

Only the blocks themselves are taken from the grids: the hand-written transposes and the check of every result follow
this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """Cells sent to one rank, or received from it.

    Attributes
    ----------
    box : tuple of slice
        Cells, in the array of this rank.
    """

    peer: int
    box: Slices

    @property
    def extents(self) -> tuple[int, ...]:
        """Cells along each axis of the array."""
        return tuple(part.stop - part.start for part in self.box)

    @property
    def starts(self) -> tuple[int, ...]:
        """First cell along each axis."""
        return tuple(part.start for part in self.box)

    @property
    def cells(self) -> int:
        return prod(self.extents)


class Pieces:
    """One rank's share of a transpose.

    Parameters
    ----------
    source, target : sequence of tuple of slice
        For each rank its block of the source's cells and of the target's, as global indices along the axes of each.
    axes : tuple of int
        For each axis of the target, the axis of the source.

    Attributes
    ----------
    sends : list of Piece
        In the source's array, by rank, the rank itself included.
    receives : list of Piece
        In the target's array likewise.

    Examples
    --------
    >>> rows = [(slice(0, 2), slice(0, 6)), (slice(2, 4), slice(0, 6))]
    >>> found = Pieces(rows, [(slice(0, 3), slice(0, 4)), (slice(3, 6), slice(0, 4))], (1, 0), 1)
    >>> [(piece.peer, piece.starts, piece.extents) for piece in found.sends]
    [(0, (0, 0), (2, 3)), (1, (0, 3), (2, 3))]
    >>> [(piece.peer, piece.starts, piece.extents) for piece in found.receives]
    [(0, (0, 0), (3, 2)), (1, (0, 2), (3, 2))]
    """

    def __init__(
        self, source: Sequence[Slices], target: Sequence[Slices], axes: tuple[int, ...], rank: int
    ) -> None:
        self.axes, self.rank = axes, rank
        self.source, self.target = source[rank], target[rank]
        back = tuple(axes.index(axis) for axis in range(len(axes)))
        # All blocks along the source's axes.
        arriving = [tuple(block[k] for k in back) for block in target]
        self.sends = _common(source[rank], arriving)
        self.receives = [
            Piece(piece.peer, tuple(piece.box[axis] for axis in axes))
            for piece in _common(arriving[rank], source)
        ]
        self._near = [
            {piece.peer for piece in _common(source[one], arriving)} for one in range(len(source))
        ]

    @property
    def together(self) -> list[int]:
        """Ranks that this one exchanges cells with, directly or through others, itself included."""
        found = {self.rank}
        while True:
            more = found | {
                rank
                for one, peers in enumerate(self._near)
                if found & (peers | {one})
                for rank in (one, *peers)
            }
            if more == found:
                return sorted(found)
            found = more

    @property
    def cells_sent(self) -> int:
        """Cells that go to other ranks."""
        return sum(piece.cells for piece in self.sends if piece.peer != self.rank)


def _common(own: Slices, others: Sequence[Slices]) -> list[Piece]:
    """Return the intersections of a block with other blocks, counted from the block's first cell."""
    found = []
    for peer, other in enumerate(others):
        box = tuple(
            slice(max(a.start, b.start) - a.start, min(a.stop, b.stop) - a.start)
            for a, b in zip(own, other, strict=True)
        )
        if all(part.start < part.stop for part in box):
            found.append(Piece(peer, box))
    return found
