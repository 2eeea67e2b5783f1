"""One axis of the grid, cut into parts: ranges of cells, and the halo widths that the parts can fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import sub


@dataclass(frozen=True)
class AxisPartition:
    """One axis of the grid, cut into consecutive parts.

    Part ``p`` owns cells ``bounds[p]`` to ``bounds[p + 1] - 1``; the bounds rise from 0 to ``cells``.
    On a periodic axis the first cell follows the last.

    Examples
    --------
    >>> axis = AxisPartition.even(10, 4, periodic=True)
    >>> axis.bounds
    (0, 3, 6, 8, 10)
    >>> axis.owned(1)
    (3, 6)
    """

    cells: int
    bounds: tuple[int, ...]
    periodic: bool

    @classmethod
    def even(cls, cells: int, parts: int, periodic: bool, unit: int = 1) -> AxisPartition:
        """Cut into equal parts; the first ``cells % parts`` parts are one cell larger.

        ``unit``, which must divide ``cells``, is a number of cells that stay in one part. The first parts are then
        larger by one unit.
        """
        units = cells // unit
        size, extra = divmod(units, parts)
        larger = extra * (size + 1)  # units of the larger parts
        starts = [*range(0, larger, size + 1), *range(larger, units, size)]
        return cls(cells, (*map(unit.__mul__, starts), cells), periodic)

    @classmethod
    def from_blocks(cls, blocks: Sequence[int], periodic: bool) -> AxisPartition:
        """Cut into parts of the given sizes, each of at least one cell.

        Examples
        --------
        >>> AxisPartition.from_blocks([4, 1, 5], periodic=False).bounds
        (0, 4, 5, 10)
        """
        return cls(sum(blocks), (0, *accumulate(blocks)), periodic)

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(sub, self.bounds[1:], self.bounds))

    def owned(self, part: int) -> tuple[int, int]:
        """Half-open range of the cells that ``part`` owns."""
        return self.bounds[part], self.bounds[part + 1]

    def closes(self, part: int) -> bool:
        """Whether ``part`` is the last part of a non-periodic axis and so owns a staggered field's extra point."""
        return not self.periodic and part == self.parts - 1

    def points(self, staggered: bool) -> int:
        """Distinct points of a field along the axis.

        A staggered field has one more point than cells. On a periodic axis the extra point is the
        first point again and does not count.
        """
        return self.cells + (staggered and not self.periodic)

    def owned_points(self, part: int, staggered: bool) -> tuple[int, int]:
        """Half-open range of the points of a field that ``part`` owns.

        Examples
        --------
        >>> axis = AxisPartition.even(10, 2, periodic=False)
        >>> axis.owned_points(0, staggered=True), axis.owned_points(1, staggered=True)
        ((0, 5), (5, 11))
        """
        start, stop = self.owned(part)
        return start, stop + (staggered and self.closes(part))

    def width_limits(self, staggered: bool = False) -> tuple[int | None, int | None]:
        """Widest low and high halo that the next part alone has enough points to fill, for all parts.

        Both are None if the axis has a single part and is not periodic, because nothing is then exchanged.
        A part of a staggered field also stores the first point of the next part, so the next part has one
        point less for the high halo.

        Examples
        --------
        >>> AxisPartition.even(10, 4, periodic=True).width_limits()
        (2, 2)
        >>> AxisPartition.even(10, 1, periodic=False).width_limits()
        (None, None)
        """
        if self.parts == 1 and not self.periodic:
            return None, None
        # The part below fills a low halo, and the part above fills a high halo.
        first, last = (0, self.parts) if self.periodic else (1, self.parts - 1)
        high_sizes = list(self.sizes[first:])
        if staggered:
            high_sizes = [size - 1 for size in high_sizes]
            high_sizes[-1] += self.closes(self.parts - 1)
        return min(self.sizes[:last]), min(high_sizes)
