"""``halox bench exchange``: halo exchanges of all ranks, by every path and by hand.

The cells that ranks exchange are derived from shapes alone, without :mod:`halox.decomposition`: the exchanges by hand
and the check of every result follow them.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import gcd, prod
from typing import Any

import numpy as np

import halox
from halox.errors import HaloxError
from halox.runtime.gpu.compiler import OPTIONS
from halox.runtime.world import load_mpi
from halox_bench.bench import CHECKS, NAMED, Bench, Method, Plan, paths_taken, timed
from halox_bench.byhand import EACH, THREADS, BoxRow
from halox_bench.checks import (
    as_values,
    chunks,
    modulus_of,
    outer_sum,
)
from halox_bench.clock import Call
from halox_bench.kernels import cupy, multiprocessors, packed_buffer, settings_of, source
from halox_bench.kinds import Kind, Option, dtypes, numbers, shapes
from halox_bench.layouts import Box
from halox_bench.rows import BASELINE, SELECTED, Column, Row

MPI_TYPES = "mpi4py types, Isend/Irecv"
NCCL = "pack + NCCL + unpack"
ZERO_COPY = "zero-copy + mpi4py"
WIRE = "a hop and the bytes at the speed of a copy"

AXES = "xyzt"
"""Names of the axes, the innermost first."""

FACES = (*AXES, "faces", "all")
"""The two faces normal to one axis; all faces; faces, edges and corners."""

SIZES, QUICK_SIZES = (16, 32, 64, 128, 256, 512), (16, 64)
HOP_US = 1.5
_ALIGNMENT, _TAG = 16, 7


@dataclass(frozen=True)
class ExchangeCase:
    """A halo exchange of equal periodic blocks on all ranks.

    If ``faces`` is one axis the ranks form a row along it; else they are spread over all axes, the innermost first.
    """

    shape: tuple[int, ...]  # cells that a rank owns, the innermost axis last
    faces: str = "x"  # one of `FACES`
    halo: int = 1
    dtype: str = "f8"
    fields: int = 1

    def __post_init__(self) -> None:
        names = (*AXES[: self.ndim], "faces", "all")
        if self.faces not in names:
            raise HaloxError(
                f"faces {self.faces!r} of a block of {self.ndim} axes: expected one of {', '.join(names)}"
            )
        if min(self.shape[axis] for axis in self.along) < self.halo:
            raise HaloxError(f"a halo of {self.halo} is wider than a block of {self.shape} cells")

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def name(self) -> str:
        equal = self.ndim > 1 and len(set(self.shape)) == 1
        size = f"{self.shape[0]}^{self.ndim}" if equal else "x".join(map(str, self.shape))
        halo = f" halo {self.halo}" if self.halo != 1 else ""
        fields = f" {self.fields} fields" if self.fields != 1 else ""
        return f"{size} {self.dtype} {self.faces}{halo}{fields}"

    @property
    def details(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def along(self) -> tuple[int, ...]:
        """Axes along which cells are exchanged, as positions in the shape."""
        if self.faces in AXES:
            return (self.ndim - 1 - AXES.index(self.faces),)
        return tuple(range(self.ndim))

    @property
    def corners(self) -> bool:
        return self.faces == "all"

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(n + 2 * self.halo for n in self.shape)

    @property
    def nbytes(self) -> int:
        return self.fields * prod(self.padded_shape) * np.dtype(self.dtype).itemsize

    def proc_shape(self, ranks: int) -> tuple[int, ...]:
        parts = load_mpi().Compute_dims(ranks, len(self.along))
        along = dict(zip(self.along[::-1], parts, strict=True))
        return tuple(along.get(axis, 1) for axis in range(self.ndim))

    @property
    def directions(self) -> tuple[tuple[int, ...], ...]:
        """Neighbours' places relative to a rank, in the same order on all ranks."""
        reach = [(-1, 0, 1) if axis in self.along else (0,) for axis in range(self.ndim)]
        found = (d for d in product(*reach) if any(d))
        return tuple(d for d in found if self.corners or sum(map(abs, d)) == 1)

    def region(
        self, direction: Sequence[int], *, received: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the first cell and the extents, in a rank's array, of cells for a neighbour or from it."""
        halo = self.halo
        starts, extents = [], []
        for n, d in zip(self.shape, direction, strict=True):
            inside = {-1: 0, 0: halo, 1: n + halo} if received else {-1: halo, 0: halo, 1: n}
            starts.append(inside[d])
            extents.append(halo if d else n)
        return tuple(starts), tuple(extents)

    def box(self, starts: Sequence[int], extents: Sequence[int], field: int) -> Box:
        item = np.dtype(self.dtype).itemsize
        strides = [item * prod(self.padded_shape[axis + 1 :]) for axis in range(self.ndim)]
        offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        return Box(extents[-1] * item, tuple(extents[:-1]), tuple(strides[:-1]), offset, field)


@dataclass(frozen=True)
class Piece:
    """One region of one field, sent to or received from one rank; the tag is the number of the direction."""

    peer: int
    tag: int
    field: int
    starts: tuple[int, ...]
    extents: tuple[int, ...]
    box: Box


class Neighbourhood:
    """Messages of one rank, given the place of each rank in the process grid.

    ``sends`` and ``receives`` are by peer; two ranks list the pieces between them in the same order.
    """

    def __init__(
        self, case: ExchangeCase, coords: Mapping[int, tuple[int, ...]], rank: int
    ) -> None:
        self.case, self.coords, self.rank = case, coords[rank], rank
        self.proc_shape = tuple(max(axis) + 1 for axis in zip(*coords.values(), strict=True))
        self._rank_at = {place: rank for rank, place in coords.items()}
        self.sends = self._pieces(received=False)
        self.receives = self._pieces(received=True)
        others = (piece.box.nbytes for piece in self.sends if piece.peer != rank)
        self.bytes_each_way = sum(others)

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


class Oracle:
    """Contents of every cell after a periodic exchange, in closed form, on NumPy and CuPy arrays.

    A cell's number depends on its place in the whole grid, its field and the step; the halo, and all that belongs to no
    cell, is filled with a number that no cell has.
    """

    STEPS = (10007, 40009, 70001, 130003)

    def __init__(self, near: Neighbourhood, xp: Any = np) -> None:
        self._case, self._xp = near.case, xp
        self._modulus = modulus_of(near.case.dtype)
        axes = zip(range(near.case.ndim), near.coords, near.proc_shape, strict=True)
        self._shares, self._outside = zip(*(self._axis(*one) for one in axes), strict=True)

    def _axis(self, axis: int, coord: int, parts: int) -> tuple[Any, Any]:
        """Return each index's share of the cell's number, and whether it is outside of the block."""
        case, xp = self._case, self._xp
        n, halo = case.shape[axis], case.halo
        local = xp.arange(-halo, n + halo)
        outside = ((local < 0) | (local >= n)).astype(np.int32)
        # The halo along an axis without exchange belongs to no cell.
        outside *= 1 if axis in case.along else 2 * case.ndim
        share = (coord * n + local) % (parts * n) * self.STEPS[case.ndim - 1 - axis]
        return share % self._modulus, outside

    def fill(self, fields: Sequence[Any], step: int) -> None:
        """Fill the owned cells with their numbers, and poison the halo."""
        for part, values in self._values(fields, step, 0):
            part[...] = values

    def wrong(self, fields: Sequence[Any], step: int) -> int:
        """Count the wrong values after an exchange, owned cells included."""
        found = self._values(fields, step, self._case.ndim if self._case.corners else 1)
        return sum(int(self._xp.count_nonzero(part != values)) for part, values in found)

    def _values(self, fields: Sequence[Any], step: int, reach: int) -> Iterator[tuple[Any, Any]]:
        """Yield parts of fields with their values, the poison's where more than ``reach`` axes leave the block."""
        for number, field in enumerate(fields):
            for at in chunks(self._case.padded_shape):
                cells = outer_sum(self._shares, at) + number * 7919 + step * 31
                inside = outer_sum(self._outside, at) <= reach
                values = self._xp.where(inside, cells % self._modulus, self._modulus)
                yield field[at], as_values(values, self._case.dtype)


def mpi_types(comm: Any, near: Neighbourhood, fields: Sequence[Any]) -> Method:
    """Return the exchange by mpi4py alone: a subarray type, an Isend and an Irecv for each region; Waitall."""
    from mpi4py import MPI
    from mpi4py.util.dtlib import from_numpy_dtype

    case, posts, types = near.case, [], []
    element = from_numpy_dtype(np.dtype(case.dtype))
    for post, pieces in ((comm.Irecv, near.receives), (comm.Isend, near.sends)):
        for piece in pieces:
            box = case.padded_shape, piece.extents, piece.starts
            types.append(element.Create_subarray(*box).Commit())
            buffer = [fields[piece.field], 1, types[-1]]
            posts.append((post, buffer, piece.peer, piece.tag * case.fields + piece.field))

    def call() -> None:
        MPI.Request.Waitall([post(buffer, peer, tag) for post, buffer, peer, tag in posts])

    def close() -> None:
        for datatype in types:
            datatype.Free()

    return Method(call, close, arrays=fields)


class Segments:
    """Packed bytes of one side, a segment a peer: the offset of each piece, and each peer's first byte and length."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.offsets: list[int] = []
        self.spans: dict[int, tuple[int, int]] = {}
        end = 0
        for piece in pieces:
            self.offsets.append(end)
            begin = self.spans.get(piece.peer, (end, 0))[0]
            end += -(-piece.box.nbytes // _ALIGNMENT) * _ALIGNMENT
            self.spans[piece.peer] = (begin, end - begin)
        self.nbytes = end


def face_table(
    pieces: Sequence[Piece], arrays: Sequence[int], packed: Sequence[int]
) -> tuple[Any, int, int]:
    """Return the table of the kernel ``faces``, its widest word, and the thread blocks for each row.

    ``arrays`` are the fields' addresses, ``packed`` the addresses of the pieces' packed bytes, multiples of 16.
    """
    word = gcd(16, *(piece.box.word() for piece in pieces), *arrays)
    rows = (BoxRow * len(pieces))()
    for row, piece, to in zip(rows, pieces, packed, strict=True):
        row.fill(piece.box, arrays[piece.field], to, word)
    return rows, word, -(-max(row.total for row in rows) // (THREADS * EACH))


def _launch(
    pieces: Sequence[Piece], arrays: Sequence[int], packed: Sequence[int], unpack: int, device: int
) -> Call:
    """Return a launch on CuPy's current stream, as users make it: through a CuPy kernel."""
    cp = cupy()
    rows, word, each = face_table(pieces, arrays, packed)
    each = max(1, min(each, 8 * multiprocessors(device)))
    on_device = cp.asarray(np.frombuffer(bytearray(rows), np.uint8))
    settings = settings_of(WORD_BYTES=word, UNPACK=unpack, THREADS=THREADS)
    kernel = cp.RawModule(code=source("byhand", settings), options=OPTIONS).get_function("faces")
    shape, arguments = ((len(pieces) * each,), (THREADS,)), (on_device, np.uint32(each))
    return lambda: kernel(*shape, arguments)


class PackedFaces:
    """One kernel packs, one message a peer, one kernel unpacks; as careful users write it.

    Between two ranks all regions of all fields are one message. For messages of a rank to itself the packing kernel
    writes into the unpacking kernel's buffer.
    """

    def __init__(
        self, comm: Any, near: Neighbourhood, fields: Sequence[Any], device: int, *, host: bool
    ) -> None:
        self.fields = fields
        sides = Segments(near.sends), Segments(near.receives)
        buffers = [packed_buffer(side.nbytes, host=host) for side in sides]
        memory, bases, self._keep = zip(*buffers, strict=True)
        self._comm, self._stream = comm, cupy().cuda.get_current_stream
        arrays = [int(field.data.ptr) for field in fields]
        places = [
            [base + offset for offset in side.offsets]
            for base, side in zip(bases, sides, strict=True)
        ]
        # Both sides list messages of this rank to itself in the same order.
        both = zip(near.receives, places[1], strict=True)
        own = iter(to for piece, to in both if piece.peer == near.rank)
        targets = [
            next(own) if piece.peer == near.rank else to
            for piece, to in zip(near.sends, places[0], strict=True)
        ]
        self._pack = _launch(near.sends, arrays, targets, 0, device)
        self._unpack = _launch(near.receives, arrays, places[1], 1, device)
        # Peer, memory, address and length of each segment for another rank.
        self._sends, self._receives = (
            [
                (peer, memory[k][at : at + n], bases[k] + at, n)
                for peer, (at, n) in sides[k].spans.items()
                if peer != near.rank
            ]
            for k in (0, 1)
        )

    def by_mpi(self) -> Method:
        """Return the exchange by MPI: wait for the packing, Irecv and Isend for each peer, Waitall."""
        from mpi4py import MPI

        def call() -> None:
            self._pack()
            self._stream().synchronize()
            requests = [self._comm.Irecv(part, peer, _TAG) for peer, part, _, _ in self._receives]
            requests += [self._comm.Isend(part, peer, _TAG) for peer, part, _, _ in self._sends]
            MPI.Request.Waitall(requests)
            self._unpack()

        return Method(call, arrays=self.fields)

    def by_nccl(self, nccl: Any) -> Method:
        """Return the exchange in one NCCL group, everything on the stream."""
        out, into = (
            [(peer, address, nbytes) for peer, _, address, nbytes in parts]
            for parts in (self._sends, self._receives)
        )

        def call() -> None:
            self._pack()
            nccl.exchange(out, into, self._stream().ptr)
            self._unpack()

        return Method(call, captures=True, arrays=self.fields)


def cases(args: argparse.Namespace) -> list[ExchangeCase]:
    sizes = args.sizes or tuple((n,) for n in (QUICK_SIZES if args.quick else SIZES))
    return [
        ExchangeCase(size if len(size) > 1 else size * 3, faces, halo, dtype, fields)
        for size, faces, halo, dtype, fields in product(
            sizes, args.faces or ("x", "faces", "all"), args.halo, args.dtype, args.fields
        )
    ]


def measure(bench: Bench, args: argparse.Namespace, case: ExchangeCase) -> list[Row]:
    comm, stage = bench.comm, bench.stage
    if not bench.fits(case.nbytes):
        return bench.left_out(case, f"{case.nbytes:,} bytes a rank are too many")
    proc_shape = case.proc_shape(comm.size)
    with (
        stage.current(),
        halox.Grid(
            tuple(n * p for n, p in zip(case.shape, proc_shape, strict=True)),
            halo=case.halo,
            periodic=tuple(axis in case.along for axis in range(case.ndim)),
            proc_shape=proc_shape,
            comm=comm,
            corners=case.corners,
            device=bench.device,
        ) as grid,
    ):
        fields = [grid.zeros(case.dtype) for _ in range(case.fields)]
        places = comm.allgather(tuple(grid.proc_coords))
        near = Neighbourhood(case, dict(enumerate(places)), comm.rank)
        oracle = Oracle(near, stage.xp)

        def by_path(path: str | None) -> Method:
            named: dict[str, Any] = {} if path is None else {"path": path}
            plan = grid.plan(*fields, corners=case.corners, **named)
            taken = paths_taken(plan.explain().rows, without=comm.rank)
            return Method(plan, plan.close, True, fields, found={"path": taken})

        def check(method: Method, call: Call) -> int:
            wrong = 0
            for step in range(1, CHECKS + 1):
                oracle.fill(method.arrays, step)
                call()
                wrong += oracle.wrong(method.arrays, step)
            return wrong

        plans = [Plan(SELECTED, SELECTED, partial(by_path, None))]
        plans += [Plan(NAMED, path, partial(by_path, path)) for path in bench.paths(args.paths)]
        plans += _by_hand(bench, near, bench.users(fields))
        graph = not args.no_graph
        rows = timed(bench, case, plans, check, graph=graph, bytes_each_way=near.bytes_each_way)
    bench.free()
    if bench.on_gpu and comm.size > 1 and not bench.shared_gpu and bench.peer_bytes_per_us:
        us = HOP_US + near.bytes_each_way / bench.peer_bytes_per_us
        rows.append(Row(case.name, BASELINE, WIRE, us=us, details=rows[0].details))
    return rows


def _by_hand(bench: Bench, near: Neighbourhood, fields: Sequence[Any]) -> list[Plan]:
    what, device = (bench.comm, near, fields), bench.stage.device
    if device is None:
        return [Plan(BASELINE, MPI_TYPES, partial(mpi_types, *what))]

    def packed(host: bool) -> PackedFaces:
        return PackedFaces(*what, device or 0, host=host)

    def by_nccl() -> Method:
        nccl = bench.nccl()
        return packed(False).by_nccl(nccl)

    return [
        Plan(BASELINE, NCCL, by_nccl),
        Plan(BASELINE, ZERO_COPY, lambda: packed(True).by_mpi()),
    ]


EXCHANGE = Kind(
    "exchange",
    "halo exchanges: every path, halox's own choice, and exchanges by hand",
    cases,
    measure,
    (
        Option("--sizes", "cells a rank: N for N^3, or a shape, the innermost axis last", shapes),
        Option("--faces", f"faces to exchange, out of {', '.join(FACES)}; x is the innermost axis"),
        Option("--halo", "halo widths; default: 1", numbers, (1,)),
        Option("--dtype", "dtypes; default: f8", dtypes, ("f8",)),
        Option("--fields", "fields of one exchange; default: 1", numbers, (1,)),
    ),
    (Column("bytes", "bytes_each_way"),),
    named="paths",
    budget_s=120.0,
)
