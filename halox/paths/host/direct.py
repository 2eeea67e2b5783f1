"""The ``direct`` protocol of the ``host`` path: copies halos straight from the neighbour's array in shared memory.

For arrays that the grid allocated, on one node, with blocks long enough that reading another core's cache lines
in place is faster than packing them. No cell is copied twice; in exchange a rank must not return before its
neighbours have read its cells, so that two flags are needed where the packed path needs one::

    A: cells final | ready=e | ...... copy B's cells | read=e | wait for B's read=e | return
    B: cells final | ready=e | copy A's cells | read=e | ...... wait for A's read=e | return

A rank that waits copies for its other exchanges between `start` and `finish` too, so that they may be finished in any
order (`halox.runtime.waiting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from halox.datatypes import StridedBlocks
from halox.paths.base import Channel, Job
from halox.paths.messages import Message, located
from halox.paths.node import NodeLink
from halox.runtime.arena import Place, SharedArena
from halox.runtime.arrays import WORDS, common_word, strided_view
from halox.runtime.waiting import UNDER_WAY


@dataclass(frozen=True)
class Window:
    """Addresses of a message's parts in the shared memory of its end."""

    places: tuple[Place, ...]
    layouts: tuple[StridedBlocks, ...]

    @property
    def blocks(self) -> list[tuple[Place, StridedBlocks]]:
        """Each part's place with its layout."""
        return [*zip(self.places, self.layouts, strict=True)]


def window_of(message: Message, arrays: Any, arena: SharedArena) -> Window | None:
    """Return the addresses of a message's parts, None unless all are single strided items in the arena."""
    if any(part.count != 1 for part in message.parts):
        return None
    found = located(message, arrays, arena.locate)
    return None if found is None else Window(*found)


def _view(arena: SharedArena, place: Place, layout: StridedBlocks, word: Any) -> Any:
    """Return the words of a part in any rank's segment."""
    memory = arena.memory(Place(place.window, place.node_rank))
    return strided_view(memory, place.offset, layout, word)


class DirectChannel(Channel):
    """Copies from the neighbours' arrays."""

    def __init__(
        self,
        job: Job,
        arena: SharedArena,
        link: NodeLink,
        windows: Mapping[tuple[int, int], Window | None],
    ) -> None:
        self._world, self._link = link.world, link
        self._epoch = 0
        self._copied = 0
        # Epochs to be copied, at most one. Whoever takes it out copies, of whichever thread.
        self._to_copy: list[int] = []
        self._moves: list[tuple[Any, Any]] = []
        for message in job.receives:
            window, own = windows[message.peer, message.tag], window_of(message, job.arrays, arena)
            if window is None or own is None:
                raise AssertionError("a message without a window was sent the direct way")
            for target, source in zip(own.blocks, window.blocks, strict=True):
                word = WORDS[
                    common_word((target[0].offset, target[1]), (source[0].offset, source[1]))
                ]
                self._moves.append((_view(arena, *target, word), _view(arena, *source, word)))
        sources = sorted({m.peer for m in job.receives})
        readers = sorted({m.peer for m in job.sends})
        self._ready = link.flag("ready", sources)
        self._read = link.flag("read", readers)

    def start(self) -> None:
        """Let the neighbours read."""
        self.run()
        self._to_copy.append(self._epoch)
        UNDER_WAY[self] = None

    def run(self) -> None:
        """Let the neighbours read; nobody waits for anything else before `finish`."""
        self._epoch += 1
        self._ready.signal(self._epoch)

    def finish(self) -> None:
        """Copy what the neighbours hold, and wait until they have read as well."""
        epoch = self._epoch
        if UNDER_WAY and not self._is_alone():
            self._finish_helping(epoch)
            return
        self._ready.wait(epoch)
        copyto = np.copyto
        for target, source in self._moves:
            copyto(target, source)
        self._read.signal(epoch)
        self._read.wait(epoch)

    def _is_alone(self) -> bool:
        """Take this exchange out of those under way; return whether it was the only one, and nobody has copied yet."""
        was_started = UNDER_WAY.pop(self, self) is None
        if not was_started:
            self._to_copy.append(self._epoch)
        elif not UNDER_WAY:
            with suppress(IndexError):
                self._to_copy.pop()
                return True
        return False

    def _finish_helping(self, epoch: int) -> None:
        """Finish while other exchanges are under way, or after somebody has copied."""
        self._ready.wait(epoch)
        self._copy()
        self._world.waiter().until(
            lambda: self._copied == epoch,
            lambda: f"rank {self._world.rank} has waited for another thread to copy",
        )
        self._read.wait(epoch)

    def help(self) -> None:
        """Copy, if the neighbours have come and nobody has copied yet."""
        if self._to_copy and self._ready.passed(self._epoch):
            self._copy()

    def _copy(self) -> None:
        try:
            epoch = self._to_copy.pop()
        except IndexError:  # somebody else does
            return
        for target, source in self._moves:
            np.copyto(target, source)
        self._read.signal(epoch)
        self._copied = epoch

    def close(self) -> None:
        """Leave an exchange that is under way: the neighbours need not wait for this rank to read."""
        UNDER_WAY.pop(self, None)
        if self._to_copy:
            self._to_copy.clear()
            self._read.signal(self._epoch)

    def free(self) -> None:
        """Give the flags back."""
        self._link.close()
