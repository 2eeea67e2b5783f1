"""Arrays of the cells that a rank owns, without a halo, as fields: beside NumPy on the whole array."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError

pytestmark = pytest.mark.usually(1, 2, 3, 4)


def grid(comm: MPI.Intracomm, shape: Any = (7, 10), **options: Any) -> halox.Grid:
    return halox.Grid(shape, **({"comm": comm, "device": "cpu", "halo": (1, 2)} | options))


def cells(g: halox.Grid, whole: np.ndarray, before: int = 0) -> np.ndarray:
    """Return a copy of this rank's cells of a whole array, with ``before`` component axes in front."""
    return whole[(slice(None),) * before + g.owned].copy()


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape)


@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("copy", (3,), ()),
        ("view", (), ()),
        ("view", (2,), (3,)),
        ("permuted", (), (2, 3)),
        ("strided", (), ()),
        ("negative", (3,), ()),
    ],
)
def test_all_calls_that_need_no_halo_take_the_owned_cells(
    comm: MPI.Intracomm, form: str, before: Any, after: Any
) -> None:
    whole = values(*before, 7, 10, *after)
    with grid(comm) as g:
        u = cells(g, whole, len(before))
        if form == "view":
            f = g.zeros(components=(*before, ..., *after))
            g.interior(f)[...] = u
            u = g.interior(f)
        elif form == "permuted":
            u = np.asfortranarray(u)
        elif form == "strided":
            u = np.repeat(u, 2, -1)[..., ::2]
        elif form == "negative":
            u = u[..., ::-1].copy()[..., ::-1]
        gathered = g.gather(u)
        assert gathered is None if g.rank else np.array_equal(gathered, whole)
        for root in range(g.size):
            found = g.gather(u, root, region=(slice(1, 6, 2), slice(0, None, 4)))
            cut = (..., slice(1, 6, 2), slice(0, None, 4), *[slice(None)] * len(after))
            assert found is None if g.rank != root else np.array_equal(found, whole[cut])
        for name in ("sum", "mean", "std", "min", "max"):
            assert np.isclose(getattr(g, name)(u), getattr(np, name)(whole)), name
        assert np.isclose(g.norm(u), np.linalg.norm(whole))
        assert np.isclose(g.dot(u, 2 * u), 2 * (whole**2).sum())
        assert np.isclose(g.reduce("u * u - 1", u=u), (whole**2 - 1).sum())
        assert np.isclose(g.sum("w + index_y", w=u), (whole + axis_1(whole, before)).sum())
        assert g.sum(u, reproducible=True) == g.sum(u + 0.0, reproducible=True)
        assert g.argmax(u) == np.unravel_index(whole.argmax(), whole.shape)
        assert np.array_equal(g.histogram(u, 5)[0], np.histogram(whole, 5)[0])
        summed = g.sum(u, axis=1)
        assert np.allclose(summed, whole.sum(axis=len(before) + 1))
        into = np.zeros_like(u)
        g.scatter(whole if g.rank == 0 else None, out=into)
        assert np.array_equal(into, u)
        assert g.layout(u).owned == g.owned and g.interior(u).shape == u.shape


def axis_1(whole: np.ndarray, before: Any) -> np.ndarray:
    shape = [1] * whole.ndim
    shape[len(before) + 1] = -1
    return np.arange(whole.shape[len(before) + 1]).reshape(shape)


@pytest.fixture
def folder(comm: MPI.Intracomm) -> Iterator[Path]:
    name = comm.bcast(tempfile.mkdtemp(prefix="halox-test-") if comm.rank == 0 else None)
    yield Path(name)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(name)


def test_files_take_the_owned_cells(comm: MPI.Intracomm, folder: Path) -> None:
    """Records and checkpoints may come from one kind of array, and be read into the other."""
    pytest.importorskip("tensorstore")
    zarr = pytest.importorskip("zarr")
    whole = values(2, 7, 10)
    with grid(comm, boundary="symmetric") as g:
        u, padded = cells(g, whole, 1), g.zeros(components=2)
        g.interior(padded)[...] = u
        g.save(folder / "u.zarr", u=u)
        loaded, into = g.load(folder / "u.zarr")["u"], np.zeros_like(u)
        assert g.layout(loaded) is g.layout(padded)
        g.load(folder / "u.zarr", u=into)
        assert np.array_equal(g.interior(loaded), u) and np.array_equal(into, u)
        g.save(folder / "u.npy", u=u)
        with halox.Output(g, folder / "run.zarr", u=padded) as out:
            out.append(time=0.0)
            out.append(time=1.0, u=2 * u)
        with halox.Output(g, folder / "cut.zarr", u=u, region=(slice(1, 6, 2), slice(3, 4))) as out:
            out.append(time=0.0)
            out.append(time=1.0, u=2 * padded)
        comm.Barrier()
    if comm.rank == 0:
        assert np.array_equal(np.load(folder / "u.npy"), whole)
        assert np.array_equal(zarr.open(str(folder / "run.zarr"))["u"][:], [whole, 2 * whole])
        cut = whole[:, 1:6:2, 3:4]
        assert np.array_equal(zarr.open(str(folder / "cut.zarr"))["u"][:], [cut, 2 * cut])


def test_expressions_mix_fields_with_and_without_halo(comm: MPI.Intracomm) -> None:
    whole = values(7, 10)
    with grid(comm) as g:
        u, v = cells(g, whole), g.zeros()
        g.interior(v)[...] = 3 * u
        wide = g.zeros(halo=3)
        g.interior(wide)[...] = u
        for _ in range(3):  # the last calls find their arrays again
            assert np.isclose(g.reduce("u * v + w", u=u, v=v, w=wide), (3 * whole**2 + whole).sum())
            assert np.isclose(g.dot(u, v), 3 * (whole**2).sum())
            assert np.isclose(g.dot(v, g.interior(v)), 9 * (whole**2).sum())
            assert np.isclose(g.sum(g.interior(v) - u), 2 * whole.sum())
        with pytest.raises(FieldError, match="of one layout"):
            g.dot(u, g.zeros(components=2))


def test_cells_of_staggered_fields(comm: MPI.Intracomm) -> None:
    """Along periodic axes these are as many as cells; along others an error, on any number of ranks."""
    with grid(comm, periodic=(True, False)) as g:
        u, v = g.zeros(staggered=0), g.zeros(staggered=1)
        g.interior(u)[...] = g.indices(field=u)[0]
        gathered = g.gather(g.interior(u))
        if g.rank == 0:
            assert np.array_equal(gathered, np.repeat(np.arange(7.0)[:, None], 10, 1))
        for call in (g.gather, g.sum, g.std):
            with pytest.raises(FieldError, match="array"):
                call(g.interior(v))
        assert np.isclose(g.sum(g.interior(g.ones()) * 2), 140)


def test_a_halo_that_a_call_needs_is_an_error_on_all_ranks(comm: MPI.Intracomm) -> None:
    with grid(comm) as g:
        u, padded = cells(g, values(7, 10)), np.zeros(g.layout(g.zeros()).padded_shape)
        for call in (g.exchange, g.accumulate, g.plan):
            with pytest.raises(FieldError, match=r"array.* without their halo"):
                call(u)
            with pytest.raises(FieldError, match=r"array.* without their halo"):
                call(u if g.rank == g.size - 1 else padded)
        assert np.isclose(g.sum(u), values(7, 10).sum())
        declared = g.zeros_like(u)  # has no halo
        g.exchange(declared)
        with pytest.raises(FieldError, match=r"array.* without their halo"):
            g.exchange(u)
    with grid(comm, halo=0) as g:
        g.exchange(cells(g, values(7, 10)))


@pytest.mark.parametrize("name", ["sum", "gather", "std", "exchange"])
@pytest.mark.parametrize(
    ("extents", "declared", "shape"),
    [
        ((4, 4), {}, (4, 4, 4)),  # components before or after the cells
        ((4,), {}, (4, 7)),  # or 4 components of a field with its halo
        ((4,), {"components": 4, "halo": ((3, 3),)}, (4, 10)),  # or of a declared field
    ],
)
def test_a_shape_with_two_readings_is_an_error_on_all_ranks(
    comm: MPI.Intracomm, name: str, extents: Any, declared: Any, shape: Any
) -> None:
    """An exchange takes the reading with the halo that it needs."""
    whole, ndim = (extents[0] * comm.size, *extents[1:]), len(extents)
    parts = (comm.size, *[1] * (ndim - 1))
    with grid(comm, whole, proc_shape=parts, halo=((1, 2),) * ndim, periodic=True) as g:
        kept = g.zeros(**declared)
        if name == "exchange" and shape != (4, 4, 4):
            low, high = (3, 3) if declared else (1, 2)
            array = np.full(shape, -1.0)
            array[:, low:-high] = 4.0 * comm.rank + np.arange(4)
            g.exchange(array)
            row = (4.0 * comm.rank + np.arange(-low, 4 + high)) % whole[0]
            assert np.array_equal(array, np.broadcast_to(row, shape))
            return
        with pytest.raises(FieldError, match=r"array: .* can be read in .* ways.*grid\.declare"):
            getattr(g, name)(np.ones(shape))
        array = g.declare(np.ones(shape), halo=0, components=(..., *shape[ndim:]))
        assert g.sum(array) == comm.size * array.size and g.sum(kept) == 0


def test_tensors_of_as_many_images_and_channels_as_cells(comm: MPI.Intracomm) -> None:
    """On some ranks (N, C, H, W) could also be cells without halo with components (H, W)."""
    with grid(comm, (11, 7), halo=1, boundary="edge") as g:
        for before in sorted(set(comm.allgather(cells(g, np.empty((11, 7))).shape))):
            whole = values(*before, 11, 7)
            array = np.zeros((*before, *g.padded_shape))
            array[..., 1:-1, 1:-1] = cells(g, whole, 2)
            g.exchange(array)
            (top, left), (bottom, right) = [
                (s.start for s in g.owned),
                (s.stop + 2 for s in g.owned),
            ]
            padded = np.pad(whole, ((0, 0), (0, 0), (1, 1), (1, 1)), "edge")
            assert np.array_equal(array, padded[..., top:bottom, left:right])


def test_unlike_blocks_are_read_alike(comm: MPI.Intracomm) -> None:
    """The shape has two readings on the last rank alone."""
    cuts = [5] * (comm.size - 1) + [4]
    with grid(comm, sum(cuts), blocks=[cuts], halo=1) as g:
        array = np.ones((cuts[comm.rank], 6))
        with pytest.raises((FieldError, MismatchError)):
            g.gather(array)
