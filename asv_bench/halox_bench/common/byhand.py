"""Hand-written packing kernels for the layouts of :mod:`halox_bench.common.layouts`, on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halox.runtime.gpu.cuda import cupy, multiprocessors
from halox.runtime.gpu.launch import PreparedLaunch
from halox.runtime.gpu.memory import pinned
from halox_bench.common.kernels import defines, kernel
from halox_bench.common.layouts import Box, Boxes, ByHand, Gathers, Records, Triangle

THREADS = 256
EACH = 4
PARTS = 10

Move = Callable[[int, int, int], None]
"""``(slab, packed, stream)``: enqueues a copy between a slab of arrays and packed bytes."""


class BoxRow(ctypes.Structure):
    """``Box`` of byhand.cu."""

    _fields_ = (
        ("array", ctypes.c_longlong),
        ("packed", ctypes.c_longlong),
        ("stride", ctypes.c_longlong * 3),
        ("count", ctypes.c_uint * 3),
        ("words", ctypes.c_uint),
        ("total", ctypes.c_uint),
        ("blocks", ctypes.c_uint),
    )

    def fill(self, box: Box, array: int, packed: int, word: int) -> None:
        """Describe a box of an array, in words, and the address of its packed bytes."""
        levels = [*zip(box.counts[::-1], box.strides[::-1], strict=True)]
        levels += [(1, 0)] * (3 - len(levels))
        self.array, self.packed = array + box.offset, packed
        self.count[:] = [count for count, _ in levels]
        self.stride[:] = [stride for _, stride in levels]
        self.words, self.total = box.block_bytes // word, box.nbytes // word


class GatherRow(ctypes.Structure):
    """``Gather`` of byhand.cu."""

    _fields_ = (
        ("index", ctypes.c_void_p),
        ("array", ctypes.c_longlong),
        ("packed", ctypes.c_longlong),
        ("extent", ctypes.c_longlong),
        ("entries", ctypes.c_uint),
        ("words", ctypes.c_uint),
        ("total", ctypes.c_uint),
        ("blocks", ctypes.c_uint),
    )


class BoxTable(ctypes.Structure):
    """``Boxes`` of byhand.cu."""

    _fields_ = (("rows", BoxRow * PARTS),)


class GatherTable(ctypes.Structure):
    """``Gathers`` of byhand.cu."""

    _fields_ = (("rows", GatherRow * PARTS),)


def box_table(layout: Boxes, offsets: Sequence[int], word: int) -> tuple[BoxTable, int]:
    """Return the kernel's table and its number of thread blocks."""
    table, blocks = BoxTable(), 0
    for row, (at, box) in zip(table.rows, layout.placed(), strict=False):
        row.fill(box, offsets[box.array], at, word)
        row.blocks = -(-row.total // (THREADS * EACH))
        blocks += row.blocks
    return table, blocks


def gather_table(
    layout: Gathers, offsets: Sequence[int], indices: Sequence[int], word: int
) -> tuple[GatherTable, int]:
    """Return the kernel's table and its number of thread blocks, given the lists' addresses."""
    table, blocks = GatherTable(), 0
    rows = zip(table.rows, layout.placed(), indices, strict=False)
    for row, (at, part), index in rows:
        row.index, row.array, row.packed = index, offsets[part.array], at
        row.extent, row.entries = part.extent, part.index.size
        row.words, row.total = part.element_bytes // word, part.nbytes // word
        row.blocks = -(-row.total // (THREADS * EACH))
        blocks += row.blocks
    return table, blocks


def prepare(layout: ByHand, offsets: Sequence[int], direction: str, device: int) -> Move:
    """Return the hand-written kernel for a layout.

    Parameters
    ----------
    offsets : sequence of int
        Offset of each array in the slab.
    direction : {"pack", "unpack"}
    device : int
        The GPU; must be current.

    Notes
    -----
    Not collective. Compiles, and uploads lists of indices.
    """
    unpack = int(direction == "unpack")
    first, second = ctypes.c_uint64(0), ctypes.c_uint64(0)

    def launch(name: str, grid: int, args: Sequence[Any], word: int = 8, keep: Any = None) -> Move:
        settings = defines(
            "byhand", WORD_BYTES=word, UNPACK=unpack, THREADS=THREADS, EACH=EACH, PARTS=PARTS
        )
        function = kernel("byhand", name, device, settings)
        prepared = PreparedLaunch(function, grid, THREADS, (first, second, *args), device=device)

        def move(slab: int, packed: int, stream: int, kept: Any = keep) -> None:
            prepared.launch_at(stream, slab, packed)

        return move

    if isinstance(layout, Boxes):
        word = layout.word
        table, blocks = box_table(layout, offsets, word)
        return launch("boxes", blocks, (table,), word)
    if isinstance(layout, Gathers):
        lists = [cupy().asarray(part.index.astype(np.uint32)) for part in layout.parts]
        word = min(part.word for part in layout.parts)
        gathers, blocks = gather_table(
            layout, offsets, [int(index.data.ptr) for index in lists], word
        )
        cupy().cuda.Device(device).synchronize()
        return launch("gathers", blocks, (gathers,), word, keep=lists)
    if isinstance(layout, Triangle):
        args = (ctypes.c_uint(layout.n), ctypes.c_int(layout.lower))
        return launch("triangle", min(layout.n, 16 * multiprocessors(device)), args)
    if isinstance(layout, Records):
        return launch("records", -(-layout.count // THREADS), (ctypes.c_uint(layout.count),))
    raise TypeError(f"no kernel for {type(layout).__name__}")


def copies_3d(box: Box) -> list[tuple[int, int, Box]] | None:
    """Split a box into boxes that cudaMemcpy2D and cudaMemcpy3D take.

    Returns
    -------
    list of (array offset, packed offset, Box) or None
        Boxes of at most two levels, the outer stride a multiple of the inner; None if runs are closer
        than their length.

    Examples
    --------
    >>> cube = Box(8, (2, 4, 4), (4096, 512, 64))
    >>> [(at, packed, part.counts) for at, packed, part in copies_3d(cube)]
    [(0, 0, (4, 4)), (4096, 128, (4, 4))]
    """
    counts, strides = box.counts, box.strides
    if not counts:
        return [(box.offset, 0, box)]
    row, rows = strides[-1], counts[-1]
    if row < box.block_bytes:
        return None
    whole_planes = len(counts) == 2 and strides[0] % row == 0 and strides[0] >= row * rows
    if len(counts) == 1 or whole_planes:
        return [(box.offset, 0, Box(box.block_bytes, counts, strides))]
    inner = Box(box.block_bytes, counts[1:], strides[1:])
    parts = copies_3d(inner)
    if parts is None:
        return None
    return [
        (box.offset + i * strides[0] + at, i * inner.nbytes + packed, part)
        for i in range(counts[0])
        for at, packed, part in parts
    ]


def packed_buffer(nbytes: int, *, host: bool) -> tuple[Any, int, Any]:
    """Return memory for packed bytes that kernels reach, its address on the GPU, and its owner.

    Parameters
    ----------
    host : bool
        Page-locked host memory, as a NumPy array; else device memory.
    """
    if host:
        page = pinned(nbytes)
        return page.array, page.device_pointer, page
    memory = cupy().empty(nbytes, np.uint8)
    return memory, int(memory.data.ptr), memory
