"""Hand-written packing on a GPU: CUDA's copies, one copy per block, a kernel for one layout."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from halox.datatypes import BlockList
from halox.runtime.gpu.cuda import cupy
from halox_bench.common.byhand import Move, copies_3d, prepare
from halox_bench.common.layouts import Box, Boxes
from halox_bench.common.rig import DEFAULT, copy
from halox_bench.pack.patterns import Case
from halox_bench.pack.rows import COPY

MEMCPY_2D = "cudaMemcpy2D"
MEMCPY_3D = "cudaMemcpy3D"
BLOCK_COPIES = "one copy a block"
BY_HAND = "kernel by hand"
NAMES = (COPY, MEMCPY_2D, MEMCPY_3D, BLOCK_COPIES, BY_HAND)

MOST_BLOCKS = 1024
"""Most blocks to copy one by one; the time of more is extrapolated."""

MOST_BOXES = 512
"""Calls of cudaMemcpy3D for one case."""


class _Pitched(ctypes.Structure):
    """``cudaPitchedPtr``."""

    _fields_ = (
        ("ptr", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("xsize", ctypes.c_size_t),
        ("ysize", ctypes.c_size_t),
    )


class _Parameters3D(ctypes.Structure):
    """``cudaMemcpy3DParms``."""

    _fields_ = (
        ("src_array", ctypes.c_void_p),
        ("src_pos", ctypes.c_size_t * 3),
        ("src", _Pitched),
        ("dst_array", ctypes.c_void_p),
        ("dst_pos", ctypes.c_size_t * 3),
        ("dst", _Pitched),
        ("extent", ctypes.c_size_t * 3),
        ("kind", ctypes.c_int),
    )


def scaling(blocks: BlockList) -> float:
    """Return the number of blocks over the number that is copied one by one."""
    return max(1.0, blocks.n_blocks / MOST_BLOCKS)


def moves(
    case: Case, blocks: BlockList, direction: str, device: int
) -> dict[str, Callable[[], Move]]:
    """Return the hand-written methods of a case, by name; a call prepares each.

    Parameters
    ----------
    blocks : BlockList
        The blocks, relative to the slab.
    direction : {"pack", "unpack"}
    device : int
        The GPU; must be current.
    """
    unpack = direction == "unpack"
    found: dict[str, Callable[[], Move]] = {}
    if isinstance(case.by_hand, Boxes):
        name, move = _boxes_by_copies(case, case.by_hand, unpack=unpack)
        if move is not None:
            found[name] = lambda: move
    if blocks.n_blocks > 1:
        found[BLOCK_COPIES] = lambda: _block_copies(blocks, unpack=unpack)
    layout = case.by_hand
    if layout is not None:
        found[BY_HAND] = lambda: prepare(layout, case.offsets, direction, device)
    return found


def _block_copies(blocks: BlockList, *, unpack: bool) -> Move:
    runtime = cupy().cuda.runtime
    offsets = blocks.offsets[:MOST_BLOCKS].tolist()
    lengths = blocks.lengths[:MOST_BLOCKS].tolist()
    places, at = [], 0
    for offset, length in zip(offsets, lengths, strict=True):
        places.append((offset, at, length))
        at += length

    def move(slab: int, packed: int, stream: int) -> None:
        for offset, at, length in places:
            ends = (slab + offset, packed + at) if unpack else (packed + at, slab + offset)
            runtime.memcpyAsync(*ends, length, DEFAULT, stream)

    return move


def _boxes_by_copies(case: Case, layout: Boxes, *, unpack: bool) -> tuple[str, Move | None]:
    """CUDA's copies of more than one dimension, called once a box and outer step."""
    calls: list[Callable[[int, int, int], None]] = []
    name = MEMCPY_2D
    for at, box in layout.placed():
        parts = copies_3d(box)
        if parts is None or len(calls) + len(parts) > MOST_BOXES:
            return name, None
        for offset, packed_offset, part in parts:
            place = (case.offsets[box.array] + offset, at + packed_offset)
            if len(part.counts) == 2:
                name = MEMCPY_3D
                calls.append(_copy_3d(part, *place, unpack=unpack))
            elif part.counts:
                calls.append(_copy_2d(part, *place, unpack=unpack))
            else:
                calls.append(_copy_1d(part, *place, unpack=unpack))
    if all(not box.counts for box in layout.boxes):
        return name, None  # one copy a block, which is measured as such

    def move(slab: int, packed: int, stream: int) -> None:
        for call in calls:
            call(slab, packed, stream)

    return name, move


def _copy_1d(box: Box, offset: int, at: int, *, unpack: bool) -> Move:
    def move(slab: int, packed: int, stream: int) -> None:
        ends = (slab + offset, packed + at)
        copy(*(ends[::-1] if unpack else ends), box.block_bytes, stream)

    return move


def _copy_2d(box: Box, offset: int, at: int, *, unpack: bool) -> Move:
    copy_2d = cupy().cuda.runtime.memcpy2DAsync
    ((height,), (pitch,), width) = box.counts, box.strides, box.block_bytes

    def move(slab: int, packed: int, stream: int) -> None:
        array_side, packed_side = (slab + offset, pitch), (packed + at, width)
        target, source = (array_side, packed_side) if unpack else (packed_side, array_side)
        copy_2d(*target, *source, width, height, DEFAULT, stream)

    return move


def _copy_3d(box: Box, offset: int, at: int, *, unpack: bool) -> Move:
    copy_3d = cupy().cuda.runtime.memcpy3DAsync
    (depth, height), (plane, row), width = box.counts, box.strides, box.block_bytes

    parameters = _Parameters3D()
    array_side, packed_side = parameters.src, parameters.dst
    if unpack:
        array_side, packed_side = packed_side, array_side
    array_side.pitch, array_side.xsize, array_side.ysize = row, width, plane // row
    packed_side.pitch, packed_side.xsize, packed_side.ysize = width, width, height
    parameters.extent[:] = [width, height, depth]
    parameters.kind = DEFAULT

    def move(slab: int, packed: int, stream: int) -> None:
        array_side.ptr, packed_side.ptr = slab + offset, packed + at
        copy_3d(ctypes.addressof(parameters), stream)

    return move
