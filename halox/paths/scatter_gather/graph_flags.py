"""Flags of the copy engine's channel in device memory, by which exchanges in CUDA graphs wait for one another.

A graph repeats the captured operations unchanged, so that no operation can count exchanges. Each flag is a word: one
rank sets it to 1, and the rank that waits for it resets it to 0. A rank's words are in memory of its GPU, a pair for
each peer::

    owner of an array   ready=1 . . . . . . . . . . . . . . . . . . . . . . . . . wait for moved==1 | moved=0
    rank that moves     . . . . wait for ready==1 | ready=0 | copies | moved=1

No flag is set twice before it is reset. The owner sets "ready" again only behind its wait for "moved", which the moving
rank sets behind its ``ready=0``. The moving rank sets "moved" again only behind its wait for the next "ready", which
the owner sets behind its ``moved=0``. So both flags are 0 whenever an exchange ends on a stream, whether replayed or
not, and exchanges that use events instead may run in between.

A rank sets its "ready" flags before it waits for anything, and waits for "moved" after all its copies. So ranks that
replay the same exchanges in the same order cannot block one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halox.runtime.device_arena import DeviceArena
from halox.runtime.gpu.cuda import cupy
from halox.runtime.gpu.stream_words import PreparedWords, WordStep
from halox.runtime.segments import Place, SegmentKey

_LINE_BYTES = 128
_READY, _MOVED = 0, 4  # offsets of a peer's pair of words


class GraphFlags:
    """Flags of one channel; all are 0 at first.

    This rank accesses arrays of the ranks ``accessed``; the ranks ``accessing`` access this rank's arrays.
    """

    def __init__(
        self, arena: DeviceArena, accessed: Sequence[int], accessing: Sequence[int]
    ) -> None:
        self._arena, self._accessed, self._accessing = arena, accessed, accessing
        peers = sorted({*accessed, *accessing})
        nbytes = _LINE_BYTES * len(peers)
        self._block = arena.allocate(nbytes)
        self._at = {peer: _LINE_BYTES * number for number, peer in enumerate(peers)}
        with cupy().cuda.Device(arena.device):
            cupy().cuda.runtime.memset(self._block.pointer, 0, nbytes)
            cupy().cuda.runtime.deviceSynchronize()

    def place(self, peer: int) -> Place:
        """Return the place of the words that a peer sets."""
        return self._block.place.at(self._at[peer])

    def handles(self) -> dict[SegmentKey, bytes]:
        """Return the handle of the words' memory, for peers to open."""
        return self._arena.handles([self._block.place])

    def open(self, places: Mapping[int, Place]) -> None:
        """Prepare the operations, from the places of the peers' words; the memory of these words is open."""
        there = {peer: self._arena.pointer(place) for peer, place in places.items()}
        here = {peer: self._block.pointer + at for peer, at in self._at.items()}

        def signal(peers: Sequence[int], word: int) -> list[WordStep]:
            return [WordStep("write", there[peer] + word, 1) for peer in peers]

        def consume(peers: Sequence[int], word: int) -> list[WordStep]:
            return [
                step
                for at in (here[peer] + word for peer in peers)
                for step in (WordStep("wait", at, 1), WordStep("write", at, 0))
            ]

        def prepared(*steps: WordStep) -> PreparedWords:
            return PreparedWords(steps, self._arena.device)

        self.signal_ready = prepared(*signal(self._accessing, _READY)).launch
        self.consume_ready = prepared(*consume(self._accessed, _READY)).launch
        self.end = prepared(
            *signal(self._accessed, _MOVED), *consume(self._accessing, _MOVED)
        ).launch

    def free(self) -> None:
        """Release the memory, when no rank uses it any longer."""
        self._arena.release(self._block)
