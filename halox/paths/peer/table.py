"""Plans for the kernel that makes a whole exchange among GPUs in one launch: the table of its segments.

No GPU is touched here. The table's layout is that of the C structs in ``kernels/peer.cu``; a test holds one against
the other. A message is a list of segments on either side, cut into chunks, each of which its sender flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from halox.datatypes import StridedBlocks
from halox.packing.refine import Copy, Level, Side, pieces
from halox.packing.strided_plan import (
    MAX_LEVELS,
    MAX_WORDS,
    Row,
    fill_region,
    region_dtype,
    rows_of,
    sides_of,
)

EPOCH_SHIFT = 12
"""Bits of a block's number, the same as in ``peer.cu``: a launch has fewer than 2**EPOCH_SHIFT blocks."""

PACKET_EXPANSION = 2
"""Bytes of packets for a byte of data."""

TILE_BYTES, TILE_DATA_BYTES = 2048, 32 * 56
"""Bytes of the LL128-like packets that a warp sends at once, and of the data in them."""

WIDE_WORDS = (4, 8)
"""Bytes of the words that travel in LL128-like packets."""

TABLE_BYTES = 3800
"""Most bytes of a table that travels with the launch; larger ones are in device memory."""

INLINE_CHUNKS = 600
"""Most chunks that are worked on in the order of the segments, which needs no table in device memory."""

MOST_SHIFTS = 16
"""Shifts of a launch's arrays to others, the first of which is 0, as in ``peer.cu``."""

IN_FLIGHT = 4
"""Words that a thread loads before it stores the first; 1 in small exchanges."""

THREADS = 128
"""Threads of a block in small exchanges."""

MANY_THREADS = 256
"""The same in larger ones, where a block ends each chunk with a flag."""

WIDE_THREADS = 64
"""The same in larger ones where something goes in LL128-like packets: each thread has seven loads under way."""

BLOCKS_PER_SM = {THREADS: 2, MANY_THREADS: 1}
"""Most blocks a multiprocessor that send, and as many that take, by their threads.

A thread has at most 128 registers, so that a multiprocessor holds 4 or 2 of them, or 8 of WIDE_THREADS. What is taken
thus never fills a GPU by itself: another exchange, on another stream, finds room to send what others wait for.
"""

WIDE_BLOCKS_PER_SM = ((3, 3), (10, 2), (inf, 4))
"""The same for blocks of WIDE_THREADS: up to so many chunks a multiprocessor, so many blocks.

One chunk a block while three a multiprocessor suffice. Then two, which all run at once on half of a GPU as well; four
where there is much to do, as for six faces.
"""

WIDE_BLOCKS_ASIDE = 2
"""Most of them in an exchange beside other work, which they leave half of each multiprocessor."""

SMALL_WORDS = 1 << 16
"""Words, of what is sent or taken, up to which an exchange is small."""

CHUNK_BYTES = (2048, 8192)
"""Least and most bytes of a chunk that is flagged."""

LONG_CHUNK_BYTES = 32768
"""Most bytes where words are long: a flag costs more than their bytes then."""

DIRECT_CHUNK_BYTES = (2048, 1 << 16)
"""Least and most bytes of a chunk that goes direct: nobody waits for it alone, so that a block best has one only."""

TILED_CHUNK_BYTES = 1 << 16
"""Bytes, more or less, of a chunk of tiles: the flag behind it waits until its last stores have arrived."""

MOST_CHUNKS = 1 << 15
"""Chunks, more or less, from which they grow beyond that."""

CHUNKS = 64
"""Chunks of a segment that is neither so small nor so large that CHUNK_BYTES says otherwise."""


class Kind(IntEnum):
    """Kinds of transfer of a segment's words; see ``peer.cu``."""

    COPY = 0
    SEND_STAGED = 1
    SEND_LL = 2
    SEND_WIDE = 3
    SEND_DIRECT = 4
    TAKE_STAGED = 5
    TAKE_LL = 6
    TAKE_WIDE = 7
    TAKE_DIRECT = 8


class Run(NamedTuple):
    """A row of a message's words, with its place in the packed message, from whose start packed addresses count."""

    row: Row
    packed: int  # first packed byte; -1 if its bytes are not there one after the other
    array: int = -1  # number of the array on the other side, -1 where there is none
    direct_words: int = 0  # of a chunk of what goes direct, which only its sender needs to know

    @property
    def chunk_words(self) -> int:
        """Words, or tiles, of a chunk that is flagged: as many bytes for both ends of equally long runs."""
        if self.row.tile:
            return self.direct_words or tiles_of(self.row)
        if not self.row.word_bytes:
            return MANY_THREADS  # lanes of runs: a multiple of the lanes of any of them
        if self.direct_words:
            return self.direct_words
        most = LONG_CHUNK_BYTES if self.row.word_bytes == 16 else CHUNK_BYTES[1]
        return chunk_bytes(self.row.nbytes, most) // self.row.word_bytes

    @property
    def chunks(self) -> int:
        """Number of chunks that are flagged."""
        return -(-self.row.units // self.chunk_words)

    @property
    def signature(self) -> tuple[int, int, int, int]:
        """Packed start, bytes, chunks and word, which are the other end's as well where chunks or tiles match."""
        return self.packed, self.row.nbytes, self.chunks, self.row.word_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of the LL128-like packets of all its words."""
        return -(-self.row.nbytes // TILE_DATA_BYTES) * TILE_BYTES


def in_even_chunks(run: Run, total: int, sms: int) -> Run:
    """Return a run that goes direct, of ``total`` bytes in the same launch, in as many chunks for each thread block."""
    least, most = DIRECT_CHUNK_BYTES
    blocks = BLOCKS_PER_SM[MANY_THREADS] * sms
    most = max(most, total // MOST_CHUNKS)
    rounds = -(-total // (blocks * most))
    nbytes = max(least, -(-total // (blocks * rounds)))
    if run.row.tile:
        return run._replace(direct_words=tiles_of(run.row, nbytes))
    word = run.row.word_bytes or 1
    return run._replace(direct_words=-(-nbytes // (word * 32)) * 32)  # a word a lane


def tiles_of(row: Row, nbytes: int | None = None) -> int:
    """Return the tiles of a chunk of so many bytes, one at least; by default such that there are enough of them."""
    assert row.tile is not None
    if nbytes is None:
        nbytes = min(TILED_CHUNK_BYTES, row.nbytes // (4 * CHUNKS))
    return max(1, nbytes // (row.tile.area * row.word_bytes))


def chunk_bytes(nbytes: int, most: int) -> int:
    """Bytes of a chunk of a run of so many: a power of two.

    Examples
    --------
    >>> [chunk_bytes(n, 8192) for n in (32768, 1 << 20, 1 << 31)]
    [2048, 8192, 65536]
    """
    wanted = max(min(most, max(CHUNK_BYTES[0], nbytes // CHUNKS)), nbytes // MOST_CHUNKS)
    return 1 << (wanted - 1).bit_length()


def runs(
    copies: Sequence[Copy], *, packed: int, max_word: int = 16, tiles: bool = False
) -> list[Run]:
    """Rows between arrays and the packed message, side 1 of copies that send, 0 of those that receive."""
    found = []
    for copy in copies:
        for row in rows_of(copy, None, MAX_WORDS, max_word, tiles=tiles):
            start = row.target if packed else row.source
            found.append(Run(row, start if _is_contiguous(row, packed) else -1))
    return found


def pieces_between(a: StridedBlocks, b: StridedBlocks) -> int:
    """Return how many loop nests a copy between two layouts takes, as far as their counts tell.

    Examples
    --------
    >>> rows, cells = StridedBlocks(0, (6,), (64,), 32), StridedBlocks(0, (6, 4), (512, 64), 8)
    >>> pieces_between(rows, cells)
    1
    """
    return len(pieces(Copy(Side(0, a), Side(0, b))))


def least_word(found: Sequence[Run]) -> int:
    """Bytes of the shortest word of some runs, 1 for runs of no alignment, 16 for no runs."""
    return min((run.row.word_bytes or 1 for run in found), default=16)


def _is_contiguous(row: Row, packed: int) -> bool:
    if row.tile:
        return False  # its chunks are tiles
    expected = row.word_bytes
    for level in reversed(row.levels):
        if level[1 + packed] != expected:
            return False
        expected *= level.steps
    return bool(row.word_bytes)


def repacked(row: Row, packed: int, base: int, expansion: int = 1) -> Row:
    """Return the row with its packed side at an address; with ``expansion`` bytes there for a byte of data.

    0 for LL128-like packets: their place is known by the number of the tile.
    """
    at = [row.source, row.target]
    at[packed] = base + expansion * at[packed]
    factors = (1, expansion) if packed else (expansion, 1)
    levels = tuple(Level(steps, a * factors[0], b * factors[1]) for steps, a, b in row.levels)
    return row._replace(source=at[0], target=at[1], levels=levels)


def both_packed(row: Row, packed: int) -> Row:
    """Return the row with both sides at the addresses, from 0 on, of its packed side."""
    at = (row.source, row.target)[packed]
    levels = tuple(Level(level.steps, *[level[1 + packed]] * 2) for level in row.levels)
    return row._replace(source=at, target=at, levels=levels)


class Segment(NamedTuple):
    """A row and its kind of transfer, as in ``peer.cu``; with addresses on the GPU that runs the kernel."""

    kind: Kind
    row: Row
    message: int  # its number among the rank's, for errors
    chunk_words: int = 0  # 0 for as many as the launch likes
    flags: int = 0
    begun: int = 0
    slot_bytes: int = 0
    flag_count: int = 0
    lag: int = 0
    shifts: int = 0  # see `shifts_of`


@dataclass(frozen=True)
class PeerPlan:
    """Table and shape of one launch; see :func:`plan`."""

    segments: npt.NDArray[np.void]  # of `segment_dtype`; sends and copies first
    send_chunks: int
    chunks: int
    send_blocks: int
    blocks: int
    aside: tuple[int, int]  # the same two for a launch beside other work
    threads: int
    in_flight: int
    word_bytes: int
    levels: int
    tiled: int

    @property
    def inline(self) -> int:
        """Segments of the launch's own table, 0 if the table is in device memory."""
        if self.chunks > INLINE_CHUNKS:
            return 0
        most = TABLE_BYTES // self.segments.dtype.itemsize
        sizes = (4, 12)  # few, because each is compiled
        return next((size for size in sizes if len(self.segments) <= size <= most), 0)

    @property
    def table(self) -> npt.NDArray[np.uint8]:
        """Table of the kernel: the segments, and in device memory behind them each chunk's segment."""
        if self.inline:
            filled = np.zeros(self.inline, self.segments.dtype)
            filled[: len(self.segments)] = self.segments
            return filled.view(np.uint8)
        return np.concatenate([self.segments.view(np.uint8), self.order.reshape(-1).view(np.uint8)])

    @property
    def order(self) -> npt.NDArray[np.uint32]:
        """Segment and number of each chunk, shape (chunks, 2): what is sent first, the segments taking turns.

        Opposite faces are in the same cache lines: the high end of a row of cells beside the low end of the next.
        In turns, a line is fetched once for both. Copies are made when everything is sent, since the receiver has work
        with it still; but beside what all goes direct, which the wire alone holds up.
        """
        first = self.segments["region"]["first_chunk"].astype(np.int64)
        counts = np.append(first[1:], self.chunks) - first
        segment = np.repeat(np.arange(len(self.segments)), counts)
        number = np.arange(self.chunks) - first[segment]
        is_taken = segment >= np.searchsorted(first, self.send_chunks)
        kinds = self.segments["kind"]
        unpacked = np.isin(kinds, (Kind.SEND_STAGED, Kind.SEND_LL, Kind.SEND_WIDE)).any()
        is_late = unpacked & (kinds == Kind.COPY)[segment]
        turn = np.lexsort((segment, number / counts[segment], is_late, is_taken))
        return np.stack([segment[turn], number[turn]], axis=1).astype(np.uint32)

    @property
    def defines(self) -> tuple[tuple[str, str], ...]:
        """Parameters that the kernel is compiled with."""
        return (
            ("MAX_LEVELS", str(self.levels)),
            ("WORD_BYTES", str(self.word_bytes)),
            ("IN_FLIGHT", str(self.in_flight)),
            ("MAX_THREADS", str(MANY_THREADS)),
            ("TABLE_SEGMENTS", str(self.inline)),
            ("KINDS", str(sum({1 << int(kind) for kind in self.segments["kind"]}))),
            *((("TILED", str(self.tiled)),) if self.tiled else ()),
        )


@cache
def segment_dtype(levels: int) -> np.dtype[np.void]:
    """Return the layout of a segment whose region has that many levels."""
    return np.dtype(
        [
            ("flags", "u8"),
            ("begun", "u8"),
            ("slot_bytes", "u8"),
            ("kind", "u4"),
            ("peer", "u4"),
            ("chunk_words", "u4"),
            ("flag_count", "u4"),
            ("lag", "u4"),
            ("shifts", "u4"),
            ("region", region_dtype(levels)),
        ]
    )


def shifts_of(source: int, target: int) -> int:
    """Numbers of the shifts of a segment's two addresses, by those of their arrays, -1 for none.

    Shift n + 1 is that of array n, shift 0 is none.
    """
    numbers = [n + 1 if n + 1 < MOST_SHIFTS else 0 for n in (source, target)]
    return numbers[0] | numbers[1] << 16


def plan(segments: Sequence[Segment], *, sms: int) -> PeerPlan:
    """Plan one launch.

    Not collective; touches no device. See BLOCKS_PER_SM for what is left to others.
    """
    # Copies last of what is not taken: nobody waits for them.
    ordered = sorted(
        segments, key=lambda segment: (segment.kind >= Kind.TAKE_STAGED, segment.kind == Kind.COPY)
    )
    words = [0, 0]
    for segment in ordered:
        words[segment.kind >= Kind.TAKE_STAGED] += segment.row.words
    small = max(words) <= SMALL_WORDS
    is_wide = any(segment.kind in (Kind.SEND_WIDE, Kind.TAKE_WIDE) for segment in ordered)
    threads = THREADS if small else WIDE_THREADS if is_wide else MANY_THREADS
    in_flight = 1 if small else IN_FLIGHT
    most_levels = max(len(segment.row.levels) for segment in ordered)
    levels = 3 if most_levels <= 3 else MAX_LEVELS  # few kinds, because each is compiled
    table = np.zeros(len(ordered), segment_dtype(levels))
    chunk = send_chunks = 0
    for entry, segment in zip(table, ordered, strict=True):
        chunk_words = segment.chunk_words or (
            tiles_of(segment.row) if segment.row.tile else threads * in_flight
        )
        if segment.kind in (Kind.SEND_WIDE, Kind.TAKE_WIDE):
            chunk_words = threads // 32 * TILE_DATA_BYTES // segment.row.word_bytes
        fill_region(entry["region"], segment.row, chunk)
        for name in ("flags", "begun", "slot_bytes", "flag_count", "lag", "shifts"):
            entry[name] = getattr(segment, name)
        entry["kind"], entry["peer"] = segment.kind, segment.message
        entry["chunk_words"] = chunk_words
        is_waited_for = segment.kind == Kind.TAKE_DIRECT
        chunk += 1 if is_waited_for else max(1, -(-segment.row.units // chunk_words))
        if segment.kind < Kind.TAKE_STAGED:
            send_chunks = chunk
    words_of = {segment.row.word_bytes for segment in ordered if segment.kind != Kind.TAKE_DIRECT}
    common = words_of.pop() if len(words_of) == 1 else 0
    sides = sides_of(segment.row for segment in ordered)
    per_sm = _blocks_per_sm(threads, max(send_chunks, chunk - send_chunks), sms)
    send_blocks, blocks = _shape(send_chunks, chunk, per_sm * sms)
    fewer = min(per_sm, WIDE_BLOCKS_ASIDE) if threads == WIDE_THREADS else per_sm
    return PeerPlan(
        segments=table,
        send_chunks=send_chunks,
        chunks=chunk,
        send_blocks=send_blocks,
        blocks=blocks,
        aside=_shape(send_chunks, chunk, fewer * sms),
        threads=threads,
        in_flight=in_flight,
        word_bytes=common if common > 2 or sides else 0,
        levels=levels,
        tiled=sides,
    )


def _blocks_per_sm(threads: int, chunks: int, sms: int) -> int:
    if threads != WIDE_THREADS:
        return BLOCKS_PER_SM[threads]
    return next(blocks for most, blocks in WIDE_BLOCKS_PER_SM if chunks <= most * sms)


def _shape(send_chunks: int, chunks: int, most: int) -> tuple[int, int]:
    """Blocks that send, and all, of which each has a chunk."""
    most = min(most, 2 ** (EPOCH_SHIFT - 1) - 1)
    send_blocks = min(send_chunks, most)
    return send_blocks, send_blocks + min(chunks - send_chunks, most)
