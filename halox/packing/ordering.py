"""Order of additions: overlapping additions are assigned to different rounds, with one launch per round.

If two thread blocks of a launch added to the same bytes, an update would be lost. So the targets within a
round are disjoint. Overlapping additions keep the given order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError
from halox.packing.refine import Copy, Piece, Side, pieces
from halox.runtime.arrays import HostBytes

MAX_ROUNDS = 4096
"""Largest number of launches of one addition."""

# Limit of NumPy's exact overlap search; reaching it takes some milliseconds.
_SEARCH_STEPS = 100_000


def rounds(copies: Sequence[Copy]) -> list[list[Copy]]:
    """Divide copies into rounds with disjoint targets.

    If the targets of two copies overlap, the later copy is in a later round. If the target of a copy
    visits a byte more than once, the copy is cut into parts that visit each byte once. Raises
    `DatatypeError` for more than 4096 rounds. The time grows with the square of the number of copies,
    in NumPy operations, and each pair with intersecting byte ranges takes an exact overlap test.
    """
    parts = [part for copy in copies for part in _without_self_overlap(copy)]
    views = [_view(part.target) for part in parts]
    bounds = [[part.target.pointer + end for end in part.target.strided.span] for part in parts]
    low, high = np.array(bounds, dtype=np.uint64).reshape(-1, 2).T
    round_of = np.zeros(len(parts), dtype=np.int64)
    for i, view in enumerate(views):
        near = np.flatnonzero((low[:i] < high[i]) & (low[i] < high[:i]))
        # In descending order of rounds, so that the first true overlap determines the round.
        for j in near[np.argsort(-round_of[near], kind="stable")]:
            if round_of[j] < round_of[i]:
                break
            if _overlap(views[j], view):
                round_of[i] = round_of[j] + 1
                break
    if parts and round_of.max() >= MAX_ROUNDS:
        raise _too_many()
    by_round: list[list[Copy]] = [[] for _ in range(int(round_of.max()) + 1)] if parts else []
    for part, position in zip(parts, round_of, strict=True):
        by_round[position].append(part)
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


def _without_self_overlap(copy: Copy) -> list[Copy]:
    """Return the copy; if its target may visit a byte twice, return parts, in order, that visit each byte once."""
    if not copy.target.strided.block_bytes:
        return []
    if not copy.target.strided.overlaps:
        return [copy]
    parts = [part for piece in pieces(copy) for part in _parts(piece)]
    if len(parts) > MAX_ROUNDS:
        raise _too_many()
    numbers = copy.source.array, copy.target.array
    return [
        Copy(*(side._replace(array=n) for side, n in zip(part, numbers, strict=True)))
        for part in parts
    ]


def _parts(piece: Piece) -> list[Copy]:
    """Unroll outer levels of a piece until its target visits each byte once."""
    *outer, run = piece.levels
    counts, *strides = zip(*outer, strict=True) if outer else ((), (), ())
    source, target = (
        Side(pointer, StridedBlocks(0, counts, along, run.steps))
        for pointer, along in zip(piece[:2], strides, strict=True)
    )
    if not target.strided.overlaps:
        return [Copy(source, target)]
    first = piece.levels[0]
    if first.steps > MAX_ROUNDS:
        raise _too_many()
    starts = (
        (piece.source + i * first.source_stride, piece.target + i * first.target_stride)
        for i in range(first.steps)
    )
    return [part for start in starts for part in _parts(Piece(*start, piece.levels[1:]))]


def _too_many() -> DatatypeError:
    return DatatypeError(
        f"the target overlaps itself so often that adding would take more than {MAX_ROUNDS} "
        "launches; use a datatype whose blocks overlap less, or add on the host"
    )
