"""Benchmark patterns: data, its datatype, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from halox.datatypes import Datatype
from halox_bench.common.layouts import Box, Boxes, ByHand

# Arrays of a case are aligned, with gaps between, like separate allocations.
_ALIGNMENT = 512
_GAP = 4096


@dataclass(frozen=True)
class Case:
    """One pattern in one size.

    Attributes
    ----------
    pattern, size : str
        Name of the pattern and of the size; without spaces.
    arrays : tuple of int
        Bytes of memory of each array, from its first element.
    build : callable
        Given the offset of each array in the slab, returns the datatype.
    payload : int
        Bytes that are packed, by the pattern's own formula.
    count : int
        Items of the datatype.
    start : int
        Bytes from the first array's beginning to the datatype's buffer address.
    by_hand : ByHand or None
        The layout for hand-written baselines.
    block_bytes : int
        Length of the contiguous runs if they are equal, else 0; for plots.
    """

    pattern: str
    size: str
    arrays: tuple[int, ...]
    build: Callable[[Sequence[int]], Datatype]
    payload: int
    count: int = 1
    start: int = 0
    by_hand: ByHand | None = None
    block_bytes: int = 0

    @property
    def name(self) -> str:
        """Pattern and size in one word."""
        return f"{self.pattern}/{self.size}"

    @property
    def details(self) -> dict[str, Any]:
        what = {"pattern": self.pattern, "size": self.size}
        return {**what, "payload_bytes": self.payload, "block_bytes": self.block_bytes}

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each array in one slab of memory for all arrays."""
        found, at = [], 0
        for nbytes in self.arrays:
            found.append(at)
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _GAP
        return tuple(found)

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self.offsets[-1] + -(-self.arrays[-1] // _ALIGNMENT) * _ALIGNMENT

    def place(self, base: int) -> tuple[Datatype, int]:
        """Return the datatype for arrays in a slab at an address, and the buffer address.

        Notes
        -----
        For another slab the same datatype is valid, with the buffer address moved likewise.
        """
        return self.build(self.offsets), base + self.start


def of_box(
    pattern: str,
    size: object,
    nbytes: int,
    build: Callable[[], Datatype],
    box: Box,
    *,
    start: int = 0,
    count: int = 1,
) -> Case:
    """Return a case of equal runs in one array of so many bytes."""
    what = pattern, str(size), (nbytes,), lambda _: build(), box.nbytes, count, start
    return Case(*what, by_hand=Boxes((box,)), block_bytes=box.block_bytes)


@dataclass(frozen=True)
class Pattern:
    """A family of cases.

    Attributes
    ----------
    make : callable
        Returns all cases.
    quick : tuple of str
        Sizes of a quick run.
    source : str
        Publication of the sizes.
    """

    name: str
    summary: str
    make: Callable[[], Iterable[Any]]
    quick: tuple[str, ...]
    source: str = ""

    def cases(self, *, quick: bool = False) -> Iterator[Any]:
        """Yield the cases."""
        for case in self.make():
            if not quick or case.size in self.quick:
                yield case
