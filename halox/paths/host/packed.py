"""Packed protocols of NumPy arrays: `HostChannel` packs into transport buffers, and unpacks from them.

`packed_channels` makes the channels of the ``host`` path, and also of the ``staged`` path, for arrays on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import numpy as np

from halox.packing.blocking import SMALL_BYTES, Move, blocked, copy_all
from halox.packing.host import HostPacker
from halox.packing.host_layout import host_layout
from halox.packing.host_views import View, block_view, common_views, element_view
from halox.paths.base import Build, Channel, ChannelMessages, Job, Path
from halox.paths.buffers import (
    RequestBuffers,
    SharedBuffers,
    TransportBuffers,
    host_buffer,
    pinned_buffer,
)
from halox.paths.fragments import Cutter, whole
from halox.paths.messages import Message, Part
from halox.runtime.arrays import Array, DType, HostArray
from halox.runtime.shared_memory import Bytes

PartView = tuple[int, tuple[int, ...], DType, int, tuple[int, ...]]
"""A view of a part in the memory of its array: the array's number, shape, dtype, offset in this memory, and strides.

A plain tuple, since tuples are made fastest.
"""

Calls = list[Callable[[], object]]
"""Calls that pack or unpack, to make in sequence."""

_LINE_BYTES = 64
_LARGE_BYTES = 2 << 20  # of cache lines: more than a core's private cache is sure to hold
_BLOCK_BYTES = 1 << 18


def places_of(
    parts: Iterable[Part], arrays: Sequence[HostArray], *, values: bool = False
) -> list[PartView] | None:
    """Return the places of parts: of words to copy, or with ``values`` of elements to add to.

    They are the same in all arrays of these layouts. None unless the blocks of all parts are regular, as they are in
    accumulations.
    """
    places = []
    for part in parts:
        strided = part.datatype.items(part.count).strided
        if strided is None:
            return None
        if values:
            assert part.datatype.uniform is not None
            view = element_view(strided, part.datatype.uniform)
        else:
            view = block_view(strided)
        places.append(_in_memory(part, view, arrays))
    return places


def paired_places(
    source: Part, target: Part, arrays: Sequence[HostArray]
) -> tuple[PartView, PartView] | None:
    """Return the places of two parts of equal size, in views of one shape; None if there are no such views."""
    to, of = target.strided, source.strided
    views = None if to is None or of is None else common_views(to, of)
    if views is None:
        return None
    return _in_memory(source, views[1], arrays), _in_memory(target, views[0], arrays)


def _in_memory(part: Part, view: View, arrays: Sequence[HostArray]) -> PartView:
    """Convert a view that starts at an array's first element to a place that starts at the first byte of its memory."""
    shape, dtype, offset, strides = view
    return part.array, shape, dtype, arrays[part.array].origin + offset, strides


def views_of(places: Sequence[PartView], memories: Sequence[memoryview]) -> list[Array]:
    """View parts in the memory of some arrays."""
    return [
        np.ndarray(shape, dtype, memories[n], offset, strides)
        for n, shape, dtype, offset, strides in places
    ]


def call_all(calls: Calls) -> None:
    """Make some calls in sequence."""
    for call in calls:
        call()


def add_all(moves: Sequence[Move]) -> None:
    """Add the sources of some moves to their targets, in sequence; shapes differ across folds."""
    for target, source in moves:
        np.add(target, source.reshape(target.shape), target)


_Rows = list[list[Move]] | list[Calls]
"""For each slot, moves or calls between some arrays and its buffers."""


class _Views(NamedTuple):
    """Work of an exchange of some arrays."""

    pack: _Rows
    clear: list[Move]  # of an accumulation: set the cells that have been sent to zero
    unpack: _Rows


class HostChannel(Channel):
    """Moves NumPy arrays through transport buffers.

    If all parts are regular, views of the arrays and buffers do the work, or calls of MPI where it copies faster, and
    the channel can move to other arrays. Otherwise prepared calls of packers do it.
    """

    timeline = (
        ("_buffers.open", "wait"),
        ("_pack", "pack"),
        ("_buffers.post", "send"),
        ("_buffers.collect", "wait"),
        ("_unpack", "unpack"),
    )

    def __init__(self, job: Job, buffers: TransportBuffers) -> None:
        self._buffers, self._epoch = buffers, 0
        adds = job.operation == "add"
        # Functions that do the work of a slot in `_Views`.
        self._pack: Callable[..., None] = copy_all
        self._unpack: Callable[..., None] = add_all if adds else copy_all
        self._odd = False  # whether MPI copies some parts
        arrays = cast(Sequence[HostArray], job.arrays)
        self._arrays = arrays
        self._parts = tuple(
            [part for m in some for part in m.parts] for some in (job.sends, job.receives)
        )
        sent = places_of(self._parts[0], arrays)
        received = places_of(self._parts[1], arrays, values=adds)
        if sent is None or received is None:
            self._pack = self._unpack = call_all
            packs = _by_slot(job, job.sends, buffers.outgoing, "packing")
            unpacks = _by_slot(job, job.receives, buffers.incoming, "unpacking")
            self._views = _Views(packs, [], unpacks)
            return
        self.is_movable = True
        self._sent, self._received = sent, received
        self._outgoing = [_packed(sent, job.sends, row) for row in buffers.outgoing]
        self._incoming = [_packed(received, job.receives, row) for row in buffers.incoming]
        self._zeros = [np.zeros((), dtype) for _, _, dtype, *_ in sent] if adds else []
        packed = [*self._outgoing[0], *self._incoming[0]]
        every = [] if adds else [part for parts in self._parts for part in parts]
        if any([host_layout(p.datatype, p.count).is_by_mpi(p.datatype, p.count) for p in every]):
            self._odd, self._pack, self._unpack = True, call_all, call_all
        self._is_large = any(
            [
                view.size * _LINE_BYTES > _LARGE_BYTES or view.nbytes >= SMALL_BYTES
                for view in packed
            ]
        )
        self.bind(self.views([array.memory for array in arrays]))

    def views(self, memories: Sequence[memoryview]) -> _Views:
        sent, received = views_of(self._sent, memories), views_of(self._received, memories)
        if self._odd:
            return _Views(
                [self._odd_calls(row, memories, unpack=False) for row in self._outgoing],
                [],
                [self._odd_calls(row, memories, unpack=True) for row in self._incoming],
            )
        packs = [[*zip(row, sent, strict=True)] for row in self._outgoing]
        unpacks = [[*zip(received, row, strict=True)] for row in self._incoming]
        if self._is_large:
            packs = [_ordered(moves, 1, backwards=False) for moves in packs]
            if self._unpack is copy_all:
                unpacks = [_ordered(moves, 0, backwards=True) for moves in unpacks]
        clear = [*zip(sent, self._zeros, strict=True)] if self._zeros else []
        return _Views(packs, clear, unpacks)

    def _odd_calls(
        self, packed: Sequence[Array], memories: Sequence[memoryview], *, unpack: bool
    ) -> Calls:
        """Return the calls that pack parts of some memories to ``packed``, or unpack them."""
        calls: Calls = []
        for part, buffer in zip(self._parts[unpack], packed, strict=True):
            first, stop = part.datatype.reach(part.count)
            origin = self._arrays[part.array].origin
            memory = np.ndarray((stop - first,), np.uint8, memories[part.array], origin + first)
            layout, whole = host_layout(part.datatype, part.count), buffer.reshape(-1).view("u1")
            calls.append(layout.prepared(memory, whole, unpack, part.datatype, part.count))
        return calls

    def bind(self, views: _Views) -> None:
        self._views = views

    def start(self) -> None:
        self._epoch = epoch = self._epoch + 1
        self._buffers.open(epoch)
        views = self._views
        self._pack(views.pack[epoch % self._buffers.slots])
        if views.clear:
            copy_all(views.clear)
        self._buffers.post(epoch)

    def finish(self) -> None:
        epoch = self._epoch
        self._buffers.collect(epoch)
        self._unpack(self._views.unpack[epoch % self._buffers.slots])
        self._buffers.release(epoch)

    def close(self) -> None:
        self._views = _Views([], [], [])
        self._buffers.close()

    def free(self) -> None:
        self._buffers.free()


def packed_channels(build: Build, path: Path, cut: Cutter = whole) -> list[ChannelMessages]:
    """Make the channels of a path's packed messages: through the node's shared memory, and through MPI.

    The peers' arrays may be in a different kind of memory from this rank's arrays.
    """
    channels = []
    for protocol in ("shared", "mpi"):
        job = build.job(path, protocol)
        if not job.messages:
            continue
        buffers: TransportBuffers
        if protocol == "shared":
            link = build.links[path.name]
            buffers = SharedBuffers(build.context.arena, link, job.sends, job.receives, cut)
        else:
            buffers = RequestBuffers(
                build.world,
                job.sends,
                job.receives,
                build.mpi_tag,
                host_buffer if build.device is None else pinned_buffer,
                cut=cut,
                leftovers=build.context.leftovers,
            )
        channel: Channel
        if build.device is None:
            channel = HostChannel(job, buffers)
        else:
            from halox.paths.staged.pipeline import StagedPipeline, Work

            work = Work(job, buffers, build.device, "staged")
            channel = StagedPipeline(build.world, buffers, work)
        channels.append(ChannelMessages(f"{path.name}/{protocol}", channel, job.messages))
    return channels


def _packed(
    places: Sequence[PartView], messages: Sequence[Message], buffers: list[Bytes]
) -> list[Array]:
    """View the parts of packed messages with the shapes and dtypes of their places."""
    starts = [
        (buffer, offset)
        for message, buffer in zip(messages, buffers, strict=True)
        for offset in message.offsets
    ]
    return [
        np.ndarray(shape, dtype, buffer.data, offset)
        for (_, shape, dtype, *_), (buffer, offset) in zip(places, starts, strict=True)
    ]


def _by_slot(
    job: Job, messages: tuple[Message, ...], rows: list[list[Bytes]], method: str
) -> list[Calls]:
    """Return for each slot, with its row of buffers, the calls that a method of the parts' packers prepares."""
    packers = [[packer_of(job, part) for part in message.parts] for message in messages]
    return [
        [
            getattr(packer, method)(buffer[offset : offset + packer.nbytes])
            for message, of_parts, buffer in zip(messages, packers, row, strict=True)
            for packer, offset in zip(of_parts, message.offsets, strict=True)
        ]
        for row in rows
    ]


def packer_of(job: Job, part: Part) -> HostPacker:
    """Return the packer of a part of a message."""
    array = cast(Sequence[HostArray], job.arrays)[part.array]
    return HostPacker(array, part.datatype, part.count)


def _ordered(copies: list[Move], side: int, *, backwards: bool) -> list[Move]:
    """Cut permuting copies into tiles; if there are none, interleave large copies of short runs."""
    cut = blocked(copies)
    return cut if len(cut) > len(copies) else _in_turns(copies, side, backwards=backwards)


def _in_turns(copies: list[Move], side: int, *, backwards: bool) -> list[Move]:
    """Cut large copies of short runs into blocks, and interleave the copies block by block.

    The blocks at both ends of a row share cache lines with the next row: the low halo is beside the cells that are sent
    up, and the high halo beside the cells that are sent down. When the copies are interleaved, a block's cache lines
    are still in the cache when they are used again. Unpacking goes ``backwards``: it begins with the last blocks of the
    preceding copies, which are also still in the cache.
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


def _lines_bytes(view: Array) -> int:
    """Return the bytes of the cache lines that a view touches, if its runs are shorter than a line; otherwise 0."""
    run, steps = 1, view.strides
    if steps[-1] == view.itemsize:
        run, steps = view.shape[-1], steps[:-1]
    is_short = run * view.itemsize < _LINE_BYTES and steps and abs(steps[-1]) > _LINE_BYTES
    return view.size // run * _LINE_BYTES if is_short else 0
