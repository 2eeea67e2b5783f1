"""Parts of NumPy arrays as indices, made once for a layout, so that a new array needs no views.

A copy by an index takes 0.1 us more than a copy of a view; making a view of memory at an address takes 0.4 us.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from halox.datatypes.boxes import contiguous_strides
from halox.paths.host.indexed import Indices, PartView
from halox.runtime.arrays import WORDS, Array, DType, span

Index: TypeAlias = slice | int | tuple[slice | int, ...] | Indices

Moved = TypeVar("Moved")

# An inner loop of NumPy takes 8 ns: if there are many blocks of fewer elements, copy each block as one element.
_FEW_BLOCKS, _FEW_ELEMENTS = 16, 8
# Larger places along several axes are copied faster through views of one axis, which NumPy never copies twice.
_LARGE_BYTES = 1 << 15


class Base(NamedTuple):
    """Alternative form of a contiguous array, in the order of its addresses: shape, dtype, first byte.

    ``is_row`` says that the form has the array's elements, in one row.
    """

    shape: tuple[int, ...]
    dtype: DType
    start: int = 0
    is_row: bool = False

    def of(self, array: Array) -> Array:
        """View an array in this form."""
        run = array.ravel("K")
        shape, dtype, start, is_row = self
        return run if is_row else np.ndarray(shape, dtype, run, start)


class Slice(NamedTuple):
    """A place as an index of an array, or of its base, with the extents in packed order and the order of the axes."""

    array: int
    base: Base | None
    at: Index
    counts: tuple[int, ...]
    order: tuple[int, ...]
    dtype: DType

    def packed(self, view: Array) -> Array:
        """View the place's packed bytes with the shape that its index selects."""
        return view.reshape(-1).view(self.dtype).reshape(self.counts).transpose(self.order)


def slices_of(places: Sequence[PartView], arrays: Sequence[Array]) -> list[Slice] | None:
    """Return places as indices that are valid for all arrays that differ from these only in address.

    None if some place cannot be an index, or if copying through a view is faster.
    """
    found: list[Slice] = []
    bases = {n: _bases([p for p in places if p[0] == n], arrays[n]) for n in {p[0] for p in places}}
    for place in places:
        n = place[0]
        made = (_slice(place, arrays[n], base) for base in bases[n])
        one = next((one for one in made if one is not None), None)
        if one is None:
            return None
        found.append(one)
    return found


def grouped(
    slices: Sequence[Slice], moves: Sequence[Moved]
) -> list[tuple[int, Base | None, list[Moved]]]:
    """Return the moves of some places by array, in their order, moves of one form together."""
    found: list[tuple[int, Base | None, list[Moved]]] = []
    pairs = [*zip(slices, moves, strict=True)]
    for one, move in sorted(pairs, key=lambda pair: pair[0].array):
        if not found or found[-1][:2] != (one.array, one.base):
            found.append((one.array, one.base, []))
        found[-1][2].append(move)
    return found


def flat(dtype: DType, start: int, array: Array) -> Base | None:
    """Return the base that views all memory of an array from a byte on as words; None unless it is contiguous."""
    n = (array.nbytes - start) // dtype.itemsize
    is_row = start == 0 and dtype == array.dtype
    return Base((n,), dtype, start, is_row) if _is_contiguous(array) else None


def _bases(places: Sequence[PartView], array: Array) -> list[Base | None]:
    """Return the bases to try for places of an array, the fastest first; None in the list is the array itself."""
    size = 0  # of the widest elements that divide all places
    for _, shape, dtype, offset, strides in places:
        size = gcd(size, dtype.itemsize, offset)
        size = gcd(size, *[stride for n, stride in zip(shape, strides, strict=True) if n > 1])
    # NumPy copies elements of these dtypes unchanged, byte for byte.
    is_plain = array.dtype.kind in "biufcmM"
    if not _is_contiguous(array):
        return [None] if is_plain else []
    bases = [flat(array.dtype, 0, array), None] if is_plain else []
    axes = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    *rows, last = [array.shape[axis] for axis in axes]
    if size != array.itemsize or not is_plain:
        word = WORDS.get(size, np.dtype(f"V{size}"))
        bases.append(flat(word, 0, array))
        if last * array.itemsize % size == 0:
            bases.append(Base((*rows, last * array.itemsize // size), word))
    return bases


def _is_contiguous(array: Array) -> bool:
    """Whether the elements fill a contiguous run of memory, in any order of the axes."""
    return array.size > 0 and array.ravel("K").ctypes.data == array.ctypes.data


def _slice(place: PartView, array: Array, base: Base | None) -> Slice | None:
    """Return a place as an index of an array in one form; None if that is not possible."""
    number, counts, block, offset, steps = place
    offset -= span(array.shape, array.strides, array.itemsize)[0]
    shape, dtype, strides = array.shape, array.dtype, array.strides
    if base is not None:
        shape, dtype = base.shape, base.dtype
        strides = contiguous_strides(shape, dtype.itemsize)
    size = dtype.itemsize
    levels = [(n, step) for n, step in zip(counts, steps, strict=True) if n > 1]
    if block.itemsize != size:
        if block.itemsize % size:
            return None
        if block.itemsize < _FEW_ELEMENTS * size and prod(counts) > _FEW_BLOCKS:
            return None
        levels.append((block.itemsize // size, size))
    axes = sorted((axis for axis, n in enumerate(shape) if n > 1), key=lambda axis: -strides[axis])
    index: list[slice | int] = [0] * len(shape)
    starts = dict.fromkeys(axes, 0)
    for axis in axes:
        if strides[axis] <= 0:
            return None
        starts[axis], offset = divmod(offset, strides[axis])
        index[axis] = starts[axis]
    if offset or any(starts[axis] >= shape[axis] for axis in axes):
        return None
    chosen: list[tuple[int, int]] = []  # axes with their extents, innermost first
    while levels:
        count, step = levels.pop()
        fits = [axis for axis in axes if step > 0 and step % strides[axis] == 0]
        if not fits or fits[0] in [axis for axis, _ in chosen]:
            return None
        axis = fits[0]
        n, start, by = shape[axis], starts[axis], step // strides[axis]
        if by == 1 and start == 0 and count > n and count % n == 0:  # continues along another axis
            levels.append((count // n, step * n))
            count = n
        if start + (count - 1) * by >= n:
            return None
        index[axis] = slice(start, start + (count - 1) * by + 1, by)
        chosen.append((axis, count))
    if len(chosen) > 1 and block.itemsize * prod(counts) > _LARGE_BYTES:
        return None
    if not chosen:  # a scalar index would make a copy
        axis = len(shape) - 1
        start = starts.get(axis, 0)
        index[axis] = slice(start, start + 1)
        chosen.append((axis, 1))
    chosen.reverse()
    order = tuple(sorted(range(len(chosen)), key=lambda i: chosen[i][0]))
    extents = tuple([n for _, n in chosen])
    return Slice(number, base, tuple(index) if len(index) > 1 else index[0], extents, order, dtype)
