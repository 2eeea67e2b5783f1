"""Strided copies cut at packed byte ranges, so that a large message can be packed fragment by fragment.

Pure planning; :mod:`halox.packing.fragments` makes the launches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from halox.datatypes import StridedBlocks
from halox.errors import DatatypeError
from halox.packing.refine import Copy, Run, Side, paired, run_of

if TYPE_CHECKING:
    from halox.datatypes import Datatype


def cut(copy: Copy, ends: Sequence[int]) -> list[list[Copy]]:
    """Cut a copy at byte positions of its packed order.

    Parameters
    ----------
    copy : Copy
    ends : sequence of int
        Where the parts end: ascending, the last one at the copy's size. A part may be empty.

    Returns
    -------
    list of list of Copy
        For each part the copies that move its bytes: few, as long as both sides are few nested
        loops.

    Raises
    ------
    DatatypeError
        If the sides differ in bytes, or ``ends`` does not end at their size.

    Notes
    -----
    Not collective; touches no device.
    """
    source, target = run_of(copy.source), run_of(copy.target)
    nbytes = copy.source.strided.nbytes
    if copy.target.strided.nbytes != nbytes:
        raise DatatypeError(
            f"copy: the source has {nbytes} bytes and the target {copy.target.strided.nbytes}; both "
            "sides must have the same number"
        )
    if not ends or ends[-1] != nbytes or any(a > b for a, b in pairwise(ends)):
        raise DatatypeError(f"ends: got {list(ends)}, must ascend to the copy's {nbytes} bytes")
    parts, start = [], 0
    for end in ends:
        parts.append([*_matched(_range(source, start, end), _range(target, start, end))])
        start = end
    return parts


def _range(run: Run, start: int, end: int) -> list[Run]:
    return [*run.range(start, end - start)]


def _matched(sources: list[Run], targets: list[Run]) -> Iterator[Copy]:
    """Pair two sequences of runs of equally many bytes, cut at each other's ends."""
    sources, targets = sources[::-1], targets[::-1]  # stacks: the next run is the last
    while sources:
        source, target = sources.pop(), targets.pop()
        nbytes = min(source.nbytes, target.nbytes)
        for run, stack in ((source, sources), (target, targets)):
            stack.extend(reversed(_range(run, nbytes, run.nbytes)))
        heads = _range(source, 0, nbytes), _range(target, 0, nbytes)
        if len(heads[0]) == len(heads[1]) == 1:
            yield Copy(_side(heads[0][0]), _side(heads[1][0]))
        else:  # one of them fell apart: pair what it fell into
            yield from _matched(*heads)


def _side(run: Run) -> Side:
    *outer, last = run.levels or ((1, 1),)
    if last[1] != 1:
        outer, last = [*outer, last], (1, 1)
    counts, strides = (tuple(level[i] for level in outer) for i in (0, 1))
    return Side(run.pointer, StridedBlocks(0, counts, strides, last[0]))


def cut_parts(
    pointer: int,
    datatype: Datatype,
    count: int,
    packed: int,
    ends: Sequence[int],
    *,
    unpack: bool,
) -> list[list[Copy]] | int:
    """Cut the packing, or unpacking, of some items at positions of their packed bytes.

    Parameters
    ----------
    pointer : int
        Address of the element at displacement 0.
    datatype : Datatype
    count : int
        Items, one extent apart.
    packed : int
        Address of the first packed byte.
    ends : sequence of int
        Where the fragments end, counted from ``packed``: ascending, the last one at the items'
        size. Fragments may be empty.
    unpack : bool

    Returns
    -------
    list of list of Copy, or int
        For each fragment what must be moved for it. If the items are too irregular to be moved as
        strided copies, the number of the one fragment with which all of them must be moved.

    Notes
    -----
    Not collective; touches no device. What cannot be cut is packed for the first fragment that has
    a byte of it, and unpacked with the last one.
    """
    pairs = paired(pointer, datatype, count, packed)
    if pairs is None:
        return _bearer(ends, 0, ends[-1], unpack)
    fragments: list[list[Copy]] = [[] for _ in ends]
    for array, place in pairs:
        copy = Copy(place, array) if unpack else Copy(array, place)
        low = place.pointer + place.strided.offset - packed
        if place.strided.counts:  # scattered over the packed bytes
            levels = zip(place.strided.counts, place.strided.strides, strict=True)
            high = low + sum((n - 1) * step for n, step in levels) + place.strided.block_bytes
            fragments[_bearer(ends, low, high, unpack)].append(copy)
            continue
        nbytes = place.strided.nbytes
        own = [min(max(end - low, 0), nbytes) for end in ends]
        for fragment, copies in zip(fragments, cut(copy, own), strict=True):
            fragment += copies
    return fragments


def _bearer(ends: Sequence[int], low: int, high: int, unpack: bool) -> int:
    """Return the first fragment that has a byte of [low, high), or for unpacking the last one."""
    return bisect_left(ends, high) if unpack else bisect_right(ends, low)
