"""Labelled arrays: blocks that xarray combines, fields made from labelled arrays, and exchanges of datasets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
import halox.xarray
from halox.errors import FieldError, HaloxError, MismatchError
from tests.mpi.bad_input import Table, check_error

pytestmark = pytest.mark.usually(2)

xr = pytest.importorskip("xarray")

SHAPE = (7, 6)
X = 0.5 + np.arange(SHAPE[0]) / 4
Y = np.linspace(-1, 1, SHAPE[1]) ** 3


@pytest.fixture
def grid(comm: MPI.Intracomm) -> Iterator[halox.Grid]:
    with make(comm) as found:
        yield found


def make(comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    return halox.Grid(SHAPE, comm=comm, device="cpu", periodic=(True, False), **options)


def whole(*shape: int, dtype: str = "f8") -> np.ndarray:
    return np.random.default_rng(5).integers(-99, 99, shape).astype(dtype)


def together(grid: halox.Grid, block: Any) -> Any:
    """Combine the blocks of all ranks by `xarray.combine_by_coords`."""
    return xr.combine_by_coords(grid.comm.allgather(block.copy(deep=True)))


def test_blocks_combine(grid: halox.Grid) -> None:
    values = whole(2, *SHAPE)
    u = grid.zeros(components=2)
    grid.interior(u)[...] = values[(slice(None), *grid.owned)]
    units = xr.DataArray(X, dims="i", attrs={"units": "m"})
    options = {"coords": {"i": units, "j": Y}, "attrs": {"long_name": "wind"}}
    block = grid.dataarray(u, name="u", dims=("i", "j"), **options)
    assert np.shares_memory(block.values, u)
    found = together(grid, block)
    found = found["u"] if isinstance(found, xr.Dataset) else found
    assert found.dims == ("component_0", "i", "j") and found.attrs == {"long_name": "wind"}
    assert np.array_equal(found, values) and found.i.attrs == {"units": "m"}
    assert np.array_equal(found.i, X) and np.array_equal(found.j, Y)


def test_a_staggered_axis_has_faces(grid: halox.Grid) -> None:
    values = whole(SHAPE[0], SHAPE[1] + 1)
    v = grid.zeros(staggered=1)
    layout = grid.layout(v)
    grid.interior(v)[...] = values[layout.owned]
    faces = np.arange(SHAPE[1] + 1) - 0.5
    block = grid.dataarray(v, name="v", coords={"y_face": faces})
    found = together(grid, block)
    found = found["v"] if isinstance(found, xr.Dataset) else found
    assert found.dims == ("x", "y_face") and np.array_equal(found.y_face, faces)
    assert np.array_equal(found, values)
    again = grid.from_dataarray(found)
    assert grid.layout(again).spec == layout.spec
    assert np.array_equal(grid.interior(again), grid.interior(v))


def test_coordinates_continue_in_the_halo(comm: MPI.Intracomm) -> None:
    with make(comm, halo=2) as grid:
        u = grid.zeros()
        block = grid.dataarray(u, halo=True, coords={"x": X, "y": Y})
        assert block.shape == u.shape and np.shares_memory(block.values, u)
        low, high = (
            Y[0] - np.array([2, 1]) * (Y[1] - Y[0]),
            Y[-1] + np.array([1, 2]) * (Y[-1] - Y[-2]),
        )
        padded = np.concatenate([low, Y, high])
        cut = grid.layout(u).stored[1]
        assert np.allclose(block.y, padded[cut.start + 2 : cut.stop + 2])
        assert np.allclose(np.diff(block.x), 0.25)
        names = np.array(list("abcdef"))
        assert set(grid.dataarray(u, halo=True, coords={"y": names}).y.values) <= set(names)
        for dtype in ("u1", "i1", "u8"):
            numbers = np.arange(SHAPE[1], dtype=dtype)
            found = grid.dataarray(u, halo=True, coords={"y": numbers}).y
            assert np.array_equal(found, np.arange(cut.start, cut.stop))


@pytest.mark.parametrize(
    "dtype, order",
    [(dtype, order) for dtype in ("f8", "c16", ">f8", "?") for order in ("xy", "yx")],
)
def test_a_whole_array_becomes_a_field(grid: halox.Grid, dtype: str, order: str) -> None:
    values = whole(*SHAPE, dtype=dtype)
    array = xr.DataArray(values, dims=("x", "y")).transpose(*order)
    u = grid.from_dataarray(array)
    assert u.dtype == values.dtype and u.shape == grid.padded_shape
    assert np.array_equal(grid.interior(u), values[grid.owned])
    grid.exchange(u)
    i, _ = grid.indices(halo=True)
    assert np.array_equal(u[:, 1:-1], values[i.ravel() % SHAPE[0]][:, grid.owned[1]])


def test_there_and_back(grid: halox.Grid) -> None:
    u = grid.zeros("f4", components=(2, ..., 3))
    u[...] = np.random.default_rng(grid.rank).random(u.shape)
    for halo in (False, True):
        block = grid.dataarray(u, halo=halo)
        for turned in (block, block.transpose("y", "component_0", "x", "component_1")):
            again = grid.from_dataarray(turned, part="halo" if halo else "block")
            assert again is not u and not np.shares_memory(again, u)
            if turned is block:
                assert np.array_equal(grid.interior(again), grid.interior(u))
                assert np.array_equal(again, u) is halo
            else:  # components behind the first grid axis move behind all grid axes
                expected = grid.dataarray(again, halo=halo)
                assert np.array_equal(
                    expected, turned.transpose("x", "y", "component_0", "component_1")
                )


def test_only_its_own_part_is_loaded(grid: halox.Grid) -> None:
    values, asked = whole(*SHAPE), []

    class OnDemand(xr.backends.BackendArray):
        shape, dtype = values.shape, values.dtype

        def __getitem__(self, key: Any) -> Any:
            asked.append(key.tuple)
            return values[key.tuple]

    from xarray.core.indexing import LazilyIndexedArray

    array = xr.DataArray(xr.Variable(("x", "y"), LazilyIndexedArray(OnDemand())))
    u = grid.from_dataarray(array)
    assert np.array_equal(grid.interior(u), values[grid.owned])
    lengths = [
        tuple(len(range(n)[cut]) for n, cut in zip(SHAPE, key, strict=True)) for key in asked
    ]
    assert lengths == [grid.rank_shape]


@pytest.mark.parametrize("turned", [False, True])
def test_a_dataset_is_exchanged(grid: halox.Grid, turned: bool) -> None:
    values = {"u": whole(*SHAPE), "w": whole(SHAPE[0], SHAPE[1] + 1, dtype="f4")}
    u, w = grid.zeros(), grid.zeros("f4", staggered=1)
    for field, name in ((u, "u"), (w, "w")):
        grid.interior(field)[...] = values[name][grid.layout(field).owned]
    dataset = xr.Dataset({"u": grid.dataarray(u, halo=True), "w": grid.dataarray(w, halo=True)})
    dataset["time"] = 0.5
    if turned:
        dataset = dataset.transpose("y", "x", "y_face")
    dataset["double"] = 2 * dataset["u"]
    dataset.halox.exchange(grid)
    i, j = grid.indices(halo=True)
    inside = (j.ravel() >= 0) & (j.ravel() < SHAPE[1])
    expected = values["u"][i.ravel() % SHAPE[0]][:, j.ravel()[inside]]
    for name, factor in (("u", 1), ("double", 2)):
        found = dataset[name].transpose("x", "y").values
        assert np.array_equal(found[:, inside], factor * expected)
    assert np.array_equal(u[:, inside], expected)
    other = halox.Grid(SHAPE, comm=grid.comm, device="cpu", periodic=(True, False))
    with other:
        v = other.zeros("f4", staggered=1)
        other.interior(v)[...] = values["w"][other.layout(v).owned]
        other.exchange(v)
        assert np.array_equal(w, v)


def test_a_grid_with_a_boundary_function(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """No rank sends the function, which cannot be pickled."""
    path = comm.bcast(tmp_path) / "run.zarr"
    boundary = (None, lambda slab, *_: slab.fill(0))
    with make(comm, boundary=boundary) as grid:
        u = grid.random(3)
        for halo in (False, True):
            v = grid.from_dataarray(grid.dataarray(u, halo=halo), part="halo" if halo else "block")
            assert np.array_equal(grid.interior(v), grid.interior(u))
        xr.Dataset({"u": grid.dataarray(u, halo=True)}).halox.to_zarr(path, grid)
        assert np.array_equal(grid.interior(grid.load(path)["u"]), grid.interior(u))


def test_some_variables_only(grid: halox.Grid) -> None:
    u, v = grid.zeros(), grid.zeros()
    for field in (u, v):
        grid.interior(field)[...] = 1 + grid.rank
    dataset = xr.Dataset({"u": grid.dataarray(u, halo=True), "v": grid.dataarray(v, halo=True)})
    dataset.halox.exchange(grid, "v")
    assert np.all(v[0, 1:-1] > 0) and np.all(u[0] == 0)


def test_variables_that_are_no_fields_are_left_alone(grid: halox.Grid, tmp_path: Path) -> None:
    u = grid.zeros()
    grid.interior(u)[...] = 1
    dims = ("lon", "lat")
    dataset = xr.Dataset(
        {
            "u": grid.dataarray(u, halo=True, dims=dims),
            "time": 0.5,
            "profile": ("lat", np.full(u.shape[1], 7.0)),
            "names": ("station", ["a", "b"]),
        }
    ).assign_coords(height=(dims, np.full(u.shape, 3.0)))
    before = dataset.copy(deep=True)
    dataset.halox.exchange(grid, dims=dims)
    assert np.all(u[:, 1:-1] == 1)
    for name in ("time", "profile", "names", "height"):
        assert dataset[name].identical(before[name])
    pytest.importorskip("zarr")
    path = grid.comm.bcast(tmp_path) / "run.zarr"
    dataset.halox.to_zarr(path, grid, dims=dims)
    with xr.open_zarr(path, chunks=None) as found:
        assert set(found.data_vars) == {"u"} and np.all(found.u == 1)


@pytest.mark.parametrize("halo", [False, True])
def test_a_dataset_becomes_a_checkpoint(grid: halox.Grid, halo: bool, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    path = grid.comm.bcast(tmp_path) / "run.zarr"
    values = {"u": whole(*SHAPE), "w": whole(SHAPE[0], SHAPE[1] + 1, dtype="f4")}
    u, w = grid.zeros(), grid.zeros("f4", staggered=1)
    for field, name in ((u, "u"), (w, "w")):
        grid.interior(field)[...] = values[name][grid.layout(field).owned]
    coords = {"x": xr.DataArray(X, dims="x", attrs={"units": "m"}), "y": Y}
    dataset = xr.Dataset(
        {
            "u": grid.dataarray(u, halo=halo, coords=coords, attrs={"units": "m/s"}),
            "w": grid.dataarray(w, halo=halo, coords={"x": X}),
            "time": 0.5,
        },
        attrs={"step": 7},
    )
    dataset.halox.to_zarr(path, grid, part="halo" if halo else "block")
    with xr.open_zarr(path, chunks=None) as found:
        assert set(found.data_vars) == {"u", "w"} and found.attrs["step"] == 7
        assert found.u.dims == ("x", "y") and found.w.dims == ("x", "y_face")
        assert np.array_equal(found.u, values["u"]) and np.array_equal(found.w, values["w"])
        assert np.allclose(found.x, X) and np.allclose(found.y, Y)
        assert found.u.attrs["units"] == "m/s" and found.x.attrs == {"units": "m"}
        again = grid.from_dataarray(found.u)
        found.halox.to_zarr(path.with_name("again.zarr"), grid, part="whole")
    assert np.array_equal(grid.interior(again), grid.interior(u))
    with xr.open_zarr(path.with_name("again.zarr"), chunks=None) as found:
        assert np.array_equal(found.w, values["w"]) and found.attrs["step"] == 7
        assert found.u.attrs["units"] == "m/s" and np.array_equal(found.x, X)


Case = tuple[tuple[int, ...], Any, bool]

CASES: list[Case] = [
    *(((n,), halo, n % 2 == halo % 2) for n in (4, 5, 7) for halo in (1, 2)),
    ((8, 6), ((2, 2), (0, 0)), True),
    ((5, 8), ((1, 1), (0, 2)), False),
    ((3, 9), ((1, 0), (3, 3)), False),
]


def fields_of(case: Case, comm: MPI.Intracomm) -> Iterator[tuple[halox.Grid, Any, Any, Any]]:
    """Yield a grid with a field of each staggering, the whole field, and its coordinates.

    Along some axes the block of some or all ranks, halo included, is as long as the grid.
    """
    shape, halo, periodic = case
    try:
        grid = halox.Grid(shape, halo=halo, periodic=periodic, comm=comm, device="cpu")
    except halox.HaloxError:  # the grid is too small for so many ranks
        return
    with grid:
        for staggered in ((), *range(len(shape))):
            try:
                u = grid.zeros("i4", staggered=staggered)
            except halox.HaloxError:  # a halo wider than the faces of a block
                continue
            layout = grid.layout(u)
            points = layout.global_shape
            values = 10 + np.arange(np.prod(points), dtype="i4").reshape(points)
            grid.interior(u)[...] = values[layout.owned]
            names = grid.dataarray(u).dims
            coords = {d: 10.0 * np.arange(n) + n for d, n in zip(names, points, strict=True)}
            yield grid, u, values, coords


def check_saved(
    dataset: Any, grid: halox.Grid, path: Path, values: Any, coords: Any, part: str = "halo"
) -> None:
    """Write a dataset, and compare all stored variables and coordinates."""
    dataset.halox.to_zarr(path, grid, part=part)
    with xr.open_zarr(path, chunks=None) as found:
        for name in dataset.data_vars:
            assert np.array_equal(found[name], values)
        for d in coords:
            assert np.array_equal(found[d], coords[d])
    grid.comm.Barrier()


@pytest.mark.parametrize("kind", ["whole", "block", "halo", "arithmetic"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.part(4)
def test_coordinates_of_a_checkpoint_are_those_of_the_whole_grid(
    case: Case, kind: str, comm: MPI.Intracomm, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    path = comm.bcast(tmp_path) / "run.zarr"
    part = "halo" if kind == "arithmetic" else kind
    for grid, u, values, coords in fields_of(case, comm):
        block = grid.dataarray(u, coords=coords, halo=part == "halo")
        if kind == "whole":
            block = xr.DataArray(values, coords, block.dims)
        elif kind == "arithmetic":
            block = 1 * block
        check_saved(xr.Dataset({"u": block}), grid, path, values, coords, part)
        again = grid.from_dataarray(block, part=part)
        assert np.array_equal(grid.interior(again), grid.interior(u))


def test_an_unknown_option_on_one_rank_begins_no_call(grid: halox.Grid, tmp_path: Path) -> None:
    u = grid.ones()
    if grid.rank == 0:
        with pytest.raises(TypeError, match="coords"):
            xr.Dataset({"u": grid.dataarray(u)}).halox.to_zarr(tmp_path, grid, coords={})
    assert grid.mean(u) == 1


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.part(3)
def test_fields_with_another_halo_become_a_checkpoint(
    case: Case, comm: MPI.Intracomm, tmp_path: Path
) -> None:
    pytest.importorskip("zarr")
    path = comm.bcast(tmp_path) / "run.zarr"
    for grid, u, values, coords in fields_of(case, comm):
        layout = grid.layout(u)
        axes = [axis for axis, is_so in enumerate(layout.spec.staggered) if is_so]
        v = grid.zeros("i4", staggered=axes, halo=((1, 0),) * len(values.shape))
        grid.interior(v)[...] = values[layout.owned]
        block = grid.dataarray(v, coords=coords, halo=True)
        check_saved(xr.Dataset({"v": block}), grid, path, values, coords)
        for array in (block, 1 * block):
            again = grid.from_dataarray(array, part="halo")
            assert np.array_equal(again, v) and grid.layout(again) is grid.layout(v)


def given(array: Any, **options: Any) -> Any:
    def call(comm: MPI.Intracomm) -> None:
        with make(comm) as grid:
            grid.from_dataarray(array(grid) if callable(array) else array, **options)

    return call


def labelled(**options: Any) -> Any:
    def call(comm: MPI.Intracomm) -> None:
        with make(comm) as grid:
            grid.dataarray(grid.zeros(), **options)

    return call


def exchanged(make_dataset: Any, *names: Any) -> Any:
    def call(comm: MPI.Intracomm) -> None:
        with make(comm) as grid:
            make_dataset(grid).halox.exchange(grid, *names)

    return call


def written(make_dataset: Any, part: str = "whole") -> Any:
    def call(comm: MPI.Intracomm) -> None:
        with make(comm) as grid:
            make_dataset(grid).halox.to_zarr("none.zarr", grid, part=part)

    return call


def of_shape(*shape: int, dtype: str = "f8", dims: tuple[str, ...] = ("x", "y")) -> Any:
    return xr.DataArray(np.zeros(shape, dtype), dims=dims)


def geographic(grid: halox.Grid) -> Any:
    return xr.Dataset({"u": grid.dataarray(grid.zeros(), halo=True, dims=("lon", "lat"))})


BAD: Table = {
    "not a labelled array": (given(np.zeros(SHAPE)), FieldError, "DataArray"),
    "a labelled array without a grid axis": (
        given(of_shape(*SHAPE, dims=("x", "z"))),
        FieldError,
        "dims=",
    ),
    "a labelled array with cells and faces of one axis": (
        given(of_shape(7, 6, 7, dims=("x", "y", "y_face"))),
        FieldError,
        "twice",
    ),
    "a labelled array of another shape": (given(of_shape(9, 4)), FieldError, "(7, 6)"),
    "a labelled array of objects": (
        given(lambda grid: of_shape(*SHAPE).astype(object)),
        FieldError,
        "dtype object",
    ),
    "labelled arrays of two dtypes >1": (
        given(lambda grid: of_shape(*SHAPE, dtype="f4" if grid.rank == 1 else "f8")),
        MismatchError,
        "dtype",
    ),
    "a labelled array with components on one rank >1": (
        given(
            lambda grid: (
                of_shape(2, *SHAPE, dims=("c", "x", "y")) if grid.rank == 1 else of_shape(*SHAPE)
            )
        ),
        MismatchError,
        "components",
    ),
    "the whole labelled array on one rank only >1": (
        given(
            lambda grid: (
                of_shape(*SHAPE) if grid.rank == 0 else grid.dataarray(np.zeros(grid.padded_shape))
            )
        ),
        FieldError,
        "part='block'",
    ),
    "a labelled array with halo as the whole field": (
        given(lambda grid: grid.dataarray(grid.zeros(), halo=True)),
        FieldError,
        "part='whole'",
    ),
    "a labelled array of an unknown part": (
        given(of_shape(*SHAPE), part="interior"),
        FieldError,
        "part",
    ),
    "parts in a list": (given(of_shape(*SHAPE), part=["whole"]), FieldError, "part"),
    "parts that differ >1": (
        lambda comm: given(
            lambda grid: grid.dataarray(grid.zeros(), halo=comm.rank == 0),
            part="halo" if comm.rank == 0 else "block",
        )(comm),
        MismatchError,
        "part differs",
    ),
    "a labelled array on one rank only >1": (
        given(lambda grid: None if grid.rank == 1 else of_shape(*SHAPE)),
        FieldError,
        "got a NoneType",
    ),
    "coordinates of the wrong length": (labelled(coords={"x": X[:-1]}), FieldError, "coords['x']"),
    "coordinates of no dimension": (labelled(coords={"lat": X}), FieldError, "coords"),
    "an int as attributes": (labelled(attrs=3), FieldError, "attrs"),
    "a dataset written with the grid before the path": (
        lambda comm: xr.Dataset({"u": of_shape(*SHAPE)}).halox.to_zarr(make(comm), "path"),
        HaloxError,
        "grid",
    ),
    "a dataset exchanged without a grid": (
        lambda comm: xr.Dataset({"u": of_shape(*SHAPE)}).halox.exchange("u"),
        HaloxError,
        "grid",
    ),
    "a dataset whose variable has no halo": (
        exchanged(lambda grid: xr.Dataset({"u": grid.dataarray(grid.zeros())})),
        FieldError,
        "variable 'u'",
    ),
    "a dataset whose variable lacks a grid axis": (
        exchanged(lambda grid: xr.Dataset({"u": ("x", np.zeros(7))}), "u"),
        FieldError,
        "variable 'u'",
    ),
    "a dataset exchanged without a variable on the grid": (
        exchanged(lambda grid: geographic(grid).assign(time=0.5)),
        FieldError,
        "dims=",
    ),
    "a dataset exchanged with a variable on other axes": (
        exchanged(lambda grid: geographic(grid).assign(v=grid.dataarray(grid.zeros(), halo=True))),
        FieldError,
        "variable 'u'",
    ),
    "a dataset written with a variable on other axes": (
        written(lambda grid: geographic(grid).assign(v=grid.dataarray(grid.zeros(), halo=True))),
        FieldError,
        "variable 'u'",
    ),
    "names of variables in a list": (
        exchanged(lambda grid: xr.Dataset({"u": of_shape(*SHAPE)}), ["u"]),
        FieldError,
        "u",
    ),
    "a variable that a dataset lacks": (
        exchanged(lambda grid: xr.Dataset({"u": of_shape(*SHAPE)}), "v"),
        FieldError,
        "'v'",
    ),
    "a dataset of blocks written as if with halo": (
        written(lambda grid: xr.Dataset({"u": grid.dataarray(grid.zeros())}), part="halo"),
        FieldError,
        "variable 'u'",
    ),
    "a dataset without a variable on one rank >1": (
        written(lambda grid: xr.Dataset({} if grid.rank == 1 else {"u": of_shape(*SHAPE)})),
        FieldError,
        "dims=",
    ),
    "a dataset with coordinates on one rank >1": (
        written(
            lambda grid: xr.Dataset({"u": of_shape(*SHAPE)}, {"x": X} if grid.rank == 1 else {})
        ),
        MismatchError,
        "coordinates",
    ),
    "a variable with an int as name": (
        written(lambda grid: xr.Dataset({3: of_shape(*SHAPE)})),
        FieldError,
        "variable 3 has a name",
    ),
    "a variable with an attribute that JSON does not support": (
        written(lambda grid: xr.Dataset({"u": of_shape(*SHAPE).assign_attrs(scale=1j)})),
        FieldError,
        "attrs of u: scale has",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    check_error(BAD, name, comm)
