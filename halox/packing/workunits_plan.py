"""Work units: a datatype's blocks cut into lists of equal work for the warps of a GPU.

This module does not use a GPU. The method follows Wu et al. 2016, section 3.2. :func:`converted` turns the
blocks of one item into rows of similar units; ``packing/kernels/workunits.cu`` lists the forms of units.
It works part by part, so that the GPU can move a part while the host converts the next part.
:func:`repeated` turns the rows of one item into the segments of ``count`` items, and :func:`launch_of`
divides the segments into the tiles of one launch. The records have the layout of the C structs in the
kernel. A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halox.datatypes import BlockList
from halox.packing.strided_plan import divisor

LISTED, REGULAR, SHORT, LONG = range(4)
"""Forms of a segment: index per block, blocks at equal steps, descriptors for some lanes, descriptors for a warp."""

WORDS_IN_FLIGHT = 4
"""Words that a thread loads before it stores the first word, as in ``workunits.cu``."""

MAX_THREADS = 256
"""Largest thread block, as in ``workunits.cu``."""

SEGMENTS = 32
"""Largest number of segments in the kernel parameter; more segments are in device memory."""

SEGMENT = np.dtype(
    [
        ("array", "i8"),
        ("packed", "i8"),
        ("extent", "i8"),
        ("item_bytes", "i8"),
        ("granule", "i8"),
        ("list", "u8"),
        ("first_tile", "u4"),
        ("tile", "u4"),
        ("units", "u4"),
        ("items", "u4"),
        ("units_magic", "u4"),
        ("units_shift", "u4"),
        ("block_bytes", "u4"),
        ("block_magic", "u4"),
        ("block_shift", "u4"),
        ("word", "u4"),
        ("form", "u4"),
        ("lanes_log", "u4"),
    ]
)
TABLE = np.dtype(
    [
        ("segments", "u8"),
        ("n_segments", "u4"),
        ("tiles", "u4"),
        ("segment", SEGMENT, (SEGMENTS,)),
    ]
)

# Blocks per part. Converting a part takes about a millisecond. The units of a part are sorted by length, and
# a part is small enough that adjacent units are written while they are in the L2 cache.
_PART_BLOCKS = 1 << 15
_MOST_PARTS = 64
_MOST_RUNS = 12  # largest number of runs of equal blocks with one row each
_SHORT_BLOCK = 32  # mean block size above which descriptors are faster than an index per granule
_MOST_BYTES = 1 << 30  # bytes of an item's blocks in a row; word numbers then have 31 bits
_WINDOW_BYTES = 1 << 24  # bytes of items; their units are sorted by length and processed together
_THREADS_PER_SM = 1280  # resident threads, limited by registers: 5 blocks of 256

Rows = npt.NDArray[np.void]
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Units:
    """Some blocks of one item, converted to rows and a list; ``list`` of a row is an index into the words."""

    rows: Rows
    words: npt.NDArray[np.uint32]

    def rows_at(self, address: int) -> Rows:
        """Return the rows with addresses of their lists; the words begin at ``address``."""
        rows = self.rows.copy()
        rows["list"] = self.rows["list"] * np.uint64(4) + np.uint64(address)
        return rows


@dataclass(frozen=True)
class Launch:
    """Segments and shape of one launch; see :func:`launch_of`."""

    segments: Rows
    tiles: int
    blocks: int
    threads: int


def unit_bytes_of(nbytes: int) -> int:
    """Return the length of the longest work unit, which grows with the size of the message.

    For messages of some megabytes and more, units of 2 KiB are the fastest (docs/performance/packing.md).

    Examples
    --------
    >>> unit_bytes_of(64 << 10), unit_bytes_of(64 << 20)
    (512, 2048)
    """
    return next((s for s in (2048, 1024) if nbytes >= 2048 * s), 512)


def converted(blocks: BlockList, unit_bytes: int) -> Iterator[Units]:
    """Convert the blocks of one item into rows of work units, part by part.

    The blocks are in packed order and not empty.
    ``unit_bytes`` is the longest unit of blocks with different lengths. The conversion is vectorised and takes
    some 10 to 100 ns per block.
    """
    step = max(_PART_BLOCKS, -(-blocks.n_blocks // _MOST_PARTS))
    if blocks.n_blocks > step and _regular(blocks):
        step = blocks.n_blocks
    packed = 0
    for start in range(0, blocks.n_blocks, step):
        offsets, lengths = (a[start : start + step] for a in (blocks.offsets, blocks.lengths))
        nbytes = int(lengths.sum())
        yield joined(_pieces(offsets, lengths, packed, nbytes, unit_bytes))
        packed += nbytes


def most_words(blocks: BlockList, unit_bytes: int) -> int:
    """Return an upper bound of the words of all parts' lists, without converting the blocks."""
    n, nbytes = blocks.n_blocks, blocks.nbytes
    if not n:
        return 0
    padding = 8 * _MOST_RUNS * (_MOST_PARTS + 1)
    alike = bool((blocks.lengths == blocks.lengths[0]).all())
    near = int(blocks.offsets.max()) - int(blocks.offsets.min()) < 1 << 34
    if alike and near and _low_bit(4, blocks.offsets, blocks.lengths) == 4:
        return n + padding
    return 8 * n + 4 * (nbytes // unit_bytes) + padding


def _regular(blocks: BlockList) -> bool:
    """Whether all blocks have the same length and the same distance."""
    steps = np.diff(blocks.offsets)
    return bool((blocks.lengths == blocks.lengths[0]).all() and (steps == steps[0]).all())


def joined(parts: Iterable[Units]) -> Units:
    """Join several parts, in order."""
    rows, words, at = [], [], 0
    for part in parts:
        part_rows = part.rows.copy()
        part_rows["list"] += at
        rows.append(part_rows)
        words.append(part.words)
        at += part.words.size
    if not rows:
        return Units(np.zeros(0, SEGMENT), np.zeros(0, np.uint32))
    return Units(np.concatenate(rows), np.concatenate(words))


def _pieces(
    offsets: Int64, lengths: Int64, packed: int, nbytes: int, unit_bytes: int
) -> Iterator[Units]:
    """Convert some blocks; the form depends on whether the lengths are equal, equal in runs, similar, or different."""
    n = lengths.size
    low, high = int(lengths.min()), int(lengths.max())
    if low == high:
        yield from _alike(offsets, low, packed, unit_bytes)
        return
    common = int(np.gcd.reduce(lengths))
    listed = nbytes // common  # pieces with 4 bytes of list each; a descriptor takes 16 bytes
    changes = np.flatnonzero(lengths[1:] != lengths[:-1]) + 1
    if listed > 2 * n and changes.size < _MOST_RUNS:
        for some, same in zip(np.split(offsets, changes), np.split(lengths, changes), strict=True):
            yield from _alike(some, int(same[0]), packed, unit_bytes)
            packed += int(same.sum())
        return
    if listed <= 4 * n or (common >= 4 and nbytes <= _SHORT_BLOCK * n):
        units = _listed(_cut(offsets, lengths, common)[0], common, packed)
        if units is not None:
            yield from units
            return
    yield _described(offsets, lengths, packed, unit_bytes)


def _alike(offsets: Int64, length: int, packed: int, unit_bytes: int) -> Iterator[Units]:
    units = _listed(offsets, length, packed)
    if units is None:
        yield _described(offsets, np.full(offsets.size, length, dtype=np.int64), packed, unit_bytes)
    else:
        yield from units


def _listed(offsets: Int64, length: int, packed: int) -> list[Units] | None:
    """Convert blocks of one length to rows with one index per block; None if descriptors are better."""
    steps = np.diff(offsets)
    regular = offsets.size == 1 or bool((steps == steps[0]).all())
    base = int(offsets[0] if regular else offsets.min())
    if regular:
        granule = int(steps[0]) if offsets.size > 1 else length
        index = None
    else:
        apart = offsets - base
        bits = int(np.bitwise_or.reduce(apart))
        granule = bits & -bits
        if int(apart.max()) // granule >= 1 << 32:
            return None
        index = (apart // granule).astype(np.uint32)
    word = _low_bit(16, granule, length)
    # Words of 1 or 2 bytes suit only short blocks. A descriptor's run uses wider words at its own alignment.
    if _low_bit(word, base, packed) < 4 and length > _SHORT_BLOCK:
        return None
    parts = []
    step = max(1, _MOST_BYTES // length)
    for first in range(0, offsets.size, step):
        units = min(step, offsets.size - first)
        for start in range(0, length, _MOST_BYTES):  # one step, except for blocks above 1 GiB
            row = np.zeros(1, SEGMENT)
            row["array"] = base + start + (first * granule if regular else 0)
            row["packed"] = packed + first * length + start
            row["granule"] = granule
            row["units"] = units
            block_bytes = min(_MOST_BYTES, length - start)
            row["block_bytes"] = block_bytes
            magic, shift = divisor(block_bytes)
            row["block_magic"], row["block_shift"] = magic, 32 + shift
            row["word"] = _low_bit(word, block_bytes)
            row["form"] = REGULAR if index is None else LISTED
            words = np.zeros(0, np.uint32) if index is None else index[first : first + units]
            padding = -words.size % 4  # 16 bytes are the alignment of descriptors
            parts.append(Units(row, np.pad(words, (0, padding))))
    return parts


def _described(offsets: Int64, lengths: Int64, packed: int, unit_bytes: int) -> Units:
    """Convert blocks to 16-byte descriptors, with one row per number of lanes."""
    offsets, lengths = _cut(offsets, lengths, unit_bytes)
    places = np.cumsum(lengths) - lengths
    base = int(offsets.min())
    offsets = offsets - base
    word = _low_bit(16, offsets, lengths)
    # Units with an alignment of less than 4 bytes move mostly in words of 4 bytes, like runs.
    lane_bytes = max(word, 4)
    classes = np.searchsorted(lane_bytes * (1 << np.arange(6)), np.arange(unit_bytes + 1))
    lanes = classes.astype(np.uint8)[lengths]
    rows, words = [], []
    at = 0
    for lanes_log in np.flatnonzero(np.bincount(lanes)):
        chosen = np.flatnonzero(lanes == lanes_log)
        units = np.empty((chosen.size, 2), dtype=np.int64)
        units[:, 0] = offsets[chosen]
        units[:, 1] = (places[chosen] << 16) | lengths[chosen]
        row = np.zeros(1, SEGMENT)
        row["array"], row["packed"] = base, packed
        row["list"] = at
        row["units"] = chosen.size
        row["block_bytes"] = lengths[chosen].max()
        row["word"] = word
        row["form"] = LONG if lanes_log > 5 else SHORT
        row["lanes_log"] = min(lanes_log, 5)
        rows.append(row)
        words.append(units.view(np.uint32).reshape(-1))
        at += words[-1].size
    return Units(np.concatenate(rows), np.concatenate(words))


def _cut(offsets: Int64, lengths: Int64, most: int) -> tuple[Int64, Int64]:
    """Cut each block into pieces of ``most`` bytes; its last piece has the remaining bytes."""
    counts = -(-lengths // most)
    total = int(counts.sum())
    if total == lengths.size:
        return offsets, lengths
    first = np.cumsum(counts) - counts
    starts = (np.arange(total) - np.repeat(first, counts)) * most
    left = np.repeat(lengths, counts) - starts
    return np.repeat(offsets, counts) + starts, np.minimum(left, most)


def _low_bit(start: int, *numbers: int | Int64) -> int:
    """Return the largest power of two, at most ``start``, that divides all numbers."""
    bits = start
    for number in numbers:
        bits |= number if isinstance(number, int) else int(np.bitwise_or.reduce(number))
    return bits & -bits


def repeated(rows: Rows, items: int, extent: int, item_bytes: int) -> Rows:
    """Return the segments of ``items >= 1`` items, ``extent`` bytes apart in the array, from the rows of one item.

    The items are split into windows, because the indices of a segment must fit 31 bits, and units with
    neighbouring bytes should be processed at about the same time.
    """
    if not rows.size:
        return rows
    most = rows["units"].astype(np.int64) * np.where(
        rows["form"] <= REGULAR, rows["block_bytes"], 1
    )
    window = (2 * _MOST_BYTES - (1 << 16)) // max(1, int(most.max()))
    if rows.size > 1:
        window = min(window, _WINDOW_BYTES // max(1, item_bytes))
    window = min(max(1, window), items)
    starts = np.arange(0, items, window)
    segments = np.tile(rows, starts.size)
    shift = np.repeat(starts, rows.size)
    segments["array"] += shift * extent
    segments["packed"] += shift * item_bytes
    segments["items"] = np.repeat(np.minimum(window, items - starts), rows.size)
    segments["extent"], segments["item_bytes"] = extent, item_bytes
    if items > 1:
        segments["word"] = np.minimum(segments["word"], _low_bit(16, extent, item_bytes))
    for units in np.unique(segments["units"]):
        if units > 1:
            same = segments["units"] == units
            segments["units_magic"][same], segments["units_shift"][same] = divisor(int(units))
    return segments


def launch_of(segments: Rows, *, sms: int, max_blocks: int | None = None) -> Launch:
    """Cut segments into tiles, and choose the launch's shape.

    The segments may belong to several datatypes. By default there is one thread block per tile, and
    ``max_blocks`` limits the blocks. Without tiles there is nothing to launch.
    """
    segments = segments.copy()
    blocks_of = segments["form"] <= REGULAR
    units = segments["units"].astype(np.int64) * segments["items"]
    word = segments["word"].astype(np.int64)
    lanes = 1 << segments["lanes_log"].astype(np.int64)
    # Work in lane-steps: words, or lanes of units. A warp processes a long unit in steps of 512 bytes.
    long = segments["form"] == LONG
    deep = np.where(long, -(-segments["block_bytes"].astype(np.int64) // 512), 1)
    work = np.where(blocks_of, units * segments["block_bytes"] // word, units * lanes * deep)
    total = int(work.sum())
    wide = total >= sms * MAX_THREADS * 8 and bool(blocks_of.any())
    threads = MAX_THREADS if wide else 128 if total >= sms * 128 else 64
    if max_blocks is not None and total > max_blocks * 128:
        threads = MAX_THREADS  # Few blocks must keep many bytes in flight.
    resident = sms * _THREADS_PER_SM
    if max_blocks is not None:
        resident = min(resident, max_blocks * threads)
    # If one step per resident thread covers all work, more steps per thread would leave SMs idle. Otherwise
    # short-lived blocks in the order of the addresses are the fastest, with a few words in flight per thread
    # or one long unit per warp.
    flight = 1 if total <= resident else WORDS_IN_FLIGHT
    words = np.where(word == 16, min(2, flight), flight)
    unit_tile = threads // lanes * np.where(long, 1, flight)
    segments["tile"] = np.where(blocks_of, threads * word * words, unit_tile)
    everything = np.where(blocks_of, units * segments["block_bytes"], units)
    tiles = -(-everything // segments["tile"])
    segments["first_tile"] = np.cumsum(tiles) - tiles
    n_tiles = int(tiles.sum())
    return Launch(segments, n_tiles, min(n_tiles, max_blocks or n_tiles), threads)


def table(launch: Launch, segments: int = 0) -> bytes:
    """Return the table parameter of a kernel.

    ``segments`` is the address of the segments in device memory, or 0 to include them in the parameter.
    """
    made = np.zeros((), TABLE)
    made["segments"], made["n_segments"] = segments, launch.segments.size
    made["tiles"] = launch.tiles
    if not segments:
        made["segment"][: launch.segments.size] = launch.segments
    return made.tobytes()
