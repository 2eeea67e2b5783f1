"""Packing in host memory with NumPy; the oracle for every other packer."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from halox.datatypes import BlockList, Datatype, StridedBlocks
from halox.datatypes.arguments import count_of
from halox.errors import DatatypeError, FieldError
from halox.packing.blocking import copy
from halox.packing.refine import Copy, Side, single_piece
from halox.runtime.arrays import Array, DType, HostArray, HostMemory, as_ndarray, borrow
from halox.runtime.dlpack import Shown

Bytes = npt.NDArray[np.uint8]
"""One-dimensional array of bytes."""

# One NumPy element a block: no inner loop, and often one axis in all, along which NumPy does not look for overlaps.
_LARGEST_ELEMENT = 1 << 16
# From this mean block length on, one slice copy a block beats an index entry a word.
_LONG_BLOCK = 4096
# Words of index kept between calls (32 MiB); longer indices are made piece by piece each time.
_KEPT_INDEX = 1 << 22
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class HostPacker:
    """Copies the bytes that a datatype describes out of a NumPy array, and back.

    Checked and planned once; :meth:`pack` and :meth:`unpack` then only copy.

    Parameters
    ----------
    array : ndarray or HostArray
        Host array of any dtype and strides, or a view; also another library's that offers DLPack.
        Displacements count from its first element ``[0, ..., 0]`` and may leave the view, but not
        the memory of the array it is a view of.
    datatype : Datatype
        What to copy.
    count : int
        Number of consecutive items.

    Attributes
    ----------
    nbytes : int
        Bytes of packed data.
    view : ndarray or None
        The bytes as a strided view of the array's memory, shape ``counts`` or ``counts + (words,)``, of opaque
        words; None where the datatype is not regular.

    Raises
    ------
    FieldError
        If ``array`` is not a plain NumPy array, or the datatype reaches beyond its memory.
    DatatypeError
        If ``count`` is not an integer, or negative.

    Notes
    -----
    Not collective. Holds a reference to the array, if it is not borrowed; blocks until the bytes are copied.

    Examples
    --------
    >>> from halox.datatypes import vector
    >>> grid = np.arange(12, dtype="i4").reshape(3, 4)
    >>> column = HostPacker(grid[:, 1:], vector(3, 1, 4, "i4"))
    >>> packed = np.empty(column.nbytes, np.uint8)
    >>> column.pack(packed)
    >>> packed.view("i4")
    array([1, 5, 9], dtype=int32)
    """

    def __init__(self, array: Array | HostArray, datatype: Datatype, count: int = 1) -> None:
        count = count_of("count", count)
        layout = datatype.items(count)
        first, stop = datatype.reach(count)
        self.nbytes = datatype.size * count
        self.view: Array | None = None
        self._datatype, self._count = datatype, count
        self._first = first
        self._memory = _memory(array, first, stop) if self.nbytes else np.empty(0, np.uint8)
        self._adder: _Adder | None = None
        self._copier: _Copier
        strided = layout.strided
        if strided is not None:
            shape, word, offset, strides = block_view(strided)
            self.view = np.ndarray(shape, word, self._memory.data, offset - first, strides)
            self._copier = _Strided(self.view)
        else:
            blocks = layout.block_list().shifted(-first)
            if blocks.nbytes >= _LONG_BLOCK * blocks.n_blocks:
                self._copier = _Sliced(self._memory, blocks)
            else:
                self._copier = _Gathered(self._memory, blocks)

    def pack(self, out: Bytes) -> None:
        """Copy the described bytes into a contiguous uint8 array, in the datatype's order; the rest of it stays.

        Raises
        ------
        FieldError
            If ``out`` is not such an array, or too short.
        """
        self._copier.pack(self._checked("out", out, written=True))

    def unpack(self, packed: Bytes) -> None:
        """Copy packed bytes to the places of the datatype; errors as of `pack`, or if the target is read-only."""
        source = self._checked("packed", packed, written=False)
        self._check_target()
        self._copier.unpack(source)

    def add(self, packed: Bytes) -> None:
        """Add packed values to those at the places of the datatype, in order; errors as of `unpack`.

        Raises
        ------
        DatatypeError
            If the primitives are not all of one integer, floating or complex type.
        """
        source = self._checked("packed", packed, written=False)
        self._check_target()
        if self._adder is None:
            self._adder = _Adder(self._memory, self._first, self._datatype, self._count)
        self._adder.add(source)

    def _checked(self, name: str, buffer: Bytes, *, written: bool) -> Bytes:
        """Cut a packed buffer to the bytes used, if it is fit for its use."""
        if not isinstance(buffer, np.ndarray):
            buffer = as_ndarray(buffer, name)
        if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8 or buffer.ndim != 1:
            given = (
                f"{buffer.dtype} of shape {buffer.shape}"
                if isinstance(buffer, np.ndarray)
                else type(buffer).__name__
            )
            raise FieldError(f"{name} must be a one-dimensional uint8 array, got {given}")
        if buffer.size < self.nbytes:
            raise FieldError(f"{name} must hold {self.nbytes} bytes or more, got {buffer.size}")
        if not buffer.flags.c_contiguous:
            raise FieldError(f"{name} must be contiguous, got strides {buffer.strides}")
        if written and not buffer.flags.writeable:
            raise FieldError(f"{name} is read-only; pass a writable array")
        return buffer[: self.nbytes]

    def _check_target(self) -> None:
        if not self._memory.flags.writeable:
            raise FieldError("the target array is read-only; pass a writable one")


class _Copier(Protocol):
    """One way to copy; buffers are checked and of the right size."""

    def pack(self, out: Bytes) -> None: ...

    def unpack(self, packed: Bytes) -> None: ...


class _Strided:
    """Regular blocks: one strided copy, or one a tile where the packed order is another than that in memory."""

    def __init__(self, view: Array) -> None:
        self._view = view

    def pack(self, out: Bytes) -> None:
        copy(out.view(self._view.dtype).reshape(self._view.shape), self._view)

    def unpack(self, packed: Bytes) -> None:
        copy(self._view, packed.view(self._view.dtype).reshape(self._view.shape))


class _Sliced:
    """Long blocks of any kind: one slice copy a block."""

    def __init__(self, memory: Bytes, blocks: BlockList) -> None:
        self._memory = memory
        stops = np.cumsum(blocks.lengths)
        self._places = [
            (slice(start, start + length), slice(stop - length, stop))
            for start, length, stop in zip(
                blocks.offsets.tolist(), blocks.lengths.tolist(), stops.tolist(), strict=True
            )
        ]

    def pack(self, out: Bytes) -> None:
        target, source = out.data, self._memory.data
        for place, packed_place in self._places:
            target[packed_place] = source[place]

    def unpack(self, packed: Bytes) -> None:
        target, source = self._memory.data, packed.data
        for place, packed_place in self._places:
            target[place] = source[packed_place]


class _Gathered:
    """Short blocks of any kind: gather and scatter words through an index."""

    def __init__(self, memory: Bytes, blocks: BlockList) -> None:
        word = 8
        for values in (blocks.offsets, blocks.lengths):
            word = gcd(word, int(np.gcd.reduce(values)))
        aligned = memory.ctypes.data % word == 0
        # Opaque words have no alignment: NumPy would copy the whole of unaligned memory first.
        self._dtype = np.dtype(f"u{word}" if aligned else f"V{word}")
        self._words = memory[: memory.size // word * word].view(self._dtype)
        self._index = _Index(blocks, word, word)

    def pack(self, out: Bytes) -> None:
        target = out.view(self._dtype)
        for part, index in self._index.parts():
            # Indices are in range by construction; "clip" spares NumPy a checked copy.
            np.take(self._words, index, out=target[part], mode="clip")

    def unpack(self, packed: Bytes) -> None:
        source = packed.view(self._dtype)
        for part, index in self._index.parts():
            self._words[index] = source[part]


class _Adder:
    """Typed accumulation into the described places."""

    def __init__(self, memory: Bytes, first: int, datatype: Datatype, count: int) -> None:
        dtype = datatype.uniform
        if dtype is None and datatype.size:
            raise DatatypeError(
                f"only values of one type can be added, got {datatype.signature}; "
                "accumulate each type with a datatype of its own"
            )
        dtype = np.dtype(np.uint8) if dtype is None else dtype
        if dtype.kind not in "iufc":
            raise DatatypeError(f"values of type {dtype} cannot be added; use numbers")
        self._dtype = dtype
        self._view: Array | None = None
        layout = datatype.items(count)
        strided = layout.strided
        if strided is not None and not strided.overlaps:
            shape, _, offset, strides = element_view(strided, dtype)
            self._view = np.ndarray(shape, dtype, memory.data, offset - first, strides)
            return
        blocks = layout.block_list().shifted(-first)
        # Elements may start at any byte: index an array of elements that overlap each other, at
        # the finest step that occurs.
        step = gcd(dtype.itemsize, int(np.gcd.reduce(blocks.offsets)))
        places = (memory.size - dtype.itemsize) // step + 1
        self._places = np.ndarray((places,), dtype, memory, strides=(step,))
        self._index = _Index(blocks, dtype.itemsize, step)
        self._overlaps = blocks.overlaps

    def add(self, packed: Bytes) -> None:
        source = packed.view(self._dtype)
        if self._view is not None:
            self._view += source.reshape(self._view.shape)
            return
        for part, index in self._index.parts():
            if self._overlaps:
                np.add.at(self._places, index, source[part])
            else:
                self._places[index] += source[part]


class _Index:
    """Places of a block list's elements, in order, in units of ``step`` bytes."""

    def __init__(self, blocks: BlockList, itemsize: int, step: int) -> None:
        self._stops = np.cumsum(blocks.lengths // itemsize)
        self._begins = self._stops - blocks.lengths // itemsize
        self._starts = blocks.offsets // step
        self._stride = itemsize // step
        self._kept: list[tuple[slice, npt.NDArray[np.int64]]] | None = None

    def parts(self) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
        """Slices of the packed elements, each with the places of its elements."""
        if self._kept is not None:
            yield from self._kept
            return
        total = int(self._stops[-1]) if self._stops.size else 0
        if total <= _KEPT_INDEX:
            self._kept = [(slice(0, total), self._between(0, total))]
            yield from self._kept
            return
        for begin in range(0, total, _KEPT_INDEX):
            stop = min(begin + _KEPT_INDEX, total)
            yield slice(begin, stop), self._between(begin, stop)

    def _between(self, begin: int, stop: int) -> npt.NDArray[np.int64]:
        blocks = slice(
            int(np.searchsorted(self._stops, begin, side="right")),
            int(np.searchsorted(self._begins, stop, side="left")),
        )
        begins, stops = self._begins[blocks], self._stops[blocks]
        counts = np.minimum(stops, stop) - np.maximum(begins, begin)
        origin = np.repeat(self._starts[blocks] - begins * self._stride, counts)
        return origin + np.arange(begin, stop, dtype=np.int64) * self._stride


def _memory(array: Array | HostArray, first: int, stop: int) -> Bytes:
    """Bytes ``first`` to ``stop`` of memory, counted from an array's first element."""
    if isinstance(array, HostArray):
        check_inside(array.reach, first, stop)
        return np.frombuffer(array.memory, np.uint8)[array.origin + first : array.origin + stop]
    found, root = borrow(array), as_ndarray(array)
    check_inside(found.reach, first, stop)
    shown = Shown(
        found.pointer + first, (stop - first,), (1,), np.dtype(np.uint8), root.flags.writeable
    )
    return np.asarray(HostMemory(root, shown))


def check_inside(reach: tuple[int, int], first: int, stop: int) -> None:
    """Raise `FieldError` if bytes, counted from an array's first element, are outside its memory."""
    if first < reach[0] or stop > reach[1]:
        raise FieldError(
            f"the datatype touches bytes {first} to {stop} from the array's first element, but "
            f"its memory holds bytes {reach[0]} to {reach[1]}"
        )


class View(NamedTuple):
    """A strided view of memory, as `numpy.ndarray` makes it: relative to an array's first element."""

    shape: tuple[int, ...]
    dtype: DType
    offset: int
    strides: tuple[int, ...]


def block_view(blocks: StridedBlocks) -> View:
    """View regular blocks: one element a block, or long blocks as words.

    Where blocks in two rows interleave, NumPy copies views of several axes by way of a buffer, those of one axis not.
    """
    block = blocks.block_bytes
    if block in _WORDS:
        word = _WORDS[block]
    elif 0 < block <= _LARGEST_ELEMENT:
        word = np.dtype(f"V{block}")
    else:
        word = _WORDS[gcd(block, 8)]
    view = element_view(blocks, word)
    if blocks.counts and word.itemsize == block:
        return View(view.shape[:-1], word, view.offset, view.strides[:-1])
    return view


def element_view(blocks: StridedBlocks, dtype: DType) -> View:
    """View regular blocks as elements of a dtype whose size divides theirs."""
    size = dtype.itemsize
    shape, strides = (*blocks.counts, blocks.block_bytes // size), (*blocks.strides, size)
    return View(shape, dtype, blocks.offset, strides)


def common_views(target: StridedBlocks, source: StridedBlocks) -> tuple[View, View] | None:
    """View regular blocks of two layouts so that both views have one shape and dtype.

    None if no such views hold all bytes in their order: blocks of different lengths meet, there are no bytes, or
    more in one layout.
    """
    if target.nbytes != source.nbytes:
        return None
    piece = single_piece(Copy(Side(0, source), Side(0, target)))
    if piece is None:
        return None
    *levels, run = piece.levels
    counts, from_strides, to_strides = zip(*levels, strict=True) if levels else ((), (), ())
    return (
        block_view(StridedBlocks(piece.target, counts, to_strides, run.steps)),
        block_view(StridedBlocks(piece.source, counts, from_strides, run.steps)),
    )
