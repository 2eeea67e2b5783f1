"""Hand-written packing kernels for the layouts of :mod:`halox_bench.layouts`, on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halox_bench.kernels import cupy, multiprocessors, prepared, settings_of
from halox_bench.layouts import Box, Boxes, ByHand, Gathers, Triangle

THREADS, EACH, PARTS = 256, 4, 10

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


def _blocks(rows: Sequence[Any]) -> int:
    """Divide the words of each row of a table into thread blocks, and return the number of all."""
    for row in rows:
        row.blocks = -(-row.total // (THREADS * EACH))
    return sum(row.blocks for row in rows)


def box_table(layout: Boxes, offsets: Sequence[int], word: int) -> tuple[Any, int]:
    """Return ``Boxes`` of byhand.cu and its number of thread blocks."""
    table = (BoxRow * PARTS)()
    for row, (at, box) in zip(table, layout.placed(), strict=False):
        row.fill(box, offsets[box.array], at, word)
    return table, _blocks(table[: len(layout.boxes)])


def gather_table(
    layout: Gathers, offsets: Sequence[int], indices: Sequence[int], word: int
) -> tuple[Any, int]:
    """Return ``Gathers`` of byhand.cu and its number of thread blocks, given the lists' addresses."""
    table = (GatherRow * PARTS)()
    for row, (at, part), index in zip(table, layout.placed(), indices, strict=False):
        row.index, row.array, row.packed = index, offsets[part.array], at
        row.extent, row.entries = part.extent, part.index.size
        row.words, row.total = part.element_bytes // word, part.nbytes // word
    return table, _blocks(table[: len(layout.parts)])


def prepare(layout: ByHand, offsets: Sequence[int], direction: str, device: int) -> Move:
    """Return the hand-written kernel for a layout, compiled, with its lists of indices on the GPU.

    ``offsets`` are the places of the arrays in the slab, ``direction`` is ``"pack"`` or ``"unpack"``; the device must
    be current.
    """
    first, second = ctypes.c_uint64(0), ctypes.c_uint64(0)

    def launch(name: str, grid: int, args: Sequence[Any], word: int = 8, keep: Any = None) -> Move:
        settings = settings_of(
            WORD_BYTES=word,
            UNPACK=int(direction == "unpack"),
            THREADS=THREADS,
            EACH=EACH,
            PARTS=PARTS,
        )
        kernel = prepared("byhand", name, grid, THREADS, (first, second, *args), device, settings)

        def move(slab: int, packed: int, stream: int, kept: Any = keep) -> None:
            kernel.launch_at(stream, slab, packed)

        return move

    if isinstance(layout, Boxes):
        table, blocks = box_table(layout, offsets, layout.word)
        return launch("boxes", blocks, (table,), layout.word)
    if isinstance(layout, Gathers):
        lists = [cupy().asarray(part.index.astype(np.uint32)) for part in layout.parts]
        word = min(part.word for part in layout.parts)
        places = [int(index.data.ptr) for index in lists]
        gathers, blocks = gather_table(layout, offsets, places, word)
        cupy().cuda.Device(device).synchronize()
        return launch("gathers", blocks, (gathers,), word, keep=lists)
    assert isinstance(layout, Triangle)
    grid = min(layout.n, 16 * multiprocessors(device))
    return launch("triangle", grid, (ctypes.c_uint(layout.n),))
