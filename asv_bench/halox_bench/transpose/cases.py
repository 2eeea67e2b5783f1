"""Cases of the transpose benchmark: shapes, orders of axes, dtypes, divisions among ranks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from math import isqrt, prod
from typing import Any

import numpy as np

from halox.errors import HaloxError
from halox_bench.common.exact import need_numbers
from halox_bench.common.options import words

TRANSPOSE, VECTOR = "transpose", "vector"
METHODS = (TRANSPOSE, VECTOR)
"""`halox.Transpose`; `halox.pack` and `halox.unpack` by a type of the transposed matrix."""

WHOLE, SLABS, PENCILS = "whole", "slabs", "pencils"
DIVISIONS = (WHOLE, SLABS, PENCILS)
"""One rank; ranks in a row along one axis; ranks over two axes, with the division of one unchanged."""

FORWARD, BACKWARD = "forward", "backward"
DIRECTIONS = (FORWARD, BACKWARD)

DTYPES = ("u1", "u2", "f4", "f8", "c16")
"""Elements of 1, 2, 4, 8 and 16 bytes."""

MATRICES = (((8192, 8192), "f4"), ((8192, 8192), "f8"), ((4096, 4096), "c16"))
VOLUME = (256, 384, 512)
DIVIDED = (256, 256, 512)
SMALL = {2: (1024, 1536), 3: (64, 96, 128), 4: (24, 32, 40, 48)}


@dataclass(frozen=True)
class TransposeCase:
    """Cells of one grid copied into another, or the bytes of a transposed matrix.

    Attributes
    ----------
    shape : tuple of int
        Cells of the first grid, all ranks together.
    axes : tuple of int
        Axis ``k`` of the second grid is axis ``axes[k]`` of the first, as in `numpy.transpose`.
    components : tuple of int
        Extents of axes behind the grid axes, the same in both.
    division : str
        One of `DIVISIONS`.
    direction : str
        One of `DIRECTIONS`; of a datatype, pack and unpack.
    method : str
        One of `METHODS`.

    Raises
    ------
    HaloxError
        If it is not a transpose.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    dtype: str = "f8"
    components: tuple[int, ...] = ()
    division: str = WHOLE
    direction: str = FORWARD
    method: str = TRANSPOSE

    def __post_init__(self) -> None:
        if sorted(self.axes) != list(range(self.ndim)):
            raise HaloxError(
                f"axes {self.order} of a shape of {self.ndim} axes: expected an order of "
                f"{''.join(map(str, range(self.ndim)))}"
            )
        if not 2 <= self.ndim <= 4:
            raise HaloxError(f"shape {self.size}: expected 2 to 4 axes")
        if self.division == PENCILS and self.ndim < 3:
            raise HaloxError(f"pencils of {self.size}: expected 3 or 4 axes; two axes have slabs")
        if self.method != TRANSPOSE and (self.axes != (1, 0) or self.division != WHOLE):
            raise HaloxError(
                f"{self.method}: expected a whole matrix with axes 10, got {self.name}"
            )
        need_numbers(self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def details(self) -> dict[str, Any]:
        return {"order": self.order, **vars(self)}

    @property
    def order(self) -> str:
        """The axes as text."""
        return "".join(map(str, self.axes))

    @property
    def name(self) -> str:
        """Everything in one line."""
        element = self.dtype + "".join(f"[{n}]" for n in self.components)
        if self.method != TRANSPOSE:
            what = "unpack" if self.backward else "pack"
            return f"{self.size} {element} {self.method} {what}"
        divided = "" if self.division == WHOLE else f" {self.division}"
        return f"{self.size} {element} axes {self.order}{divided} {self.direction}"

    @property
    def backward(self) -> bool:
        """Whether the second grid is the source."""
        return self.direction == BACKWARD

    @property
    def turned_shape(self) -> tuple[int, ...]:
        """Cells of the second grid."""
        return tuple(self.shape[axis] for axis in self.axes)

    @property
    def source_axes(self) -> tuple[int, ...]:
        """For each axis of the target, the axis of the source.

        Examples
        --------
        >>> TransposeCase((2, 3, 4), (1, 2, 0), direction="backward").source_axes
        (2, 0, 1)
        """
        if not self.backward:
            return self.axes
        return tuple(self.axes.index(axis) for axis in range(self.ndim))

    @property
    def element_bytes(self) -> int:
        """Bytes of one cell."""
        return np.dtype(self.dtype).itemsize * prod(self.components)

    @property
    def nbytes(self) -> int:
        """Bytes of all cells."""
        return prod(self.shape) * self.element_bytes

    def proc_shapes(self, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Ranks along each axis of the first and of the second grid.

        The second grid is divided along its first axis that is whole in the first grid; pencils keep their division
        along the first grid's axis 0.

        Examples
        --------
        >>> TransposeCase((8, 8, 8), (2, 1, 0), division="slabs").proc_shapes(2)
        ((2, 1, 1), (2, 1, 1))
        >>> TransposeCase((8, 8, 8), (0, 1, 2), division="pencils").proc_shapes(6)
        ((2, 3, 1), (2, 1, 3))
        """
        first, second = [1] * self.ndim, [1] * self.ndim
        kept, last_divided = 1, 0
        if self.division == PENCILS:
            kept = next(n for n in range(isqrt(ranks), 0, -1) if ranks % n == 0)
            last_divided = 1
            first[0] = second[self.axes.index(0)] = kept
        first[last_divided] = ranks // kept
        free = next(k for k, axis in enumerate(self.axes) if axis > last_divided)
        second[free] = ranks // kept
        return tuple(first), tuple(second)


def orders(ndim: int) -> tuple[tuple[int, ...], ...]:
    """Return all orders of axes, the natural one first."""
    return tuple(permutations(range(ndim)))


def axes_of(text: str) -> tuple[tuple[int, ...], ...]:
    """Read orders of axes with commas between.

    Examples
    --------
    >>> axes_of("10,021")
    ((1, 0), (0, 2, 1))
    """
    for word in words(text):
        if not word.isdecimal():
            raise argparse.ArgumentTypeError(f"{word}: expected orders of axes, as in 10,021,3210")
    return tuple(tuple(map(int, word)) for word in words(text))


def cases(args: argparse.Namespace) -> list[TransposeCase]:
    """Return the cases of a command line, for any number of ranks.

    All combinations of its sizes, axes, dtypes and components, or without these a grid of cases; its divisions,
    directions and methods select among them.

    Raises
    ------
    HaloxError
        If a combination is not a transpose, or nothing is left.
    """
    if args.sizes or args.axes or args.dtype or args.components:
        found = _combined(args)
    else:
        found = _quick() if args.quick else _everything()
    kept = [
        case
        for case in dict.fromkeys(found)
        if case.division in (args.divisions or DIVISIONS)
        and case.direction in (args.directions or DIRECTIONS)
        and case.method in (args.methods or METHODS)
    ]
    if not kept:
        raise HaloxError(
            "nothing to measure: vector is of whole matrices (two axes, order 10, on one rank), pencils of 3 or 4 axes"
        )
    return kept


def _combined(args: argparse.Namespace) -> Iterator[TransposeCase]:
    ndims = sorted({len(axes) for axes in args.axes}) or [2, 3, 4]
    sizes = args.sizes or tuple(SMALL[n] for n in ndims if n in SMALL)
    if not sizes:
        raise HaloxError("--axes: expected orders of 2 to 4 axes, as in 10,021,3210")
    components = tuple((n,) if n > 1 else () for n in args.components) or ((),)
    for shape, dtype, others in product(sizes, args.dtype or ("f8",), components):
        asked = tuple(axes for axes in args.axes if len(axes) == len(shape))
        if args.axes and not asked:
            raise HaloxError(
                f"--axes: no order of {len(shape)} axes for the shape {'x'.join(map(str, shape))}"
            )
        for axes in asked or orders(len(shape))[-1 if args.quick else 0 :]:
            yield from _of(shape, axes, dtype, others)


def _of(
    shape: tuple[int, ...],
    axes: Sequence[int],
    dtype: str = "f8",
    components: tuple[int, ...] = (),
    divisions: Iterable[str] = DIVISIONS,
    methods: Iterable[str] = METHODS,
) -> Iterator[TransposeCase]:
    """Yield all divisions, methods and directions."""
    for division, method, direction in product(divisions, methods, DIRECTIONS):
        fits = tuple(axes) == (1, 0) and division == WHOLE
        if (division == PENCILS and len(shape) < 3) or (method != TRANSPOSE and not fits):
            continue
        yield TransposeCase(shape, tuple(axes), dtype, components, division, direction, method)


def _quick() -> Iterator[TransposeCase]:
    yield from _of(SMALL[2], (1, 0), "f4")
    for axes in ((0, 1, 2), (0, 2, 1), (2, 1, 0)):
        yield from _of(SMALL[3], axes, "c16")
    yield from _of(SMALL[4], (3, 2, 1, 0))


def _everything() -> Iterator[TransposeCase]:
    for dtype in DTYPES:
        yield from _of(SMALL[2], (1, 0), dtype)
    for axes in orders(3):
        yield from _of(SMALL[3], axes, "c16")
    for axes in orders(4):
        yield from _of(SMALL[4], axes, "f8")
    for dtype in DTYPES[:-1]:
        yield from _of(SMALL[3], (2, 1, 0), dtype)
    for components in ((2,), (3,), (8,)):
        yield from _of(SMALL[3], (2, 1, 0), "f8", components)
        yield from _of(SMALL[2], (1, 0), "f8", components)
    for shape, dtype in MATRICES:
        yield from _of(shape, (1, 0), dtype, divisions=(WHOLE,))
    for axes, dtype in product(orders(3), ("c16", "f8")):
        yield from _of(VOLUME, axes, dtype, divisions=(WHOLE,))
    for axes in orders(3):
        yield from _of(DIVIDED, axes, "c16", divisions=(SLABS, PENCILS))
