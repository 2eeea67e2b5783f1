"""The staged path with large messages: fragments, order in the user's stream, and refused captures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send, datatypes
from halox.errors import StateError
from halox.paths import fragments
from tests.mpi.conftest import agree
from tests.oracle import Case, Field, check_exchanges
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]

ONES = ((1, 1),) * 3


@pytest.fixture(params=["shared memory", "MPI"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HALOX_PATH", "staged")
    if request.param == "MPI":
        monkeypatch.setenv("HALOX_NODE", "rank")
    yield "mpi" if request.param == "MPI" else "shared"


def most_stages(plan: Any) -> int:
    return max(c._buffers.stages_out for c in plan._runner._channels if hasattr(c, "_buffers"))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_large_faces(axis: int, comm: MPI.Intracomm) -> None:
    """Faces of 2.2 MB with blocks of 8 bytes, of a row or of a plane, with edges and corners."""
    blocks: list[tuple[int, ...]] = [(528,), (528,), (528,)]
    blocks[axis] = (4,) * comm.size
    check_exchanges(Case(tuple(blocks), (True,) * 3, [Field(np.dtype("f8"), ONES)]), comm, "gpu")


def test_fields_of_several_dtypes(comm: MPI.Intracomm) -> None:
    """Fragments that start in one field and end within an element of the next field."""
    sorts = [("f8", ()), ("c16", ()), ("f4", (3,)), ("i1", ()), ("f8", (3, 3))]
    fields = [Field(np.dtype(d), ONES, (), after) for d, after in sorts]
    blocks = ((211,), (203,), (4,) * comm.size)
    check_exchanges(Case(blocks, (True,) * 3, fields), comm, "gpu")


def test_fragments_are_used_and_overlap(way: str, comm: MPI.Intracomm) -> None:
    with halox.Grid((16, 16, 4 * comm.size), periodic=True, comm=comm, device="gpu") as grid:
        assert most_stages(grid.plan(grid.zeros("f8"))) == 1
    with halox.Grid(
        (520, 520, 4 * comm.size),
        periodic=True,
        proc_shape=(1, 1, comm.size),
        comm=comm,
        device="gpu",
    ) as grid:
        plan = grid.plan(grid.zeros("f8"))
        assert most_stages(plan) > 1
        ways = {row.protocol for row in plan.explain().rows if row.peer != comm.rank}
        assert ways == {way}


def test_after_a_stalled_stream_and_on_changing_streams(comm: MPI.Intracomm) -> None:
    shape = (520, 520, 4 * comm.size)
    with halox.Grid(
        shape, periodic=True, proc_shape=(1, 1, comm.size), comm=comm, device="gpu"
    ) as grid:
        u = grid.zeros("f8")
        plan = grid.plan(u)
        x, y, z = grid.indices()
        hx, hy, hz = grid.indices(halo=True)
        wanted = (hx % shape[0]) * 1e6 + (hy % shape[1]) * 1e3 + hz % shape[2]
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        cupy.cuda.Device().synchronize()
        for step in range(9):
            first, second = streams[step % 3], streams[(step // 2) % 3]
            with first:
                stall()
                grid.interior(u)[...] = x * 1e6 + y * 1e3 + z + step * 1e9
                plan.start()
            with second:
                plan.finish()
                right = bool((u == wanted + step * 1e9).all())
                # The next step writes on another stream.
                second.synchronize()
            assert agree(right, comm), step


def test_accumulate_gives_the_bits_of_whole_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of additions does not depend on fragments, so results are equal bit for bit."""
    found = []
    for size in (fragments.FRAGMENT_BYTES, 1 << 30):
        monkeypatch.setattr(fragments, "FRAGMENT_BYTES", size)
        with halox.Grid(
            (520, 520, 4 * comm.size),
            periodic=True,
            proc_shape=(1, 1, comm.size),
            comm=comm,
            device="gpu",
        ) as grid:
            u = grid.zeros("f8")
            values = np.random.default_rng(comm.rank).standard_normal(u.shape)
            u[...] = cupy.asarray(values)
            grid.accumulate(u)
            grid.exchange(u)
            found.append(u.get())
    assert agree(np.array_equal(*found), comm)
    assert not np.array_equal(found[0], values)


def test_an_irregular_type_among_large_ones(comm: MPI.Intracomm) -> None:
    """Irregular datatypes, which cannot be cut, before and after a regular datatype in one message."""
    n, m = 300_000, 40_000
    rng = np.random.default_rng(7)
    at = np.sort(rng.choice(2 * m, m, replace=False))
    scattered = datatypes.indexed_block(1, at, "f8")
    regular = datatypes.vector(n, 1, 2, "f8")
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    a, b = cupy.arange(2.0 * m) + comm.rank, cupy.arange(2.0 * n) + 1e6 * comm.rank
    x, y, z = cupy.zeros(2 * m), cupy.zeros(2 * n), cupy.zeros(m)
    sends = [Send(a, scattered, high), Send(b, regular, high), Send(a, scattered, high)]
    receives = [
        Recv(x, scattered, low),
        Recv(y, regular, low),
        Recv(z, datatypes.contiguous(m, "f8"), low),
    ]
    with Exchange(sends, receives, comm=comm) as exchange:
        for step in range(4):
            a += step
            b += step
            x[...] = y[...] = z[...] = -1
            comm.Barrier()
            exchange()
            extra = sum(range(step + 1))
            theirs = np.arange(2.0 * m) + low + extra
            wx, wy = np.full(2 * m, -1.0), np.full(2 * n, -1.0)
            wx[at] = theirs[at]
            wy[::2] = np.arange(2.0 * n)[::2] + 1e6 * low + extra
            right = [
                np.array_equal(x.get(), wx),
                np.array_equal(y.get(), wy),
                np.array_equal(z.get(), theirs[at]),
            ]
            assert agree(all(right), comm), (step, right)


@pytest.mark.parametrize("n", [16, 520])
def test_capture_is_refused_before_it_is_broken(n: int, comm: MPI.Intracomm) -> None:
    """Small and large messages: the call raises, and leaves the capture and the stream usable."""
    with halox.Grid(
        (n, n, 4 * comm.size), periodic=True, proc_shape=(1, 1, comm.size), comm=comm, device="gpu"
    ) as grid:
        u, v = grid.zeros("f8"), cupy.zeros(10)
        plan, other = grid.plan(u), grid.plan(u)
        plan()
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            v += 1
            with pytest.raises(StateError):
                plan()
            v += 1
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            assert bool((v == 2).all())
            x, y, z = grid.indices()
            grid.interior(u)[...] = x * 1e6 + y * 1e3 + z
            other()
            hx, hy, hz = grid.indices(halo=True)
            right = bool((u == (hx % n) * 1e6 + (hy % n) * 1e3 + hz % (4 * comm.size)).all())
            stream.synchronize()
        assert agree(right, comm)
