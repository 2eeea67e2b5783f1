"""Packed protocols of NumPy arrays: packed into transport buffers, and unpacked from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from halox.packing.host import HostPacker
from halox.paths.base import Carried, Channel, Job, Path
from halox.paths.buffers import RequestBuffers, SharedBuffers, TransportBuffers
from halox.paths.build import Build
from halox.paths.fragments import Cutter, whole
from halox.paths.messages import Message, Part
from halox.paths.node import NodeLink
from halox.runtime.shared_memory import Bytes

Move = tuple[Any, Any]
"""Target and source of a copy: two views of one shape."""

_LINE_BYTES = 64
_LARGE_BYTES = 2 << 20  # of cache lines: more than a core's own cache is sure to hold
_BLOCK_BYTES = 1 << 18


Moves = tuple[list[Move], list[Callable[[], None]]]
"""Plain copies, and calls for what is none."""


class HostChannel(Channel):
    """Moves NumPy arrays through transport buffers."""

    def __init__(self, job: Job, buffers: TransportBuffers) -> None:
        self._buffers = buffers
        self._epoch = 0
        self._pack = [_packing(job, row) for row in buffers.outgoing]
        self._unpack = [_unpacking(job, row) for row in buffers.incoming]
        self._clear = clearing(job)

    def start(self) -> None:
        """Pack everything and post it."""
        self._epoch = epoch = self._epoch + 1
        self._buffers.open(epoch)
        _make(self._pack[epoch % self._buffers.slots])
        for call in self._clear:
            call()
        self._buffers.post(epoch)

    def finish(self) -> None:
        """Wait for what comes in and unpack it."""
        epoch = self._epoch
        self._buffers.collect(epoch)
        _make(self._unpack[epoch % self._buffers.slots])
        self._buffers.release(epoch)

    def close(self) -> None:
        """Close the buffers."""
        self._buffers.close()

    def free(self) -> None:
        """Free the buffers."""
        self._buffers.free()


def packed_channels(
    build: Build, path: Path, link: NodeLink | None, cut: Cutter = whole
) -> list[Carried]:
    """Make the channels of a path's packed messages: through the node's shared memory, and through MPI.

    The peers' arrays may be in another kind of memory than this rank's.
    """
    made = []
    for protocol in ("shared", "mpi"):
        job = build.job(path, protocol)
        if not job.messages:
            continue
        buffers: TransportBuffers
        if protocol == "shared" and link is not None:
            buffers = SharedBuffers(build.context.arena, link, job.sends, job.receives, cut)
        else:
            buffers = RequestBuffers(
                build.world,
                job.sends,
                job.receives,
                build.mpi_tag,
                pinned=build.device is not None,
                cut=cut,
                leftovers=build.context.leftovers,
            )
        channel: Channel
        if build.device is None:
            channel = HostChannel(job, buffers)
        else:
            from halox.paths.staged.channel import staged_channel

            channel = staged_channel(build.world, job, buffers, build.device)
        made.append(Carried(f"{path.name}/{protocol}", channel, job.messages))
    return made


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
    return _in_turns(copies, 1, backwards=False), calls


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
    return _in_turns(copies, 0, backwards=True), calls


def clearing(job: Job) -> list[Callable[[], None]]:
    """Return calls that set the job's ``cleared`` parts to zero."""
    return [
        _call(packer_of(job, part).unpack, np.zeros(part.nbytes, np.uint8)) for part in job.cleared
    ]


def packer_of(job: Job, part: Part) -> HostPacker:
    """Return the packer of a part of a message."""
    return HostPacker(job.arrays[part.array], part.datatype, part.count)


def _pieces(job: Job, messages: tuple[Message, ...], buffers: list[Bytes]) -> Any:
    """Yield a packer and its piece of the message's buffer for each part."""
    for message, buffer in zip(messages, buffers, strict=True):
        for part, offset in zip(message.parts, message.offsets, strict=True):
            yield packer_of(job, part), buffer[offset : offset + part.nbytes]


def _in_turns(copies: list[Move], side: int, *, backwards: bool) -> list[Move]:
    """Cut large copies of short runs into blocks, and let those of one block follow one another.

    The blocks at both ends of a row share cache lines as the next row's: the low halo beside the cells that
    are sent up, the high halo beside those sent down. In turns, a block's lines are still near when they are used
    again; backwards, so are those of the last blocks of the copies before.
    """
    large = [copy for copy in copies if _lines_bytes(copy[side]) > _LARGE_BYTES]
    if len({len(copy[side]) for copy in large}) != 1:
        return copies
    n = len(large[0][side])
    blocks = min(n, _lines_bytes(large[0][side]) // _BLOCK_BYTES)
    order = range(blocks - 1, -1, -1) if backwards else range(blocks)
    ranges = [slice(n * b // blocks, n * (b + 1) // blocks) for b in order]
    cut = [(target[part], source[part]) for part in ranges for target, source in large]
    whole = {id(copy) for copy in large}
    return [copy for copy in copies if id(copy) not in whole] + cut


def _lines_bytes(view: Any) -> int:
    """Return the bytes of the cache lines that runs too short to fill one touch, 0 for longer runs."""
    apart = view.ndim > 1 and abs(view.strides[-2]) > _LINE_BYTES
    run_bytes = view.shape[-1] * view.itemsize
    return view.size // view.shape[-1] * _LINE_BYTES if apart and run_bytes < _LINE_BYTES else 0


def _call(function: Callable[[Bytes], Any], argument: Bytes) -> Callable[[], None]:
    def call() -> None:
        function(argument)

    return call
