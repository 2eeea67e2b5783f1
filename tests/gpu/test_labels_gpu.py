"""Names and coordinates of the axes, indices of staggered fields, and errors, of a grid on a GPU."""

from __future__ import annotations

import traceback

import numpy as np
import pytest

import halox
from halox.errors import FieldError
from tests.support import require

require("gpu")

import cupy  # noqa: E402
from mpi4py import MPI  # noqa: E402

pytestmark = pytest.mark.gpu

SHAPE = (8, 6)
LON, LAT = 5.0 + 10 * np.arange(8), np.linspace(50, -50, 6)


def make() -> halox.Grid:
    options = {"periodic": (True, False), "comm": MPI.COMM_SELF, "device": "gpu"}
    coords = {"lon": cupy.asarray(LON), "lat": LAT}
    return halox.Grid(SHAPE, dims=("lon", "lat"), coords=coords, **options)


def test_a_dataset_of_a_grid_with_names_and_coordinates() -> None:
    xr = pytest.importorskip("xarray")
    with make() as grid:
        h, v = grid.zeros(), grid.zeros(staggered=1)
        for field in (h, v):
            i, j = grid.indices(field=field)
            assert isinstance(field, cupy.ndarray) and isinstance(i, cupy.ndarray)
            grid.interior(field)[...] = 100 * i + j
        dataset = xr.Dataset({"h": grid.dataarray(h, halo=True), "v": grid.dataarray(v, halo=True)})
        assert dataset.h.dims == ("lon", "lat") and dataset.v.dims == ("lon", "lat_face")
        dataset.halox.exchange(grid)
        i, j = np.indices((8, 7))
        assert np.array_equal(v[:, 1:-1].get(), np.pad(100 * i + j, ((1, 1), (0, 0)), "wrap"))
        assert np.allclose(dataset.lon, np.r_[-5.0, LON, 85.0])
        assert np.allclose(dataset.lat_face, np.linspace(80, -80, 9))
        points = grid.indices(staggered=(0, 1))
        assert [int(along.size) for along in points] == [8, 7]


def test_errors_are_short_and_name_the_remedy() -> None:
    xr = pytest.importorskip("xarray")
    with make() as grid:
        array = xr.DataArray(grid.zeros(), dims=("lon", "lat"))
        for call in (grid.exchange, grid.sum, grid.gather, grid.interior):
            with pytest.raises(FieldError) as caught:
                call(array)
            assert len(traceback.extract_tb(caught.value.__traceback__)) <= 5
        with pytest.raises(FieldError):
            grid.full(1 + 2j)
