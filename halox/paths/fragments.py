"""Fragments of large messages, alike on both of their ends.

A message travels packed, so it can be cut at any byte: where depends on its size alone, which both ends know. While
one fragment is packed, the one before it is under way and the one before that is unpacked. After Wu et al. 2016,
section 4: what remains is the slowest of the three stages, and the other two for one fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from halox.errors import PathError
from halox.paths.messages import Message

FRAGMENT_BYTES = 1 << 20
"""Bytes of a fragment, from which each gets up to half as many more.

A fragment costs the host some 10 us: two launches, an event, a request or two. The GPU writes 1 MiB to host memory
in 20 us (measured on an H200), and most networks take longer for it, so that this time is hidden.
"""

MOST_FRAGMENTS = 32
"""Most fragments of a message: more of them would shorten neither the first nor the last stage by much."""

MPI_BYTES = 1 << 30
"""Most bytes of one MPI message: counts are 32-bit integers in most MPI libraries."""

_GRANULE = 4096  # fragments start where pages, and the widest words of any kernel, do

Cutter: TypeAlias = Callable[[Message], tuple[int, ...]]
"""Returns where the fragments of a message end, the last one at its ``packed_bytes``."""


def ends_of(nbytes: int, fragment_bytes: int | None = None) -> tuple[int, ...]:
    """Return where the fragments of a packed message end, at most 32 and the last one at its end.

    Below twice ``fragment_bytes`` (the same on both ends, `FRAGMENT_BYTES` by default, 0 for none) it stays whole.

    Examples
    --------
    >>> ends_of(1 << 20), ends_of(4 << 20)
    ((1048576,), (1048576, 2097152, 3145728, 4194304))
    """
    if fragment_bytes is None:
        fragment_bytes = FRAGMENT_BYTES
    if fragment_bytes < 0:
        raise PathError(
            f"fragment_bytes: got {fragment_bytes}, must be at least 1, or 0 for whole messages"
        )
    count = min(nbytes // fragment_bytes, MOST_FRAGMENTS) if fragment_bytes else 1
    if count <= 1:
        return (nbytes,)
    size = -(-nbytes // (count * _GRANULE)) * _GRANULE
    return (*range(size, nbytes, size), nbytes)


def whole(message: Message) -> tuple[int, ...]:
    """Leave a message in one piece."""
    return (message.packed_bytes,)


def cutter(fragment_bytes: int | None = None) -> Cutter:
    """Return the cutter of :func:`ends_of`."""

    def cut(message: Message) -> tuple[int, ...]:
        return ends_of(message.packed_bytes, fragment_bytes)

    return cut


def within_counts(cut: Cutter) -> Cutter:
    """Return a cutter whose fragments MPI can count: those beyond `MPI_BYTES` are cut once more."""

    def counted(message: Message) -> tuple[int, ...]:
        return tuple(
            end
            for start, stop in pairwise((0, *cut(message)))
            for end in (*range(start + MPI_BYTES, stop, MPI_BYTES), stop)
        )

    return counted


def senders_by_stage(
    messages: Sequence[Message], ends: Sequence[tuple[int, ...]]
) -> list[list[int]]:
    """Return for each fragment number the peers whose messages have such a fragment."""
    return [
        sorted({m.peer for m, at in zip(messages, ends, strict=True) if stage < len(at)})
        for stage in range(max(map(len, ends), default=0))
    ]
