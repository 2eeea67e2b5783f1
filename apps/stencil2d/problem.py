"""The global problem: division of the plane into blocks, and initial values.

With a halo of width h > 1 the original computes every point of its padded array except the
outermost ring, thus also the inner h - 1 rings of the halo at the outer boundary. This is a larger
problem: the plane has h - 1 more points on every side, which are zero at the start, and the zero
boundary surrounds *them*. Here these points belong to the ranks at the edge, so that the result
does not depend on the number of ranks::

        columns       0 .. h-2 | the plane's columns | h-1 more
    rows 0 .. h-2     zero       zero                  zero
    the plane's       zero       initial values        zero        each rank's block, edge ranks'
    h-1 more          zero       zero                  zero        blocks h-1 wider on that side
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .operator import FLOPS_PER_POINT


@dataclass(frozen=True)
class Axis:
    """One axis of the plane.

    Attributes
    ----------
    tiles : tuple of int
        Points of the plane in each part.
    margin : int
        Points added at both ends.
    local : bool
        Whether the initial values start from 0 in every part, as in the original.
    """

    tiles: tuple[int, ...]
    margin: int
    local: bool

    @property
    def blocks(self) -> tuple[int, ...]:
        """Points owned by each part, margins included."""
        sizes = list(self.tiles)
        sizes[0] += self.margin
        sizes[-1] += self.margin
        return tuple(sizes)

    @property
    def points(self) -> int:
        """Points along the axis, margins included."""
        return sum(self.blocks)

    def index(self) -> np.ndarray:
        """Return for every point this axis's factor of the initial value; 0 in the margins."""
        counts = self.tiles if self.local else (sum(self.tiles),)
        inner = np.concatenate([np.arange(count) for count in counts])
        return np.pad(inner, self.margin).astype(np.float64)


@dataclass(frozen=True)
class Problem:
    """A plane, cut into blocks.

    Attributes
    ----------
    axes : tuple of Axis
        Rows and columns.
    halo : int
        Halo width, which is also the number of steps between exchanges.
    """

    axes: tuple[Axis, Axis]
    halo: int

    @classmethod
    def make(
        cls, size: tuple[int, int], proc_shape: tuple[int, int], halo: int, *, strong: bool
    ) -> Problem:
        """Cut a plane: ``size`` is the size of each rank's tile, or of the whole plane if ``strong``."""
        axes = (
            Axis(_split(n, parts) if strong else (n,) * parts, halo - 1, local=not strong)
            for n, parts in zip(size, proc_shape, strict=True)
        )
        rows, cols = axes
        return cls((rows, cols), halo)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Points of the whole plane, margins included."""
        return self.axes[0].points, self.axes[1].points

    @property
    def blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of the parts along each axis."""
        return self.axes[0].blocks, self.axes[1].blocks

    def initial(self, owned: tuple[slice, ...] = (slice(None), slice(None))) -> np.ndarray:
        """Return the initial values, float64, of the whole plane or a part of it."""
        return np.outer(self.axes[0].index()[owned[0]], self.axes[1].index()[owned[1]])

    @property
    def is_original(self) -> bool:
        """Whether the initial values equal the original's on one rank."""
        return all(not axis.local or len(axis.tiles) == 1 for axis in self.axes)

    @property
    def largest(self) -> float:
        """Largest initial value."""
        return float(self.axes[0].index().max() * self.axes[1].index().max())

    @property
    def flops_per_step(self) -> int:
        """Operations by the original's rule, which counts each tile and h - 1 points on each of its sides."""
        points = 1
        for axis in self.axes:
            points *= sum(axis.tiles) + len(axis.tiles) * 2 * axis.margin
        return points * FLOPS_PER_POINT


def computed(start: int, stop: int, points: int, stored: int, halo: int) -> tuple[int, int]:
    """Return the half-open local range that a rank computes along an axis.

    Towards a neighbour the range includes the halo except its outermost point. At the outer
    boundary the halo stays zero.

    Parameters
    ----------
    start, stop : int
        Global range that the rank owns.
    points : int
        Points along the axis.
    stored : int
        Points along the axis in the rank's array, halo included.
    halo : int
        Halo width.

    Examples
    --------
    >>> computed(0, 8, 16, 14, 3)
    (3, 13)
    """
    return halo if start == 0 else 1, stored - (halo if stop == points else 1)


def _split(points: int, parts: int) -> tuple[int, ...]:
    """Return the sizes of parts, which differ by at most one, larger parts first."""
    return tuple(points // parts + (part < points % parts) for part in range(parts))
