"""Layouts of the packing benchmarks: vectors, boxes, triangles, lists, structs, and the patterns of applications.

Sizes are those of Jenkins et al. 2013, Wu et al. 2016, and DDTBench 1.2 (Schneider, Gerstenberger, Hoefler), of which
only the send sides are here; random lists use a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from halox import datatypes as dt
from halox.errors import HaloxError
from halox_bench.checks import Int64Array
from halox_bench.kinds import size_label
from halox_bench.layouts import Box, Boxes, ByHand, Gather, Gathers, Triangle

KIB, MIB = 1 << 10, 1 << 20
PAYLOADS = (64 * KIB, MIB, 64 * MIB)
BLOCKS = (8, 16, 32, 64, 128, 256, 512, KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB)
LIST_LENGTH = 1024
LIST_SPANS = {"dense": 1178, "sparse": 65536}
"""Elements out of which a list of 1024 is drawn: 1.15 Ki, as dense as LAMMPS's; 64 Ki."""

# Arrays of a case are aligned, with gaps between, like separate allocations.
_ALIGNMENT, _GAP = 512, 4096

Range = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One pattern in one size; ``build`` returns the datatype, given the offset of each array in the slab."""

    pattern: str
    size: str
    arrays: tuple[int, ...]  # bytes of each, from its first element
    build: Callable[[Sequence[int]], dt.Datatype]
    payload: int  # bytes that are packed, by the pattern's own formula
    by_hand: ByHand  # the layout for hand-written code
    count: int = 1  # items of the datatype
    start: int = 0  # bytes from the first array's beginning to the datatype's buffer address

    @property
    def name(self) -> str:
        return f"{self.pattern}/{self.size}"

    @property
    def details(self) -> dict[str, Any]:
        return {"pattern": self.pattern, "size": self.size, "nbytes": self.payload}

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each array in one slab of memory for all arrays."""
        found, at = [], 0
        for nbytes in self.arrays:
            found.append(at)
            at += -(-nbytes // _ALIGNMENT) * _ALIGNMENT + _GAP
        return tuple(found)

    @property
    def slab_bytes(self) -> int:
        return self.offsets[-1] + -(-self.arrays[-1] // _ALIGNMENT) * _ALIGNMENT

    def datatype(self) -> dt.Datatype:
        """Return the datatype, relative to the slab's address and `start`."""
        return self.build(self.offsets)


def of_box(
    pattern: str,
    size: object,
    nbytes: int,
    build: Callable[[], dt.Datatype],
    box: Box,
    *,
    start: int = 0,
    count: int = 1,
) -> Case:
    """Return a case of equal runs in one array of so many bytes."""
    what = pattern, str(size), (nbytes,), lambda _: build(), box.nbytes, Boxes((box,))
    return Case(*what, count, start)


def runs(block: int, payload: int) -> Case:
    """Return runs twice their length apart."""
    n = payload // block
    build = partial(dt.vector, n, block // 8, block // 4, "f8")
    size = f"{size_label(block)}-{size_label(payload)}"
    return of_box("vector", size, 2 * n * block, build, Box(block, (n,), (2 * block,)))


def vector() -> Iterator[Case]:
    for block in BLOCKS:
        yield from (runs(block, payload) for payload in PAYLOADS)
    yield from (runs(block, 256 * MIB) for block in (128, KIB))


def hypercube(n: int = 64) -> Iterator[Case]:
    """Yield the first elements along all four axes of a float64 volume of n^4."""
    for edge in (4, 8, 16, 32):
        box = Box(8 * edge, (edge,) * 3, tuple(8 * n**axis for axis in (3, 2, 1)))
        build = partial(dt.subarray, (n,) * 4, (edge,) * 4, (0,) * 4, "f8")
        yield of_box("hypercube", edge, 8 * n**4, build, box)


def lower_triangle() -> Iterator[Case]:
    """Yield the lower triangle of an n x n float64 matrix by columns."""
    for n in (1024, 4096, 8192):

        def build(_: Sequence[int], n: int = n) -> dt.Datatype:
            column = np.arange(n)
            return dt.indexed(n - column, column * n + column, "f8")

        yield Case("lower_triangle", str(n), (8 * n * n,), build, 4 * n * (n + 1), Triangle(n))


def matrix() -> Iterator[Case]:
    """Yield whole matrices by columns: packing transposes them."""
    for n, dtype in ((1024, "f4"), (8192, "f4"), (8192, "f8"), (4096, "c16")):
        nbytes = np.dtype(dtype).itemsize

        def build(n: int = n, dtype: str = dtype, nbytes: int = nbytes) -> dt.Datatype:
            return dt.resized(dt.vector(n, 1, n, dtype), 0, nbytes)

        box = Box(nbytes, (n, n), (nbytes, nbytes * n))
        yield of_box("matrix", f"{n}x{n}-{dtype}", nbytes * n * n, build, box, count=n)


def random_indexed() -> Iterator[Case]:
    """Yield a list of 1024 distinct 8-byte elements in random order, repeated by the count."""
    for density, span in LIST_SPANS.items():
        index = np.random.default_rng(span).permutation(span)[:LIST_LENGTH].astype(np.int64)
        for payload in PAYLOADS:
            count = payload // (8 * LIST_LENGTH)

            def build(_: Sequence[int], index: Int64Array = index, span: int = span) -> dt.Datatype:
                return dt.resized(dt.indexed_block(1, index, "f8"), 0, 8 * span)

            what = f"{density}-{size_label(payload)}", (8 * span * count,), build, payload
            yield Case(
                "random_indexed", *what, Gathers((Gather(index, 8, count, 8 * span),)), count
            )


def struct_24() -> Iterator[Case]:
    """Yield a double, two ints and a char, padded to 24 bytes; 17 of them are packed."""
    for count in (4 * KIB, 64 * KIB, 4 * MIB):
        build = partial(dt.struct, [1, 2, 1], [0, 8, 16], ["f8", "i4", "i1"])
        box = Box(17, (count,), (24,))
        yield of_box("struct_24", count, 24 * count, build, box, count=count)


def face(axis: str) -> Iterator[Case]:
    """Yield a face of n^3 float64 cells with halo around them; x is the innermost axis."""
    for n in (64, 128, 256, 512):
        row, plane = 8 * (n + 2), 8 * (n + 2) ** 2
        block, counts, strides = {
            "x": (8, (n, n), (plane, row)),
            "y": (8 * n, (n,), (plane,)),
            "z": (8 * n, (n,), (row,)),
        }[axis]
        sub = [n, n, n]
        sub["zyx".index(axis)] = 1
        build = partial(dt.subarray, (n + 2,) * 3, sub, (1, 1, 1), "f8")
        box = Box(block, counts, strides, plane + row + 8)
        yield of_box(f"face_{axis}", n, plane * (n + 2), build, box)


WRF_INPUTS: dict[str, dict[str, tuple[Range, Range, Range, Range, Range, Range]]] = {
    "y": {
        "2x2": ((-4, 27), (1, 65), (34, 85), (1, 23), (1, 65), (41, 43)),
        "4x4": ((4, 27), (1, 65), (14, 47), (8, 23), (1, 65), (21, 23)),
        "8x8": ((4, 22), (1, 65), (4, 27), (8, 18), (1, 65), (11, 13)),
    },
    "x": {
        "2x2": ((-4, 27), (1, 65), (34, 85), (18, 20), (1, 65), (38, 81)),
        "4x4": ((4, 27), (1, 65), (14, 47), (18, 20), (1, 65), (18, 43)),
        "8x8": ((4, 22), (1, 65), (4, 27), (13, 15), (1, 65), (8, 23)),
    },
}
"""First and last index of the memory (i, k, j) and of the box that is exchanged (i, k, j)."""

WRF_ARRAYS = (2,) * 4 + (3,) * 3 + (4,) * 2
"""Dimensions of the fields; a field of four has two scalars, and the second is sent."""


def wrf(axis: str) -> Iterator[Case]:
    """Yield boxes of nine fields of 2, 3 and 4 dimensions, by vectors."""
    for size, (i, k, j, box_i, box_k, box_j) in WRF_INPUTS[axis].items():
        dims = tuple(last - first + 1 for first, last in (i, k, j))
        sub = tuple(last - first + 1 for first, last in (box_i, box_k, box_j))
        at = (box_i[0] - i[0], box_k[0] - k[0], box_j[0] - j[0])
        boxes = tuple(_wrf_box(n, dims, sub, at, a) for a, n in enumerate(WRF_ARRAYS))
        (d1, d2, d3), (s1, s2, s3) = dims, sub
        yield Case(
            f"WRF_{axis}_vec",
            size,
            tuple(4 * {2: d1 * d3, 3: d1 * d2 * d3, 4: 2 * d1 * d2 * d3}[n] for n in WRF_ARRAYS),
            partial(_wrf_type, dims, sub, boxes),
            4 * (4 * s1 * s3 + 5 * s1 * s2 * s3),
            Boxes(boxes),
        )


def _wrf_box(n: int, dims: Sequence[int], sub: Sequence[int], at: Sequence[int], array: int) -> Box:
    (d1, d2, d3), (s1, s2, s3), (i, k, j) = dims, sub, at
    if n == 2:
        return Box(4 * s1, (s3,), (4 * d1,), 4 * (i + d1 * j), array)
    skipped = d1 * d2 * d3 if n == 4 else 0
    offset = 4 * (i + d1 * (k + d2 * j) + skipped)
    return Box(4 * s1, (s3, s2), (4 * d1 * d2, 4 * d1), offset, array)


def _wrf_type(
    dims: Sequence[int], sub: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int]
) -> dt.Datatype:
    (d1, d2, d3), (s1, s2, s3) = dims, sub
    places = [start + box.offset for start, box in zip(offsets, boxes, strict=True)]
    three = dt.hvector(s3, 1, 4 * d1 * d2, dt.vector(s2, s1, d1, "f4"))
    four = dt.hvector(1, 1, 4 * d1 * d2 * d3, three)
    made = {2: dt.vector(s3, s1, d1, "f4"), 3: three, 4: four}
    return dt.struct([1] * len(places), places, [made[n] for n in WRF_ARRAYS])


MILC = ((16, 16, 16, 16), (8, 8, 8, 16), (8, 8, 8, 8))
NAS_MG = ((34, 18, 18), (130, 66, 66), (258, 130, 130), (514, 258, 258))


def milc(lattices: Sequence[tuple[int, int, int, int]] = MILC) -> Iterator[Case]:
    """Yield the z-down face of a checkerboarded lattice of su3 vectors in single precision."""
    for x, y, z, t in lattices:

        def build(x: int = x, y: int = y, z: int = z, t: int = t) -> dt.Datatype:
            su3 = dt.contiguous(6, "f4")
            half = dt.vector(t, x * y // 2, x * y * z // 2, su3)
            return dt.hvector(2, 1, 12 * x * y * z * t, half)

        box = Box(12 * x * y, (2, t), (12 * x * y * z * t, 12 * x * y * z))
        yield of_box("MILC_su3_zdown", f"{x}x{y}x{z}x{t}", 24 * x * y * z * t, build, box)


def nas_lu() -> Iterator[Case]:
    """Yield the y-side of a plane of five doubles a point."""
    for n in (12, 64, 162, 1020):
        pitch = 40 * (n + 2)
        box = Box(40, (n,), (pitch,), 40 * n + pitch)
        build = partial(dt.vector, n, 1, n + 2, dt.contiguous(5, "f8"))
        yield of_box("NAS_LU_y", n, pitch * (n + 2), build, box, start=box.offset)


def nas_mg(axis: str, sizes: Sequence[tuple[int, int, int]] = NAS_MG) -> Iterator[Case]:
    """Yield a face of a grid of doubles with one layer of halo; the first index runs fastest."""
    for d1, d2, d3 in sizes:
        row, plane = 8 * d1, 8 * d1 * d2
        n1, n2, n3 = d1 - 2, d2 - 2, d3 - 2
        corner = {"x": (n1, 1, 1), "y": (1, n2, 1), "z": (1, 1, 1)}[axis]
        start = 8 * corner[0] + row * corner[1] + plane * corner[2]
        block, counts, strides = {
            "x": (8, (n3, n2), (plane, row)),
            "y": (8 * n1, (n3,), (plane,)),
            "z": (8 * n1, (n2,), (row,)),
        }[axis]

        def build(d1: int = d1, d2: int = d2, d3: int = d3) -> dt.Datatype:
            if axis == "x":
                return dt.hvector(d3 - 2, 1, 8 * d1 * d2, dt.vector(d2 - 2, 1, d1, "f8"))
            if axis == "y":
                return dt.vector(d3 - 2, d1 - 2, d1 * d2, "f8")
            return dt.vector(d2 - 2, d1 - 2, d1, "f8")

        box = Box(block, counts, strides, start)
        yield of_box(f"NAS_MG_{axis}", f"{d1}x{d2}x{d3}", plane * d3, build, box, start=start)


def _list(seed: int, choices: int, length: int) -> Int64Array:
    return np.random.default_rng(seed).permutation(choices)[:length].astype(np.int64)


LAMMPS_WIDTHS = (3, 1, 1, 1, 1, 1)
"""Doubles of each property."""


def lammps() -> Iterator[Case]:
    """Yield atoms by a list of their numbers, out of one array a property; all doubles."""
    widths = LAMMPS_WIDTHS
    for atoms, n in ((3534, 3062), (1907, 1662)):
        index = _list(atoms, atoms, n)

        def build(offsets: Sequence[int], index: Int64Array = index) -> dt.Datatype:
            types = [dt.indexed_block(width, width * index, "f8") for width in widths]
            return dt.struct([1] * len(types), list(offsets), types)

        arrays = tuple(8 * width * (atoms + n) for width in widths)
        by_hand = Gathers(tuple(Gather(index, 8 * w, array=a) for a, w in enumerate(widths)))
        yield Case("LAMMPS_full", f"{atoms}-{n}", arrays, build, 8 * sum(widths) * n, by_hand)


def specfem_oc() -> Iterator[Case]:
    """Yield single floats by a list: the outer core."""
    for c, (points, n) in {1: (3697, 493), 4: (88881, 3225)}.items():
        index = _list(c, points, n)
        build = lambda _, index=index: dt.indexed_block(1, index, "f4")  # noqa: E731
        by_hand = Gathers((Gather(index, 4),))
        yield Case("SPECFEM3D_oc", f"c{c}", (4 * points,), build, 4 * n, by_hand)


def specfem_cm() -> Iterator[Case]:
    """Yield three floats a point by two lists: crust and mantle, inner core."""
    sizes = {"c1": (39929, 1225, 1957, 245), "c4": (834917, 51153, 11797, 3009)}
    for size, (points_cm, points_ic, n_cm, n_ic) in sizes.items():
        lists = (_list(1, points_cm, n_cm), _list(2, points_ic, n_ic))

        def build(offsets: Sequence[int], lists: Sequence[Int64Array] = lists) -> dt.Datatype:
            types = [dt.indexed_block(3, 3 * index, "f4") for index in lists]
            return dt.struct([1, 1], list(offsets), types)

        by_hand = Gathers(tuple(Gather(index, 12, array=a) for a, index in enumerate(lists)))
        arrays = 12 * points_cm, 12 * points_ic
        yield Case("SPECFEM3D_cm", size, arrays, build, 12 * (n_cm + n_ic), by_hand)


FFT_RANKS = 4


def fft2() -> Iterator[Case]:
    """Yield all blocks of a rank's rows of a matrix of complex doubles, as an all-to-all sends them."""
    for n in (256, 512, 1024):
        rows = n // FFT_RANKS

        def build(n: int = n, rows: int = rows) -> dt.Datatype:
            block = dt.vector(rows, rows, n, dt.contiguous(2, "f8"))
            return dt.resized(block, 0, 16 * rows)

        box = Box(16 * rows, (FFT_RANKS, rows), (16 * rows, 16 * n))
        yield of_box("FFT2", n, 16 * n * rows, build, box, count=FFT_RANKS)


def whole_arrays(pattern: str, size: str, parts: Sequence[tuple[str, int]]) -> Case:
    """Return whole arrays one after another: a struct of contiguous parts."""
    sizes = tuple(np.dtype(dtype).itemsize * n for dtype, n in parts)

    def build(offsets: Sequence[int]) -> dt.Datatype:
        return dt.struct([n for _, n in parts], list(offsets), [dtype for dtype, _ in parts])

    boxes = tuple(Box(nbytes, array=a) for a, nbytes in enumerate(sizes))
    return Case(pattern, size, sizes, build, sum(sizes), Boxes(boxes))


def hacc_vblock() -> Iterator[Case]:
    """Yield blocks of Voronoi cells: a site has about 6.8 vertices, 15.5 faces and 81 vertices of faces."""
    for n in (4 * KIB, 32 * KIB):
        floats = [("f4", k) for k in (3, 3 * int(6.8 * n), 3 * n)]
        others = [("i4", n), ("f4", n), ("f4", n), ("i4", n), ("i4", int(15.5 * n)), ("i4", 81 * n)]
        yield whole_arrays("HACC_vblock", f"{n // KIB}Ki", [*floats, *others, ("f4", 3)])


def hacc_particles() -> Iterator[Case]:
    """Yield ten properties of particles, an array each."""
    for n in (4 * KIB, 32 * KIB):
        properties = [(dtype, n) for dtype in ("f4",) * 8 + ("i8", "u2")]
        yield whole_arrays("HACC_particles", f"{n // KIB}Ki", properties)


Patterns = dict[str, tuple[Callable[[], Iterable[Any]], tuple[str, ...]]]
"""All cases of each pattern, and the sizes of a quick run."""

DDTBENCH: Patterns = {
    **{f"WRF_{axis}_vec": (partial(wrf, axis), ("2x2",)) for axis in "xy"},
    "MILC_su3_zdown": (milc, ("16x16x16x16",)),
    "NAS_LU_y": (nas_lu, ("1020",)),
    **{f"NAS_MG_{axis}": (partial(nas_mg, axis), ("258x130x130",)) for axis in "xyz"},
    "LAMMPS_full": (lammps, ("3534-3062",)),
    "SPECFEM3D_oc": (specfem_oc, ("c4",)),
    "SPECFEM3D_cm": (specfem_cm, ("c4",)),
    "FFT2": (fft2, ("1024",)),
}
PATTERNS: Patterns = {
    "vector": (vector, ("8B-1MiB", "128B-64MiB", "4KiB-1MiB")),
    "hypercube": (hypercube, ("16",)),
    "lower_triangle": (lower_triangle, ("1024",)),
    "matrix": (matrix, ("1024x1024-f4",)),
    "random_indexed": (random_indexed, ("dense-1MiB", "sparse-1MiB")),
    "struct_24": (struct_24, ("65536",)),
    **{f"face_{axis}": (partial(face, axis), ("128",)) for axis in "xyz"},
    **DDTBENCH,
    "HACC_vblock": (hacc_vblock, ("32Ki",)),
    "HACC_particles": (hacc_particles, ("32Ki",)),
}


def select(
    wanted: Sequence[str] = (), *, quick: bool = False, among: Patterns = PATTERNS
) -> list[Any]:
    """Return the cases that match one of some shell patterns, by ``pattern`` or ``pattern/size``.

    ``quick`` restricts patterns without a size to the sizes of a quick run. Raises `HaloxError` if one matches nothing.
    """
    found, matched = [], set[str]()
    for name, (make, few) in among.items():
        here = [word for word in wanted if fnmatchcase(name, word.partition("/")[0])]
        for case in make() if here or not wanted else ():
            hits = {
                word
                for word in here
                if fnmatchcase(case.size, word.partition("/")[2] or "*")
                and ("/" in word or not quick or case.size in few)
            }
            matched |= hits
            if hits or (not wanted and (not quick or case.size in few)):
                found.append(case)
    unknown = [word for word in wanted if word not in matched]
    if unknown:
        raise HaloxError(
            f"--patterns: {unknown[0]!r} matches nothing; known are {', '.join(among)}"
        )
    return found
