"""Checks that every path must pass: tests/mpi runs them on paths of NumPy arrays, tests/gpu/ranks on GPU paths.

Values encode cell and step, so that a late, early or misplaced cell is wrong. If possible, the stream compares the
results, and the host runs ahead.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox import datatypes as dt
from halox.errors import PathError
from tests.mpi.conftest import agree
from tests.mpi.test_typed import TYPES
from tests.oracle import DTYPES, NUMERIC, exchange_all, host, small_integers
from tests.strategies import cells, sample

# CuPy has no arrays of the other dtypes. WORDS consist of whole words of 4 bytes, as some protocols require.
GPU_DTYPES = ["f8", "f4", "f2", "c8", "c16", "i1", "u2", "i4", "i8", "?"]
WORDS = ["f8", "f4", "c8", "c16", "i4", "i8"]


SEED = 20261120


@dataclass(frozen=True)
class Way:
    """A requested path, "" for halox's own choice, the device of the arrays, and the ranks' HALOX_NODE (``node``)."""

    path: str
    device: str = "gpu"
    node: str = ""

    @property
    def name(self) -> str:
        return f"{self.path}{', each a node' if self.node else ''}"

    @property
    def dtypes(self) -> list[Any]:
        if self.device == "cpu":
            return DTYPES
        return WORDS if self.path in ("peer/ll", "peer/direct") else GPU_DTYPES

    @property
    def is_straight(self) -> bool:
        """Whether the path stores directly into fields, which the grid must have allocated."""
        is_copied = self.path.startswith("scatter_gather") and self.device == "gpu"
        return self.path == "peer/direct" or is_copied

    def grid(self, shape: tuple[int, ...], comm: MPI.Intracomm, **options: Any) -> halox.Grid:
        return halox.Grid(shape, comm=comm, device=self.device, path=self.path or None, **options)

    def box(self, comm: MPI.Intracomm, axis: int = 0, n: int = 8, **options: Any) -> halox.Grid:
        """Return a periodic grid of n cells per axis on each rank, divided along one axis."""
        shape, procs = [n] * 3, [1] * 3
        shape[axis], procs[axis] = n * comm.size, comm.size
        return self.grid(tuple(shape), comm, periodic=True, proc_shape=tuple(procs), **options)

    def check_taken(self, plan: Any, comm: MPI.Intracomm) -> bool:
        """Assert that all messages between ranks take this path; return whether there are any."""
        report = plan.explain()
        rows = [f"{row.path}/{row.protocol}" for row in report.rows if row.peer != report.rank]
        wrong = [row for row in rows if self.path not in (row, row.partition("/")[0])]
        assert agree(not wrong, comm), report
        return bool(comm.allreduce(len(rows)))


def stream(xp: Any) -> Any:
    """Return a new stream as a context; on the host an empty context."""
    return contextlib.nullcontext() if xp is np else xp.cuda.Stream(non_blocking=True)


def stall(xp: Any) -> None:
    """Keep the current stream, or the host, busy for some milliseconds."""
    if xp is np:
        time.sleep(0.002)
        return
    from tests.gpu.guarded import stall as busy

    busy()


def settle(xp: Any) -> None:
    """Wait for all streams."""
    if xp is not np:
        xp.cuda.runtime.deviceSynchronize()


def values(grid: halox.Grid, dtype: Any = "f8", step: Any = 0, halo: bool = True) -> Any:
    """Return the values of a periodic grid's cells at a step, mostly distinct."""
    places = [
        (i % n) * factor
        for i, n, factor in zip(
            grid.indices(halo=halo), grid.grid_shape, (9973, 331, 7, 1), strict=False
        )
    ]
    return ((sum(places) + step) % (101 if np.dtype(dtype).itemsize == 1 else 30011)).astype(dtype)


def fill(grid: halox.Grid, u: Any, step: Any) -> None:
    grid.interior(u)[...] = values(grid, u.dtype, step, halo=False)


def wrong_cells(grid: halox.Grid, u: Any, step: Any) -> Any:
    """Return the number of wrong cells, halo included, computed on the stream."""
    return (u != values(grid, u.dtype, step)).sum()


# Random grids


def random_grids(way: Way, comm: MPI.Intracomm, count: int) -> None:
    """Random grids and fields: every halo cell holds the neighbour's value, and nothing else has changed."""
    ran = 0
    for case in sample(cells(comm.size, way.dtypes), count, comm):
        case.way = "packed"
        for f in case.fields:
            f.mine = f.mine and not way.is_straight
        with case.grid(comm, way.device, path=way.path) as grid:
            fields = case.make(grid)
            try:
                plan = grid.plan(*fields)
            except PathError:
                continue  # all ranks raise, or the next collective call would hang
            ran += way.check_taken(plan, comm)
            is_right = exchange_all(case, grid, [(fields, lambda *_, plan=plan: plan())] * 3)
            assert agree(is_right, comm), case
    assert ran >= count // 4, f"{ran} of {count} grids had messages that can go this way"


def accumulations(way: Way, comm: MPI.Intracomm, count: int) -> None:
    """Compare accumulated values with the result of the same call on NumPy arrays."""
    ran = 0
    for case in sample(cells(comm.size, [t for t in NUMERIC if t in way.dtypes]), count, comm):
        case.way = "packed"
        with (
            case.grid(comm, way.device, path=way.path) as a,
            case.grid(comm, path="host") as b,
        ):
            start = small_integers(case, a, 3)
            u, v = case.make(a, start), case.make(b, start)
            for _ in range(3):
                try:
                    a.accumulate(*u)
                except PathError:
                    break
                b.accumulate(*v)
            else:
                ran += 1
            right = [np.array_equal(host(x), y) for x, y in zip(u, v, strict=True)]
            assert agree(ran == 0 or all(right), comm), (case, right)
    assert ran >= count // 2


def fields_of_many_kinds(way: Way, comm: MPI.Intracomm) -> None:
    """Exchange fields of several dtypes at once: from the grid, from the user, and at odd offsets in larger arrays."""
    kinds = ["f8", "f4", "c16"] if way.dtypes is WORDS else ["f8", "i1", "u2", "c16"]
    with way.box(comm, halo=(1, 2, 1)) as grid:
        xp = grid.xp

        def of_the_grid(dtype: str) -> Any:
            return grid.zeros(dtype)

        def of_the_user(dtype: str) -> Any:
            return xp.zeros(grid.padded_shape, dtype)

        def at_an_offset(dtype: str) -> Any:
            n = int(np.prod(grid.padded_shape))
            return xp.zeros(n + 7, dtype)[3 : 3 + n].reshape(grid.padded_shape)

        def of_either(dtype: str) -> Any:
            both = of_the_grid(dtype), of_the_user(dtype)
            return both[comm.rank % 2]

        makers = [of_the_grid, of_the_user, at_an_offset, of_either]
        if way.is_straight:
            makers = [of_the_grid]
        for chosen in ([m] for m in makers):
            _exchange_all(way, grid, [m(k) for m in chosen for k in kinds], comm)
        if len(makers) > 1:
            _exchange_all(way, grid, [m(k) for m in makers for k in kinds], comm)


def _exchange_all(way: Way, grid: halox.Grid, fields: list[Any], comm: MPI.Intracomm) -> None:
    plan = grid.plan(*fields)
    assert way.check_taken(plan, comm)
    for step in range(3):
        for number, u in enumerate(fields):
            fill(grid, u, step + 11 * number)
        plan()
        wrong = [int(wrong_cells(grid, u, step + 11 * n)) for n, u in enumerate(fields)]
        assert agree(not any(wrong), comm), (wrong, [u.dtype for u in fields])


def large_faces(way: Way, comm: MPI.Intracomm, axis: int, n: int = 512) -> None:
    """Exchange faces of n x n cells, contiguous or strided according to the axis."""
    shape, procs = [n] * 3, [1] * 3
    shape[axis], procs[axis] = 4 * comm.size, comm.size
    with way.grid(tuple(shape), comm, periodic=True, proc_shape=tuple(procs)) as grid:
        u = grid.zeros("f8")
        plan = grid.plan(u)
        assert way.check_taken(plan, comm)
        wrong = grid.xp.zeros((), "i8")
        for step in range(3):
            u[...] = -1
            fill(grid, u, step)
            plan()
            wrong += wrong_cells(grid, u, step)
        assert agree(int(wrong) == 0, comm), int(wrong)


# Order


def work_in_between(way: Way, comm: MPI.Intracomm) -> None:
    """Work between start and finish, also with two plans started before either is finished."""
    with way.box(comm, n=12, halo=1) as grid:
        u, v = grid.zeros("f8"), grid.zeros("f4")
        xp = grid.xp
        a, b = grid.plan(u), grid.plan(v)
        other, wrong = xp.zeros(10_000), xp.zeros((), "i8")
        for step in range(24):
            if (step + comm.rank) % 8 == 0:
                stall(xp)
            fill(grid, u, step)
            fill(grid, v, step + 5)
            if step % 3 == 0:
                a.start()
                other += 1
                a.finish()
                b()
            else:
                first, second = (a, b) if step % 3 == 1 else (b, a)
                a.start()
                other += 1
                b.start()
                other += 1
                first.finish()
                second.finish()
            wrong += wrong_cells(grid, u, step) + wrong_cells(grid, v, step + 5)
        assert agree(int(wrong) == 0, comm), int(wrong)
        assert int(other[0]) == 8 + 2 * 16


def changing_streams(way: Way, comm: MPI.Intracomm) -> None:
    """Run one plan alternately on two otherwise unordered streams, then with writes that the user orders."""
    with way.box(comm, n=12) as grid:
        u, xp = grid.zeros("f8"), grid.xp
        fill(grid, u, 3)
        plan = grid.plan(u)
        streams = [stream(xp) for _ in range(2)]
        wrong = [xp.zeros((), "i8") for _ in streams]
        settle(xp)
        for step in range(12):
            with streams[step % 2]:
                if (step + comm.rank) % 3 == 0:
                    stall(xp)
                plan()
                wrong[step % 2] += wrong_cells(grid, u, 3)
        settle(xp)
        for step in range(20):
            with streams[step % 2] as here:
                if xp is not np:
                    # The user must order this write after the reads of the last step.
                    here.wait_event(streams[1 - step % 2].record())
                if step % 5 == comm.rank % 5:
                    stall(xp)
                fill(grid, u, step)
                plan()
                wrong[step % 2] += wrong_cells(grid, u, step)
        settle(xp)
        assert agree(not any(map(int, wrong)), comm), wrong


def two_streams(way: Way, comm: MPI.Intracomm, n: int, rounds: int, fields: int = 1) -> None:
    """Run two plans on two streams, with no order between the streams."""
    with way.box(comm, n=n) as grid:
        xp = grid.xp
        sets = [[grid.zeros("f8") for _ in range(fields)] for _ in range(2)]
        plans = [grid.plan(*each) for each in sets]
        streams, wrong = [stream(xp) for _ in sets], [xp.zeros((), "i8") for _ in sets]
        settle(xp)
        for step in range(rounds):
            for k in range(2):
                with streams[k]:
                    for u in sets[k]:
                        fill(grid, u, step + 17 * k)
                    plans[k]()
                    for u in sets[k]:
                        wrong[k] += wrong_cells(grid, u, step + 17 * k)
        settle(xp)
        assert agree(not any(map(int, wrong)), comm), wrong


def after_a_stalled_stream(way: Way, comm: MPI.Intracomm, own: bool) -> None:
    """Exchange while pending kernels still write the cells to send and read the halo cells."""
    with way.box(comm, n=16) as grid:
        u, xp = grid.zeros("f8"), grid.xp
        plan = grid.plan(u)
        wrong = xp.zeros((), "i8")
        settle(xp)
        with stream(xp) if own else contextlib.nullcontext():
            for step in range(8):
                if (step + comm.rank) % 2:
                    stall(xp)
                fill(grid, u, step)
                plan()
                wrong += wrong_cells(grid, u, step)
            settle(xp)
        assert agree(int(wrong) == 0, comm), int(wrong)


# Typed messages


def module(way: Way, comm: MPI.Intracomm) -> Any:
    """Return NumPy, or CuPy after selection of the GPU that a grid would take."""
    if way.device == "cpu":
        return np
    import cupy

    machine = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cupy.cuda.Device(machine.rank % cupy.cuda.runtime.getDeviceCount()).use()
    machine.Free()
    return cupy


def record(gap: int) -> Any:
    """A structure of 15 bytes of data, with an extent of 16 + gap bytes."""
    types = [dt.primitive("f8"), dt.primitive("i4"), dt.primitive("i2"), dt.primitive("u1")]
    return dt.resized(dt.struct([1, 1, 1, 1], [0, 8, 12, 14], types), 0, 16 + gap)


def irregular(seed: int, blocks: int, total: int) -> Any:
    """Blocks of random lengths at random places in random order, ``total`` doubles in all."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, total), blocks - 1, replace=False))
    lengths = np.diff([0, *cuts, total])
    starts = np.cumsum(lengths + rng.integers(1, 4, blocks)) - lengths
    order = rng.permutation(blocks)
    return dt.indexed(lengths[order].tolist(), starts[order].tolist(), "f8")


def transposed(n: int) -> Any:
    """The columns of a matrix of doubles, one after the other."""
    return dt.contiguous(n, dt.resized(dt.vector(n, 1, n, "f8"), 0, 8))


TYPE_PAIRS: dict[str, tuple[Any, Any]] = {
    "vector to contiguous": (TYPES["vector"], TYPES["contiguous"]),
    "contiguous to vector": (TYPES["contiguous"], TYPES["vector"]),
    "columns to box": (TYPES["columns"], TYPES["box"]),
    "scattered to triangle": (TYPES["scattered"], TYPES["triangle"]),
    "triangle to columns": (TYPES["triangle"], TYPES["columns"]),
    "rows to columns": (dt.contiguous(150 * 150, "f8"), transposed(150)),
    "irregular to irregular": (irregular(1, 900, 40_000), irregular(2, 1700, 40_000)),
    "irregular to contiguous": (irregular(3, 900, 40_000), dt.contiguous(40_000, "f8")),
    "records": (dt.contiguous(50, record(0)), dt.contiguous(50, record(13))),
}


def typed_messages(
    way: Way, comm: MPI.Intracomm, pair: str, one_way: bool, zeros: Any = None
) -> None:
    """Send between different types, to a neighbour and to this rank itself, and compare with MPI's transfer.

    ``zeros(n, dtype)`` allocates the arrays, by default by NumPy or CuPy.
    """
    from halox.runtime.gpu.devices import to_host

    sent, received = TYPE_PAIRS[pair]
    xp = module(way, comm)
    nbytes = max(t.true_ub for t in (sent, received)) + 8
    rng = np.random.default_rng([SEED, comm.rank])
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    if one_way:
        low, high = (
            low if comm.rank else MPI.PROC_NULL,
            high if comm.rank < comm.size - 1 else MPI.PROC_NULL,
        )
    a, b = sent.to_mpi(), received.to_mpi()
    source, target, own = ((zeros or xp.zeros)(nbytes, "u1") for _ in range(3))
    sends = [Send(source, sent, high), Send(source, sent, comm.rank, tag=9)]
    receives = [Recv(target, received, low), Recv(own, received, comm.rank, tag=9)]
    try:
        with Exchange(sends, receives, comm=comm, path=way.path) as exchange:
            for _ in range(3):
                host = rng.integers(0, 256, nbytes, "u1")
                wanted, wanted_own = np.zeros(nbytes, "u1"), np.zeros(nbytes, "u1")
                comm.Sendrecv([host, 1, a], high, 0, [wanted, 1, b], low, 0)
                comm.Sendrecv([host, 1, a], comm.rank, 0, [wanted_own, 1, b], comm.rank, 0)
                source[...] = xp.asarray(host)
                exchange()
                right = [
                    np.array_equal(to_host(target), wanted),
                    np.array_equal(to_host(own), wanted_own),
                ]
                assert agree(all(right), comm), right
    finally:
        a.Free()
        b.Free()


def one_way_runs_ahead(way: Way, comm: MPI.Intracomm, zeros: Any = None, steps: int = 100) -> None:
    """Send one way: the sender's host runs far ahead, and must not overwrite data that the receiver has not read."""
    n = 1 << 15
    xp = module(way, comm)
    x, y = ((zeros or xp.zeros)(k, "f8") for k in (n, 2 * n))
    sends = [Send(x, dt.contiguous(n, "f8"), comm.rank + 1)] if comm.rank < comm.size - 1 else []
    receives = [Recv(y, dt.vector(n, 1, 2, "f8"), comm.rank - 1)] if comm.rank else []
    wrong = xp.zeros((), "i8")
    with Exchange(sends, receives, comm=comm, path=way.path) as exchange:
        for step in range(steps):
            if receives and step % 10 == 0:
                stall(xp)
            x[...] = xp.arange(n) + step * 1e6 + comm.rank * 1e5
            exchange()
            if receives:
                came = xp.arange(n) + step * 1e6 + (comm.rank - 1) * 1e5
                wrong += (y[::2] != came).sum() + (y[1::2] != 0).sum()
        assert agree(int(wrong) == 0, comm), int(wrong)
