"""Operations behind the constructors, on datatypes and checked arguments.

Several constructors reduce to one operation: a box for regular types, a list of blocks for indexed types, a struct.
Each operation derives the new type's size, bounds, layout and signature from the old types. ``call`` is the user's
constructor call, stored in the datatype for its text and for the conversion to MPI.
"""

from __future__ import annotations

from math import prod

import numpy as np

from halox.datatypes.arguments import Int64Array, total
from halox.datatypes.bounds import Bounds, check_reach
from halox.datatypes.datatype import Datatype
from halox.datatypes.layout import EMPTY, BlockList, Chained, Layout, Listed, StridedBlocks
from halox.datatypes.signature import Signature
from halox.values import LARGEST

Call = tuple[str, tuple[object, ...]]
"""Name of a constructor, and its arguments without the old types."""


def primitive_of(dtype: np.dtype) -> Datatype:
    """Datatype of one element of a dtype without fields."""
    n = dtype.itemsize
    bounds = Bounds(0, n, 0, n, dtype.alignment, False, False)
    return Datatype(
        "primitive", (dtype,), (), n, bounds, StridedBlocks(0, (), (), n), Signature.of(dtype.str)
    )


def indexed_of(
    call: Call, old: Datatype, lengths: Int64Array, displacements: Int64Array
) -> Datatype:
    """Blocks of ``lengths[i]`` consecutive items at byte ``displacements[i]``."""
    items = total(lengths)
    if not items or _is_void(old):
        return nothing(call, old)
    bounds = _indexed_bounds(old, lengths, displacements).padded()
    check_reach(call[0], items * old.size, bounds)  # before NumPy adds in 64 bits
    layout = old.layout.indexed(displacements, lengths, old.extent) if old.size else EMPTY
    return _items_of(call, old, items, bounds, layout)


def struct_of(
    call: Call, lengths: Int64Array, displacements: Int64Array, types: tuple[Datatype, ...]
) -> Datatype:
    """Blocks of ``lengths[i]`` consecutive items of ``types[i]`` at byte ``displacements[i]``."""
    entries = [
        (int(length), int(displacement), old)
        for length, displacement, old in zip(lengths, displacements, types, strict=True)
        if length
    ]
    bounds = Bounds.union(
        old.bounds.repeated(length, old.extent).over(displacement, displacement)
        for length, displacement, old in entries
    )
    size = sum(length * old.size for length, _, old in entries)
    check_reach(call[0], size, bounds)  # before NumPy adds in 64 bits
    signature = Signature.concatenated(old.signature * length for length, _, old in entries)
    layout = _struct_layout(entries)
    return Datatype(*call, types, size, bounds.padded(), layout, signature)


def resized_of(call: Call, old: Datatype, lb: int, extent: int) -> Datatype:
    """Set the bounds explicitly; the bytes touched do not change."""
    bounds = old.bounds.resized(lb, extent)
    return Datatype(*call, (old,), old.size, bounds, old.layout, old.signature)


def box_of(
    call: Call,
    old: Datatype,
    subsizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    offset: int,
) -> Datatype:
    """Items at nested strides (outermost first, any sign), with the bounds of nested hvectors."""
    items, bounds, layout = prod(subsizes), old.bounds, old.layout
    if not items or _is_void(old):
        return nothing(call, old)
    low, high, pad = offset, offset, 0
    for count, stride in zip(reversed(subsizes), reversed(strides_bytes), strict=True):
        reach = (count - 1) * stride
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
        if not bounds.marked:
            pad += -(bounds.ub - bounds.lb + high - low + pad) % bounds.alignment
    true = (0, 0) if bounds.empty else (bounds.true_lb + low, bounds.true_ub + high)
    lb, ub = bounds.lb + low, bounds.ub + high + pad
    around = Bounds(lb, ub, *true, bounds.alignment, bounds.marked, bounds.empty)
    if isinstance(layout, StridedBlocks):
        counts, strides = (*subsizes, *layout.counts), (*strides_bytes, *layout.strides)
        layout = StridedBlocks.canonical(
            layout.offset + offset, counts, strides, layout.block_bytes
        )
    else:
        check_reach(call[0], items * old.size, around, offset)  # before NumPy adds in 64 bits
        for count, stride in zip(reversed(subsizes), reversed(strides_bytes), strict=True):
            layout = layout.repeated(count, stride)
        layout = layout.shifted(offset)
    return _items_of(call, old, items, around, layout)


def nothing(call: Call, old: Datatype) -> Datatype:
    """Datatype without items."""
    return Datatype(*call, (old,), 0, Bounds(), EMPTY, Signature())


def _items_of(call: Call, old: Datatype, items: int, bounds: Bounds, layout: Layout) -> Datatype:
    size = items * old.size
    return Datatype(*call, (old,), size, bounds, layout, old.signature * items)


def _is_void(old: Datatype) -> bool:
    """Whether a type has neither bytes nor explicit bounds; its copies then have neither, too."""
    return not old.size and not old.bounds.marked


def _indexed_bounds(old: Datatype, lengths: Int64Array, displacements: Int64Array) -> Bounds:
    used = lengths != 0
    first, behind = displacements[used], lengths[used] - 1
    reach = max(abs(int(first.min())), abs(int(first.max())))
    if reach + int(behind.max()) * abs(old.extent) > LARGEST:
        # Python's integers do not overflow.
        first, behind = first.astype(object), behind.astype(object)
    last = first + behind * old.extent
    return old.bounds.over(
        min(int(first.min()), int(last.min())), max(int(first.max()), int(last.max()))
    )


def _struct_layout(entries: list[tuple[int, int, Datatype]]) -> Layout:
    """Layout of a struct: one block list if every entry is contiguous, else a chain of layouts."""
    parts = [
        old.layout.repeated(length, old.extent).shifted(displacement)
        for length, displacement, old in entries
    ]
    if len(parts) < 2:
        return parts[0] if parts else EMPTY
    runs = [part for part in parts if isinstance(part, StridedBlocks) and not part.counts]
    if len(runs) == len(parts):
        offsets = np.array([run.offset for run in runs], np.int64)
        return Listed(BlockList(offsets, np.array([run.block_bytes for run in runs], np.int64)))
    return Chained(tuple(parts))
