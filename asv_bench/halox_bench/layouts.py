"""Layouts of hand-written code, and their packing by NumPy slicing.

They describe the bytes of a benchmark case's datatype without the datatype engine: the baselines by hand use them, and
the checks of messages follow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import numpy.typing as npt

from halox_bench.checks import Bytes, Int64Array


def _word_type(nbytes: int) -> str:
    """Return a dtype of so many bytes that NumPy copies fast, if possible."""
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(nbytes, f"V{nbytes}")


@dataclass(frozen=True)
class Box:
    """Equal runs at nested equal strides in one of a case's arrays."""

    block_bytes: int  # contiguous bytes a run
    counts: tuple[int, ...] = ()  # runs at each level, outermost first; at most three levels
    strides: tuple[int, ...] = ()  # bytes a step at each level
    offset: int = 0  # bytes from the array's start to the first run
    array: int = 0  # its number

    @property
    def nbytes(self) -> int:
        return prod(self.counts) * self.block_bytes

    def word(self, *offsets: int) -> int:
        """Widest word of up to 16 bytes that also divides these packed offsets."""
        return gcd(16, self.block_bytes, self.offset, *self.strides, *offsets)

    def view(self, memory: Bytes) -> npt.NDArray[np.generic]:
        word = self.word()
        shape = (*self.counts, self.block_bytes // word)
        dtype = _word_type(word)
        return np.ndarray(shape, dtype, memory.data, self.offset, (*self.strides, word))


@dataclass(frozen=True)
class Boxes:
    """Boxes of one or several arrays, packed one after another."""

    boxes: tuple[Box, ...]

    @property
    def word(self) -> int:
        """Widest word of up to 16 bytes for all of them, packed."""
        return gcd(16, *(box.word(at) for at, box in self.placed()))

    def placed(self) -> Iterator[tuple[int, Box]]:
        at = 0
        for box in self.boxes:
            yield at, box
            at += box.nbytes

    def pack(self, arrays: Sequence[Bytes], out: Bytes) -> None:
        for at, box in self.placed():
            view = box.view(arrays[box.array])
            np.copyto(out[at : at + box.nbytes].view(view.dtype).reshape(view.shape), view)


@dataclass(frozen=True)
class Triangle:
    """The lower triangle, diagonal included, of an n x n float64 matrix by columns."""

    n: int

    def pack(self, arrays: Sequence[Bytes], out: Bytes) -> None:
        columns = arrays[0][: 8 * self.n**2].view("f8").reshape(self.n, self.n)
        packed, at = out.view("f8"), 0
        for j in range(self.n):
            packed[at : at + self.n - j] = columns[j, j:]
            at += self.n - j


@dataclass(frozen=True, eq=False)
class Gather:
    """Elements of one array by a list of their numbers, the list repeated ``count`` times."""

    index: Int64Array
    element_bytes: int
    count: int = 1
    extent: int = 0  # bytes from repetition to repetition
    array: int = 0  # its number

    @property
    def nbytes(self) -> int:
        return self.count * self.index.size * self.element_bytes

    @property
    def word(self) -> int:
        """Widest word of up to 8 bytes that divides the elements."""
        return gcd(8, self.element_bytes, self.extent)


@dataclass(frozen=True, eq=False)
class Gathers:
    """Gathers from one or several arrays, packed one after another."""

    parts: tuple[Gather, ...]

    def placed(self) -> Iterator[tuple[int, Gather]]:
        at = 0
        for part in self.parts:
            yield at, part
            at += part.nbytes

    def pack(self, arrays: Sequence[Bytes], out: Bytes) -> None:
        for at, part in self.placed():
            memory, dtype = arrays[part.array], _word_type(part.element_bytes)
            each = part.index.size * part.element_bytes
            for item in range(part.count):
                elements = memory[item * part.extent :]
                elements = elements[: elements.size // part.element_bytes * part.element_bytes]
                there = out[at + item * each : at + (item + 1) * each]
                there.view(dtype)[...] = elements.view(dtype)[part.index]


ByHand = Boxes | Triangle | Gathers
"""Layouts with a hand-written packing routine."""
