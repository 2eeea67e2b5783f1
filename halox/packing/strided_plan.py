"""Plans for the strided kernels: the table of regions that one launch reads.

No GPU is touched here. The table has the layout of the C structs in ``packing/kernels/strided_body.cu``;
a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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
"""Levels of a region: four, and the words of a block."""

THREADS = (64, 128, 256)
"""Threads of a block: the most that still occupy every multiprocessor."""

CAPPED_THREADS = (64, 128, 256, 512, 1024)
"""The same where the number of blocks is limited: up to all threads of a multiprocessor."""

IN_FLIGHT = {16: 1, 8: 2, 4: 4, 2: 4, 1: 4}
"""Words a thread loads before it stores the first, by bytes a word.

Short blocks of few words a thread, in the order of the addresses, keep the memory busier than
long-lived ones with many (98 % of a copy's speed against 94 %, docs/performance/packing.md).
"""

CAPPED_IN_FLIGHT = 4
"""The same where the number of blocks is limited: few threads must keep many loads in flight."""

CAPPED_THREADS_PER_SM = 512
"""Most threads of such a launch, by multiprocessor: more of them are slower, and half as many
multiprocessors as there are can hold these, so that a half-busy GPU costs nothing."""

MAX_WORDS = 2**31 - 2**14
"""Most words of a region: 32-bit indices, with room for the last steps of a loop."""

TABLE_BYTES = 4000
"""Most bytes of a table that is a kernel parameter; larger tables are read from device memory.

Reading a table from device memory costs two loads, one after the other, before the first byte
moves: 0.35 us, a third of what packing 64 KiB takes. A launch carries 4 KiB of parameters.
"""

RUN_PIECE = 1024
"""Bytes of an unaligned run that the lanes of a warp move at once, as in ``strided_body.cu``."""

SHORTEST_RUN = 32
"""Bytes of a block from which it is moved as a run, where no words of 4 bytes fit."""

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
    """Layout of a region with that many levels."""
    return np.dtype(
        [
            ("source", "u8"),
            ("target", "u8"),
            ("words", "u4"),
            ("first_chunk", "u4"),
            ("word_bytes", "u4"),
            ("run_bytes", "u4"),
            ("level", LEVEL, (levels,)),
        ]
    )


class Row(NamedTuple):
    """A region without its chunks: loops over words, outermost first.

    In a row of runs (``word_bytes`` 0) the innermost loop is over the lanes that share a piece of a
    run, the one around it over the pieces if there are several. In a row of tiles the two innermost
    loops are over elements, along the axes of the tiles.
    """

    source: int
    target: int
    word_bytes: int
    levels: tuple[Level, ...]
    run_bytes: int = 0
    tile: Tile | None = None

    @property
    def words(self) -> int:
        """Words of the region."""
        return prod(level.steps for level in self.levels) * (self.tile.words if self.tile else 1)

    @property
    def units(self) -> int:
        """Words or tiles: what the kernels count."""
        if self.tile is None:
            return self.words
        around = prod(level.steps for level in self.levels[:-2])
        return around * prod(self.tile.counts(self.levels))

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        if self.word_bytes:
            return self.words * self.word_bytes
        return self.run_bytes * prod(level.steps for level in self.outer)

    @property
    def outer(self) -> tuple[Level, ...]:
        """Loops over runs."""
        return self.levels[: -1 if self.run_bytes <= RUN_PIECE else -2]


@dataclass(frozen=True)
class Plan:
    """Tables and shape of one launch of a strided kernel; see :func:`plan`."""

    regions: npt.NDArray[np.void]  # of region_dtype
    chunks: int  # of all regions
    chunk_words: int  # of each chunk but the last one of a region
    threads: int  # of a block
    blocks: int
    word_bytes: int  # 0 if regions differ in that
    in_flight: int  # words a thread loads before it stores the first
    nbytes: int  # moved
    tiled: int  # sum of the sides in tiled regions

    @property
    def chunk_region(self) -> npt.NDArray[np.uint32]:
        """The region of each chunk."""
        ends = np.append(self.regions["first_chunk"][1:], self.chunks)
        of_each = np.arange(len(self.regions), dtype=np.uint32)
        return np.repeat(of_each, ends - self.regions["first_chunk"])

    @property
    def levels(self) -> int:
        """Levels of the regions."""
        return int(self.regions.dtype["level"].shape[0])

    @property
    def inline(self) -> int:
        """Regions of the parameter that holds this plan's, or 0 if it needs device memory."""
        # Few sizes, because each is compiled.
        sizes = (1, 6, TABLE_BYTES // self.regions.dtype.itemsize)
        return next((size for size in sizes if len(self.regions) <= size), 0)

    @property
    def table(self) -> npt.NDArray[np.uint8]:
        """Bytes that the kernel reads; in device memory the regions, then each chunk's region."""
        if self.inline:
            filled = np.zeros(self.inline, self.regions.dtype)
            filled[: len(self.regions)] = self.regions
            return filled.view(np.uint8)
        return np.concatenate([self.regions.view(np.uint8), self.chunk_region.view(np.uint8)])

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Compile-time parameters of the kernel."""
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
) -> Plan:
    """Plan one launch that performs all copies, with no chunks if there is nothing to move.

    The words are spread over ``sms`` multiprocessors, a thread block for each chunk unless ``max_blocks``
    limits them. Words have at most ``max_word`` bytes, for copies whose addresses are relative to ones that are
    only known to be multiples of it; where elements of ``element_bytes`` are added, they hold whole ones. Regions
    of more than ``max_words`` words are cut. With ``tiles``, copies between different orders of the axes go through
    shared memory. Raises `DeviceError` if ``max_blocks`` is less than 1, and `DatatypeError` if the two sides of a
    copy differ in bytes, or an address or a stride is not a multiple of ``element_bytes``.
    """
    check_max_blocks(max_blocks)
    rows = [
        row
        for copy in copies
        for row in rows_of(copy, element_bytes, max_words, max_word, tiles=tiles)
    ]
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
    # Few kinds, because each is compiled: 1, 2, 3 or MAX_LEVELS levels; no words of 1 or 2 bytes alone, but in tiles.
    most = max((len(row.levels) for row in rows), default=1)
    regions = np.zeros(len(rows), region_dtype(max(1, most) if most <= 3 else MAX_LEVELS))
    common = word_bytes.pop() if len(word_bytes) == 1 else 0
    for region, row, first_chunk in zip(regions, rows, first_chunks, strict=True):
        fill_region(region, row, int(first_chunk))
    total = int(chunks.sum())
    sides = sides_of(rows)
    return Plan(
        regions=regions,
        chunks=total,
        chunk_words=chunk_words,
        threads=threads,
        blocks=total if max_blocks is None else min(total, max_blocks),
        word_bytes=common if common > 2 or sides else 0,
        in_flight=in_flight,
        nbytes=sum(row.nbytes for row in rows),
        tiled=sides,
    )


def most_threads(work: int, blocks: int, choices: tuple[int, ...]) -> int:
    """Return the most threads a block with which ``work`` threads in all make that many blocks."""
    return max((t for t in choices if work >= blocks * t), default=choices[0])


def divisor(count: int, bits: int = 32) -> tuple[int, int]:
    """Numbers (magic, shift), ``w // count == (w * magic >> bits) >> shift`` for w < 2**(bits - 1).

    With ``2**(s-1) < count <= 2**s`` the multiplier ceil(2**(bits-1+s) / count) exceeds the true
    quotient by less than 2**s / 2**(bits-1+s) of itself, too little to reach the next integer while
    w < 2**(bits-1), and it is below 2**bits (Granlund and Montgomery 1994, section 4).

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


def fill_region(region: np.void, row: Row, first_chunk: int) -> None:
    """Write a row into an entry of a table of regions."""
    region["source"] = row.source % 2**64
    region["target"] = row.target % 2**64
    region["words"] = row.units
    region["first_chunk"] = first_chunk
    region["word_bytes"] = row.word_bytes
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
) -> Iterator[Row]:
    """Yield the rows that together perform a copy; arguments as for :func:`plan`."""
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
            rows = [Row(piece.source, piece.target, word, (*outer, *words))]
        for row in rows:
            for low in _limit_levels(row):
                for small in _limit_words(low, max_words):
                    yield _permuting(small, max_word) if tiles else small


def _permuting(row: Row, most: int) -> Row:
    """Return the row in tiles if its sides run along different axes; words of ``most`` bytes at once."""
    if not row.word_bytes:
        return row
    bits = most | row.source | row.target
    found = tiled(row.levels, row.word_bytes, bits & -bits)
    return row if found is None else row._replace(levels=found[0], tile=found[1])


def least_row_bytes(blocks: StridedBlocks) -> int:
    """Bytes that packing reads, or unpacking writes, one after the other: of a block, or of a tile's row."""
    if blocks.nbytes < LEAST_BYTES or blocks.block_bytes > MOST_ELEMENT_BYTES:
        return blocks.block_bytes
    copy = Copy(Side(0, blocks), contiguous_side(0, blocks.nbytes))
    rows = [*rows_of(copy, None, MAX_WORDS, 16, tiles=True)]
    return min(
        min(row.tile[:2]) * row.tile.words * row.word_bytes if row.tile else blocks.block_bytes
        for row in rows
    )


def sides_of(rows: Iterable[Row]) -> int:
    """Return the sum of the sides of the squares in tiled rows, each once."""
    return sum({row.tile.side for row in rows if row.tile})


def _runs(piece: Piece) -> Iterator[Row]:
    """Rows that move a piece's blocks as runs."""
    *outer, run = piece.levels
    longest = 1 << 30
    for start in range(0, run.steps, longest):
        nbytes = min(longest, run.steps - start)
        # A lane stores words of 4 bytes; two each keep the first and the last byte's share small.
        lanes = min(32, 1 << (-(-nbytes // 8) - 1).bit_length())
        pieces_of = -(-nbytes // RUN_PIECE)
        counted = [Level(pieces_of, RUN_PIECE, RUN_PIECE)] if pieces_of > 1 else []
        levels = (*outer, *counted, Level(lanes, 0, 0))
        yield Row(piece.source + start, piece.target + start, 0, levels, nbytes)


def _word_bytes(source: int, target: int, levels: tuple[Level, ...]) -> int:
    """Return the widest of 16, 8, 4, 2, 1 bytes that divides everything."""
    bits = 16 | source | target | levels[-1].steps
    for level in levels[:-1]:
        bits |= level.source_stride | level.target_stride
    return bits & -bits


def _limit_levels(row: Row) -> Iterator[Row]:
    """Unroll the shortest outer levels until at most MAX_LEVELS are left."""
    if len(row.levels) <= MAX_LEVELS:
        yield row
        return
    at = min(range(len(_loops(row))), key=lambda i: row.levels[i].steps)
    for item in _items(row, at):
        yield from _limit_levels(item)


def _loops(row: Row) -> tuple[Level, ...]:
    """Levels that may be unrolled: all but the words of a block, or all around a run."""
    return row.levels[:-1] if row.word_bytes else row.outer


def _limit_words(row: Row, max_words: int) -> Iterator[Row]:
    """Cut the outermost level until a region has at most ``max_words`` words, or is one run."""
    if row.words <= max_words or not row.levels[: len(_loops(row)) + bool(row.word_bytes)]:
        yield row
        return
    level, inner = row.levels[0], row.levels[1:]
    fitting = max_words // prod(below.steps for below in inner)
    if fitting < 2:
        for item in _items(row, 0):
            yield from _limit_words(item, max_words)
        return
    for start in range(0, level.steps, fitting):
        part = level._replace(steps=min(fitting, level.steps - start))
        yield _item(row, level, start, (part, *inner) if part.steps > 1 else inner)


def _items(row: Row, at: int) -> Iterator[Row]:
    """Yield the rows that level ``at`` walks through."""
    left = row.levels[:at] + row.levels[at + 1 :]
    for i in range(row.levels[at].steps):
        yield _item(row, row.levels[at], i, left)


def _item(row: Row, level: Level, step: int, left: tuple[Level, ...]) -> Row:
    source = row.source + step * level.source_stride
    target = row.target + step * level.target_stride
    return row._replace(source=source, target=target, levels=left)
