"""Benchmark patterns taken from applications: DDTBench, HACC's Voronoi blocks, faces of cubes.

DDTBench is version 1.2 (Schneider, Gerstenberger, Hoefler), with its datatypes, element types and
input sizes; random lists use a fixed seed. Only the send sides are described here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from halox import datatypes as dt
from halox_bench.common.layouts import Box, Boxes, Gather, Gathers, Int64Array
from halox_bench.common.options import KIB
from halox_bench.pack.patterns import Case, Pattern, of_box

Range = tuple[int, int]

WRF_INPUTS: dict[str, dict[str, tuple[Range, Range, Range, Range, Range, Range]]] = {
    "y": {
        "2x2": ((-4, 27), (1, 65), (34, 85), (1, 23), (1, 65), (41, 43)),
        "3x3": ((8, 34), (1, 65), (21, 61), (12, 30), (1, 65), (28, 30)),
        "4x4": ((4, 27), (1, 65), (14, 47), (8, 23), (1, 65), (21, 23)),
        "5x5": ((10, 31), (1, 65), (10, 39), (14, 27), (1, 65), (17, 19)),
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


def wrf(axis: str, kind: str) -> Iterator[Case]:
    """Yield boxes of nine fields of 2, 3 and 4 dimensions, by vectors or by subarrays."""
    for size, (i, k, j, box_i, box_k, box_j) in WRF_INPUTS[axis].items():
        dims = tuple(last - first + 1 for first, last in (i, k, j))
        sub = tuple(last - first + 1 for first, last in (box_i, box_k, box_j))
        at = (box_i[0] - i[0], box_k[0] - k[0], box_j[0] - j[0])
        boxes = tuple(_wrf_box(n, dims, sub, at, a) for a, n in enumerate(WRF_ARRAYS))
        (d1, d2, d3), (s1, s2, s3) = dims, sub
        yield Case(
            f"WRF_{axis}_{kind}",
            size,
            tuple(4 * {2: d1 * d3, 3: d1 * d2 * d3, 4: 2 * d1 * d2 * d3}[n] for n in WRF_ARRAYS),
            partial(_wrf_type, kind, dims, sub, at, boxes),
            4 * (4 * s1 * s3 + 5 * s1 * s2 * s3),
            by_hand=Boxes(boxes),
            block_bytes=4 * s1,
        )


def _wrf_box(n: int, dims: Sequence[int], sub: Sequence[int], at: Sequence[int], array: int) -> Box:
    (d1, d2, d3), (s1, s2, s3), (i, k, j) = dims, sub, at
    if n == 2:
        return Box(4 * s1, (s3,), (4 * d1,), 4 * (i + d1 * j), array)
    skipped = d1 * d2 * d3 if n == 4 else 0
    offset = 4 * (i + d1 * (k + d2 * j) + skipped)
    return Box(4 * s1, (s3, s2), (4 * d1 * d2, 4 * d1), offset, array)


def _wrf_type(
    kind: str,
    dims: Sequence[int],
    sub: Sequence[int],
    at: Sequence[int],
    boxes: Sequence[Box],
    offsets: Sequence[int],
) -> dt.Datatype:
    """Return the struct of the nine fields."""
    (d1, d2, d3), (s1, s2, s3), (i, k, j) = dims, sub, at
    if kind == "vec":
        places = [start + box.offset for start, box in zip(offsets, boxes, strict=True)]
        three = dt.hvector(s3, 1, 4 * d1 * d2, dt.vector(s2, s1, d1, "f4"))
        four = dt.hvector(1, 1, 4 * d1 * d2 * d3, three)
        made = {2: dt.vector(s3, s1, d1, "f4"), 3: three, 4: four}
    else:
        places = list(offsets)
        made = {
            2: dt.subarray((d3, d1), (s3, s1), (j, i), "f4"),
            3: dt.subarray((d3, d2, d1), (s3, s2, s1), (j, k, i), "f4"),
            4: dt.subarray((2, d3, d2, d1), (1, s3, s2, s1), (1, j, k, i), "f4"),
        }
    return dt.struct([1] * len(places), places, [made[n] for n in WRF_ARRAYS])


MILC = ((16, 16, 16, 16), (8, 16, 16, 16), (8, 8, 8, 16), (8, 8, 8, 8))
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


def nas_lu(axis: str) -> Iterator[Case]:
    """Yield a side of a plane of five doubles a point."""
    for n in (12, 33, 64, 102, 162, 408, 1020):
        pitch = 40 * (n + 2)
        if axis == "x":
            box = Box(40 * n, (), (), 40 + pitch * n)
            build = partial(dt.contiguous, 5 * n, "f8")
        else:
            box = Box(40, (n,), (pitch,), 40 * n + pitch)
            build = partial(dt.vector, n, 1, n + 2, dt.contiguous(5, "f8"))
        yield of_box(f"NAS_LU_{axis}", n, pitch * (n + 2), build, box, start=box.offset)


def nas_mg(axis: str, shapes: Sequence[tuple[int, int, int]] = NAS_MG) -> Iterator[Case]:
    """Yield a face of a grid of doubles with one layer of halo; the first index runs fastest."""
    for d1, d2, d3 in shapes:
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


def lammps(pattern: str, widths: tuple[int, ...], inputs: Sequence[tuple[int, int]]) -> list[Case]:
    """Return atoms by a list of their numbers, out of one array a property; all doubles."""
    cases = []
    for atoms, n in inputs:
        index = _list(atoms, atoms, n)

        def build(offsets: Sequence[int], index: Int64Array = index) -> dt.Datatype:
            types = [dt.indexed_block(width, width * index, "f8") for width in widths]
            return dt.struct([1] * len(types), list(offsets), types)

        cases.append(
            Case(
                pattern,
                f"{atoms}-{n}",
                tuple(8 * width * (atoms + n) for width in widths),
                build,
                8 * sum(widths) * n,
                by_hand=Gathers(tuple(Gather(index, 8 * w, array=a) for a, w in enumerate(widths))),
            )
        )
    return cases


def specfem_oc() -> Iterator[Case]:
    """Yield single floats by a list: the outer core."""
    for c, (points, n) in enumerate(((3697, 493), (12857, 877), (38585, 1897), (88881, 3225)), 1):
        index = _list(c, points, n)
        yield Case(
            "SPECFEM3D_oc",
            f"c{c}",
            (4 * points,),
            lambda _, index=index: dt.indexed_block(1, index, "f4"),  # type: ignore[misc]
            4 * n,
            by_hand=Gathers((Gather(index, 4),)),
            block_bytes=4,
        )


SPECFEM_CM = {
    "c1": (39929, 1225, 1957, 245),
    "c2": (152001, 7209, 3801, 801),
    "c3": (396849, 22477, 7125, 1729),
    "c4": (834917, 51153, 11797, 3009),
}


def specfem_cm() -> Iterator[Case]:
    """Yield three floats a point by two lists: crust and mantle, inner core."""
    for size, (points_cm, points_ic, n_cm, n_ic) in SPECFEM_CM.items():
        lists = (_list(1, points_cm, n_cm), _list(2, points_ic, n_ic))

        def build(offsets: Sequence[int], lists: Sequence[Int64Array] = lists) -> dt.Datatype:
            types = [dt.indexed_block(3, 3 * index, "f4") for index in lists]
            return dt.struct([1, 1], list(offsets), types)

        yield Case(
            "SPECFEM3D_cm",
            size,
            (12 * points_cm, 12 * points_ic),
            build,
            12 * (n_cm + n_ic),
            by_hand=Gathers(tuple(Gather(index, 12, array=a) for a, index in enumerate(lists))),
        )


def specfem_mt() -> Iterator[Case]:
    """Yield every second triple of floats."""
    for c, n in enumerate((7600, 6400, 5600, 6200), 1):
        build = partial(dt.vector, n, 1, 2, dt.contiguous(3, "f4"))
        yield of_box("SPECFEM3D_mt", f"c{c}", 24 * n, build, Box(12, (n,), (24,)))


FFT_RANKS = 4


def fft2() -> Iterator[Case]:
    """Yield all blocks of a rank's rows of a matrix of complex doubles, as an all-to-all sends them."""
    for n in (256, 512, 768, 1024, 1536):
        rows = n // FFT_RANKS

        def build(n: int = n, rows: int = rows) -> dt.Datatype:
            block = dt.vector(rows, rows, n, dt.contiguous(2, "f8"))
            return dt.resized(block, 0, 16 * rows)

        box = Box(16 * rows, (FFT_RANKS, rows), (16 * rows, 16 * n))
        yield of_box("FFT2", n, 16 * n * rows, build, box, count=FFT_RANKS)


def runs_of_arrays(pattern: str, size: str, runs: Sequence[tuple[str, int]]) -> Case:
    """Return whole arrays one after another: a struct of contiguous parts."""
    sizes = tuple(np.dtype(dtype).itemsize * n for dtype, n in runs)

    def build(offsets: Sequence[int]) -> dt.Datatype:
        lengths = [n for _, n in runs]
        return dt.struct(lengths, list(offsets), [dtype for dtype, _ in runs])

    boxes = tuple(Box(nbytes, array=a) for a, nbytes in enumerate(sizes))
    return Case(pattern, size, sizes, build, sum(sizes), by_hand=Boxes(boxes))


def vblock(particles: int) -> list[tuple[str, int]]:
    """Return element type and length of the ten entries of a block of Voronoi cells.

    A site of a random tessellation has about 6.8 vertices, 15.5 faces and 81 vertices of faces.

    Examples
    --------
    >>> sum(4 * n for _, n in vblock(4096)) // 4096
    495
    """
    n = particles
    vertices, faces, face_vertices = int(6.8 * n), int(15.5 * n), 81 * n
    return [
        ("f4", 3),
        ("f4", 3 * vertices),
        ("f4", 3 * n),
        ("i4", n),
        ("f4", n),
        ("f4", n),
        ("i4", n),
        ("i4", faces),
        ("i4", face_vertices),
        ("f4", 3),
    ]


def hacc_vblock() -> Iterator[Case]:
    """Yield Voronoi blocks of 4 Ki and 32 Ki particles."""
    for particles in (4 * KIB, 32 * KIB):
        yield runs_of_arrays("HACC_vblock", f"{particles // KIB}Ki", vblock(particles))


def hacc_particles() -> Iterator[Case]:
    """Yield ten properties of particles, an array each."""
    dtypes = ("f4",) * 8 + ("i8", "u2")
    for particles in (4 * KIB, 32 * KIB, 1024 * KIB):
        properties = [(dtype, particles) for dtype in dtypes]
        yield runs_of_arrays("HACC_particles", f"{particles // KIB}Ki", properties)


def face(axis: str) -> Iterator[Case]:
    """Yield a face of n^3 float64 cells with halo around them; x is the innermost axis."""
    for n in (64, 128, 256, 512):
        row, plane = 8 * (n + 2), 8 * (n + 2) ** 2
        first = plane + row + 8
        block, counts, strides = {
            "x": (8, (n, n), (plane, row)),
            "y": (8 * n, (n,), (plane,)),
            "z": (8 * n, (n,), (row,)),
        }[axis]

        sub = [n, n, n]
        sub["zyx".index(axis)] = 1
        build = partial(dt.subarray, (n + 2,) * 3, sub, (1, 1, 1), "f8")
        yield of_box(f"face_{axis}", n, plane * (n + 2), build, Box(block, counts, strides, first))


DDTBENCH = "DDTBench 1.2"
HACC = "Jenkins et al. 2013, 5.2"

LAMMPS_WIDTHS = {"full": (3, 1, 1, 1, 1, 1), "atomic": (3, 1, 1, 1)}
LAMMPS_FULL = ((3534, 3062), (2597, 2243), (1907, 1662))
LAMMPS_ATOMIC = ((4084, 243), (2157, 145), (1217, 114))

_ATOMS = {"full": (LAMMPS_FULL, "six", "3534-3062"), "atomic": (LAMMPS_ATOMIC, "four", "4084-243")}

PATTERNS = (
    *(
        Pattern(
            f"WRF_{axis}_{kind}",
            f"boxes of nine float32 fields, a struct of {what}",
            partial(wrf, axis, kind),
            ("2x2",),
            DDTBENCH,
        )
        for axis in "xy"
        for kind, what in (("vec", "vectors"), ("sa", "subarrays"))
    ),
    Pattern("MILC_su3_zdown", "half planes of su3 vectors", milc, ("16x16x16x16",), DDTBENCH),
    *(
        Pattern(
            f"NAS_LU_{axis}",
            "a side of a plane of five doubles a point",
            partial(nas_lu, axis),
            ("1020",),
            DDTBENCH,
        )
        for axis in "xy"
    ),
    *(
        Pattern(
            f"NAS_MG_{axis}",
            f"the {axis}-face of a grid of doubles",
            partial(nas_mg, axis),
            ("258x130x130",),
            DDTBENCH,
        )
        for axis in "xyz"
    ),
    *(
        Pattern(
            f"LAMMPS_{kind}",
            f"atoms by number out of {number} arrays",
            partial(lammps, f"LAMMPS_{kind}", LAMMPS_WIDTHS[kind], inputs),
            (quick,),
            DDTBENCH,
        )
        for kind, (inputs, number, quick) in _ATOMS.items()
    ),
    Pattern("SPECFEM3D_oc", "float32 by number", specfem_oc, ("c4",), DDTBENCH),
    Pattern(
        "SPECFEM3D_cm", "triples of float32 by number, two arrays", specfem_cm, ("c4",), DDTBENCH
    ),
    Pattern("SPECFEM3D_mt", "every second triple of float32", specfem_mt, ("c1",), DDTBENCH),
    Pattern("FFT2", f"blocks of a matrix for {FFT_RANKS} ranks", fft2, ("1024",), DDTBENCH),
    Pattern("HACC_vblock", "the ten arrays of a Voronoi block", hacc_vblock, ("32Ki",), HACC),
    Pattern("HACC_particles", "ten properties of particles", hacc_particles, ("32Ki",)),
    *(
        Pattern(
            f"face_{axis}",
            f"the {axis}-face of a cube of float64 with halo",
            partial(face, axis),
            ("128", "512") if axis == "x" else ("512",),
        )
        for axis in "xyz"
    ),
)
