"""Layouts of the ping-pong: different datatypes on both sides of a message, after Wu et al. 2016, 5.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halox import datatypes as dt
from halox.errors import HaloxError
from halox_bench.common.layouts import Box, Boxes, ByHand, Triangle

Doubles = npt.NDArray[np.float64]

MARGIN = 512
"""Elements between the columns of a sub-matrix."""

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
QUICK_SIZES = (64, 512, 2048)


@dataclass(frozen=True)
class Side:
    """One rank's memory and what of it travels.

    Attributes
    ----------
    elements : int
        float64 elements of its array.
    by_hand : ByHand
        The same for hand-written packing.
    """

    elements: int
    datatype: dt.Datatype
    count: int
    by_hand: ByHand


@dataclass(frozen=True)
class PingPong:
    """One case: what rank 0 sends and takes back, and what rank 1 receives and sends back.

    Attributes
    ----------
    n : int
        Order of the matrix.
    places : callable
        Returns, for both sides, the flat indices of the elements in the order in which they travel, by NumPy's
        slicing alone.
    """

    pattern: str
    n: int
    sides: tuple[Side, Side]
    places: Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    @property
    def name(self) -> str:
        """Pattern and size."""
        return f"{self.pattern} {self.n}"

    @property
    def nbytes(self) -> int:
        """Payload of one message."""
        return self.sides[0].datatype.size * self.sides[0].count


def _submatrix(n: int) -> Side:
    """Return n columns of n elements in a larger column-major matrix."""
    pitch = n + MARGIN
    by_hand = Boxes((Box(8 * n, (n,), (8 * pitch,)),))
    return Side(n * pitch, dt.vector(n, n, pitch, "f8"), 1, by_hand)


def _contiguous(n: int) -> Side:
    return Side(n * n, dt.contiguous(n * n, "f8"), 1, Boxes((Box(8 * n * n),)))


def _columns_as_rows(n: int) -> Side:
    """Return n vectors of single elements: what was a column lands in a row."""
    column = dt.resized(dt.vector(n, 1, n, "f8"), 0, 8)
    return Side(n * n, dt.contiguous(n, column), 1, Boxes((Box(8, (n, n), (8, 8 * n)),)))


def _triangle(n: int) -> Side:
    column = np.arange(n)
    datatype = dt.indexed(n - column, column * n + column, "f8")
    return Side(n * n, datatype, 1, Triangle(n, lower=True))


def _flat(elements: int) -> npt.NDArray[np.int64]:
    return np.arange(elements, dtype=np.int64)


def vector(n: int) -> PingPong:
    """Return a sub-matrix on both sides: figure 10, V."""

    def places() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        both = _flat(n * (n + MARGIN)).reshape(n, -1)[:, :n].ravel()
        return both, both

    return PingPong("vector", n, (_submatrix(n), _submatrix(n)), places)


def triangle(n: int) -> PingPong:
    """Return the lower triangle by columns on both sides: figure 10, T."""

    def places() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        # Columns of a column-major matrix are the rows of this view.
        both = _flat(n * n)[np.triu(np.ones((n, n), bool)).ravel()]
        return both, both

    return PingPong("triangle", n, (_triangle(n), _triangle(n)), places)


def vector_contiguous(n: int) -> PingPong:
    """Return a sub-matrix on rank 0 and contiguous memory on rank 1: figure 11."""

    def places() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return _flat(n * (n + MARGIN)).reshape(n, -1)[:, :n].ravel(), _flat(n * n)

    return PingPong("vector-contiguous", n, (_submatrix(n), _contiguous(n)), places)


def transpose(n: int) -> PingPong:
    """Return a matrix on rank 0 and its transpose on rank 1: figure 12."""

    def places() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        return _flat(n * n), _flat(n * n).reshape(n, n).T.ravel()

    return PingPong("transpose", n, (_contiguous(n), _columns_as_rows(n)), places)


PATTERNS: dict[str, Callable[[int], PingPong]] = {
    "vector": vector,
    "triangle": triangle,
    "vector-contiguous": vector_contiguous,
    "transpose": transpose,
}


def select(names: Sequence[str], sizes: Sequence[int]) -> list[PingPong]:
    """Return the cases of some patterns, all if none is named.

    Raises
    ------
    HaloxError
        If there is no such pattern.
    """
    unknown = [name for name in names if name not in PATTERNS]
    if unknown:
        raise HaloxError(f"no pattern {unknown[0]!r}; known are {', '.join(PATTERNS)}")
    return [PATTERNS[name](n) for name in (names or PATTERNS) for n in sizes]


class PingPongOracle:
    """Fills both sides of a case and says what is wrong afterwards, from flat indices alone.

    Parameters
    ----------
    player : int
        0 or 1.
    xp : module
        ``numpy`` or ``cupy``.
    """

    EMPTY = -1.0

    def __init__(self, case: PingPong, player: int, xp: Any = np) -> None:
        here = case.places()[player]
        self._values = xp.arange(here.size, dtype="f8")
        self._places = xp.asarray(here)
        self._elements = case.sides[player].elements
        self._xp = xp

    def fill(self, array: Any, step: int, *, full: bool) -> None:
        """Put the message of a step into its places, or nothing at all; and nothing everywhere else."""
        array[...] = self.EMPTY
        if full:
            array[self._places] = self._values + 0.5 * step

    def wrong(self, array: Any, step: int) -> int:
        """Count the elements that do not hold the message of a step, or are not empty beside it."""
        wanted = self._xp.full(self._elements, self.EMPTY)
        wanted[self._places] = self._values + 0.5 * step
        return int(self._xp.count_nonzero(array != wanted))
