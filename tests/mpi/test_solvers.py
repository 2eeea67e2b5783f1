"""Linear operators against dense matrices, and coarse grids against whole arrays of NumPy."""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MissingPackageError, StateError
from tests.mpi.conftest import agree
from tests.support import full

sparse = pytest.importorskip("scipy.sparse")
linalg = pytest.importorskip("scipy.sparse.linalg")

pytestmark = [pytest.mark.usually(1, 3, 4), pytest.mark.ranks(1, 2, 3, 4)]

SHAPE = (12, 6)


def laplacian(grid: halox.Grid) -> Any:
    def apply(u: Any, out: Any) -> None:
        grid.exchange(u)
        around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
        out[1:-1, 1:-1] = 4 * u[1:-1, 1:-1] - around

    return apply


def matrix() -> np.ndarray:
    """Return the same as a dense matrix: zero at the faces of axis 0, periodic along axis 1."""
    walls = sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], (SHAPE[0],) * 2).toarray()
    walls[0, 0] = walls[-1, -1] = 3
    wraps = sparse.diags([-1.0, 2.0, -1.0], [-1, 0, 1], (SHAPE[1],) * 2).toarray()
    wraps[0, -1] = wraps[-1, 0] = -1
    return np.asarray(np.kron(walls, np.eye(SHAPE[1])) + np.kron(np.eye(SHAPE[0]), wraps))


def grid_options(**options: Any) -> dict[str, Any]:
    """Return the options of a grid for the matrix, and others."""
    return {"periodic": (False, True), "boundary": ("antisymmetric", None)} | options


def grid_on(comm: MPI.Intracomm, shape: Any = SHAPE, **options: Any) -> halox.Grid:
    return halox.Grid(shape, comm=comm, device="cpu", **grid_options(**options))


@pytest.mark.usually(1)
@pytest.mark.parametrize("dtype", ["f8", "c16", "f4"])
def test_products_and_solutions_on_one_rank(dtype: str, comm: MPI.Intracomm) -> None:
    with grid_on(MPI.COMM_SELF) as grid:
        A = grid.linear_operator(laplacian(grid), grid.zeros(dtype))
        assert isinstance(A, linalg.LinearOperator) and A.dtype == dtype
        assert np.array_equal(A @ np.eye(A.shape[0], dtype=dtype), matrix().astype(dtype))
        b = np.random.default_rng(3).random(A.shape[0]).astype(dtype) * (
            1 - 2j if A.dtype.kind == "c" else 1
        )
        found, code = linalg.cg(A, b, rtol=1e-5)
        assert code == 0 and np.allclose(found, np.linalg.solve(matrix(), b), rtol=1e-3)
        if dtype == "f8":
            with pytest.raises(FieldError):
                A @ (1j * b)


def test_without_scipy(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with grid_on(comm) as grid, pytest.raises(MissingPackageError):
        grid.linear_operator(laplacian(grid), grid.zeros())


class Vec:
    """The attributes of petsc4py's vectors, with their meaning: entries of this rank, set by assignment."""

    def __init__(self, entries: np.ndarray) -> None:
        self.array_r = entries.copy()
        self.array_r.flags.writeable = False

    @property
    def array_w(self) -> np.ndarray:
        raise NotImplementedError

    @array_w.setter
    def array_w(self, entries: np.ndarray) -> None:
        new = np.empty_like(self.array_r)
        new[:] = entries
        self.array_r = new


def test_products_for_petsc_on_all_ranks(comm: MPI.Intracomm) -> None:
    u = np.random.default_rng(4).random(SHAPE)
    with grid_on(comm) as grid:
        A = grid.linear_operator(laplacian(grid), grid.zeros())
        mine = u[grid.owned].size
        assert A.sizes == ((mine, u.size), (mine, u.size))
        y = Vec(np.zeros(mine))
        A.mult(None, Vec(u[grid.owned].ravel()), y)
        expected = (matrix() @ u.ravel()).reshape(SHAPE)[grid.owned].ravel()
        assert agree(np.allclose(y.array_r, expected, rtol=0, atol=1e-14), comm)
        if comm.size > 1:
            # An exchange is not reached, so that SciPy's solver fails on each rank without waiting.
            with pytest.raises(StateError):
                linalg.cg(A, np.ones(mine))


def test_vectors_and_dtypes_that_do_not_fit(comm: MPI.Intracomm) -> None:
    with grid_on(comm) as grid:
        A = grid.linear_operator(laplacian(grid), grid.zeros())
        for wrong in (A.shape[0] + 1, A.shape[0] - 1):
            with pytest.raises(FieldError):
                A.mult(None, Vec(np.zeros(wrong)), Vec(np.zeros(wrong)))
        with pytest.raises(FieldError):
            grid.linear_operator(laplacian(grid), grid.zeros([("a", "f8")]))


def test_several_fields_of_different_layouts(comm: MPI.Intracomm) -> None:
    """Velocities at faces and pressures in cells: the gradient, and minus the divergence."""
    n = 8
    with halox.Grid(n, comm=comm, device="cpu", boundary="symmetric") as grid:

        def apply(w: Any, p: Any, out_w: Any, out_p: Any) -> None:
            grid.exchange(w, p)
            faces, cells = grid.interior(out_w), grid.interior(out_p)
            faces[...] = p[1 : 1 + len(faces)] - p[: len(faces)]
            cells[...] = w[1 : 1 + len(cells)] - w[2 : 2 + len(cells)]

        A = grid.linear_operator(apply, [grid.zeros(staggered=0), grid.zeros()])
        # The pressure does not change across a wall.
        gradient = np.diff(np.eye(n), axis=0, prepend=np.eye(n)[:1], append=np.eye(n)[-1:])
        divergence = np.diff(np.eye(n + 1), axis=0)
        x = np.random.default_rng(5).random(2 * n + 1)
        faces, cells = gradient @ x[n + 1 :], -divergence @ x[: n + 1]
        of_cells = grid.owned[0]
        of_faces = slice(of_cells.start, of_cells.stop + (of_cells.stop == n))
        y = Vec(np.zeros(A.shape[0]))
        A.mult(None, Vec(np.concatenate([x[of_faces], x[n + 1 :][of_cells]])), y)
        expected = np.concatenate([faces[of_faces], cells[of_cells]])
        assert agree(np.allclose(y.array_r, expected, rtol=0, atol=1e-14), comm)


def numbered(shape: tuple[int, ...], *cuts: slice) -> np.ndarray:
    """Return a different number for each cell of an array, at some cells."""
    return np.arange(1.0, 1 + np.prod(shape)).reshape(shape)[cuts]


LAYOUTS: list[dict[str, Any]] = [
    {"components": 2},
    {"staggered": 0, "halo": (2, 1)},
    *full({}, {"staggered": (0, 1), "components": (..., 3)}, {"halo": 0}),
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("even", "whole"), [*product([True, False], repeat=2)])
def test_blocks_of_a_coarse_grid(
    even: bool, whole: bool, layout: dict[str, Any], comm: MPI.Intracomm
) -> None:
    """After a collection and an exchange, the field is the whole array of coarse cells, padded by NumPy."""
    n = comm.size
    blocks = [[4, *[6] * (n - 1)] if even else [5, *[6] * (n - 1)], None]
    shape = (sum(blocks[0]), 12 if even else 11)
    options = {"blocks": blocks, "proc_shape": (n, 1), "halo": 2, "boundary": ("edge", None)}
    with (
        grid_on(comm, shape, **options) as fine,
        fine.coarsen((2, 3), even=even, whole=whole) as coarse,
    ):
        assert coarse.grid_shape == (-(-shape[0] // 2), 4)
        assert (coarse.periodic, coarse.halo) == (fine.periodic, fine.halo)
        assert coarse.is_whole == (whole and n > 1)
        assert coarse.size == (1 if whole else n)
        u = coarse.full(-1.0, **layout)
        spec = coarse.layout(u).spec
        every = coarse.layout(u).global_shape
        part = coarse.aligned(u)
        # A block has the coarse cells whose first cell the fine block owns.
        cuts = []
        for axis, (own, factor) in enumerate(zip(fine.owned, (2, 3), strict=True)):
            start, stop = -(-own.start // factor), -(-own.stop // factor)
            is_last = own.stop == shape[axis] and not fine.periodic[axis]
            cuts.append(slice(start, stop + (spec.staggered[axis] and is_last)))
        before, after = len(spec.components_before), len(spec.components_after)
        index = (*(slice(None),) * before, *cuts, *(slice(None),) * after)
        inside = tuple(
            slice(low, low + cut.stop - cut.start)
            for cut, (low, _) in zip(cuts, spec.halo, strict=True)
        )
        part[(*(slice(None),) * before, *inside)] = numbered(every)[index]
        coarse.collector(u)()
        coarse.exchange(u)
        # The whole array with its halo: repeated at the walls of axis 0, wrapped around along axis 1.
        widths = [*[(0, 0)] * before, *spec.halo, *[(0, 0)] * after]
        walls = [width if a == before else (0, 0) for a, width in enumerate(widths)]
        wraps = [width if a == before + 1 else (0, 0) for a, width in enumerate(widths)]
        if spec.staggered[1]:  # the first point again
            wraps[before + 1] = (widths[before + 1][0], widths[before + 1][1] + 1)
        whole_array = np.pad(np.pad(numbered(every), walls, "edge"), wraps, "wrap")
        stored = []
        for axis, (cut, (low, high)) in enumerate(zip(cuts, spec.halo, strict=True)):
            has_end = cut.stop == every[before + axis] and not fine.periodic[axis]
            next_point = spec.staggered[axis] and not has_end
            stored.append(slice(cut.start, cut.stop + low + high + next_point))
        expected = whole_array[(*(slice(None),) * before, *stored, *(slice(None),) * after)]
        assert agree(np.array_equal(part, expected), comm)
        if coarse.is_whole:
            assert np.array_equal(u, whole_array)
        # The result is a field like any other.
        assert coarse.sum(u) == numbered(every).sum()


@pytest.mark.parametrize(
    ("shape", "halo", "is_whole"),
    [
        ((192, 4096 // 96 + 1), 0, False),
        ((192, 4096 // 96), 0, True),
        ((24, 8192), 1, False),
        ((24, 8192), 7, True),
    ],
)
def test_few_cells_and_narrow_blocks_are_held_whole(
    shape: tuple[int, int], halo: int, is_whole: bool, comm: MPI.Intracomm
) -> None:
    """Coarse grids of 96 rows with 43 and 42 columns, and blocks of 3 to 6 rows with a halo of 1 and 7."""
    columns = 2 * shape[1] if halo == 0 else shape[1]
    with (
        halox.Grid(
            (shape[0], columns), proc_shape=(comm.size, 1), halo=halo, comm=comm, device="cpu"
        ) as fine,
        fine.coarsen() as coarse,
    ):
        assert coarse.is_whole == (is_whole and comm.size > 1)


def test_options_are_kept(comm: MPI.Intracomm) -> None:
    options: dict[str, Any] = {
        "corners": False,
        "checkerboard": True,
        "path": None,
        "halo": ((1, 2), (0, 1)),
        "boundary": None,
        "dims": ("y", "x"),
        "coords": {"x": np.arange(32.0)},  # of the fine cells
    }
    with grid_on(comm, (8 * comm.size, 32), proc_shape=(comm.size, 1), **options) as fine:
        for whole in (True, False):
            with fine.coarsen(whole=whole) as coarse, coarse.coarsen(whole=whole) as coarsest:
                assert coarsest.grid_shape == (2 * comm.size, 8)
                for grid in (coarse, coarsest):
                    assert not grid.corners and grid.halo == ((1, 2), (0, 1))
                    assert grid.domain.labels.dims == ("y", "x")
                    assert (
                        grid.sum(grid.ones(parity="odd"))
                        == grid.grid_shape[0] * grid.grid_shape[1] / 2
                    )


def test_ranks_keep_their_places(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where other places would be chosen, or a Cartesian communicator has determined them."""
    monkeypatch.setenv("HALOX_NODE", str(comm.rank % 2))
    shape = (8 * comm.size, 8)
    with (
        halox.Grid(
            shape, proc_shape=(comm.size, 1), placement=False, comm=comm, device="cpu"
        ) as fine,
        fine.coarsen(whole=False) as coarse,
    ):
        assert agree(coarse.proc_coords == fine.proc_coords, comm)
    cart = comm.Create_cart((comm.size, 1), (True, False))
    with halox.Grid(shape, comm=cart, device="cpu") as fine:
        for whole in (True, False):
            with fine.coarsen(whole=whole) as coarse:
                assert coarse.periodic == (True, False)
    cart.Free()


def test_fields_of_one_parity(comm: MPI.Intracomm) -> None:
    """The parts of all ranks are the whole compact array."""
    options: dict[str, Any] = {"checkerboard": True, "halo": 0, "comm": comm, "device": "cpu"}
    with (
        halox.Grid((8, 4 * comm.size), proc_shape=(1, comm.size), **options) as fine,
        fine.coarsen(whole=True) as coarse,
    ):
        u = coarse.zeros(parity="odd")
        cells = numbered((4, comm.size))
        coarse.aligned(u)[...] = cells[:, comm.rank : comm.rank + 1]
        coarse.collector(u)()
        assert agree(np.array_equal(u, cells), comm)
