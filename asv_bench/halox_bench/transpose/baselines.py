"""Transposes of NumPy arrays as users write them: NumPy's copies on one rank, mpi4py's Alltoallw on several."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from halox_bench.ranks.methods import Baseline
from halox_bench.transpose.cases import TransposeCase
from halox_bench.transpose.pieces import Piece, Pieces

COPY = "copy of the same bytes"
COPYTO = "np.copyto"
ALLTOALLW = "mpi4py Alltoallw"
ALLTOALLW_COPYTO = "mpi4py Alltoallw + np.copyto"

Arrays = Sequence[Any]
"""Source and target."""


def turned(array: Any, case: TransposeCase) -> Any:
    """View an array of the source's axes along the target's."""
    return array.transpose(*case.source_axes, *range(case.ndim, case.ndim + len(case.components)))


class Turning(Baseline):
    """A hand-written transpose.

    Attributes
    ----------
    arrays : list of array
        Source and result.
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = list(arrays)


class HostCopy(Turning):
    """The source's bytes into memory of the same shape."""

    name = COPY

    def __init__(self, arrays: Arrays) -> None:
        super().__init__([arrays[0], np.empty_like(arrays[0])])

    def __call__(self) -> None:
        np.copyto(self.arrays[1], self.arrays[0])


class CopyTo(Turning):
    """``np.copyto`` of the transposed view."""

    name = COPYTO

    def __init__(self, case: TransposeCase, arrays: Arrays) -> None:
        super().__init__(arrays)
        self._view = turned(arrays[0], case)

    def __call__(self) -> None:
        np.copyto(self.arrays[1], self._view)


class Alltoallw(Turning):
    """One ``Alltoallw`` among the ranks that exchange cells, with a type for each of them.

    The sender's types are subarrays. The receiver's are subarrays if the order of the axes stays, else nested vectors
    along the sender's axes.
    """

    name = ALLTOALLW

    def __init__(self, comm: Any, case: TransposeCase, pieces: Pieces, arrays: Arrays) -> None:
        super().__init__(arrays)
        self._start(comm, case, pieces, arrays[1], pieces.receives, case.source_axes)

    def _start(
        self,
        comm: Any,
        case: TransposeCase,
        pieces: Pieces,
        target: Any,
        receives: Sequence[Piece],
        axes: tuple[int, ...],
    ) -> None:
        """Make types for a target; its axis ``k`` is axis ``axes[k]`` of the source."""
        ranks = pieces.together
        self._comm = comm.Split(ranks[0], comm.rank)
        self._element = _element(case)
        natural = tuple(range(case.ndim))
        sides = ((self.arrays[0], pieces.sends, natural), (target, receives, axes))
        self._messages = [self._message(*side, ranks) for side in sides]

    def _message(
        self, array: Any, pieces: Sequence[Piece], axes: tuple[int, ...], ranks: Sequence[int]
    ) -> list[Any]:
        here = {piece.peer: piece for piece in pieces}
        types = [
            _box(self._element, array, here[rank], axes) if rank in here else self._element.Dup()
            for rank in ranks
        ]
        counts = [int(rank in here) for rank in ranks]
        return [array, counts, [0] * len(ranks), types]

    def __call__(self) -> None:
        self._comm.Alltoallw(*self._messages)

    def close(self) -> None:
        for message in self._messages:
            for datatype in message[-1]:
                datatype.Free()
        self._element.Free()
        self._comm.Free()


class AlltoallwCopyTo(Alltoallw):
    """``Alltoallw`` with subarrays on both sides into memory in the source's order, then ``np.copyto``."""

    name = ALLTOALLW_COPYTO

    def __init__(self, comm: Any, case: TransposeCase, pieces: Pieces, arrays: Arrays) -> None:
        Turning.__init__(self, arrays)
        back = [case.source_axes.index(axis) for axis in range(case.ndim)]
        shape = [arrays[1].shape[k] for k in back]
        between = np.empty((*shape, *case.components), case.dtype)
        receives = [
            Piece(piece.peer, tuple(piece.box[k] for k in back)) for piece in pieces.receives
        ]
        natural = tuple(range(case.ndim))
        self._start(comm, case, pieces, between, receives, natural)
        self._view = turned(between, case)

    def __call__(self) -> None:
        super().__call__()
        np.copyto(self.arrays[1], self._view)


def _element(case: TransposeCase) -> Any:
    """Return the MPI type of one cell, committed."""
    from mpi4py.util.dtlib import from_numpy_dtype

    number = from_numpy_dtype(np.dtype(case.dtype))
    return number.Create_contiguous(prod(case.components)).Commit()


def _box(element: Any, array: Any, piece: Piece, axes: tuple[int, ...]) -> Any:
    """Return a committed type of a box of an array, which runs along the axes of the source."""
    ndim = len(axes)
    if axes == tuple(range(ndim)):
        shape = array.shape[:ndim]
        return element.Create_subarray(shape, piece.extents, piece.starts).Commit()
    built = [element]
    for axis in reversed(range(ndim)):
        k = axes.index(axis)
        built.append(built[-1].Create_hvector(piece.extents[k], 1, array.strides[k]))
    offset = sum(start * stride for start, stride in zip(piece.starts, array.strides, strict=False))
    found = built[-1].Create_hindexed([1], [offset]).Commit()
    for datatype in built[1:]:
        datatype.Free()
    return found
