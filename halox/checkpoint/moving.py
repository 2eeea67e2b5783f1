"""Transfer of cells between the fields of a grid and chunks on disk.

One rank, the mover, writes a chunk. Other ranks send their cells of the chunk to the mover. A load reads plain chunks
without messages: every rank reads its own cells, and the partial checksums of the ranks add up to the checksum of the
chunk. The mover reads a chunk and sends the cells to other ranks in two cases: the chunk has other codecs, or too many
ranks would read the same bytes.

With messages, every rank processes its chunks in the same order, and waits only for messages of earlier chunks, so the
ranks cannot deadlock. A rank keeps its first error and continues its messages, until all ranks raise the error
together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from halox.checkpoint.chunks import (
    MOST_READERS,
    Chunk,
    ChunkGrid,
    Cut,
    ReadBox,
    extents,
    intersection,
    relative,
)
from halox.checkpoint.failure import Failure
from halox.checkpoint.fields import StoredField
from halox.checkpoint.store import CodecChunks, PlainChunks, check_array
from halox.collectives.host.cell_sums import blocks
from halox.runtime.arrays import Array
from halox.runtime.gpu.cuda import is_device_array
from halox.runtime.world import World
from halox.staging import Index, Staging, staging
from halox.window import Window, opaque

PART_BYTES = 512 << 10
"""Bytes of a part of a field on the host: the part stays in a core's cache between its copy and the system call."""

DEVICE_PART_BYTES = 8 << 20
"""Bytes of a part of a field on a GPU: the copy takes much longer than its launch."""

_UNDER_WAY = 2

Store = PlainChunks | CodecChunks


def open_store(
    folder: Path, path: Path, field: StoredField, *, mode: str, node_ranks: int = 1
) -> Store:
    """Return the chunks of a field in a folder; errors name ``path`` instead of the folder. Local.

    For reading, raises `CheckpointError` if the array's metadata differ from the group's metadata.
    """
    if mode == "r":
        check_array(folder, path, field)
    if field.is_plain:
        return PlainChunks(str(folder), path, field, node_ranks)
    return CodecChunks(str(folder), path, field, mode=mode)


Residues = dict[tuple[int, ...], int]
"""Results of `ChunkReader.residue` by chunk index."""

Tell = Callable[[int], None]
"""Called with the bytes of this rank's field moved since the last call."""


class Mover:
    """Moves this rank's cells of one field, on the host or a GPU, and reports progress."""

    def __init__(
        self, world: World, chunks: ChunkGrid, cells: Any, field: StoredField, tell: Tell
    ) -> None:
        self._world, self._chunks, self._cells, self._field = world, chunks, cells, field
        self._tell = tell
        self._dtype = field.opaque_dtype
        part_bytes = DEVICE_PART_BYTES if is_device_array(cells) else PART_BYTES
        self._part_cells = max(1, part_bytes // field.dtype.itemsize)
        self._part_bytes = self._part_cells * field.dtype.itemsize
        self._buffer: Array | None = None
        self._failure = Failure()

    def save(self, store: Store) -> Exception | None:
        """Write the chunks; return this rank's error. Collective."""
        with (
            Window(self._world, _UNDER_WAY, "a save") as window,
            staging(self._cells, self._part_bytes) as staged,
        ):
            parts = staged.read(self._parts())
            for chunk in self._chunks:
                cut = self._chunks.own_cut(chunk)
                places = list(self._places(extents(cut)))
                taken = islice(parts, len(places))
                if chunk.mover != self._world.rank:
                    window.make_room()
                    window.send(self._assembled(extents(cut), places, taken), chunk.mover)
                elif isinstance(store, PlainChunks) and self._is_one_piece(chunk):
                    self._failure.attempt(partial(store.write, chunk.number, taken))
                    deque(taken, 0)  # skip the rest after a failure
                else:
                    self._write(store, chunk, window, cut, zip(places, taken, strict=True))
                self._told(cut)
        self._failure.attempt_always(store.finish)
        return self._failure.error

    def load(self, store: Store) -> tuple[Residues, Exception | None]:
        """Read the chunks; return residues of chunks that other ranks read too, and this rank's error. Collective."""
        residues: Residues = {}
        with (
            staging(self._cells, self._part_bytes) as staged,
            Window(self._world, _UNDER_WAY, "a load") as window,
        ):
            if isinstance(store, PlainChunks):
                for chunk, box in self._read_alone(store):
                    found = self._failure.attempt(partial(self._read, store, chunk, box, staged))
                    if found:
                        residues[chunk.number] = found
                    self._told(self._chunks.own_cut(chunk))
            for chunk in self._chunks:
                cut = self._chunks.own_cut(chunk)
                if isinstance(store, PlainChunks) and self._read_box(chunk) is not None:
                    continue
                if chunk.mover != self._world.rank:
                    window.make_room()
                    buffer = np.empty(extents(cut), self._dtype)
                    then = partial(self._place, staged, cut, buffer)
                    window.receive(buffer, chunk.mover, then)
                else:
                    self._distribute(store, chunk, window, staged)
                self._told(cut)
        return residues, self._failure.error

    def _read_box(self, chunk: Chunk) -> ReadBox | None:
        return self._chunks.read_box(chunk, self._field.dtype.itemsize)

    def _read_alone(self, store: PlainChunks) -> Iterator[tuple[Chunk, ReadBox]]:
        """Yield the chunks that need no messages; within groups of chunks, ranks start at different chunks.

        So ranks that read the same chunks do not all wait for the same part of the disk. During the read of a chunk,
        the disk reads ahead the next chunk, if only this rank needs it.
        """
        chunks, found = iter(self._chunks), None
        while some := list(islice(chunks, MOST_READERS)):
            turn = self._world.rank % len(some)
            for chunk in some[turn:] + some[:turn]:
                box = self._read_box(chunk)
                if box is None:
                    continue
                if len(chunk.pieces) == 1:
                    store.read_ahead(chunk.number)
                if found is not None:
                    yield found
                found = chunk, box
        if found is not None:
            yield found

    def _is_one_piece(self, chunk: Chunk) -> bool:
        """Whether all cells of a chunk belong to this rank, so that it can be written part by part."""
        return len(chunk.pieces) == 1 and self._chunks.is_full(chunk)

    def _told(self, cut: Cut) -> None:
        self._failure.attempt(partial(self._tell, prod(extents(cut)) * self._field.dtype.itemsize))

    def _places(self, shape: tuple[int, ...]) -> Iterator[Index]:
        return blocks(shape, self._part_cells)

    def _parts(self) -> Iterator[Index]:
        """Yield the parts of all chunks, as indices of this rank's cells."""
        for chunk in self._chunks:
            cut = self._chunks.local(self._chunks.own_cut(chunk))
            for place in self._places(extents(cut)):
                yield _within(cut, place)

    def _assembled(
        self, shape: tuple[int, ...], places: list[Index], taken: Iterator[Array]
    ) -> Array:
        buffer = np.empty(shape, self._dtype)
        for place, part in zip(places, taken, strict=True):
            buffer[place] = opaque(part)
        return buffer

    def _write(
        self,
        store: Store,
        chunk: Chunk,
        window: Window,
        cut: Cut,
        parts: Iterator[tuple[Index, Array]],
    ) -> None:
        """Write a chunk with cells of several ranks, or a chunk that cannot be written part by part."""
        whole = np.empty(extents(chunk.cut), self._dtype)
        for piece in chunk.pieces:
            if piece.rank == self._world.rank:
                continue
            window.receive_into(whole[relative(piece.cut, chunk.cut)], piece.rank)
        own = whole[relative(cut, chunk.cut)]
        for place, part in parts:
            own[place] = opaque(part)
        window.end()
        self._failure.attempt(partial(store.write_whole, chunk.number, whole))

    def _read(self, store: PlainChunks, chunk: Chunk, box: ReadBox, staged: Staging) -> int:
        """Read this rank's cells of a chunk; check the residue if no other rank reads the chunk, else return it."""
        own, itemsize = self._chunks.own_cut(chunk), self._field.dtype.itemsize
        with store.reading(chunk.number) as reader:
            for first, cut in self._chunks.read_parts(chunk, box.cut, self._part_cells):
                here = intersection(cut, own)
                is_own = here == cut
                values = staged.take(extents(cut)) if is_own else self._scratch(extents(cut))
                reader.read(values, first * itemsize, is_counted=box.is_counted)
                if is_own:  # checksum during the next read, which uses another buffer
                    staged.put(self._chunks.local(cut))
                    continue
                with reader.counting():
                    if here is not None:
                        staged.store(self._chunks.local(here), values[relative(here, cut)])
            residue = reader.residue(has_stored=chunk.mover == self._world.rank)
        if len(chunk.pieces) == 1:
            store.check(chunk.number, residue)
            return 0
        return residue

    def _scratch(self, shape: tuple[int, ...]) -> Array:
        if self._buffer is None:
            self._buffer = np.empty(self._part_bytes, np.uint8)
        nbytes = prod(shape) * self._field.dtype.itemsize
        return self._buffer[:nbytes].view(self._dtype).reshape(shape)

    def _distribute(self, store: Store, chunk: Chunk, window: Window, staged: Staging) -> None:
        """Read a chunk, and send each rank its cells; after a failure send zeros, since all ranks raise later."""
        shape = extents(chunk.cut)
        whole = self._failure.attempt(lambda: opaque(store.read_whole(chunk.number, shape)))
        if whole is None:
            whole = np.zeros(shape, self._dtype)
        for piece in chunk.pieces:
            cells = whole[relative(piece.cut, chunk.cut)]
            if piece.rank == self._world.rank:
                self._place(staged, piece.cut, cells)
            else:
                window.send_copy(cells, piece.rank)

    def _place(self, staged: Staging, cut: Cut, values: Array) -> None:
        """Copy values to this rank's cells."""
        local = self._chunks.local(cut)
        for place in self._places(values.shape):
            staged.store(_within(local, place), values[place])


def _within(cut: Cut, place: Index) -> Index:
    """Return the index of a part of a box, as an index of the array that contains the box.

    Examples
    --------
    >>> _within((slice(4, 9), slice(2, 6)), (1, slice(0, 3)))
    (5, slice(2, 5, None))
    """
    found: list[slice | int] = [
        axis.start + one
        if isinstance(one, int)
        else slice(axis.start + one.start, min(axis.start + one.stop, axis.stop))
        for axis, one in zip(cut, place, strict=False)
    ]
    return (*found, *cut[len(place) :])
