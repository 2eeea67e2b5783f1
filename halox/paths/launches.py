"""Launches that pack, unpack and copy parts of messages on a GPU, for a plan's arrays and others of the same layouts.

A kernel's table names the array of each address, and a launch adds a shift for each array (`ArrayLaunches`). The
channels of all paths get their launches here; `halox.packing.device` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from halox.errors import StateError
from halox.paths.base import Channel, Job
from halox.paths.messages import Message, Part

if TYPE_CHECKING:
    from halox.packing.device_packer import Base, Launches
    from halox.runtime.gpu.marks import Mark

WORD = 16
"""Bytes of the longest word of any kernel."""

Item: TypeAlias = "tuple[Any, ...]"
"""A part, followed by further inputs of its launches, such as the address of its packed bytes."""

Make: TypeAlias = "Callable[[int], Sequence[Launches]]"
"""Returns launches by stage, with words of at most a number of bytes."""

Calls: TypeAlias = "Sequence[Callable[[int], None]]"
"""Launch functions of a stream's address, by stage."""

View: TypeAlias = "tuple[Calls, Sequence[Base]]"
"""Calls for some arrays, and the bases to set before them: a list, an index in it, and the shift."""


class ArrayLaunches:
    """Launches over the arrays of a job, which other arrays of the same layouts can replace.

    Words must divide the shifts of the arrays, so that there is a table for each power of two that divides all shifts,
    up to `WORD`: at most five. A new array then needs no new table, and a captured launch never reads a table that
    changes later. ``arrays`` are the numbers of the arrays in the tables. `stages` holds a function of a stream's
    address for each stage.
    """

    def __init__(self, job: Job, arrays: Iterable[int], make: Make) -> None:
        self._home = [array.pointer for array in job.arrays]
        self._arrays = sorted({*arrays})
        self._make = make
        # By the longest word: launches, which own the memory that the calls need, their calls, and their bases.
        self._by_word: dict[int, tuple[Sequence[Launches], Calls, Sequence[Base]]] = {}
        self.bind(self.view(self._home))

    def view(self, pointers: Sequence[int]) -> View:
        """Return the calls for arrays at these addresses; local.

        `StateError` if new launches must be made and the current stream is being captured.
        """
        shifts = [(new - old) % (1 << 64) for new, old in zip(pointers, self._home, strict=True)]
        bits = WORD
        for array in self._arrays:
            bits |= shifts[array]
        word = bits & -bits
        if word not in self._by_word:
            if self._by_word:
                check_no_capture()
            stages = self._make(word)
            found = [stage.at for stage in stages], [b for stage in stages for b in stage.bases]
            self._by_word[word] = stages, *found
        _, calls, bases = self._by_word[word]
        return calls, [(of, n, shifts[array]) for of, n, array in bases]

    def bind(self, view: View) -> None:
        self.stages, bases = view
        for of, n, shift in bases:
            of[n] = shift

    def launch(self, stream: int) -> None:
        """Enqueue all stages on a stream, given by its address."""
        for launch in self.stages:
            launch(stream)


def check_no_capture() -> None:
    """Raise `StateError` if the current stream is being captured, so that launches cannot be made."""
    from halox.runtime.gpu.streams import is_capturing

    if is_capturing():
        raise StateError(
            "the current stream is being captured, and these arrays are the first of their layout at such addresses, "
            "which takes new tables; exchange them once before the capture"
        )


class MovableChannel(Channel):
    """A channel on a GPU; all its launches, listed in `_movable`, can move to other arrays."""

    is_movable = True
    _movable: Sequence[ArrayLaunches] = ()

    def views(self, memories: Sequence[int]) -> Sequence[View]:
        return [launches.view(memories) for launches in self._movable]

    def bind(self, views: Sequence[View]) -> None:
        for launches, view in zip(self._movable, views, strict=True):
            launches.bind(view)


def packed_items(messages: Sequence[Message], starts: Sequence[int]) -> list[Item]:
    """Pair each part of some messages with its address in the packed messages, which begin at ``starts``."""
    return [
        (part, start + offset)
        for message, start in zip(messages, starts, strict=True)
        for part, offset in zip(message.parts, message.offsets, strict=True)
    ]


def packing(
    job: Job,
    items: Sequence[Item],
    device: int,
    mark: Mark | None = None,
    pairs: Sequence[tuple[Part, Part]] = (),
) -> ArrayLaunches:
    """Return the launch that packs parts to their paired addresses, and sets a mark as it starts.

    It also copies the first part of each of the ``pairs`` to the second part; both must be strided.
    """
    from halox.packing.device import launch_pack

    moves = [(job.endpoint(part), address) for part, address in items]
    both = [(job.endpoint(source), job.endpoint(target)) for source, target in pairs]
    parts = [*(part for part, _ in items), *(part for pair in pairs for part in pair)]
    arrays = (part.array for part in parts)
    return ArrayLaunches(job, arrays, lambda word: [launch_pack(moves, device, word, mark, both)])


def unpacking(
    job: Job, items: Sequence[Item], device: int, mark: Mark | None = None
) -> ArrayLaunches:
    """Return the launch that unpacks or adds parts from their paired addresses; sets a mark like `packing`."""
    from halox.packing.device import launch_add, launch_unpack

    unpack = launch_add if job.operation == "add" else launch_unpack
    moves = [(job.endpoint(part), address) for part, address in items]
    arrays = (part.array for part, _ in items)
    return ArrayLaunches(job, arrays, lambda word: [unpack(moves, device, word, mark)])


def fragmented(
    job: Job,
    items: Sequence[Item],
    messages: Sequence[Message],
    ends: Sequence[tuple[int, ...]],
    fragments: int,
    device: int,
    *,
    unpack: bool,
) -> ArrayLaunches:
    """Return launches whose stages are the fragments of some messages; ``ends`` has each message's fragment ends."""
    from halox.packing.device import fragment_launches

    shares = [
        [min(max(end - offset, 0), part.nbytes) for end in at + at[-1:] * (fragments - len(at))]
        for message, at in zip(messages, ends, strict=True)
        for part, offset in zip(message.parts, message.offsets, strict=True)
    ]
    moves = [
        (job.endpoint(part), address, share)
        for (part, address), share in zip(items, shares, strict=True)
    ]
    make = partial(fragment_launches, moves, fragments, device, unpack=unpack)
    return ArrayLaunches(job, (part.array for part, _ in items), make)


def clearing_of(job: Job, device: int) -> list[ArrayLaunches]:
    """Return the launch that clears the parts that an accumulation has sent; an empty list for other operations."""
    from halox.packing.device import launch_zeros

    if not job.cleared:
        return []
    ends = [job.endpoint(part) for part in job.cleared]
    arrays = (part.array for part in job.cleared)
    return [ArrayLaunches(job, arrays, lambda word: [launch_zeros(ends, device, word)])]


def copying(job: Job, pairs: Sequence[tuple[Part, Part]], device: int) -> ArrayLaunches:
    """Return the launches of a rank's messages to itself."""
    from halox.packing.device import launch_between

    both = [(job.endpoint(source), job.endpoint(target)) for source, target in pairs]
    arrays = (part.array for pair in pairs for part in pair)
    make = partial(launch_between, both, job.operation, device)
    return ArrayLaunches(job, arrays, lambda word: [make(word)])
