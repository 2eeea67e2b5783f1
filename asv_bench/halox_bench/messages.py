"""``halox bench ddtbench`` and ``scatter_gather``: typed messages there and back between two ranks.

DDTBench 1.2 has the send sides of :mod:`halox_bench.patterns`, and its receive sides: the same places (WRF, MILC,
SPECFEM3D oc and cm), the halo beside (NAS LU and MG), the tail of the arrays (LAMMPS).
FFT2 is an all-to-all that transposes, with two ranks::

    rank 0 | a b |      rank 0 | a c |
    rank 1 | c d |  ->  rank 1 | b d |   each block transposed as it is stored
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import halox
from halox import datatypes as dt
from halox.errors import PathError
from halox_bench.bench import KIB, MIB, NAMED, Bench, Method, Plan, paths_taken, timed
from halox_bench.byhand import prepare
from halox_bench.checks import Bytes
from halox_bench.clock import Call
from halox_bench.kernels import cupy, packed_buffer
from halox_bench.kinds import Kind, Option, size_label
from halox_bench.layouts import Box, Boxes, ByHand
from halox_bench.patterns import DDTBENCH as DDTBENCH_PATTERNS
from halox_bench.patterns import Case, Patterns, select
from halox_bench.rows import BASELINE, SELECTED, Column, Row

MPI_TYPES, ZERO_COPY, NCCL = "mpi4py types", "zero-copy + mpi4py", "pack + NCCL + unpack"

RANKS, WORD = 2, 8
_TAG, _CHECKS = 4, 2


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
    """One pattern in one size; ``directions`` returns the part of a rank there and back."""

    pattern: str
    size: str
    arrays: tuple[int, ...]  # bytes of the arrays of a rank
    offsets: tuple[int, ...]  # their places in its slab
    nbytes: int  # that a rank sends in one direction
    directions: Callable[[int], tuple[Direction, Direction]]
    word: int = WORD  # bytes of the words by which results are compared
    mapped: bool = False  # whether arrays on GPUs are in memory that the other rank maps

    @property
    def name(self) -> str:
        return f"{self.pattern}/{self.size}"

    @property
    def details(self) -> dict[str, Any]:
        return {"pattern": self.pattern, "size": self.size, "nbytes": self.nbytes}

    @property
    def slab_bytes(self) -> int:
        return -(-(self.offsets[-1] + self.arrays[-1]) // self.word) * self.word


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


# DDTBench.


def _side(case: Case, nbytes: int = 0) -> Side:
    datatype = at(case.datatype(), case.start + nbytes)
    if not nbytes:
        return Side(datatype, case.by_hand)
    assert isinstance(case.by_hand, Boxes)
    boxes = (replace(box, offset=box.offset + nbytes) for box in case.by_hand.boxes)
    return Side(datatype, Boxes(tuple(boxes)))


def _received(case: Case) -> Side:
    if case.pattern.startswith("NAS_LU"):
        return _side(case, -40 * int(case.size))
    if case.pattern.startswith("NAS_MG"):
        shape = [int(n) for n in case.size.split("x")]
        row, plane = 8 * shape[0], 8 * shape[0] * shape[1]
        return _side(case, {"x": 8, "y": row, "z": -plane}[case.pattern[-1]])
    if case.pattern.startswith("LAMMPS"):
        # Ghost atoms behind a rank's own.
        atoms, n = (int(number) for number in case.size.split("-"))
        widths = [nbytes // (8 * (atoms + n)) for nbytes in case.arrays]
        starts = [offset + 8 * w * atoms for offset, w in zip(case.offsets, widths, strict=True)]
        datatype = dt.struct([n * w for w in widths], starts, ["f8"] * len(widths))
        boxes = (Box(8 * w * n, offset=8 * w * atoms, array=a) for a, w in enumerate(widths))
        return Side(datatype, Boxes(tuple(boxes)))
    return _side(case)


def _fft(case: Case) -> TripCase:
    """Return the all-to-all of a rank's rows, and the all-to-all back, which restores the matrix."""
    n = int(case.size)
    rows, peers = n // RANKS, range(RANKS)
    two = replace(case, arrays=(16 * n * rows,) * 2)
    element = dt.contiguous(2, "f8")
    block = dt.resized(dt.vector(rows, rows, n, element), 0, 16 * rows)
    turned = dt.contiguous(rows, dt.resized(dt.vector(rows, 1, n, element), 0, 16))

    def direction(source: int, target: int) -> Direction:
        sends = {p: at(block, two.offsets[source] + 16 * rows * p) for p in peers}
        receives = {p: at(turned, two.offsets[target] + 16 * rows * p) for p in peers}
        packed = Box(16 * rows, (RANKS, rows), (16 * rows, 16 * n), array=source)
        unpacked = Box(16, (RANKS, rows, rows), (16 * rows, 16, 16 * n), array=target)
        return Direction(sends, receives, Boxes((packed,)), Boxes((unpacked,)))

    what = case.pattern, case.size, two.arrays, two.offsets, 16 * n * rows
    return TripCase(*what, lambda rank: (direction(0, 1), direction(1, 0)))


def of_ddtbench(case: Case) -> TripCase:
    """Return a pattern of DDTBench in one size, with its receive side."""
    if case.pattern == "FFT2":
        return _fft(case)
    directions = there_and_back([_side(case)] * RANKS, [_received(case)] * RANKS)
    what = case.pattern, case.size, case.arrays, case.offsets, case.payload
    return TripCase(*what, directions, 4)


def ddtbench(args: argparse.Namespace) -> list[TripCase]:
    found = select(args.patterns, quick=args.quick, among=DDTBENCH_PATTERNS)
    return [of_ddtbench(case) for case in found]


# Strided messages, after Suresh et al. 2022, section V.


def strided(block: int, count: int) -> Side:
    """Return blocks twice their length apart."""
    words = block // WORD
    box = Box(block, (count,), (2 * block,))
    return Side(dt.vector(count, words, 2 * words, "f8"), Boxes((box,)))


def vector(block: int, count: int) -> TripCase:
    """Return blocks twice their length apart on both ranks."""
    sides = [strided(block, count)] * RANKS
    what = f"vector-{size_label(block)}", str(count), (sides[0].datatype.true_ub,), (0,)
    return TripCase(*what, block * count, there_and_back(sides, sides), mapped=True)


def arrays(block: int, way: str) -> TripCase:
    """Return a MiB of blocks out of one array into another, from both ranks at once or there and then back."""
    count = MIB // block
    side, extent = strided(block, count), 2 * MIB
    assert isinstance(side.by_hand, Boxes)
    into = Side(at(side.datatype, extent), Boxes((replace(side.by_hand.boxes[0], array=1),)))

    def together(rank: int) -> tuple[Direction, Direction]:
        both = {1 - rank: side.datatype}, {1 - rank: into.datatype}
        return (Direction(*both, side.by_hand, into.by_hand),) * 2

    ways = there_and_back((side, side), (into, into)) if way == "one way" else together
    what = f"arrays-{size_label(block)}", way.replace(" ", "-"), (extent, extent), (0, extent), MIB
    return TripCase(*what, ways, mapped=True)


STRIDED: Patterns = {
    **{
        f"vector-{size_label(block)}": (
            partial(map, partial(vector, block), (16, 32, 64, 128)),
            ("64",),
        )
        for block in (KIB, 2 * KIB, 4 * KIB)
    },
    **{
        f"arrays-{size_label(block)}": (
            partial(map, partial(arrays, block), ("one way", "both ways")),
            ("one-way",),
        )
        for block in (KIB, 4 * KIB, 16 * KIB, 64 * KIB)
    },
}


def strided_messages(args: argparse.Namespace) -> list[TripCase]:
    return select(args.patterns, quick=args.quick, among=STRIDED)


class TripOracle:
    """Contents of both ranks' slabs after a trip, from the places that hand-written packing moves."""

    def __init__(self, case: TripCase, rank: int, xp: Any = np) -> None:
        self._case, self._rank, self._xp = case, rank, xp
        self._kind = f"u{case.word}"
        both = [case.directions(one) for one in range(RANKS)]
        self._moves = [self._messages([one[way] for one in both]) for way in range(2)]

    def _messages(self, ranks: Sequence[Direction]) -> list[tuple[int, int, Any, Any]]:
        """Return source, target and the numbers of their words, for each message of a direction."""
        sent = [self._parts(one.packed, one.sends) for one in ranks]
        received = [self._parts(one.unpacked, one.receives) for one in ranks]
        pairs = product(range(RANKS), repeat=2)
        return [
            (one, two, sent[one][two], received[two][one]) for one, two in pairs if two in sent[one]
        ]

    def _parts(self, layout: ByHand | None, messages: dict[int, Any]) -> dict[int, Any]:
        """Return the words of the message with each peer; all messages of a direction have one length."""
        if layout is None:
            return {}
        words = self._xp.asarray(places(self._case, layout)).reshape(len(messages), -1)
        return dict(zip(messages, words, strict=True))

    def _filled(self, rank: int, step: int) -> Any:
        """Return the words of a rank's slab, which differ from each other, between ranks and between steps."""
        found = self._xp.arange(self._case.slab_bytes // self._case.word, dtype=self._kind)
        kind = found.dtype.type
        return (found * kind(2) + kind(rank)) * kind(2654435761) + kind(step + 1)

    def fill(self, slab: Any, step: int) -> None:
        slab.view(self._kind)[:] = self._filled(self._rank, step)

    def wrong(self, slab: Any, step: int, directions: Sequence[int]) -> int:
        """Count the words of this rank's slab that differ from the result of some directions."""
        slabs = [self._filled(rank, step) for rank in range(RANKS)]
        for direction in directions:
            before = [one.copy() for one in slabs]
            for source, target, there, here in self._moves[direction]:
                slabs[target][here] = before[source][there]
        return int(self._xp.count_nonzero(slab.view(self._kind) != slabs[self._rank]))


def places(case: TripCase, layout: ByHand) -> Any:
    """Return the numbers of a slab's words in the packing order of hand-written code."""
    kind = f"u{case.word}"
    memory: Bytes = np.arange(case.slab_bytes // case.word, dtype=kind).view(np.uint8)
    of_slab = [memory[a : a + n] for a, n in zip(case.offsets, case.arrays, strict=True)]
    packed = np.empty(case.nbytes, np.uint8)
    layout.pack(of_slab, packed)
    return packed.view(kind).astype(np.int64)


def trip(parts: Sequence[Call], close: Call = lambda: None, **more: Any) -> Method:
    """Return the method that goes there and back."""
    there, back = parts

    def call() -> None:
        there()
        back()

    return Method(call, close, parts=(there, back), **more)


def typed(comm: Any, slab: Any, case: TripCase, path: str | None) -> Method:
    """Return two `halox.Exchange`, there and back, by a path."""
    named: dict[str, Any] = {} if path is None else {"path": path}
    found: list[Any] = []
    with ExitStack() as stack:
        for one in case.directions(comm.rank):
            sends = [halox.Send(slab, made, peer) for peer, made in one.sends.items()]
            receives = [halox.Recv(slab, made, peer) for peer, made in one.receives.items()]
            found.append(halox.Exchange(sends, receives, comm=comm, **named))
            stack.callback(found[-1].close)
        close = stack.pop_all().close
    taken = paths_taken([row for one in found for row in one.explain().rows])
    return trip(found, close, captures=True, found={"path": taken})


def mpi_types(comm: Any, slab: Any, case: TripCase) -> Method:
    """Return Send and Recv of MPI's derived types, or Alltoallw."""
    from mpi4py import MPI

    buffer = MPI.buffer.fromaddress(slab.ctypes.data, case.slab_bytes)
    types: list[Any] = []

    def move(direction: Direction) -> Call:
        sends, receives = (
            {peer: one.to_mpi() for peer, one in messages.items()}
            for messages in (direction.sends, direction.receives)
        )
        types.extend([*sends.values(), *receives.values()])
        if len(sends) == len(receives) == 2:
            both = [[buffer, [1, 1], [0, 0], [*made.values()]] for made in (sends, receives)]
            return lambda: comm.Alltoallw(*both)
        posts = [(comm.Irecv, [buffer, 1, made], peer) for peer, made in receives.items()]
        posts += [(comm.Isend, [buffer, 1, made], peer) for peer, made in sends.items()]
        if len(posts) == 1:
            ((_, message, peer),) = posts
            blocking = comm.Send if sends else comm.Recv
            return lambda: blocking(message, peer, _TAG)
        return lambda: MPI.Request.Waitall([post(what, peer, _TAG) for post, what, peer in posts])

    def close() -> None:
        for made in types:
            made.Free()

    return trip([move(direction) for direction in case.directions(comm.rank)], close)


def kernels(bench: Bench, slab: Any, case: TripCase, *, host: bool) -> Method:
    """Return one kernel that packs and one that unpacks, around MPI of page-locked memory, or NCCL on the stream."""
    comm, device = bench.comm, bench.stage.device or 0
    nccl = None if host else bench.nccl()
    (out, out_at, _), (into, into_at, _) = kept = [
        packed_buffer(case.nbytes, host=host) for _ in range(2)
    ]
    address, current = int(slab.data.ptr), cupy().cuda.get_current_stream

    def move(direction: Direction) -> Call:
        moves = [
            None if layout is None else prepare(layout, case.offsets, name, device)
            for layout, name in ((direction.packed, "pack"), (direction.unpacked, "unpack"))
        ]
        peers = {*direction.sends, *direction.receives} - {comm.rank}
        if len(direction.sends) + len(direction.receives) > 1 and not host:
            raise PathError("NCCL by hand is measured for one message at a time")
        (peer,) = peers

        def send() -> None:
            if nccl is not None:
                sends = [(peer, out_at, case.nbytes)] * bool(direction.sends)
                receives = [(peer, into_at, case.nbytes)] * bool(direction.receives)
                nccl.exchange(sends, receives, current().ptr)
            elif not direction.sends:
                comm.Recv(into, peer, _TAG)
            elif not direction.receives:
                current().synchronize()
                comm.Send(out, peer, _TAG)
            else:
                current().synchronize()
                if len(direction.sends) == 1:
                    comm.Sendrecv(out, peer, _TAG, into, peer, _TAG)
                else:
                    comm.Alltoall(out, into)

        def call(keep: object = kept) -> None:
            if moves[0] is not None:
                moves[0](address, out_at, current().ptr)
            send()
            if moves[1] is not None:
                moves[1](address, into_at, current().ptr)

        return call

    return trip([move(one) for one in case.directions(comm.rank)], captures=not host)


def measure(bench: Bench, args: argparse.Namespace, case: TripCase) -> list[Row]:
    """Measure one case: half of a round trip."""
    comm, stage = bench.comm, bench.stage
    with ExitStack() as stack, stage.current():
        if bench.on_gpu and case.mapped:
            shape = (RANKS * case.slab_bytes,)
            grid = stack.enter_context(halox.Grid(shape, halo=0, comm=comm, device=bench.device))
            slab = grid.zeros("u1")
        else:
            slab = stage.xp.zeros(case.slab_bytes, "u1")
        oracle = TripOracle(case, comm.rank, stage.xp)

        def check(method: Method, call: Call) -> int:
            """Go each way from slabs filled anew, and compare all of both; of a graph, compare its end."""
            wrong = 0
            ways = [(one, (k,)) for k, one in enumerate(method.parts)]
            if call is not method.call:
                ways = [(call, (0, 1))]  # type: ignore[list-item]
            for step in range(_CHECKS):
                for one, directions in ways:
                    oracle.fill(slab, step)
                    stage.synchronize()  # MPI reads device memory without regard to streams
                    one()
                    stage.synchronize()
                    wrong += oracle.wrong(slab, step, directions)
            return wrong

        plans = [Plan(SELECTED, SELECTED, partial(typed, comm, slab, case, None))]
        for path in bench.paths(args.paths):
            plans.append(Plan(NAMED, path, partial(typed, comm, slab, case, path)))
        if bench.on_gpu:
            plans.append(Plan(BASELINE, NCCL, partial(kernels, bench, slab, case, host=False)))
            plans.append(Plan(BASELINE, ZERO_COPY, partial(kernels, bench, slab, case, host=True)))
        else:
            plans.append(Plan(BASELINE, MPI_TYPES, partial(mpi_types, comm, slab, case)))
        rows = timed(bench, case, plans, check, graph=not args.no_graph, graph_calls=10)
    bench.free()
    return [
        row.with_(us=row.us / 2, gb_per_s=case.nbytes / row.us / 500) if row.us else row
        for row in rows
    ]


_COLUMNS = (Column("bytes", "nbytes"), Column("GB/s", "gb_per_s", ".2f"))
_PATTERNS = Option("--patterns", "patterns, or pattern/size, with wildcards; default: all")
_two = partial(Kind, columns=_COLUMNS, named="paths", ranks=RANKS)

DDTBENCH = _two(
    "ddtbench",
    "the patterns of DDTBench there and back between two ranks, beside MPI's types",
    ddtbench,
    measure,
    (_PATTERNS,),
)

SCATTER_GATHER = _two(
    "scatter_gather",
    "strided messages there and back between two ranks, by every path, also without packing",
    strided_messages,
    measure,
    (_PATTERNS,),
)
