"""Gathering of whole fields: dtypes, layouts, parts of any size, and errors."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, HaloxError, MismatchError
from tests.limits import move_in_parts

pytestmark = pytest.mark.usually(1, 3)

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
@pytest.mark.parametrize(
    "shape, proc_shape, part_bytes",
    [
        ((37,), (0,), 40),
        ((11, 9), (0, 1), 1),
        ((11, 9), (1, 0), None),
        ((11, 9), (1, 0), 1),
        ((3, 4, 5, 10), (1, 1, 1, 0), 1000),
    ],
)
def test_in_parts_of_any_size(
    shape: Any,
    proc_shape: Any,
    part_bytes: int | None,
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if part_bytes is not None:
        move_in_parts(monkeypatch, part_bytes)
    with grid(comm, shape, proc_shape=proc_shape) as g:
        check(g, g.zeros("i4"), 0)
        check(g, g.zeros("c8", components=(2, ..., 3), staggered=0), comm.size - 1)
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


def test_a_root_that_is_no_rank(comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        u = g.ones()
        for root in (5000, -2, True, "x", 0.0, None):
            with pytest.raises(FieldError, match="root"):
                g.gather(u, root=root)
        with pytest.raises(FieldError, match="root"):
            g.gather(u, root=-1 if comm.rank == comm.size - 1 else 0)
        whole = g.gather(u, root=np.int32(0))
        assert whole is None or np.all(whole == 1), "the grid goes on"


@pytest.mark.ranks(2, 3)
def test_what_differs_between_ranks(comm: MPI.Intracomm) -> None:
    last = comm.rank == comm.size - 1
    with grid(comm) as g:
        u = g.ones()
        with pytest.raises(MismatchError, match="root"):
            g.gather(u, root=comm.rank if last else 0)
        v = np.zeros(g.padded_shape, OUT_OF_ORDER if last else "f8")
        with pytest.raises(MismatchError, match="dtype"):
            g.gather(v)
        w = g.zeros(components=2), g.zeros(components=3)
        with pytest.raises(MismatchError, match="layout"):
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
            patched.setattr("halox.io.gather_scatter.allocate", too_large)
            with pytest.raises(HaloxError, match="no room"):
                g.gather(u, root=comm.size - 1)
        g.gather(u)


REGIONS = [
    (slice(2, 3), slice(None)),
    (slice(None, None, 2), slice(1, None, 3)),
    (slice(-1, None), slice(0, 1)),
    (slice(0, 99), slice(1, -1, 4)),
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("part_bytes", [1, None])
def test_regions(
    part_bytes: int | None, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NumPy cuts them from the whole array; scattered back, they fill the region and nothing else."""
    if part_bytes is not None:
        move_in_parts(monkeypatch, part_bytes)
    root = comm.size - 1
    for proc_shape in ((0, 1), (1, 0)):
        with grid(comm, (9, 3 * comm.size + 2), proc_shape=proc_shape) as g:
            for options in ({}, {"components": (2, ..., 3), "staggered": 1}):
                u, back = g.zeros("i4", **options), g.zeros("i4", **options)
                u[...] = 10_000 * g.rank + np.arange(u.size).reshape(u.shape)
                before = (slice(None),) * bool(options)
                whole = g.gather(u, root)
                for region in REGIONS:
                    part = g.gather(u, root, region=region)
                    back[...] = -1
                    assert g.scatter(part, root, out=back, region=region) is back
                    found = g.gather(back, root)
                    if g.rank == root:
                        expected = np.full_like(whole, -1)
                        expected[(*before, *region)] = whole[(*before, *region)]
                        assert np.array_equal(part, whole[(*before, *region)])
                        assert np.array_equal(found, expected)
                    else:
                        assert part is None


@pytest.mark.ranks(2, 3)
def test_bad_regions_are_one_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    everything = slice(None)
    with grid(comm) as g:
        u, last = g.ones(), comm.rank == comm.size - 1
        for bad in (
            (slice(3, 3), everything),
            (slice(99, None), everything),
            (slice(None, None, -1), everything),
            (slice(1.5, None), everything),
            (everything,),
            (0, everything),
            3,
        ):
            with pytest.raises(FieldError, match="region"):
                g.gather(u, region=bad)
            with pytest.raises(FieldError, match="region"):
                g.scatter(np.ones(1), out=u, region=bad)
        with pytest.raises(MismatchError, match="region"):
            g.gather(u, region=(slice(int(last), None), everything))
        with pytest.raises(FieldError, match="out"):
            g.scatter(np.ones((1, 2)), region=(slice(1), slice(2)))
        with pytest.raises(FieldError, match="whole"):
            g.scatter(np.ones((1, 3)), out=u, region=(slice(1), slice(2)))
        assert g.sum(u) == math.prod(g.grid_shape), "the grid goes on"
