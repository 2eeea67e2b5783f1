"""Plans for the kernel that runs a whole exchange among GPUs in one launch: the table of its segments.

This module touches no GPU. The table has the layout of the C structs in ``kernels/peer.cu``; a test compares the two.
At each end a message is a list of segments. Segments are cut into chunks, and the sender sets a flag for each chunk.
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
    StridedRow,
    fill_region,
    region_dtype,
    rows_of,
    sides_of,
)

EPOCH_SHIFT = 12
"""Bits of a block number, the same as in ``peer.cu``: a launch has fewer than 2**EPOCH_SHIFT blocks."""

PACKET_EXPANSION = 2
"""Bytes of LL packets per byte of data."""

TILE_BYTES, TILE_DATA_BYTES = 2048, 32 * 56
"""Bytes of the LL128-like packets that a warp sends at once, and bytes of data in these packets."""

WIDE_WORDS = (4, 8)
"""Bytes of the words that travel in LL128-like packets."""

TABLE_BYTES = 3800
"""Largest table, in bytes, in the launch's parameters; larger tables are in device memory."""

INLINE_CHUNKS = 600
"""Largest number of chunks that are processed in segment order, which needs no table in device memory."""

MOST_SHIFTS = 16
"""Shifts from a launch's arrays to other arrays; shift 0 is always 0, as in ``peer.cu``."""

IN_FLIGHT = 4
"""Words that a thread loads before it stores the first word; 1 in small exchanges."""

THREADS = 128
"""Threads of a block in small exchanges."""

MANY_THREADS = 256
"""The same in larger exchanges, whose blocks end each chunk with a flag."""

WIDE_THREADS = 64
"""The same in larger exchanges with LL128-like packets: each thread has seven loads under way."""

BLOCKS_PER_SM = {THREADS: 2, MANY_THREADS: 1}
"""Largest numbers of sending and of receiving blocks per multiprocessor, by threads per block.

A thread has at most 128 registers, so that a multiprocessor holds 4 or 2 of these blocks, or 8 blocks of WIDE_THREADS.
Receiving blocks thus never fill a GPU: an exchange on another stream finds room to send data for which peers wait.
"""

WIDE_BLOCKS_PER_SM = ((3, 3), (10, 2), (inf, 4))
"""The same for blocks of WIDE_THREADS, as pairs: limit of chunks per multiprocessor, and number of blocks for them.

One chunk per block while three blocks per multiprocessor suffice. Then two blocks, which also run concurrently on half
of a GPU; four blocks for much data, such as six faces.
"""

CONCURRENT_WIDE_BLOCKS = 2
"""Limit of these blocks in an exchange beside other work; they leave half of each multiprocessor to that work."""

SMALL_WORDS = 1 << 16
"""Limit of the words sent, and of the words received, in a small exchange."""

CHUNK_BYTES = (2048, 8192)
"""Smallest and largest chunk with a flag, in bytes."""

LONG_CHUNK_BYTES = 32768
"""Largest chunk of 16-byte words, in bytes: with these words a flag costs more than the bytes."""

DIRECT_CHUNK_BYTES = (2048, 1 << 16)
"""Smallest and largest direct chunk, in bytes: no flag per chunk, so prefer one chunk per block."""

TILED_CHUNK_BYTES = 1 << 16
"""Approximate bytes of a chunk of tiles: the flag behind the chunk waits until the chunk's last stores have arrived."""

MOST_CHUNKS = 1 << 15
"""Approximate number of chunks from which chunks grow beyond these bounds."""

CHUNKS = 64
"""Chunks of a segment whose chunks stay within CHUNK_BYTES."""


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


class MessageRun(NamedTuple):
    """A row of a message's words, and its place in the packed message; packed addresses count from its start."""

    row: StridedRow
    packed: int  # first packed byte; -1 if the row's bytes are not contiguous in the packed message
    array: int = -1  # number of the array on the opposite side, -1 for no array
    direct_words: int = 0  # words of a direct chunk, which only the sender needs to know

    @property
    def chunk_words(self) -> int:
        """Words, or tiles, of a chunk with a flag; for equally long runs both ends get chunks of equal bytes."""
        if self.row.tile:
            return self.direct_words or tiles_of(self.row)
        if not self.row.word_bytes:
            return MANY_THREADS  # lanes of unaligned runs: a multiple of the lanes of each run
        if self.direct_words:
            return self.direct_words
        most = LONG_CHUNK_BYTES if self.row.word_bytes == 16 else CHUNK_BYTES[1]
        return chunk_bytes(self.row.nbytes, most) // self.row.word_bytes

    @property
    def chunks(self) -> int:
        return -(-self.row.units // self.chunk_words)

    @property
    def signature(self) -> tuple[int, int, int, int]:
        """Packed start, bytes, chunks and word; equal at both ends if chunks or tiles match."""
        return self.packed, self.row.nbytes, self.chunks, self.row.word_bytes

    @property
    def tile_bytes(self) -> int:
        """Bytes of the LL128-like packets of all its words."""
        return -(-self.row.nbytes // TILE_DATA_BYTES) * TILE_BYTES


def in_even_chunks(run: MessageRun, total: int, sms: int) -> MessageRun:
    """Return a direct run, part of ``total`` bytes in one launch, with equally many chunks for each thread block."""
    least, most = DIRECT_CHUNK_BYTES
    blocks = BLOCKS_PER_SM[MANY_THREADS] * sms
    most = max(most, total // MOST_CHUNKS)
    rounds = -(-total // (blocks * most))
    nbytes = max(least, -(-total // (blocks * rounds)))
    if run.row.tile:
        return run._replace(direct_words=tiles_of(run.row, nbytes))
    word = run.row.word_bytes or 1
    return run._replace(direct_words=-(-nbytes // (word * 32)) * 32)  # a word per lane


def tiles_of(row: StridedRow, nbytes: int | None = None) -> int:
    """Return the tiles of a chunk of some bytes, at least one; by default so few that there are enough chunks."""
    assert row.tile is not None
    if nbytes is None:
        nbytes = min(TILED_CHUNK_BYTES, row.nbytes // (4 * CHUNKS))
    return max(1, nbytes // (row.tile.area * row.word_bytes))


def chunk_bytes(nbytes: int, most: int) -> int:
    """Return the bytes of a chunk, a power of two, for a run of ``nbytes`` bytes.

    Examples
    --------
    >>> [chunk_bytes(n, 8192) for n in (32768, 1 << 20, 1 << 31)]
    [2048, 8192, 65536]
    """
    wanted = max(min(most, max(CHUNK_BYTES[0], nbytes // CHUNKS)), nbytes // MOST_CHUNKS)
    return 1 << (wanted - 1).bit_length()


def runs(
    copies: Sequence[Copy], *, packed: int, max_word: int = 16, tiles: bool = False
) -> list[MessageRun]:
    """Return the rows between arrays and the packed message, which is side ``packed``: 1 of sends, 0 of receives."""
    message_runs = []
    for copy in copies:
        for row in rows_of(copy, None, MAX_WORDS, max_word, tiles=tiles):
            start = row.target if packed else row.source
            message_runs.append(MessageRun(row, start if _is_contiguous(row, packed) else -1))
    return message_runs


def pieces_between(a: StridedBlocks, b: StridedBlocks) -> int:
    """Return the number of loop nests of a copy between two layouts, judged by their counts.

    Examples
    --------
    >>> rows, cells = StridedBlocks(0, (6,), (64,), 32), StridedBlocks(0, (6, 4), (512, 64), 8)
    >>> pieces_between(rows, cells)
    1
    """
    return len(pieces(Copy(Side(0, a), Side(0, b))))


def least_word(message_runs: Sequence[MessageRun]) -> int:
    """Return the bytes of the shortest word of some runs; 1 for unaligned runs, 16 if there are no runs."""
    return min((run.row.word_bytes or 1 for run in message_runs), default=16)


def _is_contiguous(row: StridedRow, packed: int) -> bool:
    if row.tile:
        return False  # the row's chunks are tiles
    expected = row.word_bytes
    for level in reversed(row.levels):
        if level[1 + packed] != expected:
            return False
        expected *= level.steps
    return bool(row.word_bytes)


def repacked(row: StridedRow, packed: int, base: int, expansion: int = 1) -> StridedRow:
    """Return the row with its packed side at an address, with ``expansion`` bytes there per byte of data.

    ``expansion`` is 0 for LL128-like packets: the number of the tile determines their place.
    """
    at = [row.source, row.target]
    at[packed] = base + expansion * at[packed]
    factors = (1, expansion) if packed else (expansion, 1)
    levels = tuple(Level(steps, a * factors[0], b * factors[1]) for steps, a, b in row.levels)
    return row._replace(source=at[0], target=at[1], levels=levels)


def both_packed(row: StridedRow, packed: int) -> StridedRow:
    """Return the row with both sides at the addresses of its packed side, counted from 0."""
    at = (row.source, row.target)[packed]
    levels = tuple(Level(level.steps, *[level[1 + packed]] * 2) for level in row.levels)
    return row._replace(source=at, target=at, levels=levels)


class Segment(NamedTuple):
    """A row and its kind of transfer, as in ``peer.cu``, with addresses on the GPU that runs the kernel."""

    kind: Kind
    row: StridedRow
    message: int  # number of the message on this rank, for errors
    chunk_words: int = 0  # 0 lets `plan` choose
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
    concurrent: tuple[int, int]  # send_blocks and blocks of a launch beside other work
    threads: int
    in_flight: int
    word_bytes: int
    levels: int
    tiled: int

    @property
    def inline(self) -> int:
        """Number of segments in the launch's parameters, 0 if the table is in device memory."""
        if self.chunks > INLINE_CHUNKS:
            return 0
        most = TABLE_BYTES // self.segments.dtype.itemsize
        sizes = (4, 12)  # few sizes, because each is compiled
        return next((size for size in sizes if len(self.segments) <= size <= most), 0)

    @property
    def table(self) -> npt.NDArray[np.uint8]:
        """Table of the kernel: the segments; in device memory, followed by each chunk's segment and number."""
        if self.inline:
            filled = np.zeros(self.inline, self.segments.dtype)
            filled[: len(self.segments)] = self.segments
            return filled.view(np.uint8)
        return np.concatenate([self.segments.view(np.uint8), self.order.reshape(-1).view(np.uint8)])

    @property
    def order(self) -> npt.NDArray[np.uint32]:
        """Segment and number of each chunk, shape (chunks, 2): sent chunks first, interleaved by segment.

        Opposite faces share cache lines: the high end of a row of cells is beside the low end of the next row. When
        their chunks are interleaved, a line is fetched once for both faces. Copies within the GPU follow all sends,
        while the receivers are still busy with the messages. If all messages are direct, copies are interleaved with
        the sends, since only the link limits the sends.
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
    """Return the layout of a segment with a region of ``levels`` levels."""
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
    """Return the numbers of the shifts of a segment's two addresses, from their arrays' numbers (-1 for no array).

    Shift n + 1 belongs to array n; shift 0 is no shift.
    """
    numbers = [n + 1 if n + 1 < MOST_SHIFTS else 0 for n in (source, target)]
    return numbers[0] | numbers[1] << 16


def plan(segments: Sequence[Segment], *, sms: int) -> PeerPlan:
    """Plan one launch.

    Not collective; touches no device. BLOCKS_PER_SM explains the room that is left to other launches.
    """
    # Copies follow the sends, since no peer waits for copies.
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
    levels = 3 if most_levels <= 3 else MAX_LEVELS  # few values, because each is compiled
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
    fewer = min(per_sm, CONCURRENT_WIDE_BLOCKS) if threads == WIDE_THREADS else per_sm
    return PeerPlan(
        segments=table,
        send_chunks=send_chunks,
        chunks=chunk,
        send_blocks=send_blocks,
        blocks=blocks,
        concurrent=_shape(send_chunks, chunk, fewer * sms),
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
    """Return the number of sending blocks and of all blocks; each block has a chunk."""
    most = min(most, 2 ** (EPOCH_SHIFT - 1) - 1)
    send_blocks = min(send_chunks, most)
    return send_blocks, send_blocks + min(chunks - send_chunks, most)
