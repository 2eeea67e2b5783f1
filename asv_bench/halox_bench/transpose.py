"""``halox bench transpose``: `halox.Transpose` beside copies and transposes by hand.

Only the blocks of the ranks are taken from the grids: the transposes by hand and the check of every result follow them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from math import isqrt, prod
from typing import Any

import numpy as np

import halox
from halox.errors import HaloxError
from halox_bench.bench import CHECKS, NAMED, Bench, Method, Plan, paths_taken, timed
from halox_bench.checks import as_values, chunks, modulus_of, outer_sum
from halox_bench.clock import Call
from halox_bench.kernels import copy
from halox_bench.kinds import Kind, Option, Wrong, dtypes, shapes, words, words_of
from halox_bench.nccl import Nccl
from halox_bench.rows import BASELINE, SELECTED, Column, Row

COPY, COPYTO, CUPY = "copy of the same bytes", "np.copyto", "CuPy's strided copy"
ALLTOALLW, NCCL = "mpi4py Alltoallw", "pack + NCCL + unpack"
PEER = "the bytes at the speed of a copy to the peer"

WHOLE, SLABS, PENCILS = DIVISIONS = "whole", "slabs", "pencils"
"""One rank; ranks in a row along one axis; ranks over two axes, with the division of one unchanged."""

FORWARD, BACKWARD = DIRECTIONS = "forward", "backward"
SMALL = {2: (1024, 1536), 3: (64, 96, 128), 4: (24, 32, 40, 48)}

Slices = tuple[slice, ...]


@dataclass(frozen=True)
class TransposeCase:
    """Cells of one grid copied into another."""

    shape: tuple[int, ...]  # cells of the first grid, all ranks together
    # For each axis of the second grid, the axis of the first, as in `numpy.transpose`.
    axes: tuple[int, ...]
    dtype: str = "f8"
    division: str = WHOLE
    direction: str = FORWARD

    def __post_init__(self) -> None:
        if not 2 <= self.ndim <= 4 or sorted(self.axes) != list(range(self.ndim)):
            raise HaloxError(f"axes {self.axes}: expected an order of 2 to 4 axes of {self.shape}")
        if self.division == PENCILS and self.ndim < 3:
            raise HaloxError(f"pencils of {self.shape}: expected 3 or 4 axes; two axes have slabs")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def details(self) -> dict[str, Any]:
        return {**vars(self), "nbytes": prod(self.shape) * np.dtype(self.dtype).itemsize}

    @property
    def name(self) -> str:
        size, order = "x".join(map(str, self.shape)), "".join(map(str, self.axes))
        divided = "" if self.division == WHOLE else f" {self.division}"
        return f"{size} {self.dtype} axes {order}{divided} {self.direction}"

    @property
    def source_axes(self) -> tuple[int, ...]:
        """For each axis of the target, the axis of the source."""
        if self.direction == FORWARD:
            return self.axes
        return tuple(self.axes.index(axis) for axis in range(self.ndim))

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.shape, tuple(self.shape[axis] for axis in self.axes)

    def proc_shapes(self, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks along each axis of the first and of the second grid.

        The second grid is divided along its first axis that is whole in the first grid; pencils keep their division
        along the first grid's axis 0.
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


def axes_of(text: str) -> tuple[tuple[int, ...], ...]:
    if not all(word.isdecimal() for word in words(text)):
        raise Wrong(f"{text}: expected orders of axes, as in 10,021,3210")
    return tuple(tuple(map(int, word)) for word in words(text))


def cases(args: argparse.Namespace) -> list[TransposeCase]:
    """Return all combinations of a command line; pencils have 3 or 4 axes."""
    ndims = {len(axes) for axes in args.axes} or {2, 3}
    sizes = args.sizes or tuple(SMALL[n] for n in sorted(ndims) if n in SMALL)
    found = []
    for shape, dtype, division in product(sizes, args.dtype, args.divisions):
        orders = [axes for axes in args.axes if len(axes) == len(shape)]
        if not args.axes:
            orders = [*permutations(range(len(shape)))][-1 if args.quick else 0 :]
        for axes, direction in product(orders, args.directions):
            if division != PENCILS or len(shape) > 2:
                found.append(TransposeCase(shape, axes, dtype, division, direction))
    if not found:
        raise HaloxError("nothing to measure: no order of --axes fits a shape and a division")
    return found


@dataclass(frozen=True)
class Piece:
    """Cells sent to one rank, or received from it, as a box in the array of this rank."""

    peer: int
    box: Slices

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.box)

    @property
    def starts(self) -> tuple[int, ...]:
        return tuple(part.start for part in self.box)


class Pieces:
    """One rank's share of a transpose: what it sends and receives, by rank, itself included.

    ``source`` and ``target`` are, for each rank, its block on both sides, as global indices along the axes of each.
    """

    def __init__(
        self, source: Sequence[Slices], target: Sequence[Slices], axes: tuple[int, ...], rank: int
    ) -> None:
        self.axes, self.rank = axes, rank
        self.source, self.target = source[rank], target[rank]
        back = tuple(axes.index(axis) for axis in range(len(axes)))
        # All blocks along the source's axes.
        arriving = [tuple(block[k] for k in back) for block in target]
        self.sends = _common(source[rank], arriving)
        self.receives = [
            Piece(piece.peer, tuple(piece.box[axis] for axis in axes))
            for piece in _common(arriving[rank], source)
        ]
        self.cells_sent = sum(prod(piece.extents) for piece in self.sends if piece.peer != rank)


def _common(own: Slices, others: Sequence[Slices]) -> list[Piece]:
    """Return the intersections of a block with other blocks, counted from the block's first cell."""
    found = []
    for peer, other in enumerate(others):
        box = tuple(
            slice(max(a.start, b.start) - a.start, min(a.stop, b.stop) - a.start)
            for a, b in zip(own, other, strict=True)
        )
        if all(part.start < part.stop for part in box):
            found.append(Piece(peer, box))
    return found


class TransposeOracle:
    """Fills a rank's source with numbers of its global indices, and compares the target with those of its own."""

    STEPS = (130003, 70001, 40009, 10007)

    def __init__(self, case: TransposeCase, source: Slices, target: Slices, xp: Any = np) -> None:
        self._case, self._xp = case, xp
        self._modulus = modulus_of(case.dtype)
        self._source = self._shares(source, range(case.ndim))
        self._target = self._shares(target, case.source_axes)

    def _shares(self, block: Slices, axes: Iterable[int]) -> list[Any]:
        """Return each index's share of the cell's number along the axes of a block, numbered as in the source."""
        return [
            self._xp.arange(part.start, part.stop) * self.STEPS[axis] % self._modulus
            for part, axis in zip(block, axes, strict=True)
        ]

    def fill(self, source: Any, target: Any, step: int) -> None:
        """Fill the source with the numbers of a step, and the target with a number that no cell has."""
        for part, values in self._values(source, self._source, step):
            part[...] = values
        target[...] = self._modulus

    def wrong(self, target: Any, step: int) -> int:
        """Count the wrong values of the target after a step."""
        found = self._values(target, self._target, step)
        return sum(int(self._xp.count_nonzero(part != values)) for part, values in found)

    def _values(self, array: Any, shares: list[Any], step: int) -> Iterator[tuple[Any, Any]]:
        """Yield parts of an array with their values in a step."""
        for at in chunks(array.shape):
            cells = (outer_sum(shares, at) + step * 31) % self._modulus
            yield array[at], as_values(cells, self._case.dtype)


def turned(array: Any, case: TransposeCase) -> Any:
    """View an array of the source's axes along the target's."""
    return array.transpose(*case.source_axes)


def copied(bench: Bench, source: Any) -> Call:
    """Return a copy of an array's bytes into memory of the same shape."""
    xp = bench.stage.xp
    target = xp.empty_like(source)
    if not bench.on_gpu:
        return lambda: np.copyto(target, source)
    ends, current = (int(source.data.ptr), int(target.data.ptr)), xp.cuda.get_current_stream
    # The arrays live as long as the call.
    return lambda: copy(*ends, min(source.nbytes, target.nbytes), current().ptr)


def strided_copy(bench: Bench, case: TransposeCase, arrays: Sequence[Any]) -> Method:
    target, view = arrays[1], turned(arrays[0], case)

    def call() -> None:
        target[...] = view

    return Method(call, captures=bench.on_gpu, arrays=arrays)


def alltoallw(comm: Any, case: TransposeCase, pieces: Pieces, arrays: Sequence[Any]) -> Method:
    """Return one ``Alltoallw`` among the ranks that exchange cells, directly or through others.

    The sender's types are subarrays, the receiver's nested vectors along the sender's axes if the order changes.
    """
    from mpi4py.util.dtlib import from_numpy_dtype

    element = from_numpy_dtype(np.dtype(case.dtype))
    together = _together(comm.allgather({piece.peer for piece in pieces.sends}), comm.rank)
    part = comm.Split(together[0], comm.rank)
    natural = tuple(range(case.ndim))
    messages = []
    for array, found, axes in (
        (arrays[0], pieces.sends, natural),
        (arrays[1], pieces.receives, case.source_axes),
    ):
        here = {piece.peer: piece for piece in found}
        types = [
            _box_type(element, array, here[rank], axes) if rank in here else element.Dup()
            for rank in together
        ]
        counts = [int(rank in here) for rank in together]
        messages.append([array, counts, [0] * len(together), types])

    def close() -> None:
        for message in messages:
            for datatype in message[-1]:
                datatype.Free()
        part.Free()

    return Method(lambda: part.Alltoallw(*messages), close, arrays=arrays)


def _together(peers: Sequence[set[int]], rank: int) -> list[int]:
    """Return the ranks that one exchanges cells with, directly or through others, itself included."""
    found = {rank}
    while True:
        more = found.union(
            *(peers[one] | {one} for one in range(len(peers)) if found & (peers[one] | {one}))
        )
        if more == found:
            return sorted(found)
        found = more


def _box_type(element: Any, array: Any, piece: Piece, axes: tuple[int, ...]) -> Any:
    """Return a committed MPI type of a box of an array, which runs along the axes of the source."""
    ndim = len(axes)
    if axes == tuple(range(ndim)):
        return element.Create_subarray(array.shape, piece.extents, piece.starts).Commit()
    built = [element]
    for axis in reversed(range(ndim)):
        k = axes.index(axis)
        built.append(built[-1].Create_hvector(piece.extents[k], 1, array.strides[k]))
    offset = sum(start * stride for start, stride in zip(piece.starts, array.strides, strict=False))
    found = built[-1].Create_hindexed([1], [offset]).Commit()
    for datatype in built[1:]:
        datatype.Free()
    return found


def by_nccl(
    nccl: Nccl, stage: Any, case: TransposeCase, pieces: Pieces, arrays: Sequence[Any]
) -> Method:
    """Return CuPy's strided copies of the peers' cells, turned, into buffers, one NCCL group, and copies out of them.

    Cells that stay on the rank are copied to their places.
    """
    source, target = arrays
    own = {piece.peer: target[piece.box] for piece in pieces.receives}
    packs, unpacks, sends, receives = [], [], [], []
    for piece in pieces.sends:
        view = turned(source[piece.box], case)
        if piece.peer == pieces.rank:
            packs.append((own[piece.peer], view))
            continue
        buffer = stage.xp.empty(view.shape, case.dtype)
        packs.append((buffer, view))
        sends.append((piece.peer, int(buffer.data.ptr), buffer.nbytes))
    for peer, place in own.items():
        if peer != pieces.rank:
            buffer = stage.xp.empty(place.shape, case.dtype)
            unpacks.append((place, buffer))
            receives.append((peer, int(buffer.data.ptr), buffer.nbytes))
    current = stage.xp.cuda.get_current_stream

    def call() -> None:
        for to, view in packs:
            to[...] = view
        nccl.exchange(sends, receives, current().ptr)
        for to, view in unpacks:
            to[...] = view

    return Method(call, captures=True, arrays=arrays)


def measure(bench: Bench, args: argparse.Namespace, case: TransposeCase) -> list[Row]:
    comm, size = bench.comm, bench.comm.size
    if (case.division == WHOLE) is not (size == 1):
        return []  # whole arrays are for one rank, slabs and pencils for several
    proc_shapes = case.proc_shapes(size)
    for shape, parts in zip(case.shapes, proc_shapes, strict=True):
        if any(n < ranks for n, ranks in zip(shape, parts, strict=True)):
            return bench.left_out(case, f"{shape} cells cannot be divided among {parts} ranks")
    if not bench.fits(4 * case.details["nbytes"] // size):
        return bench.left_out(case, "too large")
    with ExitStack() as stack, bench.stage.current():
        arrays, pieces, own = _planned(stack, bench, case)
        oracle = TransposeOracle(case, pieces.source, pieces.target, bench.stage.xp)

        def check(method: Method, call: Call) -> int:
            wrong = 0
            for step in range(1, CHECKS + 1):
                source, target = method.arrays
                oracle.fill(source, target, step)
                call()
                bench.stage.synchronize()
                wrong += oracle.wrong(target, step)
            return wrong

        plans = [Plan(SELECTED, SELECTED, partial(own, None))]
        if size > 1:
            plans += [Plan(NAMED, path, partial(own, path)) for path in bench.paths(args.paths)]
        users = bench.users(arrays)
        plans.append(_by_hand(bench, case, pieces, users))
        sent = max(comm.allgather(pieces.cells_sent)) * np.dtype(case.dtype).itemsize
        rows = timed(
            bench,
            case,
            plans,
            check,
            graph=not args.no_graph,
            graph_calls=10,
            further={COPY: copied(bench, users[0])},
            bytes_sent=sent,
        )
    bench.free()
    if sent and bench.on_gpu and not bench.shared_gpu and bench.peer_bytes_per_us:
        us = sent / bench.peer_bytes_per_us
        rows.append(Row(case.name, BASELINE, PEER, us=us, details=rows[0].details))
    return rows


def _planned(stack: ExitStack, bench: Bench, case: TransposeCase) -> tuple[Any, Pieces, Any]:
    """Return a field of each grid, this rank's pieces, and a function that plans the transpose by a path."""
    comm = bench.comm
    grids = [
        stack.enter_context(
            halox.Grid(shape, halo=0, proc_shape=parts, comm=comm, device=bench.device)
        )
        for shape, parts in zip(case.shapes, case.proc_shapes(comm.size), strict=True)
    ]
    transpose = stack.enter_context(halox.Transpose(*grids, axes=case.axes))
    fields = [grid.zeros(case.dtype) for grid in grids]
    blocks: list[list[Slices]] = [comm.allgather(tuple(grid.owned)) for grid in grids]
    order = 1 if case.direction == FORWARD else -1
    source, target = blocks[::order]
    arrays = fields[::order]

    def own(path: str | None) -> Method:
        named: dict[str, Any] = {} if path is None else {"path": path}
        plan = transpose.plan(*fields, backward=case.direction == BACKWARD, **named)
        taken = paths_taken(plan.explain().rows, comm.rank if comm.size > 1 else None)
        return Method(plan, plan.close, True, arrays, found={"path": taken})

    return arrays, Pieces(source, target, case.source_axes, comm.rank), own


def _by_hand(bench: Bench, case: TransposeCase, pieces: Pieces, arrays: Sequence[Any]) -> Plan:
    if bench.comm.size == 1:
        name = CUPY if bench.on_gpu else COPYTO
        return Plan(BASELINE, name, partial(strided_copy, bench, case, arrays))
    if bench.on_gpu:
        between = bench.stage, case, pieces, arrays
        return Plan(BASELINE, NCCL, lambda: by_nccl(bench.nccl(), *between))
    return Plan(BASELINE, ALLTOALLW, partial(alltoallw, bench.comm, case, pieces, arrays))


TRANSPOSE_KIND = Kind(
    "transpose",
    "transposes in any order of the axes, beside copies and by hand",
    cases,
    measure,
    (
        Option("--sizes", "cells of all ranks together, 2 to 4 axes", shapes, metavar="AxB,AxBxC"),
        Option("--axes", "orders of the axes, as of numpy.transpose; default: all", axes_of),
        Option("--dtype", "dtypes; default: f8", dtypes, ("f8",)),
        Option("--divisions", f"out of {', '.join(DIVISIONS)}", words_of(*DIVISIONS), DIVISIONS),
        Option("--directions", "forward, backward", words_of(*DIRECTIONS), DIRECTIONS),
    ),
    (Column("bytes sent", "bytes_sent"),),
    named="paths",
    budget_s=80.0,
)
