"""DDTBench 1.2 between two ranks: what each of them sends and receives, there and back.

The send sides are those of :mod:`halox_bench.pack.applications`. Receive sides, as in DDTBench: the same places (WRF,
MILC, SPECFEM3D oc and cm), the halo beside (NAS LU and MG), the tail of the arrays (LAMMPS), another array
(SPECFEM3D_mt). FFT2 is an all-to-all that transposes, with two ranks::

    rank 0 | a b |      rank 0 | a c |
    rank 1 | c d |  ->  rank 1 | b d |   each block transposed as it is stored
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from halox import datatypes as dt
from halox.errors import HaloxError
from halox_bench.common.layouts import Box, Boxes, ByHand, Bytes, Int64Array
from halox_bench.pack import applications
from halox_bench.pack.cases import select as select_patterns
from halox_bench.pack.patterns import Case

WORD = 4
"""Bytes of the smallest element of any pattern."""

RANKS = 2


class Side(NamedTuple):
    """Bytes of a slab, as a datatype relative to its beginning and as hand-written code has them."""

    datatype: dt.Datatype
    by_hand: ByHand


class Direction(NamedTuple):
    """Part of one rank in one direction: the messages, by the peer, and all of them together by hand.

    ``sends`` and ``receives`` are in the order of the peers.
    """

    sends: dict[int, dt.Datatype]
    receives: dict[int, dt.Datatype]
    packed: ByHand | None
    unpacked: ByHand | None


@dataclass(frozen=True)
class DdtCase:
    """One pattern in one size.

    Attributes
    ----------
    arrays : tuple of int
        Bytes of the arrays of a rank, which are in one slab.
    offsets : tuple of int
        Where they begin.
    nbytes : int
        Bytes that a rank sends in one direction.
    block_bytes : int
        Mean contiguous run on the send side.
    directions : callable
        Given a rank, returns its part on the way there and on the way back.
    """

    pattern: str
    size: str
    arrays: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    block_bytes: int
    directions: Callable[[int], tuple[Direction, Direction]]

    @property
    def name(self) -> str:
        """Pattern and size."""
        return f"{self.pattern}/{self.size}"

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab."""
        return self.offsets[-1] + self.arrays[-1]

    def of_slab(self, slab: Bytes) -> list[Bytes]:
        """Return the arrays in a slab."""
        return [slab[a : a + n] for a, n in zip(self.offsets, self.arrays, strict=True)]


def places(case: DdtCase, layout: ByHand) -> Int64Array:
    """Return the numbers of a slab's 4-byte words in the order in which hand-written code packs them."""
    numbers = np.arange(-(-case.slab_bytes // WORD), dtype=np.uint32)
    packed = np.empty(case.nbytes, np.uint8)
    layout.pack(case.of_slab(numbers.view(np.uint8)[: case.slab_bytes]), packed)
    return packed.view(np.uint32).astype(np.int64)


def _side(case: Case) -> Side:
    datatype, start = case.place(0)
    if case.by_hand is None:
        raise HaloxError(f"{case.name} has no hand-written counterpart")
    return Side(_at(datatype, start), case.by_hand)


def _at(datatype: dt.Datatype, start: int) -> dt.Datatype:
    return dt.hindexed_block(1, [start], datatype) if start else datatype


def _moved(case: Case, nbytes: int) -> Side:
    """Return the send side so many bytes further on."""
    datatype, start = case.place(0)
    boxes = case.by_hand.boxes if isinstance(case.by_hand, Boxes) else ()
    moved = tuple(replace(box, offset=box.offset + nbytes) for box in boxes)
    return Side(_at(datatype, start + nbytes), Boxes(moved))


def _same(case: Case) -> tuple[Case, Side]:
    return case, _side(case)


def _beside(case: Case) -> tuple[Case, Side]:
    """NAS: the halo next to what is sent, or at the other end."""
    shape = [int(n) for n in case.size.split("x")]
    if case.pattern.startswith("NAS_LU"):
        (n,) = shape
        return case, _moved(case, -40 * n * (n + 2) if case.pattern.endswith("x") else -40 * n)
    row, plane = 8 * shape[0], 8 * shape[0] * shape[1]
    return case, _moved(case, {"x": 8, "y": row, "z": -plane}[case.pattern[-1]])


def _tail(case: Case) -> tuple[Case, Side]:
    """LAMMPS: ghost atoms behind a rank's own."""
    atoms, n = (int(number) for number in case.size.split("-"))
    widths = [nbytes // (8 * (atoms + n)) for nbytes in case.arrays]
    starts = [offset + 8 * w * atoms for offset, w in zip(case.offsets, widths, strict=True)]
    datatype = dt.struct([n * w for w in widths], starts, ["f8"] * len(widths))
    boxes = [Box(8 * w * n, offset=8 * w * atoms, array=a) for a, w in enumerate(widths)]
    return case, Side(datatype, Boxes(tuple(boxes)))


def _elsewhere(case: Case) -> tuple[Case, Side]:
    """SPECFEM3D_mt: a contiguous array of its own."""
    larger = replace(case, arrays=(*case.arrays, case.payload))
    here = dt.contiguous(case.payload // 4, "f4")
    return larger, Side(_at(here, larger.offsets[1]), Boxes((Box(case.payload, array=1),)))


def _ping_pong(paired: tuple[Case, Side]) -> DdtCase:
    """Return a case in which each of two ranks sends its send side and receives into its receive side."""
    case, received = paired
    sent = _side(case)

    def directions(rank: int) -> tuple[Direction, Direction]:
        sending = Direction({1 - rank: sent.datatype}, {}, sent.by_hand, None)
        receiving = Direction({}, {1 - rank: received.datatype}, None, received.by_hand)
        return (sending, receiving) if rank == 0 else (receiving, sending)

    blocks = sent.datatype.blocks().n_blocks
    mean = case.payload // blocks
    what = case.pattern, case.size, case.arrays, case.offsets, case.payload, mean
    return DdtCase(*what, directions)


def _fft(case: Case) -> DdtCase:
    """Return the all-to-all of a rank's rows, and the one back, which restores the matrix."""
    n = int(case.size)
    rows, peers = n // RANKS, range(RANKS)
    matrix = 16 * n * rows
    two = replace(case, arrays=(matrix, matrix))
    element = dt.contiguous(2, "f8")
    block = dt.resized(dt.vector(rows, rows, n, element), 0, 16 * rows)
    column = dt.resized(dt.vector(rows, 1, n, element), 0, 16)
    turned = dt.contiguous(rows, column)

    def direction(source: int, target: int) -> Direction:
        sends = {p: _at(block, two.offsets[source] + 16 * rows * p) for p in peers}
        receives = {p: _at(turned, two.offsets[target] + 16 * rows * p) for p in peers}
        packed = Box(16 * rows, (RANKS, rows), (16 * rows, 16 * n), array=source)
        unpacked = Box(16, (RANKS, rows, rows), (16 * rows, 16, 16 * n), array=target)
        return Direction(sends, receives, Boxes((packed,)), Boxes((unpacked,)))

    what = case.pattern, case.size, two.arrays, two.offsets, matrix, 16 * rows
    return DdtCase(*what, lambda rank: (direction(0, 1), direction(1, 0)))


_RECEIVES: dict[str, Callable[[Case], tuple[Case, Side]]] = {
    **{"NAS": _beside, "LAMMPS": _tail, "SPECFEM3D_mt": _elsewhere},
}

_PATTERNS = [p for p in applications.PATTERNS if p.source == applications.DDTBENCH]

PATTERNS = tuple(pattern.name for pattern in _PATTERNS)


def _made(case: Case) -> DdtCase:
    if case.pattern == "FFT2":
        return _fft(case)
    receives = (made for start, made in _RECEIVES.items() if case.pattern.startswith(start))
    return _ping_pong(next(receives, _same)(case))


def select(wanted: Sequence[str] = (), *, quick: bool = False) -> Iterator[DdtCase]:
    """Yield the cases whose pattern, or whose ``pattern/size``, matches one of some shell patterns; none means all.

    Raises
    ------
    HaloxError
        If one of them matches nothing of DDTBench.

    Examples
    --------
    >>> [(case.name, case.nbytes) for case in select(["NAS_LU_y/12"])]
    [('NAS_LU_y/12', 480)]
    """
    yield from map(_made, select_patterns(wanted, quick=quick, among=_PATTERNS))
