"""Messages there and back between two ranks, by a datatype and as hand-written code describes them.

Ping-pongs follow Wu et al. 2016, 5.2; transfers without packing Suresh et al. 2022, section V. DDTBench 1.2 has the
send sides of :mod:`halox_bench.pack.applications`, and its receive sides: the same places (WRF, MILC, SPECFEM3D oc and
cm), the halo beside (NAS LU and MG), the tail of the arrays (LAMMPS), another array (SPECFEM3D_mt). FFT2 is an
all-to-all that transposes, with two ranks::

    rank 0 | a b |      rank 0 | a c |
    rank 1 | c d |  ->  rank 1 | b d |   each block transposed as it is stored
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, starmap
from typing import Any, NamedTuple

import numpy as np

from halox import datatypes as dt
from halox.errors import HaloxError
from halox_bench.common.layouts import Box, Boxes, ByHand, Bytes, Triangle
from halox_bench.common.options import KIB, size_label
from halox_bench.pack import applications
from halox_bench.pack.cases import select as select_patterns
from halox_bench.pack.patterns import Case, Pattern

RANKS = 2
WORD = 8


class Side(NamedTuple):
    """Bytes of a slab, as a datatype relative to its beginning and as hand-written code has them."""

    datatype: dt.Datatype
    by_hand: ByHand


class Direction(NamedTuple):
    """A rank's part in one direction: messages by peer, in the order of the peers, and all of them by hand."""

    sends: dict[int, dt.Datatype]
    receives: dict[int, dt.Datatype]
    packed: ByHand | None
    unpacked: ByHand | None


@dataclass(frozen=True)
class TripCase:
    """One pattern in one size.

    Attributes
    ----------
    arrays : tuple of int
        Bytes of the arrays of a rank, which are in one slab.
    offsets : tuple of int
        Their places in the slab.
    nbytes : int
        Bytes that a rank sends in one direction.
    directions : callable
        Given a rank, returns its part there and back.
    word : int
        Bytes of the words by which results are compared.
    more : dict
        Further details of its rows.
    """

    pattern: str
    size: str
    arrays: tuple[int, ...]
    offsets: tuple[int, ...]
    nbytes: int
    directions: Callable[[int], tuple[Direction, Direction]]
    word: int = WORD
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Pattern and size."""
        return f"{self.pattern}/{self.size}"

    @property
    def details(self) -> dict[str, Any]:
        what = {"pattern": self.pattern, "size": self.size, "nbytes": self.nbytes}
        return {**what, **self.more}

    @property
    def slab_bytes(self) -> int:
        """Bytes of the slab, a multiple of the word."""
        return -(-(self.offsets[-1] + self.arrays[-1]) // self.word) * self.word

    def of_slab(self, slab: Bytes) -> list[Bytes]:
        """Return the arrays in a slab."""
        return [slab[a : a + n] for a, n in zip(self.offsets, self.arrays, strict=True)]

    def types(self) -> list[dt.Datatype]:
        """Return the datatypes of rank 0, or of both ranks where they only send or receive."""
        both = [direction for rank in range(RANKS) for direction in self.directions(rank)]
        return [one for way in both for one in (*way.sends.values(), *way.receives.values())]


def there_and_back(
    sends: Sequence[Side], receives: Sequence[Side]
) -> Callable[[int], tuple[Direction, Direction]]:
    """Return the directions of one message from rank 0 to rank 1 and one back, given each rank's sides."""

    def directions(rank: int) -> tuple[Direction, Direction]:
        sent, received = sends[rank], receives[rank]
        sending = Direction({1 - rank: sent.datatype}, {}, sent.by_hand, None)
        receiving = Direction({}, {1 - rank: received.datatype}, None, received.by_hand)
        return (sending, receiving) if rank == 0 else (receiving, sending)

    return directions


def at(datatype: dt.Datatype, start: int) -> dt.Datatype:
    """Return a datatype so many bytes further on."""
    return dt.hindexed_block(1, [start], datatype) if start else datatype


def between(pattern: str, size: object, sides: Sequence[Side], **more: Any) -> TripCase:
    """Return a case where each rank sends and receives the same places of its only array."""
    nbytes = max(side.datatype.true_ub for side in sides)
    count = sides[0].datatype.size
    directions = there_and_back(sides, sides)
    return TripCase(pattern, str(size), (nbytes,), (0,), count, directions, more=more)


# Ping-pongs: sub-matrices, triangles and transposes of float64.

MARGIN = 512
"""Elements between the columns of a sub-matrix."""

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
QUICK_SIZES = (64, 512, 2048)


def submatrix(n: int) -> Side:
    """Return n columns of n elements in a larger column-major matrix."""
    pitch = n + MARGIN
    return Side(dt.vector(n, n, pitch, "f8"), Boxes((Box(8 * n, (n,), (8 * pitch,)),)))


def contiguous(n: int) -> Side:
    """Return an n x n matrix."""
    return Side(dt.contiguous(n * n, "f8"), Boxes((Box(8 * n * n),)))


def columns_as_rows(n: int) -> Side:
    """Return n vectors of single elements, which put columns into rows."""
    column = dt.resized(dt.vector(n, 1, n, "f8"), 0, 8)
    return Side(dt.contiguous(n, column), Boxes((Box(8, (n, n), (8, 8 * n)),)))


def triangle(n: int) -> Side:
    """Return the lower triangle of an n x n matrix by columns."""
    column = np.arange(n)
    datatype = dt.indexed(n - column, column * n + column, "f8")
    return Side(datatype, Triangle(n, lower=True))


PINGPONGS: dict[str, tuple[Callable[[int], Side], Callable[[int], Side]]] = {
    "vector": (submatrix, submatrix),  # figure 10, V
    "triangle": (triangle, triangle),  # figure 10, T
    "vector-contiguous": (submatrix, contiguous),  # figure 11
    "transpose": (contiguous, columns_as_rows),  # figure 12
}


def pingpongs(args: argparse.Namespace) -> list[TripCase]:
    """Return the ping-pongs of a command line; `HaloxError` if it names another pattern."""
    unknown = [name for name in args.patterns if name not in PINGPONGS]
    if unknown:
        raise HaloxError(f"no pattern {unknown[0]!r}; known are {', '.join(PINGPONGS)}")
    sizes = args.sizes or (QUICK_SIZES if args.quick else SIZES)
    return [pingpong(*one) for one in product(args.patterns or PINGPONGS, sizes)]


def pingpong(pattern: str, n: int) -> TripCase:
    """Return a ping-pong of matrices of order n."""
    return between(pattern, n, [side(n) for side in PINGPONGS[pattern]], n=n)


# DDTBench.


def _side(case: Case) -> Side:
    datatype, start = case.place(0)
    assert case.by_hand is not None
    return Side(at(datatype, start), case.by_hand)


def _moved(case: Case, nbytes: int) -> Side:
    """Return the send side so many bytes further on."""
    datatype, start = case.place(0)
    boxes = case.by_hand.boxes if isinstance(case.by_hand, Boxes) else ()
    moved = tuple(replace(box, offset=box.offset + nbytes) for box in boxes)
    return Side(at(datatype, start + nbytes), Boxes(moved))


def _same(case: Case) -> tuple[Case, Side]:
    return case, _side(case)


def _beside(case: Case) -> tuple[Case, Side]:
    """Return NAS's halo next to the send side, or at the opposite end."""
    shape = [int(n) for n in case.size.split("x")]
    if case.pattern.startswith("NAS_LU"):
        (n,) = shape
        return case, _moved(case, -40 * n * (n + 2) if case.pattern.endswith("x") else -40 * n)
    row, plane = 8 * shape[0], 8 * shape[0] * shape[1]
    return case, _moved(case, {"x": 8, "y": row, "z": -plane}[case.pattern[-1]])


def _tail(case: Case) -> tuple[Case, Side]:
    """Return LAMMPS's ghost atoms behind a rank's own."""
    atoms, n = (int(number) for number in case.size.split("-"))
    widths = [nbytes // (8 * (atoms + n)) for nbytes in case.arrays]
    starts = [offset + 8 * w * atoms for offset, w in zip(case.offsets, widths, strict=True)]
    datatype = dt.struct([n * w for w in widths], starts, ["f8"] * len(widths))
    boxes = [Box(8 * w * n, offset=8 * w * atoms, array=a) for a, w in enumerate(widths)]
    return case, Side(datatype, Boxes(tuple(boxes)))


def _elsewhere(case: Case) -> tuple[Case, Side]:
    """Return a separate contiguous array for SPECFEM3D_mt."""
    larger = replace(case, arrays=(*case.arrays, case.payload))
    here = dt.contiguous(case.payload // 4, "f4")
    return larger, Side(at(here, larger.offsets[1]), Boxes((Box(case.payload, array=1),)))


def _fft(case: Case) -> TripCase:
    """Return the all-to-all of a rank's rows, and the all-to-all back, which restores the matrix."""
    n = int(case.size)
    rows, peers = n // RANKS, range(RANKS)
    matrix = 16 * n * rows
    two = replace(case, arrays=(matrix, matrix))
    element = dt.contiguous(2, "f8")
    block = dt.resized(dt.vector(rows, rows, n, element), 0, 16 * rows)
    column = dt.resized(dt.vector(rows, 1, n, element), 0, 16)
    turned = dt.contiguous(rows, column)

    def direction(source: int, target: int) -> Direction:
        sends = {p: at(block, two.offsets[source] + 16 * rows * p) for p in peers}
        receives = {p: at(turned, two.offsets[target] + 16 * rows * p) for p in peers}
        packed = Box(16 * rows, (RANKS, rows), (16 * rows, 16 * n), array=source)
        unpacked = Box(16, (RANKS, rows, rows), (16 * rows, 16, 16 * n), array=target)
        return Direction(sends, receives, Boxes((packed,)), Boxes((unpacked,)))

    what = case.pattern, case.size, two.arrays, two.offsets, matrix
    more = {"blocks": RANKS * rows, "block_bytes": 16 * rows}
    return TripCase(*what, lambda rank: (direction(0, 1), direction(1, 0)), more=more)


_RECEIVES = {"NAS": _beside, "LAMMPS": _tail, "SPECFEM3D_mt": _elsewhere}

PATTERNS = [p for p in applications.PATTERNS if p.source == applications.DDTBENCH]


def of_ddtbench(case: Case) -> TripCase:
    """Return a pattern of DDTBench in one size, with its receive side."""
    if case.pattern == "FFT2":
        return _fft(case)
    receives = (made for start, made in _RECEIVES.items() if case.pattern.startswith(start))
    placed, received = next(receives, _same)(case)
    sent = _side(placed)
    directions = there_and_back((sent, sent), (received, received))
    blocks = sent.datatype.blocks().n_blocks
    more = {"blocks": blocks, "block_bytes": case.payload // blocks}
    what = case.pattern, case.size, placed.arrays, placed.offsets, case.payload
    return TripCase(*what, directions, 4, more)


def ddtbench(args: argparse.Namespace) -> list[TripCase]:
    """Return the patterns of DDTBench that a command line names."""
    return [*map(of_ddtbench, select_patterns(args.patterns, quick=args.quick, among=PATTERNS))]


# Transfers without packing.

BLOCKS = (KIB, 2 * KIB, 4 * KIB)
COUNTS = (16, 32, 64, 128)
STENCIL = 128
MILC = ((8, 8, 16, 32), (8, 16, 16, 32), (16, 16, 32, 32), (16, 32, 32, 32))
NAS_MG = ((512, 66, 66), (1024, 66, 66), (2048, 66, 120))
SPECFEM = ((1024, 2, 32), (1024, 2, 64), (1024, 2, 128))


def strided(block: int, count: int) -> Side:
    """Return blocks twice their length apart."""
    words = block // WORD
    box = Box(block, (count,), (2 * block,))
    return Side(dt.vector(count, words, 2 * words, "f8"), Boxes((box,)))


def vector(block: int, count: int) -> TripCase:
    """Return blocks twice their length apart on both ranks: figures 8 and 10."""
    sides = [strided(block, count)] * RANKS
    more = {"blocks": count, "block_bytes": block}
    return between(f"vector-{size_label(block)}", count, sides, **more)


def both_ways(block: int, count: int, *, one_way: bool) -> TripCase:
    """Return the same blocks out of one array into another, from both ranks at once or there and then back."""
    side, extent = strided(block, count), 2 * block * count
    (box,) = side.by_hand.boxes  # type: ignore[union-attr]
    into = Side(at(side.datatype, extent), Boxes((replace(box, array=1),)))
    ways = there_and_back((side, side), (into, into))

    def together(rank: int) -> tuple[Direction, Direction]:
        both = {1 - rank: side.datatype}, {1 - rank: into.datatype}
        return (Direction(*both, side.by_hand, into.by_hand),) * 2

    what = f"vector-{size_label(block)}", str(count), (extent, extent), (0, extent), block * count
    return TripCase(*what, ways if one_way else together)


def stencil(axis: str, n: int = STENCIL) -> TripCase:
    """Return a face of n^3 doubles, into the opposite one: figure 9."""
    k = "zyx".index(axis)
    subsizes = tuple(1 if one == k else n for one in range(3))
    blocks = {"x": (WORD, (n, n), (WORD * n * n, WORD * n)), "y": (WORD * n, (n,), (WORD * n * n,))}
    block, counts, strides = blocks.get(axis, (WORD * n * n, (), ()))
    sides = []
    for index in (n - 1, 0):
        starts = tuple(index if one == k else 0 for one in range(3))
        box = Box(block, counts, strides, index * WORD * n ** (2 - k))
        sides.append(Side(dt.subarray((n,) * 3, subsizes, starts, "f8"), Boxes((box,))))
    more = {"blocks": sides[0].datatype.blocks().n_blocks, "block_bytes": block}
    return between(f"stencil-{axis}", f"{n}^3", sides, **more)


def specfem3d_mt(n: int, stride: int, count: int) -> TripCase:
    """Return columns of floats, into contiguous memory."""
    block = 4 * n
    box = Box(block, (count,), (stride * block,))
    column = Side(dt.vector(count, n, stride * n, "f4"), Boxes((box,)))
    whole = Side(dt.contiguous(n * count, "f4"), Boxes((Box(block * count),)))
    more = {"blocks": count, "block_bytes": block}
    return between("SPECFEM3D_mt", f"{n}x{stride}x{count}", (column, whole), **more)


WITHOUT_PACKING = (
    *(
        Pattern(
            f"vector-{size_label(block)}",
            "blocks twice their length apart",
            partial(map, partial(vector, block), COUNTS),
            quick,
        )
        for block, quick in zip(BLOCKS, (("16", "64"), (), ("64",)), strict=True)
    ),
    *(
        Pattern(f"stencil-{axis}", "a face of a cube", partial(map, stencil, axis), quick)
        for axis, quick in (("x", ()), ("y", (f"{STENCIL}^3",)), ("z", ()))
    ),
    Pattern(
        "MILC_su3_zdown",
        "half planes of su3 vectors",
        lambda: map(of_ddtbench, applications.milc(MILC)),
        ("16x16x32x32",),
    ),
    Pattern(
        "NAS_MG_y",
        "a face of a grid of doubles",
        lambda: map(of_ddtbench, applications.nas_mg("y", NAS_MG)),
        ("512x66x66",),
    ),
    Pattern(
        "SPECFEM3D_mt",
        "columns of floats, into contiguous memory",
        lambda: starmap(specfem3d_mt, SPECFEM),
        ("1024x2x64",),
    ),
)


def scatter_gather(args: argparse.Namespace) -> list[TripCase]:
    """Return the cases of ``scatter_gather`` that a command line names."""
    return select_patterns(args.patterns, quick=args.quick, among=WITHOUT_PACKING)
