"""Gathering of whole fields: dtypes, layouts, parts of any size, and errors."""

from __future__ import annotations

import math
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, MismatchError
from halox.gathering import gather as gathering
from halox.runtime.communicator import CELLS, UNFINISHED
from tests.limits import move_in_parts
from tests.mpi.conftest import agree
from tests.mpi.limits import SHORT_S, short_waits

pytestmark = pytest.mark.usually(1, 2)

OUT_OF_ORDER = {"names": ["a", "b"], "formats": ["f8", "f4"], "offsets": [8, 0]}
WITH_HOLES = {
    "names": ["a", "b"],
    "formats": ["f8", ("i2", (3,))],
    "offsets": [24, 4],
    "itemsize": 40,
}
OVERLAPPING = {"names": ["all", "half"], "formats": ["u8", "u4"], "offsets": [0, 4]}


def grid(comm: MPI.Intracomm, shape: Any = None, **options: Any) -> halox.Grid:
    shape = (5, 4 * comm.size + 1) if shape is None else shape
    return halox.Grid(shape, **({"comm": comm, "device": "cpu"} | options))


def coded(layout: Any, itemsize: int, rank: int) -> np.ndarray:
    """Return random bytes in the shape of a rank's interior, different on each rank."""
    shape = [
        len(range(n)[cut]) for n, cut in zip(layout.padded_shape, layout.interior, strict=True)
    ]
    rng = np.random.default_rng(rank)
    return rng.integers(0, 256, (*shape, itemsize), dtype=np.uint8)


def check(g: halox.Grid, field: Any, root: int) -> None:
    """Fill a field at random, gather it, and compare each byte with the blocks of all ranks."""
    layout, n = g.layout(field), field.dtype.itemsize
    spec, raw = layout.spec, f"V{n}"
    mine = coded(layout, n, g.rank)
    field.view(raw)[layout.interior] = mine.view(raw)[..., 0]
    whole = g.gather(field, root=root)
    if g.rank != root:
        assert whole is None
        return
    assert whole is not None and whole.dtype == field.dtype
    for rank in range(g.size):
        other = type(layout)(layout.decomposition, rank, spec)
        before = (slice(None),) * len(spec.components_before)
        found = np.ascontiguousarray(whole.view(raw)[(*before, *other.owned)])
        expected = coded(other, n, rank)
        assert found.tobytes() == expected.tobytes(), rank


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("part_bytes", [1, 40, 1000, None])
@pytest.mark.parametrize(
    ("shape", "proc_shape"),
    [((37,), (0,)), ((11, 9), (0, 1)), ((11, 9), (1, 0)), ((3, 4, 5, 10), (1, 1, 1, 0))],
    ids=str,
)
def test_in_parts_of_any_size(
    part_bytes: int | None,
    shape: Any,
    proc_shape: Any,
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if part_bytes is not None:
        move_in_parts(monkeypatch, part_bytes)
    with grid(comm, shape, proc_shape=proc_shape) as g:
        check(g, g.zeros("i4"), 0)
        check(g, g.zeros("c8", components=2, components_after=3, staggered=0), comm.size - 1)
        reversed_axes = np.zeros(g.padded_shape[::-1], "f8").T
        check(g, reversed_axes, comm.size // 2)


@pytest.mark.parametrize(
    "dtype",
    ["?", "S3", "U2", "M8[s]", "V5", ">f8", OUT_OF_ORDER, WITH_HOLES, OVERLAPPING],
    ids=["bool", "S3", "U2", "M8", "V5", "big-endian", "out of order", "with holes", "overlapping"],
)
def test_dtypes(dtype: Any, comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        u = g.zeros(np.dtype(dtype))
        check(g, u, 0)
        if dtype is not OVERLAPPING:
            g.exchange(u)


@pytest.mark.ranks(2, 3)
def test_memory_on_the_root(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root needs memory for the whole field and a few parts, also if ranks share the rows of the field."""
    move_in_parts(monkeypatch, 1 << 16)
    for proc_shape in ((comm.size, 1), (1, comm.size)):
        with grid(comm, (500 * comm.size, 200 * comm.size), proc_shape=proc_shape) as g:
            u = g.zeros("f8")
            tracemalloc.start()
            try:
                whole = g.gather(u)
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            room = math.prod(g.grid_shape) * 8 if comm.rank == 0 else 0
            assert peak < room + 10 * (1 << 16), (proc_shape, peak - room)
            assert (whole is None) == (comm.rank != 0)


@pytest.mark.parametrize("root", [5000, -2, -1, True, "x", 0.0, None])
def test_a_root_that_is_no_rank(root: Any, comm: MPI.Intracomm) -> None:
    text = rf"root must be a rank, 0 to {comm.size - 1}, got {root!r}"
    with grid(comm) as g:
        u = g.ones()
        with pytest.raises(FieldError, match=text):
            g.gather(u, root=root)
        with pytest.raises(FieldError, match=text):
            g.gather(u, root=root if comm.rank == comm.size - 1 else 0)
        whole = g.gather(u, root=np.int32(0))
        assert whole is None or np.all(whole == 1), "the grid goes on"


@pytest.mark.ranks(2, 3)
def test_what_differs_between_ranks(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    here, there = comm.size - 1, np.dtype(OUT_OF_ORDER)
    with grid(comm) as g:
        u = g.ones()
        roots = rf"one root on all ranks: rank 0 gave root=0, rank {here} root={here};"
        with pytest.raises(MismatchError, match=roots):
            g.gather(u, root=comm.rank if last else 0)
        v = np.zeros(g.padded_shape, there if last else "f8")
        with pytest.raises(MismatchError):
            g.gather(v)
        w = g.zeros(components=2), g.zeros(components=3)
        with pytest.raises(MismatchError):
            g.gather(w[last])
        with pytest.raises(FieldError):
            g.gather(np.zeros(3) if last else u)
        assert comm.rank or np.all(g.gather(u) == 1)
        assert comm.rank == 0 or g.gather(u) is None


def test_a_root_without_memory(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: Any) -> Any:
        raise MemoryError("no room")

    with grid(comm) as g:
        u = g.ones()
        with monkeypatch.context() as patched:
            patched.setattr(gathering, "allocate", too_large)
            with pytest.raises(HaloxError, match="a gather failed: MemoryError: no room"):
                g.gather(u, root=comm.size - 1)
        g.gather(u)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("missing", [0, -1])
@pytest.mark.full
def test_a_rank_that_does_not_come(missing: int, comm: MPI.Intracomm) -> None:
    missing %= comm.size
    g = grid(comm.Dup())
    u = g.ones()
    comm.Barrier()
    if comm.rank != missing:
        text = rf"rank {comm.rank} has waited in a gather for rank {missing} "
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
            g.gather(u)
    comm.Barrier()


@pytest.mark.ranks(2, 3)
def test_a_rank_that_stops_half_way(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root's error names the rank; parts that this rank sends later do not arrive in reused memory."""
    move_in_parts(monkeypatch, 1 << 16)
    last = comm.size - 1
    g = grid(comm.Dup(), (400 * comm.size, 100), proc_shape=(comm.size, 1))
    u = g.full(comm.rank + 1)
    sent: list[Any] = []
    if comm.rank == last:
        monkeypatch.setattr(gathering, "_send", lambda *arguments: sent.append(arguments))
    comm.Barrier()
    found = None
    with short_waits():
        try:
            g.gather(u)
        except ExchangeTimeoutError as error:
            found = str(error)
    if comm.rank == 0:
        assert found is not None
        assert f"rank 0 has waited in a gather for rank {last} for {SHORT_S:g} s" in found
    comm.Barrier()
    later = [np.zeros(1 << 13) for _ in range(50)]
    if sent:
        parts = [np.ones(1 << 13) for _ in range(2)]
        world = sent[0][0]
        sent = [world.comm.Isend(part, 0, world.ranks.call_tag(CELLS)) for part in parts]
    comm.Barrier()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        comm.iprobe()
    assert agree(not any(a.any() for a in later), comm)
    UNFINISHED.extend([*sent, u])
