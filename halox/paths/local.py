"""The ``local`` path: the neighbour is this rank itself, as on a periodic axis that it owns alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from halox.packing.host import HostPacker
from halox.paths.base import (
    Candidate,
    Carried,
    Channel,
    EndpointInfo,
    Job,
    Path,
    Protocol,
    SelectionContext,
)
from halox.paths.build import Build
from halox.paths.costs import ProtocolCost
from halox.paths.host.packed import clearing, packer_of
from halox.paths.launches import clearing_of
from halox.paths.messages import Part


class LocalPath(Path):
    """Copies within a rank."""

    name = "local"
    protocols = (
        Protocol("copy", ProtocolCost(7.0, 0.0, (250.0, 800.0, 1500.0, 1900.0)), reach="self"),
    )
    summary = "possible: a rank that is its own neighbour"
    memory = "host"
    to_self = True

    def candidates(
        self, sender: EndpointInfo, receiver: EndpointInfo, selection: SelectionContext
    ) -> Sequence[Candidate]:
        """Copy."""
        return [self.offer("copy", "the neighbour is this rank")]

    def channels(self, build: Build, agreed: Any) -> Sequence[Carried]:
        """Make the channel of messages that no kernel of another path takes along."""
        job, device = build.job(self), build.device
        if not job.sends or build.taken:
            return ()
        channel = LocalHostChannel(job) if device is None else LocalDeviceChannel(job, device)
        return [Carried(self.name, channel, job.messages)]


def _pairs(job: Job) -> Iterator[tuple[Part, Part]]:
    """Pair what this rank sends to itself with what it receives, part by part."""
    for send, receive in zip(job.sends, job.receives, strict=True):
        yield from zip(send.parts, receive.parts, strict=True)


class LocalHostChannel(Channel):
    """Copies between NumPy arrays of one rank, without a buffer where both sides are strided alike.

    All copies are made by `start`: until `finish` nobody may change what is sent or touch what is received, so that
    the earlier moment is as good.
    """

    def __init__(self, job: Job) -> None:
        self._moves: list[tuple[Any, Any]] = []
        self._calls: list[Callable[[], None]] = []
        for send, receive in _pairs(job):
            source = packer_of(job, send)
            target = packer_of(job, receive)
            if job.operation == "copy" and _alike(source, target):
                self._moves.append((target.view, source.view))
            else:
                self._calls.append(_through_buffer(source, target, job.operation))
        self._calls += clearing(job)

    def start(self) -> None:
        """Copy everything."""
        for target, source in self._moves:
            np.copyto(target, source)
        for call in self._calls:
            call()


def _alike(source: HostPacker, target: HostPacker) -> bool:
    a, b = source.view, target.view
    return a is not None and b is not None and a.shape == b.shape and a.dtype == b.dtype


def _through_buffer(source: HostPacker, target: HostPacker, operation: str) -> Callable[[], None]:
    buffer = np.empty(source.nbytes, np.uint8)
    put = target.add if operation == "add" else target.unpack

    def move() -> None:
        source.pack(buffer)
        put(buffer)

    return move


class LocalDeviceChannel(Channel):
    """Copies between arrays of one rank on its GPU, in one kernel on the current stream."""

    needs_host = False

    def __init__(self, job: Job, device: int) -> None:
        from halox.packing.device import launch_between

        pairs = [(job.endpoint(send), job.endpoint(receive)) for send, receive in _pairs(job)]
        self._launches: list[Any] = [launch_between(pairs, job.operation, device)]
        self._launches += clearing_of(job, device)

    def start(self) -> None:
        """Put the kernel on the current stream."""
        for launch in self._launches:
            launch.launch()
