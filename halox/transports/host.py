"""The ``host`` path, packed: NumPy arrays, packed into a carrier's buffers and unpacked from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halox.engine.packers.host import HostPacker
from halox.messages import Message, Part
from halox.transports.arena import Bytes
from halox.transports.base import Channel, Job
from halox.transports.carriers import Carrier

Move = tuple[Any, Any]


Moves = tuple[list[Move], list[Callable[[], None]]]
"""Plain copies, and calls for what is none."""


class HostChannel(Channel):
    """Moves NumPy arrays through a carrier's buffers."""

    def __init__(self, job: Job, carrier: Carrier) -> None:
        self._carrier = carrier
        self._epoch = 0
        self._pack = [_packing(job, row) for row in carrier.outgoing]
        self._unpack = [_unpacking(job, row) for row in carrier.incoming]
        self._clear = clearing(job)

    def start(self) -> None:
        """Pack everything and post it."""
        self._epoch = epoch = self._epoch + 1
        self._carrier.open(epoch)
        _make(self._pack[epoch % self._carrier.slots])
        for call in self._clear:
            call()
        self._carrier.post(epoch)

    def finish(self) -> None:
        """Wait for what comes in and unpack it."""
        epoch = self._epoch
        self._carrier.collect(epoch)
        _make(self._unpack[epoch % self._carrier.slots])
        self._carrier.release(epoch)

    def close(self) -> None:
        """Close the carrier."""
        self._carrier.close()


def _make(moves: Moves) -> None:
    copies, calls = moves
    copyto = np.copyto
    for target, source in copies:
        copyto(target, source)
    for call in calls:
        call()


def _packing(job: Job, buffers: list[Bytes]) -> Moves:
    copies: list[Move] = []
    calls: list[Callable[[], None]] = []
    for packer, piece in _pieces(job, job.sends, buffers):
        packed = packer.packed_view(piece)
        if packed is None:
            calls.append(_call(packer.pack, piece))
        else:
            copies.append((packed, packer.view))
    return copies, calls


def _unpacking(job: Job, buffers: list[Bytes]) -> Moves:
    copies: list[Move] = []
    calls: list[Callable[[], None]] = []
    for packer, piece in _pieces(job, job.receives, buffers):
        packed = packer.packed_view(piece)
        if job.operation == "add":
            calls.append(_call(packer.add, piece))
        elif packed is None:
            calls.append(_call(packer.unpack, piece))
        else:
            copies.append((packer.view, packed))
    return copies, calls


def clearing(job: Job) -> list[Callable[[], None]]:
    """Return calls that set the job's ``cleared`` parts to zero."""
    return [
        _call(_packer(job, part).unpack, np.zeros(part.nbytes, np.uint8)) for part in job.cleared
    ]


def _packer(job: Job, part: Part) -> HostPacker:
    return HostPacker(job.arrays[part.array], part.datatype, part.count)


def _pieces(job: Job, messages: tuple[Message, ...], buffers: list[Bytes]) -> Any:
    """Yield a packer and its piece of the message's buffer for each part."""
    for message, buffer in zip(messages, buffers, strict=True):
        for part, offset in zip(message.parts, message.offsets, strict=True):
            yield _packer(job, part), buffer[offset : offset + part.nbytes]


def _call(function: Callable[[Bytes], Any], argument: Bytes) -> Callable[[], None]:
    def call() -> None:
        function(argument)

    return call
