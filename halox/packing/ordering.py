"""Order of additions: overlapping additions are assigned to different rounds, with one launch per round.

If two thread blocks of a launch added to the same bytes, an update would be lost. So the targets within a
round are disjoint. Overlapping additions keep the given order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halox.packing.refine import Copy, Side
from halox.runtime.arrays import HostBytes

# Limit of NumPy's exact overlap search; reaching it takes some milliseconds.
_SEARCH_STEPS = 100_000


def rounds(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Divide copies into rounds with disjoint targets.

    If the targets of two copies overlap, the later copy is in a later round. No target overlaps itself.
    The time grows with the square of the number of copies, in NumPy operations, and each pair with
    intersecting byte ranges takes an exact overlap test.
    """
    views = [_view(copy.target) for copy in copies]
    bounds = [[copy.target.pointer + end for end in copy.target.strided.span] for copy in copies]
    low, high = np.array(bounds, dtype=np.uint64).reshape(-1, 2).T
    round_of = np.zeros(len(copies), dtype=np.int64)
    for i, view in enumerate(views):
        near = np.flatnonzero((low[:i] < high[i]) & (low[i] < high[:i]))
        # In descending order of rounds, so that the first true overlap determines the round.
        for j in near[np.argsort(-round_of[near], kind="stable")]:
            if round_of[j] < round_of[i]:
                break
            if _overlap(views[j], view):
                round_of[i] = round_of[j] + 1
                break
    by_round: list[list[Copy]] = [[] for _ in range(round_of.max(initial=-1) + 1)]
    for copy, position in zip(copies, round_of, strict=True):
        by_round[position].append(copy)
    return by_round


def _view(side: Side) -> np.ndarray:
    """Make an array with the addresses of a side, for address arithmetic only; it must not be read."""
    blocks = side.strided
    shape, strides = (*blocks.counts, blocks.block_bytes), (*blocks.strides, 1)
    return np.asarray(HostBytes(side.pointer + blocks.offset, shape, strides))


def _overlap(first: np.ndarray, second: np.ndarray) -> bool:
    try:
        return bool(np.shares_memory(first, second, max_work=_SEARCH_STEPS))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
