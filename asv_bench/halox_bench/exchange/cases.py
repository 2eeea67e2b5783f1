"""Cases of the halo benchmark, and the cells that ranks exchange, from shapes alone.

The module is independent of :mod:`halox.decomposition`: the hand-written exchanges and the check of every result follow
it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import Any

import numpy as np

from halox.errors import HaloxError
from halox_bench.common.exact import need_numbers, prime_factors
from halox_bench.common.layouts import Box

AXES = "xyzt"
"""Names of the axes, the innermost first."""

FACES = (*AXES, "faces", "all")
"""The two faces normal to one axis; all faces; faces, edges and corners."""

SIZES = (16, 32, 64, 128, 256, 512, 768)
QUICK_SIZES = (16, 64, 256)

MILC = ((16, 16, 16, 16), (16, 16, 16, 8), (16, 8, 8, 8), (8, 8, 8, 8))
"""Local lattices t, z, y, x of DDTBench's MILC input."""


@dataclass(frozen=True)
class ExchangeCase:
    """A halo exchange of equal blocks on all ranks.

    Attributes
    ----------
    shape : tuple of int
        Cells that a rank owns, the innermost axis last.
    faces : str
        One of `FACES`. With one axis the ranks form a row along it, and only this axis is periodic; else they are
        spread over all axes, innermost first, and all axes are periodic.
    halo : int
        Width.
    fields : int
        Fields of one exchange.
    components : tuple of int
        Extents of axes behind the grid axes.
    outer : bool
        Whether ranks are spread over the outermost axes first, as by `halox.Grid` and ``MPI_Dims_create``; their faces
        have the longest runs.
    """

    shape: tuple[int, ...]
    faces: str = "x"
    halo: int = 1
    dtype: str = "f8"
    fields: int = 1
    components: tuple[int, ...] = ()
    outer: bool = False

    def __post_init__(self) -> None:
        """Raise `HaloxError` unless shape, faces, halo and dtype describe an exchange that can be checked."""
        names = (*AXES[: self.ndim], "faces", "all")
        if self.faces not in names:
            raise HaloxError(
                f"faces {self.faces!r} of a block of {self.ndim} axes: expected one of {', '.join(names)}"
            )
        if min(self.shape[axis] for axis in self.along) < self.halo:
            raise HaloxError(f"a halo of {self.halo} is wider than a block of {self.shape} cells")
        need_numbers(self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> str:
        if self.ndim > 1 and len(set(self.shape)) == 1:
            return f"{self.shape[0]}^{self.ndim}"
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        """Everything in one line."""
        parts = [self.size, self.dtype + "".join(f"[{n}]" for n in self.components), self.faces]
        if self.halo != 1:
            parts.append(f"halo {self.halo}")
        if self.fields != 1:
            parts.append(f"{self.fields} fields")
        if self.outer:
            parts.append("outer")
        return " ".join(parts)

    @property
    def details(self) -> dict[str, Any]:
        return {"axes": f"{self.ndim}d", **vars(self)}

    @property
    def along(self) -> tuple[int, ...]:
        """Axes along which cells are exchanged, as positions in the shape."""
        if self.faces in AXES:
            return (self.ndim - 1 - AXES.index(self.faces),)
        return tuple(range(self.ndim))

    @property
    def corners(self) -> bool:
        """Whether edges and corners are exchanged too."""
        return self.faces == "all"

    @property
    def periodic(self) -> tuple[bool, ...]:
        """Per axis, whether the ends meet."""
        return tuple(axis in self.along for axis in range(self.ndim))

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of a rank's array: halo and components included."""
        return (*(n + 2 * self.halo for n in self.shape), *self.components)

    @property
    def field_bytes(self) -> int:
        """Bytes of all fields on one rank."""
        return self.fields * prod(self.padded_shape) * np.dtype(self.dtype).itemsize

    def proc_shape(self, ranks: int) -> tuple[int, ...]:
        """Ranks along each axis; the innermost axis, with the shortest runs, is divided first, or the outermost.

        Examples
        --------
        >>> ExchangeCase((8, 8, 8), "all").proc_shape(4), ExchangeCase((8, 8, 8), "z").proc_shape(4)
        ((1, 2, 2), (4, 1, 1))
        """
        shape = [1] * self.ndim
        axes = sorted(self.along, reverse=not self.outer)
        for factor in prime_factors(ranks):
            shape[min(axes, key=lambda axis: shape[axis])] *= factor
        return tuple(shape)

    @property
    def directions(self) -> tuple[tuple[int, ...], ...]:
        """Neighbours' places relative to a rank, in the same order on all ranks."""
        reach = [(-1, 0, 1) if axis in self.along else (0,) for axis in range(self.ndim)]
        found = (d for d in product(*reach) if any(d))
        return tuple(d for d in found if self.corners or sum(map(abs, d)) == 1)

    def region(
        self, direction: Sequence[int], *, received: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First cell and extents, in a rank's array, of the cells for a neighbour or from it."""
        halo = self.halo
        starts, extents = [], []
        for n, d in zip(self.shape, direction, strict=True):
            inside = {-1: 0, 0: halo, 1: n + halo} if received else {-1: halo, 0: halo, 1: n}
            starts.append(inside[d])
            extents.append(halo if d else n)
        return tuple(starts), tuple(extents)

    def box(self, starts: Sequence[int], extents: Sequence[int], field: int) -> Box:
        """Bytes of a region of one field."""
        item = np.dtype(self.dtype).itemsize * prod(self.components)
        padded = self.padded_shape[: self.ndim]
        strides = [item * prod(padded[axis + 1 :]) for axis in range(self.ndim)]
        offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        return Box(extents[-1] * item, tuple(extents[:-1]), tuple(strides[:-1]), offset, field)


@dataclass(frozen=True)
class Piece:
    """One region of one field, sent to or received from one rank.

    Attributes
    ----------
    tag : int
        Number of the direction from sender to receiver.
    starts, extents : tuple of int
        Cells, in the array of one rank.
    box : Box
        The same as bytes.
    """

    peer: int
    tag: int
    field: int
    starts: tuple[int, ...]
    extents: tuple[int, ...]
    box: Box


class Neighbourhood:
    """Messages of one rank with its neighbours.

    Parameters
    ----------
    coords : mapping
        For each rank its place in the process grid.

    Attributes
    ----------
    sends, receives : tuple of Piece
        By peer; two ranks list the pieces between them in the same order.
    """

    def __init__(
        self, case: ExchangeCase, coords: Mapping[int, tuple[int, ...]], rank: int
    ) -> None:
        self.case, self.coords, self.rank = case, coords[rank], rank
        self.proc_shape = tuple(max(axis) + 1 for axis in zip(*coords.values(), strict=True))
        self._rank_at = {place: rank for rank, place in coords.items()}
        self.sends = self._pieces(received=False)
        self.receives = self._pieces(received=True)

    def _pieces(self, *, received: bool) -> tuple[Piece, ...]:
        case = self.case
        pieces = []
        for direction in case.directions:
            place = tuple(
                (c + d) % n for c, d, n in zip(self.coords, direction, self.proc_shape, strict=True)
            )
            seen = tuple(-d for d in direction) if received else direction
            peer, tag = self._rank_at[place], case.directions.index(seen)
            region = case.region(direction, received=received)
            pieces += [
                Piece(peer, tag, field, *region, case.box(*region, field))
                for field in range(case.fields)
            ]
        return tuple(sorted(pieces, key=lambda p: (p.peer, p.tag, p.field)))

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes to other ranks in one exchange, and as many come from them."""
        return sum(piece.box.nbytes for piece in self.sends if piece.peer != self.rank)


def cases(args: argparse.Namespace) -> list[ExchangeCase]:
    """Return the cases of a command line.

    All combinations of its sizes, faces, halos, dtypes and numbers of fields; by default x-faces, all faces and all
    neighbours of float64 cubes with a halo of 1. Without any of these options, a grid of cases.

    Raises
    ------
    HaloxError
        If a combination is not an exchange.
    """
    asked = args.sizes, args.faces, args.halo, args.dtype, args.fields
    if not (any(asked) or args.outer):
        return _quick() if args.quick else _everything()
    found = []
    sizes = args.sizes or tuple((n,) for n in (QUICK_SIZES if args.quick else SIZES))
    for size, halo, dtype, fields in product(
        sizes, args.halo or (1,), args.dtype or ("f8",), args.fields or (1,)
    ):
        shape = size if len(size) > 1 else size * 3
        for faces in args.faces or ("x", "faces", "all"):
            found.append(ExchangeCase(shape, faces, halo, dtype, fields, outer=args.outer))
    return found


def _quick() -> list[ExchangeCase]:
    cubes = [ExchangeCase((n,) * 3, faces) for n in QUICK_SIZES for faces in ("x", "z", "all")]
    others = [ExchangeCase((64,) * 3, "all", fields=4), ExchangeCase((256, 256), "all")]
    return [*cubes, *others, milc(MILC[0])]


def milc(shape: tuple[int, ...]) -> ExchangeCase:
    """Return all faces of a lattice of su3 vectors in single precision."""
    return ExchangeCase(shape, "faces", dtype="c8", components=(3,))


def _everything() -> list[ExchangeCase]:
    found = [
        ExchangeCase((n,) * 3, faces) for n in SIZES for faces in ("x", "y", "z", "faces", "all")
    ]
    plain = [ExchangeCase((n,) * 3, faces) for n in (64, 256) for faces in ("x", "all")]
    found += [replace(case, halo=halo) for case in plain for halo in (2, 3)]
    found += [replace(case, dtype=dtype) for case in plain for dtype in ("i1", "f4", "c16")]
    found += [replace(case, fields=fields) for case in plain for fields in (2, 4, 8)]
    found += [ExchangeCase((n,), "x", halo) for n in (1 << 12, 1 << 24) for halo in (1, 1024)]
    found += [ExchangeCase((n, n), faces) for n in (256, 2048, 8192) for faces in ("x", "y", "all")]
    found += [ExchangeCase((n,) * 4, faces) for n in (16, 32, 64) for faces in ("faces", "all")]
    return found + [milc(shape) for shape in MILC]
