"""Names and coordinates of a grid's axes, given once: labelled arrays, checkpoints and datasets use them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from tests.mpi.bad_input import Table, check_error

pytestmark = pytest.mark.usually(2)

xr = pytest.importorskip("xarray")

SHAPE = (8, 6)
DIMS = ("lon", "lat")
LON = 5.0 + 10 * np.arange(8)  # cells of 10 degrees on a periodic axis
LAT = np.linspace(50, -50, 6)
LON_FACE, LAT_FACE = 10.0 * np.arange(8), np.linspace(60, -60, 7)


def make(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    options = {"dims": DIMS, "coords": {"lon": LON, "lat": LAT}} | options
    return halox.Grid(SHAPE, comm=comm, device="cpu", periodic=(True, False), **options)


@pytest.fixture
def grid(comm: MPI.Intracomm) -> Iterator[halox.Grid]:
    units = xr.DataArray(LAT, dims="lat", attrs={"units": "degrees_north"})
    with make(comm, coords={"lon": LON, "lat": units}) as found:
        yield found


def fields_of(grid: halox.Grid) -> dict[str, Any]:
    """Return a field of each staggering, with the global index of each point."""
    fields = {"h": grid.zeros(), "u": grid.zeros(staggered=0), "v": grid.zeros(staggered=1)}
    for field in fields.values():
        i, j = grid.indices(field=field)
        grid.interior(field)[...] = 100 * i + j
    return fields


def test_coordinates_of_the_grid(comm: MPI.Intracomm) -> None:
    with make(comm, coords={"lon": LON}) as grid:
        assert {*grid.coords.keys()} == {"lon", "lon_face"}
        assert np.array_equal(grid.coords["lon"], LON)
        assert np.array_equal(grid.coords["lon_face"], LON_FACE)
        with make(comm, coords=grid.coords) as same, make(comm, coords=None) as bare:
            assert dict(same.coords).keys() == grid.coords.keys() and not bare.coords
            for one in (grid, bare):  # programs that take them for process coordinates
                for wrong in (
                    lambda c: [each == 0 for each in c],
                    lambda c: c[0],
                    lambda c: c == (0, 0),
                    lambda c: c != (0, 0),
                ):
                    with pytest.raises(TypeError, match="proc_coords"):
                        wrong(one.coords)
        with pytest.raises(KeyError, match="lat"):
            grid.coords["lat"]
        with pytest.raises(ValueError, match="read-only"):
            grid.coords["lon"][0] = 1


@pytest.mark.parametrize("halo", [False, True])
def test_every_variable_has_the_coordinates_of_its_staggering(grid: halox.Grid, halo: bool) -> None:
    arrays = {name: grid.dataarray(u, halo=halo) for name, u in fields_of(grid).items()}
    dataset = xr.merge([array.rename(name) for name, array in arrays.items()], join="exact")
    assert {name: dataset[name].dims for name in arrays} == {
        "h": DIMS,
        "u": ("lon_face", "lat"),
        "v": ("lon", "lat_face"),
    }
    for name, field in fields_of(grid).items():
        array = arrays[name]
        assert dataset[name].shape == array.shape
        of_axes = zip(array.dims, grid.indices(field=field, halo=halo), strict=True)
        for (dim, indices), start, step in zip(of_axes, (0, 60), (10, -20), strict=True):
            shift = 0 if dim.endswith("_face") else 0.5
            assert np.allclose(array[dim], start + step * (indices.ravel() + shift))
            assert array[dim].attrs == ({"units": "degrees_north"} if "lat" in dim else {})


def test_blocks_of_all_ranks_combine(grid: halox.Grid) -> None:
    fields = fields_of(grid)
    for name, coords in {"h": (LON, LAT), "u": (LON_FACE, LAT), "v": (LON, LAT_FACE)}.items():
        blocks = grid.comm.allgather(grid.dataarray(fields[name], name=name).copy(deep=True))
        whole = xr.combine_by_coords([block.to_dataset() for block in blocks], join="outer")[name]
        i, j = np.indices([len(along) for along in coords])
        whole = whole.sortby(whole.dims[1], ascending=False)
        assert np.array_equal(whole, 100 * i + j)
        for dim, expected in zip(whole.dims, coords, strict=True):
            assert np.allclose(whole[dim], expected)


def test_checkpoints_have_them(grid: halox.Grid, comm: MPI.Intracomm, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path = comm.bcast(tmp_path)
    fields = fields_of(grid)
    dataset = xr.Dataset({name: grid.dataarray(u, halo=True) for name, u in fields.items()})
    before = {name: u.copy() for name, u in fields.items()}
    dataset.halox.exchange(grid)
    assert not np.array_equal(fields["h"], before["h"])
    grid.save(path / "saved.zarr", fields)
    dataset.halox.to_zarr(path / "dataset.zarr", grid)
    dataset.drop_vars([*dataset.coords]).halox.to_zarr(path / "bare.zarr", grid)
    for name in ("saved", "dataset", "bare"):
        with xr.open_zarr(path / f"{name}.zarr", chunks=None) as found:
            assert set(found.data_vars) == set(fields)
            assert found.v.dims == ("lon", "lat_face") and found.u.dims == ("lon_face", "lat")
            for dim, expected in {
                "lon": LON,
                "lat": LAT,
                "lon_face": LON_FACE,
                "lat_face": LAT_FACE,
            }.items():
                assert np.allclose(found[dim], expected), (name, dim)
            assert found.lat.attrs == {"units": "degrees_north"}
            again = grid.from_dataarray(found.u)
        assert np.array_equal(grid.interior(again), grid.interior(fields["u"]))
        assert grid.layout(again).spec.staggered == (True, False)
    grid.save(path / "cells.zarr", h=fields["h"])
    with xr.open_zarr(path / "cells.zarr", chunks=None) as found:
        assert set(found.coords) == {"lon", "lat"}


def test_a_call_has_precedence(grid: halox.Grid, comm: MPI.Intracomm, tmp_path: Path) -> None:
    u, v = grid.zeros(), grid.zeros(staggered=0)
    array = grid.dataarray(u, dims=("i", "j"), coords={"i": 2 * LON})
    assert array.dims == ("i", "j")
    assert np.array_equal(array.i, 2 * LON[grid.owned[0]])
    assert np.array_equal(array.j, LAT[grid.owned[1]])
    faces = grid.dataarray(v, coords={"lon_face": LON}).lon_face
    assert np.array_equal(faces, LON[grid.layout(v).owned[0]])
    assert grid.dims == DIMS and grid.dataarray(u).dims == DIMS
    pytest.importorskip("zarr")
    path = comm.bcast(tmp_path) / "run.zarr"
    grid.save(path, u=u, dims=("i", "j"), coords={"i": 2 * LON})
    with xr.open_zarr(path, chunks=None) as found:
        assert np.array_equal(found.i, 2 * LON) and np.array_equal(found.j, LAT)


def test_the_callers_array_may_change_later(comm: MPI.Intracomm) -> None:
    mine = LON.copy()
    with make(comm, coords={"lon": mine}) as grid:
        mine[...] = 0
        assert np.array_equal(grid.dataarray(grid.zeros()).lon, LON[grid.owned[0]])
        assert np.array_equal(grid.dataarray(grid.zeros()).lat, np.r_[grid.owned[1]])


def test_by_default_axes_are_x_and_y(comm: MPI.Intracomm) -> None:
    with halox.Grid(SHAPE, comm=comm, device="cpu") as grid:
        assert grid.dims == ("x", "y")
        array = grid.dataarray(grid.zeros(staggered=0))
        assert np.array_equal(array.x_face, np.r_[grid.layout(grid.zeros(staggered=0)).owned[0]])


def labelled_by(**options: Any) -> Any:
    return lambda comm: make(comm, **options)


def exchange_of(labelled: Any) -> Any:
    def call(comm: MPI.Intracomm) -> None:
        with make(comm) as grid:
            grid.exchange(labelled(grid.dataarray(grid.zeros(), halo=True)))

    return call


def indices_of(**options: Any) -> Any:
    def call(comm: MPI.Intracomm) -> None:
        with make(comm) as grid:
            grid.indices(field=grid.zeros(), **options)

    return call


BAD: Table = {
    "dims of another number of axes": (labelled_by(dims=("lon",)), FieldError, "dims"),
    "dims of which one is called like the faces of another": (
        labelled_by(dims=("x", "x_face")),
        FieldError,
        "dims",
    ),
    "dims that differ >1": (
        lambda comm: make(comm, coords=None, dims=DIMS if comm.rank == 0 else DIMS[::-1]),
        MismatchError,
        "dims",
    ),
    "coords of an unknown dimension": (labelled_by(coords={"x": LON}), FieldError, "coords"),
    "coords of the wrong length": (
        labelled_by(coords={"lat_face": LAT}),
        FieldError,
        "coords['lat_face']",
    ),
    "coords that are texts": (
        labelled_by(coords={"lat": list("abcdef")}),
        FieldError,
        "coords['lat']",
    ),
    "coords that are no mapping": (labelled_by(coords=LON), FieldError, "coords"),
    "coords on one rank only >1": (
        lambda comm: make(comm, dims=None, coords={"x": LON} if comm.rank else None),
        MismatchError,
        "coords",
    ),
    "coords that differ >1": (
        lambda comm: make(comm, coords={"lon": LON + comm.rank}),
        MismatchError,
        "coords",
    ),
    "a labelled array in an exchange": (exchange_of(lambda array: array), FieldError, "DataArray"),
    "a dataset in an exchange": (
        exchange_of(lambda array: array.to_dataset(name="u")),
        FieldError,
        "Dataset",
    ),
    "indices of a field and of a staggering": (indices_of(staggered=0), FieldError, "staggered"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    check_error(BAD, name, comm)
