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
from tests.mpi.conftest import agree
from tests.oracle import Case, Field, divide, is_adjoint

pytestmark = pytest.mark.geometry

ROOT = Path(__file__).resolve().parents[2]
UNTOUCHED = -77


def test_arrays_of_the_user(comm: MPI.Intracomm) -> None:
    """Declared arrays at new addresses use the plan of the first one, with their sign."""
    f = Field(np.dtype("f8"), ((2, 3), (3, 1)), sign=-1, mine=True)
    case = Case(divide((9, 12), (comm.size, 1)), (False, True), [f], connect=FOLD)
    with case.grid(comm) as grid:
        made, right, kept = [], [], []
        for turn in range(4):
            (u,), (wanted,) = case.make(grid), case.expected(grid.coords, turn)
            u[...] = wanted.before
            grid.exchange(u)
            right += [np.array_equal(u, wanted.after)]
            made.append(grid.plans_made)
            kept.append(u)
        assert agree(all(right), comm)
        assert made[0] == made[-1]


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


FOLD = {(0, "high"): halox.Connection(flip=1)}
BAD_INPUT: dict[str, tuple[dict[str, Any], dict[str, Any], type[halox.HaloxError], str]] = {
    "connect that is no dict": ({"connect": "fold"}, {}, DecompositionError, "expected a dict"),
    "a side that does not exist": (
        {"connect": {(0, "north"): halox.Connection(flip=1)}},
        {},
        DecompositionError,
        "the keys are grid axes",
    ),
    "an axis that does not exist": (
        {"connect": {2: halox.Connection(flip=1)}},
        {},
        DecompositionError,
        "the keys are grid axes",
    ),
    "a word in place of a connection": (
        {"connect": {(0, "high"): "fold"}},
        {},
        DecompositionError,
        "expected a halox.Connection",
    ),
    "joined sides of two axes": (
        {"connect": {0: halox.Connection(flip=1), (1, "low"): halox.Connection(flip=0)}},
        {},
        DecompositionError,
        "expected one axis",
    ),
    "a side joined with itself and with the other one": (
        {"connect": {0: halox.Connection(flip=1), (0, "low"): halox.Connection(flip=1)}},
        {},
        DecompositionError,
        "expected one axis",
    ),
    "a connection of a periodic axis": (
        {"connect": FOLD, "periodic": True},
        {},
        DecompositionError,
        "this axis is periodic",
    ),
    "neither flip nor shift": (
        {"connect": {(0, "high"): halox.Connection()}},
        {},
        DecompositionError,
        "give either flip",
    ),
    "an axis flipped along itself": (
        {"connect": {(0, "high"): halox.Connection(flip=0)}},
        {},
        DecompositionError,
        "name another grid axis",
    ),
    "an unknown pivot": (
        {"connect": {(0, "high"): halox.Connection(flip=1, pivot="Q")}},  # type: ignore[arg-type]
        {},
        DecompositionError,
        "pivot must be",
    ),
    "a pivot of sides joined with each other": (
        {"connect": {0: halox.Connection(flip=1, pivot="T")}},
        {},
        DecompositionError,
        "have no pivot",
    ),
    "a shift along an axis that is not periodic": (
        {"connect": {0: halox.Connection(shift=(1, 2))}},
        {},
        DecompositionError,
        "only a periodic axis",
    ),
    "half a shift of an odd extent": (
        {
            "shape": (8, 7),
            "periodic": (False, True),
            "connect": {(0, "high"): halox.Connection(shift=(1, 3))},
        },
        {},
        DecompositionError,
        "is shifted by half",
    ),
    "a pivot at a center of an axis that is not periodic": (
        {"connect": {(0, "high"): halox.Connection(flip=1, pivot="T")}},
        {},
        DecompositionError,
        "flipped about its middle",
    ),
    "a halo as wide as a folded axis": (
        {"connect": FOLD, "halo": ((0, 8), (1, 1))},
        {},
        DecompositionError,
        "expected at most 7",
    ),
    "a boundary on a joined side": (
        {"connect": FOLD, "boundary": ("edge", None)},
        {},
        FieldError,
        "has a side joined by connect",
    ),
    "a sign on a grid without connections": ({}, {"sign": -1}, FieldError, "only connections use"),
    "a sign that is none": ({"connect": FOLD}, {"sign": 2}, FieldError, "sign must be 1 or -1"),
    "a complex sign": ({"connect": FOLD}, {"sign": 1j}, FieldError, "sign must be 1 or -1"),
    "a sign of a component that the field lacks": (
        {"connect": FOLD},
        {"sign": {3: -1}, "components": 2},
        FieldError,
        "sign: the field has no component",
    ),
    "a sign of unsigned integers": (
        {"connect": FOLD},
        {"sign": -1, "dtype": "u4"},
        FieldError,
        "sign: -1 needs a field of signed numbers",
    ),
    "a vector on a grid that is no cubed sphere": (
        {"connect": FOLD},
        {"sign": "vector", "components": 2},
        FieldError,
        "only a halox.CubedSphere",
    ),
    "points that do not exist": (
        {"connect": FOLD},
        {"position": "corner"},
        FieldError,
        "position must be 'low'",
    ),
    "points of a staggered field at centers": (
        {"connect": FOLD},
        {"position": "center", "staggered": 1},
        FieldError,
        "has its points at the low faces",
    ),
    "points at faces of an axis that is flipped and not periodic": (
        {"connect": FOLD},
        {"position": ("center", "high")},
        FieldError,
        "is flipped and not periodic",
    ),
    "a field of one parity, and connections": (
        {"connect": FOLD, "checkerboard": True},
        {"parity": "even"},
        FieldError,
        "no fields of one parity",
    ),
}


@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    """The same error on all ranks, at the latest by the first exchange."""
    options, field, error, text = BAD_INPUT[name]
    options, field = {"shape": (8, 6), **options}, {"dtype": "f8", **field}
    shape = options.pop("shape")
    with (
        pytest.raises(error, match=text) as caught,
        halox.Grid(shape, comm=comm, device="cpu", **options) as grid,
    ):
        u = grid.zeros(field.pop("dtype"), **field)
        grid.exchange(u)
    assert set(comm.allgather(str(caught.value))) == {str(caught.value)}


def test_unlike_connections_of_ranks_are_one_error(comm: MPI.Intracomm) -> None:
    if comm.size == 1:
        return
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


@pytest.mark.parametrize("pivot", ["F", "T"])
def test_overlap(pivot: Any, comm: MPI.Intracomm) -> None:
    """Overlapped loops compute what follows whole exchanges, also next to a line that the exchange fills."""
    connect = {(0, "high"): halox.Connection(flip=1, pivot=pivot)}
    with halox.Grid(
        (9, 12), periodic=(False, True), connect=connect, comm=comm, device="cpu"
    ) as grid:
        results = []
        for overlaps in (True, False):
            u, v = grid.zeros(), grid.zeros()
            grid.interior(u)[...] = np.random.default_rng(4).random((9, 12))[grid.owned]
            plan = grid.plan(u, overlap=overlaps)
            for _ in range(4):
                for cells in plan.overlap(u, width=1):
                    v[cells] = (
                        u[cells.shifted(1, 0)]
                        + 2 * u[cells.shifted(0, 1)]
                        - u[cells.shifted(-1, 0)]
                    )
                u, v = v, u
            results.append(grid.interior(u).copy())
        assert agree(np.array_equal(*results), comm)
        with pytest.raises(FieldError, match="every=2"):
            grid.plan(grid.zeros(halo=2), every=2)
        assert "Connection(flip=1" in str(
            grid.explain()
        ) and "connect {(0, 'high'): Connection(flip=1" in repr(grid)


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
