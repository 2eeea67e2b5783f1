"""Plans for the strided kernels: the table of regions that one launch reads.

No GPU is touched here. The table's layout is that of the C structs in ``kernels/strided_body.cu``;
a test holds one against the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.engine.packers.refine import Copy, Level, pieces
from halox.errors import DatatypeError, DeviceError

MAX_LEVELS = 5
"""Levels of a region: four, and the words of a block."""

THREADS = 128
"""Threads of a block; small, so that 64 KiB still spread over most of a GPU."""

WORDS_IN_FLIGHT = 4
"""Words a thread loads before it stores the first, as in ``strided_body.cu``."""

MAX_WORDS = 2**31 - 2**12
"""Most words of a region: 32-bit indices, with room for the last steps of a loop."""

CHUNKS_PER_SM = 32
"""Enough that blocks that end late leave few SMs idle, few enough that the table stays small."""

CHUNKS_PER_BLOCK = 4
"""The same for a launch with a capped number of blocks."""

LEVEL = np.dtype(
    [
        ("source_stride", "i8"),
        ("target_stride", "i8"),
        ("count", "u4"),
        ("magic", "u4"),
        ("shift", "u4"),
        ("unused", "u4"),
    ]
)
REGION = np.dtype(
    [
        ("source", "u8"),
        ("target", "u8"),
        ("words", "u4"),
        ("first_chunk", "u4"),
        ("word_bytes", "u4"),
        ("levels", "u4"),
        ("level", LEVEL, (MAX_LEVELS,)),
    ]
)


class Row(NamedTuple):
    """A region before it has its chunks: loops over words, outermost first."""

    source: int
    target: int
    word_bytes: int
    levels: tuple[Level, ...]

    @property
    def words(self) -> int:
        """Words of the region."""
        return prod(level.steps for level in self.levels)


@dataclass(frozen=True)
class Plan:
    """What one launch of a strided kernel needs; see :func:`plan`."""

    regions: npt.NDArray[np.void]
    chunk_region: npt.NDArray[np.uint32]
    chunk_words: int
    blocks: int
    nbytes: int

    @property
    def chunks(self) -> int:
        """Chunks of all regions."""
        return len(self.chunk_region)

    @property
    def table(self) -> npt.NDArray[np.uint8]:
        """Regions, then the region of each chunk, as bytes to upload."""
        parts = [self.regions.view(np.uint8), self.chunk_region.view(np.uint8)]
        return np.concatenate(parts) if self.chunks else np.zeros(0, np.uint8)

    @property
    def chunk_region_offset(self) -> int:
        """Where in the table the regions end and the chunks' regions begin."""
        return self.regions.nbytes


def plan(
    copies: Sequence[Copy],
    *,
    sms: int,
    max_blocks: int | None = None,
    element_bytes: int = 1,
    max_words: int = MAX_WORDS,
) -> Plan:
    """Plan one launch that performs all copies.

    Parameters
    ----------
    copies : sequence of Copy
        Empty copies are left out.
    sms : int
        Multiprocessors of the GPU, over which the words are spread.
    max_blocks : int, optional
        Most thread blocks of the launch; by default a block for each chunk.
    element_bytes : int
        Words hold whole elements of this size; 1 for plain copies.
    max_words : int
        Most words of a region; larger ones are cut.

    Returns
    -------
    Plan
        With no chunks and no blocks if there is nothing to move.

    Raises
    ------
    DeviceError
        If ``max_blocks`` is less than 1.
    DatatypeError
        If the two sides of a copy differ in bytes.
        If an address or a stride is not a multiple of ``element_bytes``.

    Notes
    -----
    Not collective; touches no device.
    """
    if max_blocks is not None and max_blocks < 1:
        raise DeviceError(f"max_blocks: got {max_blocks}, must be at least 1, or None for no limit")
    rows = [row for copy in copies for row in _rows(copy, element_bytes, max_words)]
    words = np.array([row.words for row in rows], dtype=np.int64)
    slots = sms * CHUNKS_PER_SM
    if max_blocks is not None:
        slots = min(slots, max_blocks * CHUNKS_PER_BLOCK)
    chunk_words = _chunk_words(int(words.sum()), slots)
    chunks = -(-words // chunk_words)
    first_chunks = np.cumsum(chunks) - chunks
    regions = np.zeros(len(rows), REGION)
    for region, row, first_chunk in zip(regions, rows, first_chunks, strict=True):
        _fill(region, row, int(first_chunk))
    total = int(chunks.sum())
    return Plan(
        regions=regions,
        chunk_region=np.repeat(np.arange(len(rows), dtype=np.uint32), chunks),
        chunk_words=chunk_words,
        blocks=total if max_blocks is None else min(total, max_blocks),
        nbytes=sum(row.words * row.word_bytes for row in rows),
    )


def _chunk_words(words: int, slots: int) -> int:
    """Words of a chunk: one a thread while there are SMs to fill, whole rounds of loads later."""
    fair = -(-words // slots)
    step = THREADS if fair <= THREADS * WORDS_IN_FLIGHT else THREADS * WORDS_IN_FLIGHT
    return max(step, -(-fair // step) * step)


def divisor(count: int) -> tuple[int, int]:
    """Numbers (magic, shift) with ``w // count == (w * magic >> 32) >> shift`` for w < 2**31.

    With ``2**(s-1) < count <= 2**s`` the multiplier ceil(2**(31+s) / count) exceeds the true
    quotient by less than 2**s / 2**(31+s) of itself, too little to reach the next integer while
    w < 2**31, and it is below 2**32 (Granlund and Montgomery 1994, section 4).

    Examples
    --------
    >>> magic, shift = divisor(7)
    >>> (1_000_000_006 * magic >> 32) >> shift
    142857143
    """
    bits = (count - 1).bit_length()
    return -(-(1 << (31 + bits)) // count), bits - 1


def _fill(region: np.void, row: Row, first_chunk: int) -> None:
    region["source"] = row.source
    region["target"] = row.target
    region["words"] = row.words
    region["first_chunk"] = first_chunk
    region["word_bytes"] = row.word_bytes
    region["levels"] = len(row.levels)
    for position, level in enumerate(reversed(row.levels)):
        last = position == len(row.levels) - 1
        magic, shift = (0, 0) if last else divisor(level.steps)
        region["level"][position] = (
            level.source_stride,
            level.target_stride,
            level.steps,
            magic,
            shift,
            0,
        )


def _rows(copy: Copy, element_bytes: int, max_words: int) -> Iterator[Row]:
    for piece in pieces(copy):
        *outer, run = piece.levels
        word = _word_bytes(piece.source, piece.target, piece.levels)
        if word < element_bytes:
            raise DatatypeError(
                f"copy from address {piece.source:#x} to {piece.target:#x}: addresses and strides "
                f"are multiples of {word} bytes, but adding needs multiples of the element's "
                f"{element_bytes}; copy to aligned memory first"
            )
        n = run.steps // word
        words = [Level(n, word, word)] if n > 1 else []
        row = Row(piece.source, piece.target, word, (*outer, *words))
        for low in _limit_levels(row):
            yield from _limit_words(low, max_words)


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
    at = min(range(len(row.levels) - 1), key=lambda i: row.levels[i].steps)
    left = row.levels[:at] + row.levels[at + 1 :]
    for item in _items(row, at, left):
        yield from _limit_levels(item)


def _limit_words(row: Row, max_words: int) -> Iterator[Row]:
    """Cut the outermost level until a region has at most ``max_words`` words."""
    if row.words <= max_words:
        yield row
        return
    level, inner = row.levels[0], row.levels[1:]
    fitting = max_words // prod(below.steps for below in inner)
    if fitting < 2:
        for item in _items(row, 0, inner):
            yield from _limit_words(item, max_words)
        return
    for start in range(0, level.steps, fitting):
        part = level._replace(steps=min(fitting, level.steps - start))
        yield row._replace(
            source=row.source + start * level.source_stride,
            target=row.target + start * level.target_stride,
            levels=(part, *inner) if part.steps > 1 else inner,
        )


def _items(row: Row, at: int, left: tuple[Level, ...]) -> Iterator[Row]:
    """Yield the rows that level ``at`` walks through."""
    level = row.levels[at]
    for i in range(level.steps):
        yield row._replace(
            source=row.source + i * level.source_stride,
            target=row.target + i * level.target_stride,
            levels=left,
        )
