"""Contents of both ranks' slabs after a trip, from the places that hand-written packing moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halox_bench.common.layouts import ByHand
from halox_bench.trips.cases import RANKS, TripCase

_FACTOR = 2654435761


def places(case: TripCase, layout: ByHand) -> Any:
    """Return the numbers of a slab's words in the packing order of hand-written code."""
    kind = f"u{case.word}"
    numbers = np.arange(case.slab_bytes // case.word, dtype=kind)
    packed = np.empty(case.nbytes, np.uint8)
    layout.pack(case.of_slab(numbers.view(np.uint8)), packed)
    return packed.view(kind).astype(np.int64)


class TripOracle:
    """Fills the slabs of both ranks, and counts the words that are wrong afterwards.

    Parameters
    ----------
    xp : module
        ``numpy`` or ``cupy``.

    Notes
    -----
    Not collective. On a GPU the work goes to CuPy's current stream.
    """

    def __init__(self, case: TripCase, rank: int, xp: Any = np) -> None:
        self._case, self._rank, self._xp = case, rank, xp
        self._kind = f"u{case.word}"
        self._known: dict[int, Any] = {}
        self._both = both = [case.directions(one) for one in range(RANKS)]  # keeps the layouts
        self._directions = [self._messages([one[way] for one in both]) for way in range(2)]

    def _messages(self, both: Sequence[Any]) -> list[tuple[int, int, Any, Any]]:
        """Return source, target and the numbers of their words for each message of a direction."""
        found = []
        for source, target in np.ndindex(RANKS, RANKS):
            here, there = both[target], both[source]
            if target not in there.sends or source not in here.receives:
                continue
            sent = self._parts(there.packed, there.sends, target)
            received = self._parts(here.unpacked, here.receives, source)
            found.append((source, target, sent, received))
        return found

    def _parts(self, layout: ByHand, messages: dict[int, Any], peer: int) -> Any:
        """Return the words of the message with a peer; all messages of a direction have one length."""
        if id(layout) not in self._known:
            self._known[id(layout)] = self._xp.asarray(places(self._case, layout))
        each = self._known[id(layout)].size // len(messages)
        first = [*messages].index(peer) * each
        return self._known[id(layout)][first : first + each]

    def filled(self, rank: int, step: int) -> Any:
        """Return the words of a rank's slab, which differ from each other, between ranks and between steps."""
        numbers = self._xp.arange(self._case.slab_bytes // self._case.word, dtype=self._kind)
        kind = numbers.dtype.type
        return (numbers * kind(2) + kind(rank)) * kind(_FACTOR) + kind(step + 1)

    def fill(self, slab: Any, step: int) -> None:
        slab.view(self._kind)[:] = self.filled(self._rank, step)

    def wrong(self, slab: Any, step: int, directions: Sequence[int]) -> int:
        """Count the words of this rank's slab that differ from the result of some directions."""
        slabs = [self.filled(rank, step) for rank in range(RANKS)]
        for direction in directions:
            moved = [
                (target, here, slabs[source][there])
                for source, target, there, here in self._directions[direction]
            ]
            for target, here, values in moved:
                slabs[target][here] = values
        return int(self._xp.count_nonzero(slab.view(self._kind) != slabs[self._rank]))
