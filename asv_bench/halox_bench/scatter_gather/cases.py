"""Layouts of Suresh et al. 2022, section V, between two ranks.

Vectors of their figures 8 and 10, faces of the three-dimensional stencil of figure 9, and the layouts of applications
of figure 11. Rank 0 sends what it takes back; rank 1 receives the same places, the halo beside or, as in DDTBench's
SPECFEM3D_mt, contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from halox import datatypes as dt
from halox.errors import HaloxError
from halox.paths.messages import Message, Part
from halox.paths.scatter_gather.mlx5_umr import key_limits
from halox.paths.scatter_gather.windows import MessageBlocks, agreed_chunk, propose
from halox_bench.common.layouts import Box, Boxes
from halox_bench.common.sizes import KIB, size_label
from halox_bench.pingpong.cases import PingPong, Side

WORD = 8
_MOST_MESSAGE_BYTES = 1 << 30

BLOCKS = (KIB, 2 * KIB, 4 * KIB)
COUNTS = (16, 32, 64, 128)
STENCIL = 128
MILC = ((8, 8, 16, 32), (8, 16, 16, 32), (16, 16, 32, 32), (16, 32, 32, 32))
NAS_MG = ((512, 66, 66), (1024, 66, 66), (2048, 66, 120))
SPECFEM = ((1024, 2, 32), (1024, 2, 64), (1024, 2, 128))

Places = Callable[[Any], Any]
"""Returns the elements that travel, of an array in the order of its memory: a view, by NumPy's slicing alone."""


@dataclass(frozen=True)
class ScatterGatherCase(PingPong):
    """One layout in one size.

    Attributes
    ----------
    n : int
        Number of blocks.
    size : str
    block_bytes : int
    """

    size: str
    block_bytes: int

    @property
    def name(self) -> str:
        """Pattern and size."""
        return f"{self.pattern}/{self.size}"

    def adapter_keys(self) -> int:
        """Return how many keys a network adapter of the ``mlx5_umr`` engine takes at each end; no adapter is asked."""
        limits = key_limits(_MOST_MESSAGE_BYTES)
        first, second = (
            propose(MessageBlocks.of(Message(1, "send", (Part(0, side.datatype),))), limits)
            for side in self.sides
        )
        chunk = agreed_chunk(first, second, self.nbytes)
        assert chunk is not None
        return -(-self.nbytes // chunk)


def _case(
    name: tuple[str, str],
    box: Box,
    sides: Sequence[tuple[int, dt.Datatype, Box]],
    places: Sequence[Places],
) -> ScatterGatherCase:
    """Return a case of the blocks of a box, and for each side the elements, the datatype and the layout."""
    made = [Side(n, datatype, 1, Boxes((layout,))) for n, datatype, layout in sides]

    def indices() -> tuple[Any, Any]:
        flat = [np.arange(side.elements, dtype=np.int64) for side in made]
        first, second = (place(x).ravel() for place, x in zip(places, flat, strict=True))
        return first, second

    pattern, size = name
    n = box.nbytes // box.block_bytes
    return ScatterGatherCase(pattern, n, (made[0], made[1]), indices, size, box.block_bytes)


def vector(block: int, count: int) -> ScatterGatherCase:
    """Return blocks twice their length apart: figures 8 and 10."""
    words = block // WORD
    box = Box(block, (count,), (2 * block,))
    side = 2 * words * count, dt.vector(count, words, 2 * words, "f8"), box

    def place(x: Any) -> Any:
        return x.reshape(count, -1)[:, :words]

    name = f"vector-{size_label(block)}", str(count)
    return _case(name, box, (side, side), (place, place))


def stencil(axis: str, n: int = STENCIL) -> ScatterGatherCase:
    """Return a face of n^3 doubles, into the opposite one: figure 9."""
    sizes = (n, n, n)
    at = "zyx".index(axis)
    subsizes = tuple(1 if k == at else n for k in range(3))
    blocks = {"x": (WORD, (n, n), (WORD * n * n, WORD * n)), "y": (WORD * n, (n,), (WORD * n * n,))}
    block, counts, strides = blocks.get(axis, (WORD * n * n, (), ()))
    sides = []
    for index in (n - 1, 0):
        starts = tuple(index if k == at else 0 for k in range(3))
        offset = index * WORD * n ** (2 - at)
        box = Box(block, counts, strides, offset)
        sides.append((n**3, dt.subarray(sizes, subsizes, starts, "f8"), box))
    places = [lambda x, i=i: np.take(x.reshape(sizes), i, at) for i in (n - 1, 0)]
    return _case((f"stencil-{axis}", f"{n}^3"), sides[0][2], sides, places)


def milc(x: int, y: int, z: int, t: int) -> ScatterGatherCase:
    """Return DDTBench's MILC_su3_zdown: half planes of su3 vectors in single precision, of both parities."""
    half = 12 * x * y
    su3 = dt.contiguous(6, "f4")
    datatype = dt.hvector(2, 1, half * z * t, dt.vector(t, x * y // 2, x * y * z // 2, su3))
    box = Box(half, (2, t), (half * z * t, half * z))
    side = 2 * half * z * t // WORD, datatype, box

    def place(array: Any) -> Any:
        return array.reshape(2 * t, z, -1)[:, 0]

    return _case(("MILC_su3_zd", f"{x}x{y}x{z}x{t}"), box, (side, side), (place, place))


def nas_mg_y(d1: int, d2: int, d3: int) -> ScatterGatherCase:
    """Return DDTBench's NAS_MG_y: the last plane of doubles along the second axis, into the halo at the other end."""
    row, plane = WORD * d1, WORD * d1 * d2
    sides = []
    for y in (d2 - 2, 0):
        box = Box(WORD * (d1 - 2), (d3 - 2,), (plane,), plane + y * row + WORD)
        type_ = dt.subarray((d3, d2, d1), (d3 - 2, 1, d1 - 2), (1, y, 1), "f8")
        sides.append((d1 * d2 * d3, type_, box))
    places = [lambda x, y=y: x.reshape(d3, d2, d1)[1:-1, y, 1:-1] for y in (d2 - 2, 0)]
    return _case(("NAS_MG_y", f"{d1}x{d2}x{d3}"), sides[0][2], sides, places)


def specfem3d_mt(n: int, stride: int, count: int) -> ScatterGatherCase:
    """Return DDTBench's SPECFEM3D_mt: columns of floats, into contiguous memory."""
    block = 4 * n
    words = block // WORD
    box = Box(block, (count,), (stride * block,))
    strided = stride * words * count, dt.vector(count, n, stride * n, "f4"), box
    contiguous = words * count, dt.contiguous(n * count, "f4"), Box(block * count)

    def place(array: Any) -> Any:
        return array.reshape(count, -1)[:, :words]

    size = f"{n}x{stride}x{count}"
    return _case(("SPECFEM3D_mt", size), box, (strided, contiguous), (place, lambda x: x))


def every() -> list[ScatterGatherCase]:
    """Return all cases."""
    return [
        *(vector(block, count) for block in BLOCKS for count in COUNTS),
        *map(stencil, "xyz"),
        *(milc(*sizes) for sizes in MILC),
        *(nas_mg_y(*shape) for shape in NAS_MG),
        *(specfem3d_mt(*extents) for extents in SPECFEM),
    ]


QUICK = (
    *("vector-1KiB/16", "vector-1KiB/64", "vector-4KiB/64", "stencil-y/*"),
    *("MILC_su3_zd/16x16x32x32", "NAS_MG_y/512x66x66", "SPECFEM3D_mt/1024x2x64"),
)


def select(wanted: Sequence[str] = (), *, quick: bool = False) -> list[ScatterGatherCase]:
    """Return the cases whose pattern, or whose ``pattern/size``, matches one of some shell patterns; none means all.

    Raises
    ------
    HaloxError
        If one of them matches nothing.

    Examples
    --------
    >>> [(case.name, case.n, case.nbytes) for case in select(["MILC_su3_zd/8x8*"])]
    [('MILC_su3_zd/8x8x16x32', 64, 49152)]
    """
    cases = every()
    patterns = wanted or (QUICK if quick else ("*",))

    def matches(case: ScatterGatherCase, pattern: str) -> bool:
        return fnmatchcase(case.name, pattern) or fnmatchcase(case.pattern, pattern)

    for pattern in patterns:
        if not any(matches(case, pattern) for case in cases):
            known = dict.fromkeys(case.pattern for case in cases)
            raise HaloxError(f"--patterns {pattern}: matches nothing; known are {', '.join(known)}")
    return [case for case in cases if any(matches(case, pattern) for pattern in patterns)]
