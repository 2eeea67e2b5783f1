"""Plans for the strided kernels: the table of regions that one launch reads.

This module does not use a GPU. The table has the layout of the C structs in
``packing/kernels/strided_body.cu``. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError
from halox.packing.refine import Copy, Level, Piece, Side, contiguous_side, pieces
from halox.packing.tiles import LEAST_BYTES, MOST_ELEMENT_BYTES, Tile, tiled
from halox.runtime.gpu.launch import check_max_blocks

MAX_LEVELS = 5
"""Largest number of levels of a region: four, and the words of a block."""

THREADS = (64, 128, 256)
"""Sizes of a thread block; the largest size that still occupies every multiprocessor is chosen."""

CAPPED_THREADS = (64, 128, 256, 512, 1024)
"""Sizes of a thread block if the number of blocks is limited, up to CUDA's limit of 1024 threads."""

IN_FLIGHT = {16: 1, 8: 2, 4: 4, 2: 4, 1: 4}
"""Words that a thread loads before it stores the first word, by bytes per word.

Short-lived thread blocks with few words per thread, in the order of the addresses, use the memory
better than long-lived blocks with many words per thread (98 % of a copy's speed against 94 %,
docs/performance/packing.md).
"""

CAPPED_IN_FLIGHT = 4
"""Same as IN_FLIGHT if the number of blocks is limited: few threads must then keep many loads in flight."""

CAPPED_THREADS_PER_SM = 512
"""Largest number of threads per multiprocessor of a launch with a limited number of blocks.

More threads are slower. Half of the GPU's multiprocessors can hold all these threads, so the launch
loses no speed if the other half is busy.
"""

MAX_WORDS = 2**31 - 2**14
"""Largest number of words of a region: indices stay below 2**31, with room for the last steps of a loop."""

BASES = 16
"""Bases of a launch, as in ``strided_body.cu``: 0, and up to 15 numbers that are set between launches."""

TABLE_BYTES = 3904
"""Largest table, in bytes, that is a kernel parameter; larger tables are read from device memory.

Reading a table from device memory takes two dependent loads before the first byte moves: 0.35 us, a
third of the time to pack 64 KiB. The parameters of a launch have 4 KiB, of which the bases take 128 bytes.
"""

RUN_PIECE = 1024
"""Bytes of an unaligned run that the lanes of a warp move at once, as in ``strided_body.cu``."""

SHORTEST_RUN = 32
"""Smallest block, in bytes, that is moved as a run if its alignment is less than 4 bytes."""

LEVEL = np.dtype(
    [
        ("source_stride", "i8"),
        ("target_stride", "i8"),
        ("count", "u4"),
        ("magic", "u4"),
        ("shift", "u4"),
        ("extent", "u4"),
    ]
)


@cache
def region_dtype(levels: int) -> np.dtype[np.void]:
    """Return the layout of a region with ``levels`` levels."""
    return np.dtype(
        [
            ("source", "u8"),
            ("target", "u8"),
            ("words", "u4"),
            ("first_chunk", "u4"),
            ("word_bytes", "u4"),  # and the numbers of both bases
            ("run_bytes", "u4"),
            ("level", LEVEL, (levels,)),
        ]
    )


class StridedRow(NamedTuple):
    """A region without its chunks: loops over words, outermost first.

    In a row of runs (``word_bytes`` is 0), the innermost loop is over the lanes that share a piece of a
    run. If a run has several pieces, the next loop is over the pieces. In a row of tiles, the two
    innermost loops are over elements, along the axes of the tiles.
    """

    source: int
    target: int
    word_bytes: int
    levels: tuple[Level, ...]
    run_bytes: int = 0
    tile: Tile | None = None
    bases: tuple[int, int] = (0, 0)  # numbers of the bases that are added to source and target

    @property
    def words(self) -> int:
        return prod(level.steps for level in self.levels) * (self.tile.words if self.tile else 1)

    @property
    def units(self) -> int:
        """Number of words, or of tiles in a tiled region."""
        if self.tile is None:
            return self.words
        around = prod(level.steps for level in self.levels[:-2])
        return around * prod(self.tile.counts(self.levels))

    @property
    def nbytes(self) -> int:
        if self.word_bytes:
            return self.words * self.word_bytes
        return self.run_bytes * prod(level.steps for level in self.outer)

    @property
    def outer(self) -> tuple[Level, ...]:
        """Loops over the runs of a row of runs."""
        return self.levels[: -1 if self.run_bytes <= RUN_PIECE else -2]


@dataclass(frozen=True)
class StridedPlan:
    """Tables and shape of one launch of a strided kernel; see :func:`plan`."""

    regions: npt.NDArray[np.void]  # dtype: region_dtype
    chunks: int  # number of chunks of all regions
    chunk_words: int  # words per chunk; the last chunk of a region may have fewer
    threads: int  # threads per block
    blocks: int
    word_bytes: int  # bytes per word; 0 if the kernel reads it from each region
    in_flight: int  # words that a thread loads before it stores the first word
    nbytes: int  # bytes moved
    tiled: int  # sum of the different sides in tiled regions; see `sides_of`
    arrays: tuple[int, ...] = ()  # base 1, 2, ... is the address of the array with this number
    table_bytes: int = TABLE_BYTES  # most bytes of a table in the kernel's parameters

    @property
    def chunk_region(self) -> npt.NDArray[np.uint32]:
        ends = np.append(self.regions["first_chunk"][1:], self.chunks)
        of_each = np.arange(len(self.regions), dtype=np.uint32)
        return np.repeat(of_each, ends - self.regions["first_chunk"])

    @property
    def levels(self) -> int:
        return int(self.regions.dtype["level"].shape[0])

    @property
    def inline(self) -> int:
        """Size, in regions, of the kernel parameter that holds the table; 0 if the table is in device memory."""
        # Few sizes, because each size compiles another kernel.
        most = self.table_bytes // self.regions.dtype.itemsize
        return next((size for size in (1, 6, most) if len(self.regions) <= size <= most), 0)

    @property
    def table(self) -> npt.NDArray[np.uint8]:
        """Bytes of the table: the regions and, if the table is in device memory, the region of each chunk."""
        if self.inline:
            filled = np.zeros(self.inline, self.regions.dtype)
            filled[: len(self.regions)] = self.regions
            return filled.view(np.uint8)
        return np.concatenate([self.regions.view(np.uint8), self.chunk_region.view(np.uint8)])

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        return (
            ("MAX_LEVELS", str(self.levels)),
            ("WORD_BYTES", str(self.word_bytes)),
            ("IN_FLIGHT", str(self.in_flight)),
            ("MAX_THREADS", str(max(self.threads, THREADS[-1]))),
            ("TABLE_REGIONS", str(self.inline)),
            *((("TILED", str(self.tiled)),) if self.tiled else ()),
        )


def plan(
    copies: Sequence[Copy],
    *,
    sms: int,
    max_blocks: int | None = None,
    element_bytes: int | None = None,
    max_words: int = MAX_WORDS,
    max_word: int = 16,
    tiles: bool = False,
) -> StridedPlan:
    """Plan one launch that performs all copies; the plan has no chunks if there is nothing to move.

    The words are distributed over ``sms`` multiprocessors, with one thread block per chunk, unless ``max_blocks``
    limits the blocks. The copies are in at most 15 arrays, each with a base that a launch adds to the addresses. Words
    have at most ``max_word`` bytes, and the bases must be multiples of ``max_word``. For additions, ``element_bytes``
    is the element size, and a word holds whole elements. A region of more than ``max_words`` words is cut. With
    ``tiles``, copies between different axis orders go through shared memory.

    Raises `DeviceError` if ``max_blocks`` is less than 1. Raises `DatatypeError` if the two sides of a copy have
    different numbers of bytes, or if an address or a stride is not a multiple of ``element_bytes``.
    """
    check_max_blocks(max_blocks)
    arrays = sorted({side.array for copy in copies for side in copy if side.array is not None})
    assert len(arrays) < BASES
    base_of: dict[int | None, int] = {array: base for base, array in enumerate(arrays, 1)}
    base_of[None] = 0
    rows = [
        row._replace(bases=(base_of[copy.source.array], base_of[copy.target.array]))
        for copy in copies
        for row in rows_of(copy, element_bytes, max_words, max_word, tiles=tiles)
    ]
    return replace(plan_rows(rows, sms=sms, max_blocks=max_blocks), arrays=tuple(arrays))


def plan_rows(
    rows: Sequence[StridedRow],
    *,
    sms: int,
    max_blocks: int | None = None,
    table_bytes: int = TABLE_BYTES,
) -> StridedPlan:
    """Plan one launch for rows; ``table_bytes`` limits the table that is a kernel parameter."""
    words = np.array([row.words for row in rows], dtype=np.int64)
    word_bytes = {row.word_bytes for row in rows}
    in_flight = (
        IN_FLIGHT[min(word_bytes, default=16) or 16] if max_blocks is None else CAPPED_IN_FLIGHT
    )
    work = int(words.sum()) // in_flight
    if max_blocks is None:
        of_tiles = max((row.tile.threads for row in rows if row.tile), default=0)
        threads = of_tiles or most_threads(work, 2 * sms, THREADS)
    else:
        most = CAPPED_THREADS_PER_SM * sms
        max_blocks = min(max_blocks, most // CAPPED_THREADS[0])
        choices = tuple(t for t in CAPPED_THREADS if t * max_blocks <= most)
        threads = most_threads(work, max_blocks, choices)
    chunk_words = threads * in_flight
    units = np.array([row.units for row in rows], dtype=np.int64)
    chunks = -(-units // [1 if row.tile else chunk_words for row in rows])
    first_chunks = np.cumsum(chunks) - chunks
    # Few variants, because each is compiled: 1, 2, 3 or MAX_LEVELS levels. Only tiled regions have a variant for words
    # of 1 or 2 bytes.
    most = max((len(row.levels) for row in rows), default=1)
    regions = np.zeros(len(rows), region_dtype(max(1, most) if most <= 3 else MAX_LEVELS))
    common = word_bytes.pop() if len(word_bytes) == 1 else 0
    for region, row, first_chunk in zip(regions, rows, first_chunks, strict=True):
        fill_region(region, row, int(first_chunk))
    total = int(chunks.sum())
    sides = sides_of(rows)
    return StridedPlan(
        regions=regions,
        chunks=total,
        chunk_words=chunk_words,
        threads=threads,
        blocks=total if max_blocks is None else min(total, max_blocks),
        word_bytes=common if common > 2 or sides else 0,
        in_flight=in_flight,
        nbytes=sum(row.nbytes for row in rows),
        tiled=sides,
        table_bytes=table_bytes,
    )


def most_threads(work: int, blocks: int, choices: tuple[int, ...]) -> int:
    """Return the largest thread block, of ``choices``, for which ``work`` threads make at least ``blocks`` blocks."""
    return max((t for t in choices if work >= blocks * t), default=choices[0])


def divisor(count: int, bits: int = 32) -> tuple[int, int]:
    """Return (magic, shift) with ``w // count == (w * magic >> bits) >> shift`` for w < 2**(bits - 1).

    Let ``2**(s-1) < count <= 2**s``. The multiplier ceil(2**(bits-1+s) / count) is below 2**bits. It
    exceeds the exact quotient by a relative error of less than 2**s / 2**(bits-1+s). For
    w < 2**(bits-1) this error is too small to reach the next integer (Granlund and Montgomery 1994,
    section 4).

    Examples
    --------
    >>> magic, shift = divisor(7)
    >>> (1_000_000_006 * magic >> 32) >> shift
    142857143
    >>> magic, shift = divisor(7, 64)
    >>> (10**18 * magic >> 64) >> shift == 10**18 // 7
    True
    """
    s = (count - 1).bit_length()
    return -(-(1 << (bits - 1 + s)) // count), s - 1


def fill_region(region: np.void, row: StridedRow, first_chunk: int) -> None:
    """Write a row into an entry of a table of regions."""
    region["source"] = row.source % 2**64
    region["target"] = row.target % 2**64
    region["words"] = row.units
    region["first_chunk"] = first_chunk
    source, target = row.bases
    region["word_bytes"] = row.word_bytes | source << 8 | target << 16
    region["run_bytes"] = row.tile.form if row.tile else row.run_bytes
    counts = row.tile.counts(row.levels) if row.tile else ()
    for position, level in enumerate(reversed(row.levels)):
        last = position == len(row.levels) - 1
        count, extent = level.steps, 0
        if position < len(counts):
            count, extent = counts[position], level.steps
        magic, shift = (0, 0) if last or count == 1 else divisor(count)
        region["level"][position] = (*level[1:], count, magic, shift, extent)


def rows_of(
    copy: Copy, element_bytes: int | None, max_words: int, max_word: int, *, tiles: bool = False
) -> Iterator[StridedRow]:
    """Yield the rows that together perform a copy; the arguments are the same as for :func:`plan`."""
    for piece in pieces(copy):
        *outer, run = piece.levels
        word = min(max_word, _word_bytes(piece.source, piece.target, piece.levels))
        if element_bytes is not None and word < element_bytes:
            raise DatatypeError(
                f"copy from address {piece.source:#x} to {piece.target:#x}: addresses and strides "
                f"are multiples of {word} bytes, but adding needs multiples of the element's "
                f"{element_bytes}; copy to aligned memory first"
            )
        if word <= 2 and run.steps >= SHORTEST_RUN and element_bytes is None:
            rows = list(_runs(piece))
        else:
            n = run.steps // word
            words = [Level(n, word, word)] if n > 1 else []
            rows = [StridedRow(piece.source, piece.target, word, (*outer, *words))]
        for row in rows:
            for low in _limit_levels(row):
                for small in _limit_words(low, max_words):
                    yield _permuting(small, max_word) if tiles else small


def _permuting(row: StridedRow, most: int) -> StridedRow:
    """Return the row, tiled if its sides are contiguous along different axes; ``most`` is the largest word."""
    if not row.word_bytes:
        return row
    bits = most | row.source | row.target
    tiling = tiled(row.levels, row.word_bytes, bits & -bits)
    return row if tiling is None else row._replace(levels=tiling[0], tile=tiling[1])


def least_row_bytes(blocks: StridedBlocks) -> int:
    """Return the length of the shortest run that packing reads, or unpacking writes: a block, or a row of a tile."""
    if blocks.nbytes < LEAST_BYTES or blocks.block_bytes > MOST_ELEMENT_BYTES:
        return blocks.block_bytes
    copy = Copy(Side(0, blocks), contiguous_side(0, blocks.nbytes))
    rows = [*rows_of(copy, None, MAX_WORDS, 16, tiles=True)]
    return min(
        min(row.tile[:2]) * row.tile.words * row.word_bytes if row.tile else blocks.block_bytes
        for row in rows
    )


def sides_of(rows: Iterable[StridedRow]) -> int:
    """Return the sum of the different sides of the squares in tiled rows."""
    return sum({row.tile.side for row in rows if row.tile})


def _runs(piece: Piece) -> Iterator[StridedRow]:
    """Yield rows that move a piece's blocks as runs."""
    *outer, run = piece.levels
    longest = 1 << 30
    for start in range(0, run.steps, longest):
        nbytes = min(longest, run.steps - start)
        # A lane stores words of 4 bytes. With two words per lane, the bytes at both ends take little of the time.
        lanes = min(32, 1 << (-(-nbytes // 8) - 1).bit_length())
        n_pieces = -(-nbytes // RUN_PIECE)
        over_pieces = [Level(n_pieces, RUN_PIECE, RUN_PIECE)] if n_pieces > 1 else []
        levels = (*outer, *over_pieces, Level(lanes, 0, 0))
        yield StridedRow(piece.source + start, piece.target + start, 0, levels, nbytes)


def _word_bytes(source: int, target: int, levels: tuple[Level, ...]) -> int:
    """Return the largest of 16, 8, 4, 2, 1 that divides both addresses, all strides and the run."""
    bits = 16 | source | target | levels[-1].steps
    for level in levels[:-1]:
        bits |= level.source_stride | level.target_stride
    return bits & -bits


def _limit_levels(row: StridedRow) -> Iterator[StridedRow]:
    """Unroll the shortest outer levels until at most MAX_LEVELS levels are left."""
    if len(row.levels) <= MAX_LEVELS:
        yield row
        return
    at = min(range(len(_loops(row))), key=lambda i: row.levels[i].steps)
    for item in _items(row, at):
        yield from _limit_levels(item)


def _loops(row: StridedRow) -> tuple[Level, ...]:
    """Return the levels that may be unrolled: all except the words of a block, or in a row of runs all over runs."""
    return row.levels[:-1] if row.word_bytes else row.outer


def _limit_words(row: StridedRow, max_words: int) -> Iterator[StridedRow]:
    """Cut the outermost level until each region has at most ``max_words`` words, or is one run."""
    if row.words <= max_words or not row.levels[: len(_loops(row)) + bool(row.word_bytes)]:
        yield row
        return
    level, inner = row.levels[0], row.levels[1:]
    most_steps = max_words // prod(below.steps for below in inner)
    if most_steps < 2:
        for item in _items(row, 0):
            yield from _limit_words(item, max_words)
        return
    for start in range(0, level.steps, most_steps):
        part = level._replace(steps=min(most_steps, level.steps - start))
        yield _item(row, level, start, (part, *inner) if part.steps > 1 else inner)


def _items(row: StridedRow, at: int) -> Iterator[StridedRow]:
    """Yield one row per step of level ``at``."""
    left = row.levels[:at] + row.levels[at + 1 :]
    for i in range(row.levels[at].steps):
        yield _item(row, row.levels[at], i, left)


def _item(row: StridedRow, level: Level, step: int, left: tuple[Level, ...]) -> StridedRow:
    source = row.source + step * level.source_stride
    target = row.target + step * level.target_stride
    return row._replace(source=source, target=target, levels=left)
