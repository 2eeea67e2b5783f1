"""Free ranges of a piece of memory."""

from __future__ import annotations


class FreeList:
    """Free ranges of some bytes, none next to another; all are free at first."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._ranges = [(0, nbytes)]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is taken."""
        return self._ranges == [(0, self._nbytes)]

    def take(self, nbytes: int) -> int | None:
        """Take bytes out of the smallest range that has them, and return their offset; None if there is none."""
        fitting = [(length, offset) for offset, length in self._ranges if nbytes <= length]
        if not fitting:
            return None
        length, offset = min(fitting)
        at = self._ranges.index((offset, length))
        self._ranges[at : at + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
        return offset

    def put(self, offset: int, nbytes: int) -> None:
        """Put bytes back."""
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._ranges, (offset, nbytes)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = merged[-1][0], merged[-1][1] + length
            else:
                merged.append((start, length))
        self._ranges = merged
