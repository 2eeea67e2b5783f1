"""Free ranges of a memory segment."""

from __future__ import annotations


class FreeList:
    """Free ranges of a segment of ``nbytes``, with adjacent ranges merged; initially all bytes are free."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges = [(0, nbytes)]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is allocated."""
        return self._ranges == [(0, self._nbytes)]

    def allocate(self, nbytes: int) -> int | None:
        """Allocate bytes in the smallest sufficient range; return their offset, or None if all ranges are too small."""
        fitting = [(length, offset) for offset, length in self._ranges if nbytes <= length]
        if not fitting:
            return None
        length, offset = min(fitting)
        at = self._ranges.index((offset, length))
        self._ranges[at : at + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Return bytes to the free ranges."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._ranges, (offset, nbytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((start, length))
        self._ranges = merged
