"""Extents: lower and upper bound, true bounds, alignment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from halox.errors import DatatypeError
from halox.values import LARGEST


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a datatype in bytes, by the rules of MPI.

    As in the MPI standard (datatype constructors, "lower-bound and upper-bound markers"): bounds that were set
    explicitly, by ``resized`` or ``subarray``, here or in a part, outrank those of parts without, and are never padded;
    where no bound is explicit, the extent is rounded up to a multiple of the alignment.
    """

    lb: int = 0
    ub: int = 0  # the extent is the difference of the two and may be negative
    true_lb: int = 0  # first byte touched, 0 where none is
    true_ub: int = 0  # one past the last byte touched, 0 where none is
    alignment: int = 1  # largest of the primitives
    marked: bool = False  # whether the bounds are explicit
    empty: bool = True  # whether no byte is touched

    @property
    def extent(self) -> int:
        """Distance in bytes between two consecutive items."""
        return self.ub - self.lb

    def repeated(self, count: int, stride: int) -> Bounds:
        """Bounds of ``count >= 1`` copies, ``stride`` bytes apart; the extent is not yet padded."""
        last = (count - 1) * stride
        return self.over(min(0, last), max(0, last))

    def over(self, first: int, last: int) -> Bounds:
        """Bounds of copies whose lowest displacement is ``first`` and highest is ``last``."""
        true = (0, 0) if self.empty else (self.true_lb + first, self.true_ub + last)
        return Bounds(
            self.lb + first, self.ub + last, *true, self.alignment, self.marked, self.empty
        )

    def padded(self) -> Bounds:
        """Round the extent up to the alignment, unless the bounds are explicit."""
        padding = 0 if self.marked else -self.extent % self.alignment
        return replace(self, ub=self.ub + padding) if padding else self

    def resized(self, lb: int, extent: int) -> Bounds:
        """Set the bounds explicitly; the bytes stay."""
        return Bounds(lb, lb + extent, self.true_lb, self.true_ub, self.alignment, True, self.empty)

    @staticmethod
    def union(parts: Iterable[Bounds]) -> Bounds:
        """Bounds of several parts side by side; the extent is not yet padded."""
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
    """Refuse a type whose bounds, size, or further numbers in bytes leave 64 bits.

    Python's integers do not wrap, NumPy's do: whatever passes here can be laid out in int64.
    """
    true_extent = bounds.true_ub - bounds.true_lb
    places = (bounds.lb, bounds.ub, bounds.true_lb, bounds.true_ub, *displacements)
    furthest = max(size, abs(bounds.extent), true_extent, *map(abs, places))
    if furthest > LARGEST:
        raise DatatypeError(
            f"{what} reaches over {furthest} bytes, more than the 2**63 - 1 that memory can have; "
            "use smaller counts, displacements or extents"
        )
