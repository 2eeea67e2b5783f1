"""Fragments of large messages, the same at both ends.

A message is sent as packed bytes, so that it can be cut at any byte. The cuts depend only on its size, which both ends
know. While one fragment is packed, the previous fragment is sent, and the fragment before that is unpacked. After Wu et
al. 2016, section 4: the total time is the time of the slowest step, plus the time of one fragment in each of the two
faster steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeAlias

from halox.paths.messages import Message

FRAGMENT_BYTES = 1 << 20
"""Smallest fragment, in bytes; in a message of fewer than 32 fragments, these are at most 1.5 times as long.

A fragment costs the host about 10 us: two launches, an event, and one or two requests. The GPU writes 1 MiB to host
memory in 20 us (measured on an H200). Most networks take longer for 1 MiB, so that the host's time is hidden.
"""

MOST_FRAGMENTS = 32
"""Largest number of fragments of a message: more fragments would hardly shorten the first and the last stage."""

MPI_BYTES = 1 << 30
"""Largest MPI message, in bytes: most MPI libraries have 32-bit counts."""

_GRANULE = 4096  # fragments start at multiples of pages, and of the widest words of any kernel

Cutter: TypeAlias = Callable[[Message], tuple[int, ...]]
"""Returns the end offsets of a message's fragments, the last one equal to its ``packed_bytes``."""


def ends_of(nbytes: int, fragment_bytes: int | None = None) -> tuple[int, ...]:
    """Return the end offsets of a packed message's fragments: at most 32, the last one equal to ``nbytes``.

    A message shorter than twice ``fragment_bytes``, by default `FRAGMENT_BYTES`, stays whole.

    Examples
    --------
    >>> ends_of(1 << 20), ends_of(4 << 20)
    ((1048576,), (1048576, 2097152, 3145728, 4194304))
    """
    if fragment_bytes is None:
        fragment_bytes = FRAGMENT_BYTES
    count = min(nbytes // fragment_bytes, MOST_FRAGMENTS)
    if count <= 1:
        return (nbytes,)
    size = -(-nbytes // (count * _GRANULE)) * _GRANULE
    return (*range(size, nbytes, size), nbytes)


def whole(message: Message) -> tuple[int, ...]:
    """Leave a message uncut."""
    return (message.packed_bytes,)


def cutter(fragment_bytes: int | None = None) -> Cutter:
    """Return a cutter that calls :func:`ends_of`."""

    def cut(message: Message) -> tuple[int, ...]:
        return ends_of(message.packed_bytes, fragment_bytes)

    return cut


def within_counts(cut: Cutter) -> Cutter:
    """Return a cutter with fragments that MPI can count: fragments beyond `MPI_BYTES` are cut again."""

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
    """Return for each fragment number the peers with a message that has this fragment."""
    return [
        sorted({m.peer for m, at in zip(messages, ends, strict=True) if stage < len(at)})
        for stage in range(max(map(len, ends), default=0))
    ]
