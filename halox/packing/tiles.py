"""Tiles of permuting copies on a GPU: `tiled` chooses their axes and shape, for ``kernels/tile_body.cu``.

In a permuting copy, consecutive elements of the source are far apart in the target, and consecutive elements of the
target are far apart in the source. A thread block loads a tile of elements in rows along the source, and stores it in
rows along the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from halox.packing.refine import Level

MOST_ELEMENT_BYTES = 64
"""Bytes of the largest elements that are tiled.

Larger elements fill sectors on both sides without tiles. The same holds for elements that are larger than a sector and
whose number of words is not a power of two.
"""

LEAST_BYTES = 1 << 16
"""Smallest copy, in bytes, that is tiled."""

LEAST_ROWS = 4
"""Smallest number of elements along the shorter axis of a tiled copy; so few rows stay in the caches without tiles."""

SECTOR_BYTES = 32

MEMORY_BYTES = 26112
"""Bytes of a tile in shared memory, as in the kernel."""

ROW_ELEMENTS = ((1, 128), (4, 64), (16, 32), (24, 32), (MOST_ELEMENT_BYTES, 16))
"""Pairs of the largest element in bytes and the elements of a row."""

SMALL_BYTES = 1 << 23
"""Copies up to this size, in bytes, have tiles with half as many rows of half the length, to have enough tiles."""

THREADS = 256
"""Largest thread block that moves tiles, in threads."""

MOST_ROW_ELEMENTS = 511
"""Largest number of elements of a row, which the kernel's description holds in 9 bits."""

SIDES = {1: (4,), 2: (4, 2), 4: (4, 2), 8: (2,)}
"""Sides of the squares that a thread transposes in its registers, by the bytes of a word; the first is preferred."""


class Tile(NamedTuple):
    """Shape of the tiles of a region."""

    along_source: int  # elements along the axis with the source's smallest stride
    along_target: int  # elements along the axis with the target's smallest stride
    words: int  # words per element
    side: int = 1  # side, in words, of the squares that a thread loads and stores at once

    @property
    def threads(self) -> int:
        """Threads of a block: one per square, or one per four words."""
        wanted = self.area // (self.side**2 if self.side > 1 else 4)
        return min(THREADS, max(64, 1 << (wanted - 1).bit_length()))

    @property
    def area(self) -> int:
        """Words of a whole tile."""
        return self.along_source * self.along_target * self.words

    def counts(self, levels: Sequence[Level]) -> tuple[int, int]:
        """Return the numbers of tiles along both axes of a tiled row's levels."""
        along_source, along_target = levels[-1].steps, levels[-2].steps
        return -(-along_source // self.along_source), -(-along_target // self.along_target)

    @property
    def form(self) -> int:
        """Shape as the kernel reads it, in one number; see ``kernels/tile_body.cu``."""
        a, b = (n // self.side for n in self[:2])
        lanes = _lanes_log(a * self.words, b), _lanes_log(b * self.words, a)
        return (
            self.along_source
            | self.along_target << 9
            | (self.words - 1) << 18
            | lanes[0] << 24
            | lanes[1] << 27
            | (self.side.bit_length() - 1) << 30
        )


def tiled(
    levels: Sequence[Level], word_bytes: int, alignment: int
) -> tuple[tuple[Level, ...], Tile] | None:
    """Return the levels of a permuting copy in the kernel's order, and its tiles; None if the copy is not tiled.

    ``levels`` are loops over words, outermost first. ``alignment`` is a power of two that divides the addresses of both
    sides. The returned levels are loops over elements: first the loops around the tiles, then the axis along the
    target, then the axis along the source.

    Examples
    --------
    >>> matrix = Level(1000, 8, 8000), Level(1000, 8000, 8)
    >>> tiled(matrix, 8, 16)[1]
    Tile(along_source=16, along_target=16, words=1, side=2)
    """
    words, loops = 1, list(levels)
    if loops and loops[-1][1:] == (word_bytes, word_bytes):
        words = loops.pop().steps
    element = words * word_bytes
    if len(loops) < 2 or element > MOST_ELEMENT_BYTES:
        return None
    if element > SECTOR_BYTES and words & (words - 1):
        return None
    if element * prod(level.steps for level in loops) < LEAST_BYTES:
        return None
    along_source = min(loops, key=lambda level: abs(level.source_stride))
    along_target = min(loops, key=lambda level: abs(level.target_stride))
    near = max(SECTOR_BYTES, 2 * element)
    is_near = abs(along_source.source_stride) <= near and abs(along_target.target_stride) <= near
    shortest = min(along_source.steps, along_target.steps)
    if along_source is along_target or not is_near or shortest < LEAST_ROWS:
        return None
    if max(abs(along_source.target_stride), abs(along_target.source_stride)) <= near:
        return None
    outer = [level for level in loops if level is not along_source and level is not along_target]
    levels = (*outer, along_target, along_source)
    return levels, _shape(levels, element, words, _side(levels, element, words, alignment))


def _side(levels: Sequence[Level], element: int, words: int, alignment: int) -> int:
    """Return the side of the squares that a thread may load and store at once."""
    *outer, b, a = levels
    if words > 1 or a.source_stride != element or b.target_stride != element:
        return 1
    bits = alignment | b.source_stride | a.target_stride
    for level in outer:
        bits |= level.source_stride | level.target_stride
    aligned = bits & -bits
    return next(
        (
            side
            for side in SIDES.get(element, ())
            if side * element <= aligned and a.steps % side == 0 and b.steps % side == 0
        ),
        1,
    )


def _shape(levels: Sequence[Level], element: int, words: int, side: int) -> Tile:
    """Return a tile shape that divides both axes about evenly; if one axis is short, rows of the second are longer."""
    along_target, along_source = (level.steps for level in levels[-2:])
    most = next(rows for most_bytes, rows in ROW_ELEMENTS if element <= most_bytes)
    if element * prod(level.steps for level in levels) <= SMALL_BYTES:
        most //= 2
    aligned = max(side, SECTOR_BYTES // element)
    a, b = (_even(n, most, aligned) for n in (along_source, along_target))
    if b <= most // 2:
        a = _even(along_source, _longest(b, element), aligned)
    elif a <= most // 2:
        b = _even(along_target, _longest(a, element), aligned)
    return Tile(a, b, words, side)


def _longest(other: int, element: int) -> int:
    """Return the longest row, in elements, of a tile of ``other`` rows that fits in shared memory with its padding."""
    fitting = MEMORY_BYTES // ((other + 1) * max(element, 4))
    return max(1, min(MOST_ROW_ELEMENTS, fitting) - 1) // 8 * 8 or 1


def _lanes_log(words: int, rows: int) -> int:
    """Return the base-2 logarithm of the number of lanes for a row of ``words`` words.

    With many rows, a row gets at most a warp's 32 lanes. If 8 or a larger power of two divides the words of a row, the
    number of lanes divides them, too, so that no lane is idle. With few rows, a row gets up to 128 lanes.
    """
    one_per_word = (words - 1).bit_length()
    even = (words & -words).bit_length() - 1
    wanted = max(5, (THREADS // rows).bit_length() - 1)
    return min(7, wanted, even if even >= 3 and wanted == 5 else one_per_word)


def _even(elements: int, most: int, aligned: int) -> int:
    """Return the elements of a row, at most ``most``, that divide an axis into rows of about equal length."""
    rows = -(-elements // most)
    if rows == 1:
        return elements
    wanted = -(-elements // rows)
    return min(most, -(-wanted // aligned) * aligned)
