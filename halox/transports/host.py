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


Steps = list[tuple[list[Move], list[Callable[[], None]]]]
"""For each fragment the copies to make, and calls for what is no plain copy."""


class HostChannel(Channel):
    """Moves NumPy arrays through a carrier's buffers.

    Long messages are cut into fragments along their parts' outermost level, and `run` packs and unpacks them in
    turns: the cells that a rank sends and those that it receives lie beside each other, in the same cache lines.
    """

    def __init__(self, job: Job, carrier: Carrier) -> None:
        self._carrier = carrier
        self._epoch = 0
        self._fragments = carrier.fragments if job.fragmented else 1
        self._pack = [self._packing(job, row) for row in carrier.outgoing]
        self._unpack = [self._unpacking(job, row) for row in carrier.incoming]
        self._clear = clearing(job)

    def start(self) -> None:
        """Pack everything and post it."""
        self._epoch = epoch = self._epoch + 1
        self._carrier.open(epoch)
        for step in self._pack[epoch % self._carrier.slots]:
            _make(step)
        for call in self._clear:
            call()
        self._carrier.post(epoch)

    def finish(self) -> None:
        """Wait for what comes in and unpack it."""
        epoch = self._epoch
        self._carrier.collect(epoch)
        for step in self._unpack[epoch % self._carrier.slots]:
            _make(step)
        self._carrier.release(epoch)

    def run(self) -> None:
        """Exchange, fragments in turns."""
        if self._fragments == 1 or self._clear:
            self.start()
            self.finish()
            return
        carrier = self._carrier
        self._epoch = epoch = self._epoch + 1
        carrier.open(epoch)
        slot = epoch % carrier.slots
        unpacking = self._unpack[slot]
        for number, step in enumerate(self._pack[slot]):
            _make(step)
            carrier.post(epoch, number)
            if number:
                carrier.collect(epoch, number - 1)
                _make(unpacking[number - 1])
        carrier.collect(epoch)
        _make(unpacking[-1])
        carrier.release(epoch)

    def close(self) -> None:
        """Close the carrier."""
        self._carrier.close()

    def _packing(self, job: Job, buffers: list[Bytes]) -> Steps:
        steps: Steps = [([], []) for _ in range(self._fragments)]
        for message, packer, piece in _pieces(job, job.sends, buffers):
            packed = packer.packed_view(piece)
            if packed is None:
                steps[0][1].append(_call(packer.pack, piece))
            elif message.key in job.fragmented:
                for step, part in zip(steps, self._cut(packer.view), strict=True):
                    step[0].append((packed[part], packer.view[part]))
            else:
                steps[0][0].append((packed, packer.view))
        return steps

    def _unpacking(self, job: Job, buffers: list[Bytes]) -> Steps:
        steps: Steps = [([], []) for _ in range(self._fragments)]
        for message, packer, piece in _pieces(job, job.receives, buffers):
            packed = packer.packed_view(piece)
            if job.operation == "add":
                steps[-1][1].append(_call(packer.add, piece))
            elif packed is None:
                steps[-1][1].append(_call(packer.unpack, piece))
            elif message.key in job.fragmented:
                for step, part in zip(steps, self._cut(packer.view), strict=True):
                    step[0].append((packer.view[part], packed[part]))
            else:
                steps[-1][0].append((packer.view, packed))
        return steps

    def _cut(self, view: Any) -> list[slice]:
        """Cut the outermost level into fragments, alike on both ends."""
        n, fragments = view.shape[0], self._fragments
        return [slice(n * k // fragments, n * (k + 1) // fragments) for k in range(fragments)]


def _make(step: tuple[list[Move], list[Callable[[], None]]]) -> None:
    moves, calls = step
    copyto = np.copyto
    for target, source in moves:
        copyto(target, source)
    for call in calls:
        call()


def clearing(job: Job) -> list[Callable[[], None]]:
    """Return calls that set the job's ``cleared`` parts to zero."""
    return [
        _call(_packer(job, part).unpack, np.zeros(part.nbytes, np.uint8)) for part in job.cleared
    ]


def _packer(job: Job, part: Part) -> HostPacker:
    return HostPacker(job.arrays[part.array], part.datatype, part.count)


def _pieces(job: Job, messages: tuple[Message, ...], buffers: list[Bytes]) -> Any:
    """Yield the message, a packer and its piece of the message's buffer for each part."""
    for message, buffer in zip(messages, buffers, strict=True):
        for part, offset in zip(message.parts, message.offsets, strict=True):
            yield message, _packer(job, part), buffer[offset : offset + part.nbytes]


def _call(function: Callable[[Bytes], Any], argument: Bytes) -> Callable[[], None]:
    def call() -> None:
        function(argument)

    return call
