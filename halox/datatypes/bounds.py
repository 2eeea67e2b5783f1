"""Extents: lower and upper bound, true bounds, alignment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from halox.errors import DatatypeError
from halox.values import LARGEST


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a datatype in bytes, by the rules of MPI.

    The rules are in the MPI standard (datatype constructors, "lower-bound and upper-bound markers"). ``resized`` and
    ``subarray`` set bounds explicitly. If some parts of a datatype have explicit bounds, these parts alone determine
    the bounds of the datatype, and the extent is never padded. If no part has explicit bounds, the extent is rounded up
    to a multiple of the alignment.
    """

    lb: int = 0
    ub: int = 0  # The extent is ub - lb and may be negative.
    true_lb: int = 0  # first byte touched; 0 if no byte is touched
    true_ub: int = 0  # one past the last byte touched; 0 if no byte is touched
    alignment: int = 1  # largest alignment of the primitives
    marked: bool = False  # whether the bounds are explicit
    empty: bool = True  # whether no byte is touched

    @property
    def extent(self) -> int:
        """Distance in bytes between two consecutive items."""
        return self.ub - self.lb

    def repeated(self, count: int, stride: int) -> Bounds:
        """Bounds of ``count >= 1`` copies, ``stride`` bytes apart, before padding."""
        last = (count - 1) * stride
        return self.over(min(0, last), max(0, last))

    def over(self, first: int, last: int) -> Bounds:
        """Bounds of several copies, with displacements from ``first`` to ``last``."""
        true = (0, 0) if self.empty else (self.true_lb + first, self.true_ub + last)
        return Bounds(
            self.lb + first, self.ub + last, *true, self.alignment, self.marked, self.empty
        )

    def padded(self) -> Bounds:
        """Round the extent up to the alignment, unless the bounds are explicit."""
        padding = 0 if self.marked else -self.extent % self.alignment
        return replace(self, ub=self.ub + padding) if padding else self

    def resized(self, lb: int, extent: int) -> Bounds:
        """Set the bounds explicitly; the bytes touched do not change."""
        return Bounds(lb, lb + extent, self.true_lb, self.true_ub, self.alignment, True, self.empty)

    @staticmethod
    def union(parts: Iterable[Bounds]) -> Bounds:
        """Bounds of several parts together, before padding."""
        given = list(parts)
        if not given:
            return Bounds()
        marked = [part for part in given if part.marked]
        bounding = marked or given
        touching = [part for part in given if not part.empty]
        return Bounds(
            min(part.lb for part in bounding),
            max(part.ub for part in bounding),
            min((part.true_lb for part in touching), default=0),
            max((part.true_ub for part in touching), default=0),
            max(part.alignment for part in given),
            bool(marked),
            not touching,
        )


def check_reach(what: str, size: int, bounds: Bounds, *displacements: int) -> None:
    """Raise `DatatypeError` if the size, a bound or a displacement in bytes exceeds a signed 64-bit integer.

    NumPy's integers wrap around, Python's do not. After this check, layouts can be computed in int64.
    """
    true_extent = bounds.true_ub - bounds.true_lb
    places = (bounds.lb, bounds.ub, bounds.true_lb, bounds.true_ub, *displacements)
    furthest = max(size, abs(bounds.extent), true_extent, *map(abs, places))
    if furthest > LARGEST:
        raise DatatypeError(
            f"{what} reaches over {furthest} bytes, more than the 2**63 - 1 that memory can have; "
            "use smaller counts, displacements or extents"
        )
