"""Values of fields at points against SciPy and NumPy on the whole field, sources as their adjoint, and coordinates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ClosedError, FieldError, HaloxError, MismatchError, StateError
from tests.mpi.bad_input import Table, check_error
from tests.mpi.conftest import agree

pytestmark = pytest.mark.usually(1, 3)

SHAPE = (7, 6, 5)
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"components": 2, "staggered": 0, "halo": 2},
    {"components": (..., 2, 3), "staggered": (1, 2)},
]


def sixteenths(rng: np.random.Generator, high: int, shape: Any) -> np.ndarray:
    """Return random multiples of 1/16 from 0 to ``high``, whose products with small integers are exact."""
    return rng.integers(0, 16 * high, shape, endpoint=True) / 16


def make_field(grid: halox.Grid, dtype: Any, layout: dict[str, Any], seed: int) -> tuple[Any, Any]:
    """Return an exchanged field of small integers, and the whole field with the grid axes first."""
    u = grid.full(55, dtype, **layout)
    found = grid.layout(u)
    first = len(found.spec.components_before)
    whole = np.random.default_rng(seed).integers(-9, 10, found.global_shape).astype(dtype)
    grid.interior(u)[...] = whole[((slice(None),) * first) + found.owned]
    grid.exchange(u)
    return u, np.moveaxis(whole, range(first, first + 3), range(3))


@pytest.mark.usually(1, 3, 4)
@pytest.mark.parametrize("periodic", [(False, False, False), (True, False, True)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_values_between_cells_and_the_adjoint(
    layout: dict[str, Any], periodic: tuple[bool, ...], comm: MPI.Intracomm
) -> None:
    """All numbers are exact. So the adjoint is tested by <P u, v> == <u, P' v>."""
    from scipy.ndimage import map_coordinates

    rng = np.random.default_rng(3)
    options: dict[str, Any] = {"boundary": "edge", "periodic": periodic, "device": "cpu"}
    indices = sixteenths(rng, 6, (60, 3)) - (0.5, 0.5, 0.25)
    indices = np.minimum(indices, np.array(SHAPE) - 1 + 0.5)
    indices[::3, 1] //= 1  # at cells along one axis
    indices[::7] //= 1
    inside = indices[(indices >= 0).all(axis=1) & (indices <= np.array(SHAPE) - 1).all(axis=1)]
    with halox.Grid(SHAPE, halo=1, comm=comm, **options) as grid:
        points, inner = halox.Points(grid, indices), halox.Points(grid, inside)
        for dtype in ("f8", "f4", "c16"):
            u, whole = make_field(grid, dtype, layout, 5)
            values = points.get(u)
            padded = np.pad(whole, [(1, 1)] * 3 + [(0, 0)] * (whole.ndim - 3), mode="edge")
            for axis in np.flatnonzero(periodic):
                mode = [(int(n == axis),) * 2 for n in range(whole.ndim)]
                core = padded[(slice(None),) * axis + (slice(1, -1),)]
                padded = np.pad(core, mode, mode="wrap")
            flat = padded.reshape(*padded.shape[:3], -1)
            expected = [
                map_coordinates(flat[..., n], indices.T + 1, order=1) for n in range(flat.shape[-1])
            ]
            assert values.dtype == u.dtype and values.shape == (60, *whole.shape[3:])
            assert agree(np.array_equal(values.reshape(60, -1).T, expected), comm), dtype
            sources = rng.integers(-9, 10, inner.get(u).shape).astype(dtype)
            w = grid.zeros(dtype, **layout)
            inner.add(w, sources)
            assert agree(np.vdot(sources, inner.get(u)) == np.conj(grid.dot(u, w)), comm), dtype


def test_values_at_cells_are_exact(comm: MPI.Intracomm) -> None:
    """Bits of any dtype, of NaN, infinities and negative zero beside one another."""
    rng = np.random.default_rng(4)
    indices = rng.integers(0, SHAPE, (50, 3))
    dtypes = ["f8", "f4", "f2", "i8", "u1", "?", "c8", "S3", [("a", "f4"), ("b", "i8")]]
    with halox.Grid(SHAPE, device="cpu", comm=comm) as grid:
        points = halox.Points(grid, indices)
        for dtype in map(np.dtype, dtypes):
            whole = np.frombuffer(rng.bytes(210 * dtype.itemsize), dtype).reshape(SHAPE)
            if dtype == "?":
                whole = whole.view("u1") % 2 == 1
            u = grid.zeros(dtype)
            grid.interior(u)[...] = whole[grid.owned]
            found = points.get(u)
            assert agree(found.tobytes() == whole[tuple(indices.T)].tobytes(), comm), dtype
        special = np.resize([np.nan, -0.0, np.inf, -1.0], SHAPE)
        mixed = halox.Points(grid, [*indices, (0.5, 0.5, 0.5)])
        for whole in (special, np.stack([special, special[::-1]], -1).view("c16")[..., 0]):
            u = grid.zeros(whole.dtype)
            grid.interior(u)[...] = whole[grid.owned]
            found = mixed.get(u)[:-1]
            assert agree(found.tobytes() == whole[tuple(indices.T)].tobytes(), comm)
        assert halox.Points(grid, []).get(u).shape == (0,)


def test_values_do_not_depend_on_the_ranks(comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng(6)
    indices = rng.random((100, 3)) * np.array(SHAPE)
    sources = rng.normal(size=100)
    found = []
    for ranks in (comm, MPI.COMM_SELF):
        with halox.Grid(SHAPE, periodic=True, device="cpu", comm=ranks) as grid:
            u = grid.random(1)
            points = halox.Points(grid, indices)
            values = points.get(u)
            points.add(u, sources)
            points.add(u, 1)
            found.append((values, grid.gather(u)))
    assert agree(np.array_equal(found[0][0], found[1][0]), comm)
    assert comm.rank or np.array_equal(found[0][1], found[1][1])


def test_periodic_indices_wrap_around(comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng(8)
    indices = sixteenths(rng, 7, (80, 3)) * np.array(SHAPE) / 7
    indices = np.round(indices * 16) / 16
    sources = rng.integers(-9, 10, 80).astype("f8")
    with halox.Grid(SHAPE, periodic=True, device="cpu", comm=comm) as grid:
        u, v = make_field(grid, "f8", {}, 3)[0], grid.zeros()
        points, far = (halox.Points(grid, indices + n * np.array(SHAPE)) for n in (0, -5))
        assert agree(np.array_equal(points.get(u), far.get(u)), comm)
        assert np.array_equal(points.owners, far.owners)
        far.add(v, sources)
        assert agree(grid.sum(v) == sources.sum(), comm), "no share is lost"
        assert agree(grid.dot(u, v) == points.get(u) @ sources, comm)


def test_sources_in_one_cell_and_beyond_a_wall(comm: MPI.Intracomm) -> None:
    with halox.Grid((8, 6), boundary="edge", device="cpu", comm=comm) as grid:
        points = halox.Points(grid, [(2, 3), (7.25, 0), (2, 3), (2, 3), (-0.5, 5)])
        for dtype in ("i4", "f4"):
            u = grid.zeros(dtype)
            at_cells = halox.Points(grid, points.indices[[0, 2, 3]])
            at_cells.add(u, [1, 2, 5])
            whole = np.zeros((8, 6))
            whole[2, 3] = 8
            assert agree(np.array_equal(grid.interior(u), whole[grid.owned]), comm)
            u[...] = 0
        points.add(u, 4)
        whole[2, 3], whole[7, 0], whole[0, 5] = 12, 3, 2
        assert agree(np.array_equal(grid.interior(u), whole[grid.owned]), comm)
        many = halox.Points(grid, [(2, 3)] * 1000)
        u[...] = 0
        many.add(u, np.float32(0.1))
        exact = np.float32(1000 * np.float64(np.float32(0.1)))
        assert agree(grid.max(u) == exact, comm), "summed in float64"
        u[grid.layout(u).interior] = 0
        assert agree(not u.any(), comm), "the halo is not changed"


@pytest.mark.parametrize("dtype", ["f8", "f4", "c16", "c8", "i4", "u1"])
def test_sources_in_one_cell_are_added_in_their_order(dtype: str, comm: MPI.Intracomm) -> None:
    """As a loop adds them; for 1e16, 1, -1e16, 1 any other order than this has another sum than 1."""
    with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
        for layout in ({}, {"components": 2}, {"components": (..., 2, 3)}):
            u = grid.zeros(dtype, **layout)
            points = halox.Points(grid, [(2, 3)] * 40 + [(1, 1)])
            values = np.zeros(points.get(u).shape, dtype)
            big = 1e16 if values.dtype.kind in "fc" else 100
            values[:40].T[...] = np.resize(np.array([big, 1, -big, 1]).astype(dtype), 40)
            wide = {"f": np.float64, "c": np.complex128}.get(values.dtype.kind, np.int64)
            total = wide(0)
            for value in values[:40].reshape(40, -1)[:, 0]:
                total += wide(value)
            points.add(u, values)
            found = points.get(u)
            assert agree((found[:40] == total.astype(dtype)).all(), comm), dtype


def test_indices_that_float64_does_not_hold(comm: MPI.Intracomm) -> None:
    """Integers from 2**53 on would be rounded, and from 2**63 on overflow."""
    with halox.Grid((5, 3), periodic=True, device="cpu", comm=comm) as grid:
        u = grid.zeros("i8")
        grid.interior(u)[...] = 10 * grid.indices()[0] + grid.indices()[1]
        grid.exchange(u)
        for far in (2**53, -(2**53), 2**53 + 1, 2**60, 2**63, 2**64 + 2, 1e300, -1e19):
            with pytest.raises(FieldError, match="indices"):
                halox.Points(grid, [(0, 0), (far, 1)])
        most = 2**53 - 1
        found = halox.Points(grid, [(most, -most)]).get(u)
        assert agree(found.tolist() == [10 * (most % 5) + -most % 3], comm)


def test_the_halo_is_that_of_the_field(comm: MPI.Intracomm) -> None:
    with halox.Grid((9,), halo=0, boundary="edge", device="cpu", comm=comm) as grid:
        points = halox.Points(grid, [-1.5, 0.5, 9, 9.75])
        for layout, right in (
            ({"halo": 2}, [0, 0.5, 8, 8]),
            ({"halo": 2, "staggered": 0}, [0, 0.5, 9, 9]),
        ):
            u = grid.zeros(**layout)
            grid.interior(u)[...] = np.r_[grid.layout(u).owned[0]]
            grid.exchange(u)
            assert agree(points.get(u).tolist() == right, comm)
        faces = grid.ones(staggered=0)
        halox.Points(grid, [9]).add(faces, 1)
        assert agree(grid.sum(faces) == 11, comm)


def test_records_have_the_rows_of_get(comm: MPI.Intracomm) -> None:
    """Fields of two layouts and dtypes, whose arrays are swapped, at points in and between cells; several chunks."""
    rng = np.random.default_rng(9)
    between = np.minimum(sixteenths(rng, 6, (20, 3)), np.array(SHAPE) - 1)
    with halox.Grid(SHAPE, halo=1, boundary="edge", device="cpu", comm=comm) as grid:
        for indices in (between, np.floor(between), between[:1], between[:0]):
            points = halox.Points(grid, indices)
            u, old, wind = (
                grid.random(1),
                grid.random(2),
                grid.random(3, dtype="f4", components=(2, ..., 3)),
            )
            fortran = np.asfortranarray(wind)
            right: list[list[Any]] = [[], []]
            for step in range(150):
                for field in (u, wind):
                    grid.exchange(field)
                fortran[...] = wind
                points.record(u, fortran if step % 2 else wind)
                if step % 10 == 0:
                    right[0].append(points.get(u))
                    right[1].append(points.get(wind))
                u, old = old, u
                u += step
                wind *= 1.01
            found = points.collect(root=comm.size - 1)
            if agree((found is None) != (comm.rank == comm.size - 1), comm) and found is not None:
                for values, rows in zip(found, right, strict=True):
                    assert len(values) == 150 and values[::10].tobytes() == np.array(rows).tobytes()
            points.record(u)
            points.record(u)
            again = points.collect()
            assert agree(again.tobytes() == 2 * points.get(u).tobytes(), comm), "on all ranks"


def test_records_of_structs_and_other_fields(comm: MPI.Intracomm) -> None:
    """A step that raises is not recorded."""
    with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
        points = halox.Points(grid, [(7, 5), (0, 0), (4, 3)])
        s = grid.zeros([("a", "i1"), ("b", "f8")])
        grid.interior(s)["b"] = 10 * grid.indices()[0] + grid.indices()[1]
        with pytest.raises(FieldError, match="no field given"):
            points.record()
        points.record(s)
        for others in ((s, s), (grid.zeros(),), (grid.zeros(s.dtype, halo=2),), ()):
            with pytest.raises(FieldError, match="fields"):
                points.record(*others)
        found = points.collect()
        assert agree(found["b"].tolist() == [[75, 0, 43]] and found.dtype == s.dtype, comm)
        points.record(grid.ones(), grid.ones("i4"))
        assert agree([each.tolist() for each in points.collect()] == [[[1] * 3]] * 2, comm)


@pytest.mark.ranks(2, 3)
def test_records_after_an_error(comm: MPI.Intracomm) -> None:
    """Records that differ between ranks do not keep the next ones from being collected."""
    with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
        points, u = halox.Points(grid, [(7, 5), (0, 0)]), grid.full(3)
        for _ in range(comm.rank):
            points.record(u)
        with pytest.raises(HaloxError):
            points.collect()
        points.record(u)
        assert agree(points.collect().tolist() == [[3, 3]], comm)


def test_one_root(comm: MPI.Intracomm) -> None:
    with halox.Grid((9,), device="cpu", comm=comm) as grid:
        points = halox.Points(grid, [3, 8])
        u = grid.ones()
        found = points.get(u, root=comm.size - 1)
        is_root = comm.rank == comm.size - 1
        assert agree(np.array_equal(found, [1, 1]) if is_root else found is None, comm)
        assert len(points) == 2 and points.indices.tolist() == [[3], [8]]
        cuts = [owned[0] for owned in grid.layout(u).owned_of_ranks]
        expected = [n for i in (3, 8) for n, cut in enumerate(cuts) if cut.start <= i < cut.stop]
        assert points.owners.tolist() == expected
        assert halox.Points(grid, np.empty((0, 1))).get(u).shape == (0,)


def test_locate(comm: MPI.Intracomm) -> None:
    x, y = np.array([0.0, 1, 3, 4, 8]), np.array([10.0, 7.5, 5, -1])
    with halox.Grid((5, 4, 3), coords={"x": x}, device="cpu", comm=comm) as grid:
        indices = np.random.default_rng(2).random((40, 3)) * (4, 3, 2)
        points = indices.copy()
        points[:, 0] = np.interp(indices[:, 0], np.arange(5), x)
        points[:, 1] = np.interp(indices[:, 1], np.arange(4), y)
        np.testing.assert_allclose(grid.locate(points, coords={"y": y}), indices, rtol=1e-13)
        cells = np.array([(n, m, 0) for n in range(5) for m in range(4)])
        at_cells = np.stack([x[cells[:, 0]], y[cells[:, 1]], cells[:, 2]], 1)
        assert np.array_equal(grid.locate(at_cells, coords={"y": y}), cells)
        beyond = grid.locate([(-0.5, 11, 0), (10, -4, 0)], coords={"y": y})
        np.testing.assert_allclose(beyond, [(-0.5, -0.4, 0), (4.5, 3.5, 0)], rtol=1e-13)
        faces = grid.locate([(2, 2, 2)], coords={"y_face": [0, 1, 2, 3, 4]}, staggered=(0, 1))
        assert faces.tolist() == [[2, 2, 2]], "faces of x lie halfway between its cells"
        assert grid.locate([(2, 2, 2)]).tolist() == [[1.5, 2, 2]], "indices without coordinates"


def test_positions_by_dimension(comm: MPI.Intracomm) -> None:
    x = np.array([0.0, 1, 3, 4, 8])
    with halox.Grid((5, 4), coords={"x": x}, device="cpu", comm=comm) as grid:
        points = halox.Points(grid, {"y": [0.5, 1, 2], "x": np.array([0.0, 2, 6])})
        assert points.indices.tolist() == [[0, 0.5], [1.5, 1], [3.5, 2]]
        assert halox.Points(grid, {"x": 2.0, "y": [1, 3]}).indices.tolist() == [[1.5, 1], [1.5, 3]]
        assert halox.Points(grid, {"x_face": 2.0, "y": 1}).indices.tolist() == [[2, 1]]


def on_grid(call: Any) -> Any:
    """Return a call with a grid, points in two of its cells, a field of ones, and the rank."""

    def run(comm: MPI.Intracomm) -> None:
        with halox.Grid((8, 6), device="cpu", comm=comm, checkerboard=True) as grid:
            call(grid, halox.Points(grid, [(1, 1), (2, 2)]), grid.ones(), comm.rank)

    return run


FIELD_ERRORS: dict[str, tuple[Any, str]] = {
    "another number of axes": (lambda g, p, u, rank: halox.Points(g, [1, 2]), "indices"),
    "NaN": (lambda g, p, u, rank: halox.Points(g, [(np.nan, 1)]), "indices"),
    "text": (lambda g, p, u, rank: halox.Points(g, "here"), "indices"),
    "a dimension missing": (lambda g, p, u, rank: halox.Points(g, {"x": 1}), "dimensions x, y"),
    "a dimension unknown": (lambda g, p, u, rank: halox.Points(g, {"x": 1, "z": 1}), "x, y"),
    "cells and faces": (lambda g, p, u, rank: halox.Points(g, dict(x=1, x_face=1, y=1)), "y"),
    "unlike lengths": (lambda g, p, u, rank: halox.Points(g, {"x": [1, 2], "y": [1] * 3}), "(3,)"),
    "text by dimension": (lambda g, p, u, rank: halox.Points(g, {"x": "here", "y": 1}), "numbers"),
    "complex points": (lambda g, p, u, rank: halox.Points(g, [(1, 1j)]), "indices"),
    "a point outside the grid": (lambda g, p, u, rank: halox.Points(g, [(8.5, 1)]).get(u), "8.5"),
    "between cells, and a field without halo": (
        lambda g, p, u, rank: halox.Points(g, [(1.5, 1)]).get(g.ones(halo=0)),
        "halo",
    ),
    "between cells, and a field of integers": (
        lambda g, p, u, rank: halox.Points(g, [(1.5, 1)]).get(g.ones("i4")),
        "between cells",
    ),
    "a field of one parity": (lambda g, p, u, rank: p.get(g.ones(parity="odd")), "all"),
    "a root out of range": (lambda g, p, u, rank: p.get(u, root=-1), "root"),
    "a root of records": (lambda g, p, u, rank: (p.record(u), p.collect(root=99)), "root"),
    "a record outside": (lambda g, p, u, rank: halox.Points(g, [(8.5, 1)]).record(u), "8.5"),
    "sources of unlike lengths": (lambda g, p, u, rank: p.add(u, [[1], [2, 3]]), "broadcasts"),
    "sources of another number": (lambda g, p, u, rank: p.add(u, [1, 2, 3]), "broadcasts"),
    "complex sources in a real field": (lambda g, p, u, rank: p.add(u, 1j), "cannot be added"),
    "sources in a field of bools": (
        lambda g, p, u, rank: p.add(g.ones("?"), True),
        "cannot be added",
    ),
    "coordinates that rise and fall": (
        lambda g, p, u, rank: g.locate([(1, 1)], coords={"y": [0, 1, 2, 1, 4, 5]}),
        "rise or fall",
    ),
}
MISMATCHES: dict[str, tuple[Any, str]] = {
    "unlike points": (lambda g, p, u, rank: halox.Points(g, [(rank, 1)]), "indices"),
    "unlike dtypes": (lambda g, p, u, rank: p.get(u.astype("f4") if rank else u), "field"),
    "unlike steps": (
        lambda g, p, u, rank: ([p.record(u) for _ in range(1 + rank)], p.collect()),
        "steps",
    ),
    "unlike roots": (lambda g, p, u, rank: p.get(u, root=rank), "root"),
}
TABLE: Table = {
    **{name: (on_grid(call), FieldError, word) for name, (call, word) in FIELD_ERRORS.items()},
    **{
        f"{name} >1": (on_grid(call), MismatchError, word)
        for name, (call, word) in MISMATCHES.items()
    },
    "no record": (on_grid(lambda g, p, u, rank: p.collect()), StateError, "record"),
    "points without a grid": (lambda _: halox.Points((8, 6), [(1, 1)]), HaloxError, "grid"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    check_error(TABLE, name, comm)


def test_points_of_a_closed_grid(comm: MPI.Intracomm) -> None:
    grid = halox.Grid((8, 6), device="cpu", comm=comm)
    points, u = halox.Points(grid, [(1, 1)]), grid.ones()
    grid.close()
    for call in (lambda: points.get(u), lambda: halox.Points(grid, [(1, 1)])):
        with pytest.raises(ClosedError):
            call()
