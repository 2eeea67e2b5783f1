"""Folds, poles and strips: offsets, walls, overlap and errors; test_exchange.py has random grids."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import DecompositionError, FieldError, MismatchError
from tests.mpi.conftest import PART, agree
from tests.oracle import Case, images, is_adjoint, whole_values
from tests.strategies import folds, on_ranks
from tests.support import trials

pytestmark = pytest.mark.geometry

ROOT = Path(__file__).resolve().parents[2]
UNTOUCHED = -77


def test_offsets(comm: MPI.Intracomm) -> None:
    """A field with offsets gets the halo that its stencil reads, without corners."""
    with halox.Grid(
        (9, 12), halo=3, periodic=(False, True), connect=FOLD, comm=comm, device="cpu"
    ) as grid:
        fields = [grid.full(UNTOUCHED, sign=-1, offsets=2), grid.full(UNTOUCHED, sign=-1)]
        for u in fields:
            grid.interior(u)[...] = np.random.default_rng(5).random((9, 12))[grid.owned]
        grid.exchange(*fields)
        inside = [np.zeros(n, int) for n in fields[0].shape]
        for along, cut in zip(inside, grid.layout(fields[0]).interior, strict=True):
            along[cut.start - 2 : cut.stop + 2] = 1
            along[cut] = 2
        moved = np.add.outer(*inside) >= 3
        some, every = fields
        assert agree(np.array_equal(some, np.where(moved, every, UNTOUCHED)), comm)


def test_a_line_that_no_rank_owns_is_kept(comm: MPI.Intracomm) -> None:
    """Low faces have no points on the line of a fold at the high end."""
    connect = {(0, side): halox.Connection(flip=1) for side in ("low", "high")}
    for procs in {(comm.size, 1, 1), (1, 1, comm.size)}:
        options: dict[str, Any] = {"connect": connect, "proc_shape": procs, "comm": comm}
        with halox.Grid((12, 6, 9), halo=2, periodic=(0, 1, 1), device="cpu", **options) as grid:
            for twist in (None, ("phase", -1)):
                u = grid.zeros(position="low", boundary=(None, twist, twist))
                u[...] = np.arange(u.size).reshape(u.shape)
                before = u.copy()
                for _ in range(3):
                    grid.exchange(u)
                line = 12 - grid.layout(u).origin[0]
                assert agree(np.array_equal(u[line : line + 1], before[line : line + 1]), comm)
                y = grid.zeros(position="low", boundary=(None, twist, twist))
                for x in (u, y):
                    x[...] = np.random.default_rng([x is u, comm.rank]).integers(-9, 10, x.shape)
                assert is_adjoint(grid, [u], [y])


@on_ranks(folds, trials(48) // 3, part=PART)
def test_unique_points(case: Case, comm: MPI.Intracomm) -> None:
    """Each point counts once, whether it has one index or two."""
    right = []
    with case.grid(comm) as grid:
        for number, (f, u) in enumerate(zip(case.fields, case.make(grid), strict=True)):
            whole = whole_values(case, f, number)
            first = len(f.before)
            grid.interior(u)[...] = whole[(slice(None),) * first + grid.layout(u).owned]
            points = np.indices(whole.shape[first : first + len(case.shape)])
            images_of, *_ = images(case, f, [*points])
            once = np.all(np.equal(images_of, points), axis=0)
            once = once.reshape(*(1,) * first, *once.shape, *(1,) * len(f.after))
            values = np.where(once, whole, 0).astype(np.result_type(whole, "f8"))
            counted = np.count_nonzero(np.broadcast_to(once, whole.shape))
            right += [
                np.isclose(grid.sum(u, unique=True), values.sum(), 1e-12),
                np.isclose(grid.mean(u, unique=True), values.sum() / counted, 1e-12),
                np.isclose(
                    grid.std(u, unique=True), whole[np.broadcast_to(once, whole.shape)].std()
                ),
                np.isclose(grid.norm(u, unique=True), np.linalg.norm(values.ravel()), 1e-12),
                np.isclose(grid.dot(u, u, unique=True), np.vdot(values, values), 1e-12),
                np.isclose(grid.sum("2.0 * a", unique=True, a=u), 2 * values.sum(), 1e-12),
                grid.sum(u, unique=False) == grid.sum(u),
            ]
    assert agree(all(right), comm), right


FOLD = {(0, "high"): halox.Connection(flip=1)}
SHIFT = halox.Connection(shift=(1, 3))
BAD_GRIDS: dict[str, dict[str, Any]] = {
    "connect that is no dict": {"connect": "fold"},
    "a side that does not exist": {"connect": {(0, "north"): halox.Connection(flip=1)}},
    "an axis that does not exist": {"connect": {2: halox.Connection(flip=1)}},
    "a word in place of a connection": {"connect": {(0, "high"): "fold"}},
    "joined sides of two axes": {"connect": FOLD | {(1, "low"): halox.Connection(flip=0)}},
    "a side joined twice": {"connect": FOLD | {0: halox.Connection(flip=1)}},
    "a connection of a periodic axis": {"connect": FOLD, "periodic": True},
    "neither flip nor shift": {"connect": {(0, "high"): halox.Connection()}},
    "an axis flipped along itself": {"connect": {(0, "high"): halox.Connection(flip=0)}},
    "an unknown pivot": {"connect": {(0, "high"): halox.Connection(flip=1, pivot="Q")}},  # type: ignore[arg-type]
    "a pivot of sides joined with each other": {"connect": {0: halox.Connection(1, pivot="T")}},
    "a shift along an axis that is not periodic": {"connect": {0: SHIFT}},
    "half a shift of an odd extent": {
        "connect": {(0, "high"): SHIFT},
        "shape": (8, 7),
        "periodic": (False, True),
    },
    "a pivot at a center of an axis that ends": {
        "connect": {(0, "high"): halox.Connection(flip=1, pivot="T")}
    },
    "a halo as wide as a folded axis": {"connect": FOLD, "halo": ((0, 8), (1, 1))},
}
BAD_FIELDS: dict[str, dict[str, Any]] = {
    "a boundary on a joined side": {"boundary": ("edge", None)},
    "a sign that is none": {"sign": 2},
    "a complex sign": {"sign": 1j},
    "a sign of a component that the field lacks": {"sign": {3: -1}, "components": 2},
    "a sign of unsigned integers": {"sign": -1, "dtype": "u4"},
    "a vector on a grid that is no cubed sphere": {"sign": "vector", "components": 2},
    "points that do not exist": {"position": "corner"},
    "points of a staggered field at centers": {"position": "center", "staggered": 1},
    "points at faces of an axis that is flipped and ends": {"position": ("center", "high")},
    "a field of one parity": {"parity": "even"},
}


@pytest.mark.usually(2)
@pytest.mark.parametrize("name", BAD_GRIDS)
def test_bad_grids(name: str, comm: MPI.Intracomm) -> None:
    options = {"grid_shape": BAD_GRIDS[name].get("shape", (8, 6)), **BAD_GRIDS[name]}
    options.pop("shape", None)
    with pytest.raises(DecompositionError, match=r"connect|halo") as caught:
        halox.Grid(comm=comm, device="cpu", **options)
    assert set(comm.allgather(str(caught.value))) == {str(caught.value)}


@pytest.mark.usually(2)
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_fields(name: str, comm: MPI.Intracomm) -> None:
    """The same error on all ranks, at the latest by the first exchange."""
    options = {"dtype": "f8", **BAD_FIELDS[name]}
    with (
        halox.Grid((8, 6), connect=FOLD, comm=comm, device="cpu") as grid,
        pytest.raises(FieldError, match=r"boundary|sign|position|parity") as caught,
    ):
        grid.exchange(grid.zeros(**options))
    assert set(comm.allgather(str(caught.value))) == {str(caught.value)}


@pytest.mark.usually(2)
def test_deep_halos_and_signs_without_folds(comm: MPI.Intracomm) -> None:
    with halox.Grid((8, 6), connect=FOLD, comm=comm, device="cpu") as grid:
        with pytest.raises(FieldError, match="every=2"):
            grid.plan(grid.zeros(halo=2), every=2)
        assert "connect {(0, 'high'): Connection(flip=1" in repr(grid)
    with (
        halox.Grid((8, 6), comm=comm, device="cpu") as grid,
        pytest.raises(FieldError, match="sign"),
    ):
        grid.zeros(sign=-1)


@pytest.mark.usually(2)
def test_unlike_connections_of_ranks_are_one_error(comm: MPI.Intracomm) -> None:
    pivot: Any = "T" if comm.rank else "F"
    connect = {(0, "high"): halox.Connection(flip=1, pivot=pivot)}
    with pytest.raises(MismatchError):
        halox.Grid((8, 6), periodic=(False, True), connect=connect, comm=comm, device="cpu")
    with halox.Grid((8, 6), connect=FOLD, comm=comm, device="cpu") as grid:
        u = grid.zeros()
        grid.declare(u, sign=-1 if comm.rank else 1)
        with pytest.raises(MismatchError, match="sign"):
            grid.exchange(u)


def test_walls_beside_a_fold(comm: MPI.Intracomm) -> None:
    """A boundary for all axes is that of the walls; it fills corners from the halo of the fold, after its signs."""
    with halox.Grid(
        (8, 6, 5),
        halo=2,
        periodic=(False, True, False),
        connect=FOLD,
        boundary="symmetric",
        comm=comm,
        device="cpu",
    ) as grid:
        whole = np.random.default_rng(3).random((8, 6, 5))
        u = grid.zeros(sign=-1)
        grid.interior(u)[...] = whole[grid.owned]
        grid.exchange(u)
        padded = np.concatenate([whole, -whole[:-3:-1, ::-1]])
        padded = np.pad(padded, ((2, 0), (0, 0), (2, 2)), mode="symmetric")
        padded = np.pad(padded, ((0, 0), (2, 2), (0, 0)), mode="wrap")
        cut = tuple(slice(at.start + 2, at.stop + 2) for at in grid.layout(u).stored)
        assert agree(np.array_equal(u, padded[cut]), comm)
        assert not grid.at_wall(0, "high")


@pytest.mark.usually(3)
def test_a_tracer_over_the_fold_has_the_same_bits(comm: MPI.Intracomm) -> None:
    """The example computes the same on any number of ranks, and loses nothing of the tracer."""
    example = runpy.run_path(str(ROOT / "examples" / "tripolar.py"))
    wholes = []
    for ranks in (comm, MPI.COMM_SELF):
        with halox.Grid(
            (24, 48), periodic=(False, True), connect=example["FOLD"], comm=ranks, device="cpu"
        ) as grid:
            tracer, lost = example["turn"](grid, 0.1)
            assert lost < 1e-13
            wholes.append(grid.gather(tracer))
    if comm.rank == 0:
        assert np.array_equal(*wholes)


@pytest.mark.usually(3)
@pytest.mark.parametrize("whole", [True, False])
def test_coarse_grids(whole: bool, comm: MPI.Intracomm) -> None:
    """Coarse cells have the fold of the fine cells, and shifts of coarse cells; not all connections allow it."""
    shape, procs = (4 * comm.size, 12), (comm.size, 1)
    options: Any = {"periodic": (False, True), "comm": comm, "device": "cpu", "proc_shape": procs}
    for connection, back in (({"flip": 1}, 1), ({"shift": (1, 6)}, 0)):
        connect = {(0, "high"): halox.Connection(**connection)}  # type: ignore[arg-type]
        with (
            halox.Grid(shape, connect=connect, **options) as fine,
            fine.coarsen(2, whole=whole) as grid,
        ):
            u = grid.zeros()
            j, i = grid.indices()
            grid.interior(u)[...] = 100 * j + i
            grid.exchange(u)
            if grid.owned[0].stop == grid.grid_shape[0]:
                x = np.arange(6)
                row = (5 - x) if back else (x + 3) % 6
                assert np.array_equal(u[-1, 1:-1], 100 * (grid.grid_shape[0] - 1) + row)
    for connection in ({"flip": 1, "pivot": "T"}, {"shift": (1, 6)}):
        factor = 4 if "shift" in connection else 2
        connect = {(0, "high"): halox.Connection(**connection)}  # type: ignore[arg-type]
        with (
            halox.Grid(shape, connect=connect, **options) as fine,
            pytest.raises(DecompositionError),
        ):
            fine.coarsen(factor)
