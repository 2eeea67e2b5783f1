"""The ``local`` path: messages of a rank to itself, as on a periodic axis with one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from halox.packing.blocking import Move, blocked, copy_all
from halox.paths.base import (
    Build,
    Candidate,
    Channel,
    ChannelMessages,
    Job,
    MessageEnds,
    Path,
    Protocol,
)
from halox.paths.costs import ProtocolCost
from halox.paths.host.packed import (
    PartView,
    add_all,
    packer_of,
    paired_places,
    places_of,
    views_of,
)
from halox.paths.launches import MovableChannel, clearing_of, copying
from halox.paths.messages import Part
from halox.runtime.arrays import HostArray
from halox.runtime.gpu.cuda import cupy


class LocalPath(Path):
    """Copies within a rank."""

    name = "local"
    protocols = (
        Protocol("copy", ProtocolCost(7.0, 0.0, (250.0, 800.0, 1500.0, 1900.0)), reach="self"),
    )
    summary = "possible: a rank that is its own neighbour"
    memory = "host"
    to_self = True

    def candidates(self, ends: MessageEnds) -> Sequence[Candidate]:
        return [self.candidate("copy", "the neighbour is this rank")]

    def channels(self, build: Build, agreed: object) -> Sequence[ChannelMessages]:
        job, device = build.job(self), build.device
        channel = LocalHostChannel(job) if device is None else LocalDeviceChannel(job, device)
        return [ChannelMessages(self.name, channel, job.messages)]


_Moves: TypeAlias = tuple[list[Move], list[Callable[[], object]]]


class LocalHostChannel(Channel):
    """Copies between NumPy arrays of one rank, without a buffer if one loop nest can walk both sides.

    `start` makes the copies. The caller changes neither the sent nor the received parts between `start` and `finish`,
    so that the copies may be made at any time in between. They are made in the order of the parts, since a part may
    hold cells that an earlier part has received, and before anything is sent to other ranks.
    """

    timeline = (("start", "copy"),)

    def __init__(self, job: Job) -> None:
        pairs, adds = [*job.pairs()], job.operation == "add"
        arrays = cast(Sequence[HostArray], job.arrays)
        places, cleared = _places_of(pairs, arrays, values=adds), places_of(job.cleared, arrays)
        self._in_tiles: bool | None = None  # the same for all arrays of a layout
        # Plain copies, and calls for all other work.
        self._copies: list[Move] = []
        self._calls: list[Callable[[], object]] = []
        if places is not None and cleared is not None:
            self.is_movable = True
            self._adds = adds
            self._sources, self._targets = places
            self._cleared = cleared
            self._zeros = [np.zeros((), dtype) for _, _, dtype, *_ in cleared]
            self.bind(self.views([array.memory for array in arrays]))
            return
        for send, receive in pairs:
            buffer = np.empty(send.nbytes, np.uint8)
            self._calls += [
                packer_of(job, send).packing(buffer),
                packer_of(job, receive).unpacking(buffer),
            ]

    def views(self, memories: Sequence[memoryview]) -> _Moves:
        """Return copies between other arrays, and the calls that follow them."""
        sources, targets = views_of(self._sources, memories), views_of(self._targets, memories)
        moves = [*zip(targets, sources, strict=True)]
        if not self._adds:
            if self._in_tiles is None:
                cut = blocked(moves)
                self._in_tiles = len(cut) > len(moves)
                return cut, []
            return blocked(moves) if self._in_tiles else moves, []
        cleared = [*zip(views_of(self._cleared, memories), self._zeros, strict=True)]
        return [], [partial(add_all, moves), partial(copy_all, cleared)]

    def bind(self, views: _Moves) -> None:
        self._copies, self._calls = views

    def start(self) -> None:
        for target, source in self._copies:
            target[...] = source
        if self._calls:
            for call in self._calls:
                call()

    def close(self) -> None:
        self._copies, self._calls = [], []


def _places_of(
    pairs: Sequence[tuple[Part, Part]], arrays: Sequence[HostArray], *, values: bool
) -> tuple[list[PartView], list[PartView]] | None:
    """Return the source places and the target places of copies or additions; None unless each copy has one shape."""
    sources = places_of((send for send, _ in pairs), arrays, values=values)
    targets = places_of((receive for _, receive in pairs), arrays, values=values)
    if sources is None or targets is None:
        return None
    for number, (a, b) in enumerate(zip(sources, targets, strict=True)):
        if values or a[1:3] == b[1:3]:  # shape and dtype
            continue
        common = paired_places(*pairs[number], arrays)
        if common is None:
            return None
        sources[number], targets[number] = common
    return sources, targets


class LocalDeviceChannel(MovableChannel):
    """Copies between arrays of one rank on its GPU, in one kernel on the current stream."""

    needs_host = False
    timeline = (("start", "launch"),)

    def __init__(self, job: Job, device: int) -> None:
        self._movable = [copying(job, [*job.pairs()], device), *clearing_of(job, device)]
        self._current_stream = cupy().cuda.get_current_stream

    def start(self) -> None:
        pointer = self._current_stream().ptr
        for launches in self._movable:
            launches.launch(pointer)
