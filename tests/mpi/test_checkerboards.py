"""Fields of one parity: stencils, reductions and arguments; test_exchange.py has random fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import DecompositionError, FieldError, MismatchError
from tests.mpi.bad_input import Table, check_error
from tests.mpi.conftest import agree
from tests.oracle import factorisations

pytestmark = pytest.mark.usually(1, 3)

SEED = 20261122


def lattice(shape: tuple[int, ...], comm: MPI.Intracomm, **options: Any) -> halox.Grid:
    """Make a checkerboard of halo 3, with the ranks along the last axis if they fit, otherwise along other axes."""
    options = {"halo": 3, "periodic": True, "checkerboard": True, "device": "cpu"} | options
    for procs in sorted(factorisations(comm.size, len(shape)), key=lambda p: p[::-1], reverse=True):
        fits = all(n // p >= 3 for n, p in zip(shape, procs, strict=True))
        if fits and shape[-1] // (2 * procs[-1]) >= 2:
            return halox.Grid(shape, proc_shape=procs, comm=comm, **options)
    return halox.Grid(tuple(n * comm.size for n in shape), comm=comm, **options)


def split(grid: halox.Grid, whole: np.ndarray, parity: str, dtype: str, **options: Any) -> Any:
    """Return the cells of one parity of a whole lattice, as a field with a poisoned halo."""
    u = grid.full(np.nan, dtype, parity=parity, **options)
    index = np.broadcast_arrays(*grid.indices(parity=parity))  # type: ignore[arg-type]
    grid.interior(u)[...] = whole[(..., *index)]
    return u


def whole_of(grid: halox.Grid, u: Any, parity: str) -> np.ndarray | None:
    """Gather a field on the whole lattice, with NaN at cells of the other parity; on rank 0."""
    compact = grid.gather(u)
    if compact is None:
        return None
    before = compact.shape[: compact.ndim - len(grid.grid_shape)]
    whole = np.full((*before, *grid.grid_shape), np.nan, compact.dtype)
    mask = np.indices(grid.grid_shape).sum(axis=0) % 2 == (parity == "odd")
    whole[..., mask] = compact.reshape(*before, -1)
    return whole


@pytest.mark.parametrize(("shape", "offsets"), [((6, 24), (1, 3)), ((6, 6, 4, 12), (3,))])
def test_a_stencil_against_roll(
    shape: tuple[int, ...], offsets: tuple[int, ...], comm: MPI.Intracomm
) -> None:
    """Sums over neighbours at the offsets, with cells from the halo, equal numpy.roll on the whole lattice."""
    with lattice(shape, comm) as grid:
        ndim = len(shape)
        whole = np.random.default_rng(SEED).integers(-99, 100, (2, *grid.grid_shape)).astype("f8")
        rolled = np.zeros_like(whole)
        for axis in range(ndim):
            for o in offsets:
                near = np.roll(whole, -o, axis + 1) - 3 * np.roll(whole, o, axis + 1)
                rolled += (axis + 2) * (o + 1) * near
        for parity in ("even", "odd"):
            u = split(grid, whole, parity, "f8", components=2, offsets=offsets)
            grid.exchange(u)
            # The field on this rank's part of the lattice, with NaN at all cells that were not received.
            index = [
                np.broadcast_to(x, u.shape[1:]) for x in grid.indices(parity=parity, halo=True)
            ]
            first = [cut.start - 4 for cut in grid.owned]
            extents = [cut.stop - cut.start + 8 for cut in grid.owned]
            local = np.full((2, *extents), np.nan)
            places = [x - at for x, at in zip(index, first, strict=True)]
            local[(slice(None), *places)] = u
            found = np.zeros((2, *grid.rank_shape))
            for axis in range(ndim):
                for o in offsets:
                    for sign, weight in ((1, 1), (-1, -3)):
                        cut = [slice(4, n - 4) for n in extents]
                        cut[axis] = slice(4 + sign * o, extents[axis] - 4 + sign * o)
                        found += (axis + 2) * (o + 1) * weight * local[(slice(None), *cut)]
            sums = sum(grid.indices())
            targets = sums % 2 == ((parity == "odd") + offsets[0]) % 2
            mine = rolled[(slice(None), *grid.owned)]
            right = np.array_equal(found[:, targets], mine[:, targets])
            assert agree(bool(targets.any()) and right, comm)


@pytest.mark.parametrize("shape", [(16,), (6, 8, 12)], ids=str)
def test_reductions_and_gather(shape: tuple[int, ...], comm: MPI.Intracomm) -> None:
    with lattice(shape, comm) as grid:
        whole = np.random.default_rng(SEED).integers(-99, 100, (3, *grid.grid_shape)).astype("f8")
        other = np.random.default_rng(SEED + 1).integers(-99, 100, whole.shape).astype("f8")
        checked = np.indices(grid.grid_shape).sum(axis=0) % 2
        for number, parity in enumerate(("even", "odd")):
            cells, others = whole[:, checked == number], other[:, checked == number]
            u, v = (split(grid, one, parity, "f8", components=3) for one in (whole, other))
            for _ in range(2):  # the second is a prepared call
                assert grid.sum(u) == cells.sum()
                assert grid.dot(u, v) == (cells * others).sum()
                assert grid.norm(u) == np.sqrt((cells**2).sum())
                assert (grid.min(u), grid.max(u)) == (cells.min(), cells.max())
            gathered = whole_of(grid, u, parity)
            right = gathered is None or np.array_equal(
                gathered, np.where(checked == number, whole, np.nan), equal_nan=True
            )
            assert agree(right, comm)


def test_factories(comm: MPI.Intracomm) -> None:
    with lattice((6, 24), comm) as grid:
        u = grid.ones("c8", components=3, parity="odd", offsets=(3, 1, 1))
        like = [grid.zeros_like(u), grid.ones_like(u), grid.full_like(u, 2), grid.empty_like(u)]
        specs = {grid.layout(one).spec for one in [u, *like]}
        (spec,) = specs
        assert (spec.parity, spec.offsets, spec.components_before) == ("odd", (1, 3), (3,))
        cells = 3 * np.prod(grid.grid_shape) // 2
        assert [grid.sum(one) for one in like[:3]] == [0, cells, 2 * cells]
        assert grid.sum(u) == cells
        assert grid.layout(u).interior == (
            slice(None),
            slice(3, 3 + grid.rank_shape[0]),
            slice(2, 2 + grid.rank_shape[1] // 2),
        )


def test_declared_again(comm: MPI.Intracomm) -> None:
    """New offsets take effect at the next exchange; an existing plan keeps its offsets."""
    with lattice((6, 24), comm) as grid:
        u = grid.zeros(parity="odd", offsets=(1, 3))
        plan = grid.plan(u)
        received = []
        for offsets in (None, 1, (1, 3)):
            grid.declare(u, parity="odd", offsets=offsets)
            grid.exchange(u)
            rows = [row for row in grid.explain(u).rows if row.direction == "receive"]
            received.append(sum(row.nbytes for row in rows))
        rows_before = [row for row in plan.explain().rows if row.direction == "receive"]
        area = [n * m for n, m in ((grid.rank_shape[0], 6), (grid.rank_shape[1], 6))]
        corners = 6 * 6
        # Half the cells of the layers below and above along both axes, 8 bytes per cell.
        assert received == [4 * (sum(area) + corners), 4 * sum(area) // 3, 4 * sum(area)]
        assert sum(row.nbytes for row in rows_before) == received[2]
        plan()


def test_checkerboard_cuts_between_pairs(comm: MPI.Intracomm) -> None:
    procs = comm.size
    shape = (4, 6 * procs + 2)
    options: dict[str, Any] = {"proc_shape": (1, procs), "comm": comm, "device": "cpu"}
    with halox.Grid(shape, checkerboard=True, **options) as grid:
        assert agree(grid.owned[1].start % 2 == 0 and grid.owned[1].stop % 2 == 0, comm)
        sizes = comm.allgather(grid.rank_shape[1])
        assert sum(sizes) == shape[1]
        assert max(sizes) - min(sizes) == (0 if procs == 1 else 2)
        assert grid.sum(grid.ones(parity="odd")) == 2 * shape[1]


Call = Callable[[MPI.Intracomm], None]


def with_grid(call: Callable[[halox.Grid], Any], **options: Any) -> Call:
    def run(comm: MPI.Intracomm) -> None:
        with lattice((6, 24), comm, **options) as grid:
            call(grid)

    return run


def bare(*shape: int, **options: Any) -> Call:
    def run(comm: MPI.Intracomm) -> None:
        size = (*shape[:-1], shape[-1] * (comm.size if shape[-1] % 2 == 0 else 1))
        options.setdefault("proc_shape", (comm.size, *(1,) * (len(shape) - 1)))
        halox.Grid(size, comm=comm, device="cpu", **options).close()

    return run


def two(grid: halox.Grid, **options: Any) -> tuple[Any, Any]:
    return grid.zeros(parity="even", **options), grid.zeros(parity="odd", **options)


def on_one_rank(grid: halox.Grid) -> Any:
    """Return the even field on rank 0, the odd field on the other ranks."""
    return two(grid)[min(grid.rank, 1)]


def own(grid: halox.Grid, call: Callable[[Any], Any]) -> None:
    """Call with an array that the user has allocated in the shape of a field of one parity."""
    call(np.zeros(two(grid)[0].shape))


def odd_blocks(comm: MPI.Intracomm) -> None:
    """Allocate a field of one parity on a grid with blocks that begin at odd cells."""
    blocks = [3] * (comm.size - 1) + [3 + (comm.size % 2) * 3]
    shape = (4, sum(blocks))
    with halox.Grid(shape, blocks=[(4,), blocks], comm=comm, device="cpu") as grid:
        grid.zeros(parity="even")


def declared(grid: halox.Grid, **options: Any) -> Any:
    """Declare an array of the user as a field of one parity."""
    return grid.declare(np.zeros(two(grid)[0].shape), **options)


MISMATCHES: dict[str, Callable[[halox.Grid], Any]] = {
    "an exchange of even and odd": lambda g: g.exchange(on_one_rank(g)),
    "an exchange of arrays declared even and odd": lambda g: g.exchange(
        declared(g, parity=("even", "odd")[min(g.rank, 1)])
    ),
    "a sum of even and odd": lambda g: g.sum(on_one_rank(g)),
    "a gather of even and odd": lambda g: g.gather(on_one_rank(g)),
    "offsets that differ": lambda g: g.exchange(
        declared(g, parity="odd", offsets=1 + 2 * (g.rank == 0))
    ),
}
BAD_FIELDS: dict[str, tuple[Callable[[halox.Grid], Any], str]] = {
    "no such parity": (lambda g: g.zeros(parity="uneven"), "parity"),
    "a parity that is an array": (lambda g: g.zeros(parity=np.arange(3)), "parity"),
    "offsets of zero": (lambda g: g.zeros(parity="odd", offsets=(0, 1)), "offsets"),
    "no offsets": (lambda g: g.zeros(offsets=()), "offsets"),
    "a dot of even with odd": (lambda g: g.dot(*two(g)), "dot"),
    "a dot of even with all": (lambda g: g.dot(g.zeros(parity="even"), g.zeros()), "dot"),
    "an even field declared odd": (lambda g: g.declare(two(g)[0], parity="odd"), "array"),
    "an exchange of an array of either parity": (lambda g: own(g, g.exchange), "parity"),
    "a sum of an array of either parity": (lambda g: own(g, g.sum), "which"),
    "a transpose": (
        lambda g: halox.Transpose(g, g).forward(g.zeros(parity="even"), g.zeros()),
        "checkerboard",
    ),
    "an FFT": (lambda g: halox.FFT(g, axes=0).forward(two(g)[1]), "parity"),
    "a DataArray": (lambda g: g.dataarray(two(g)[1]), "field"),
}
BAD_GRIDS: dict[str, tuple[Callable[[MPI.Intracomm], Any], str]] = {
    "an odd extent": (bare(7, 6, checkerboard=True, halo=0, proc_shape=None), "grid_shape[0]"),
    "an odd extent of a field": (
        lambda c: halox.Grid((8 * c.size, 5), comm=c, device="cpu").zeros(parity="odd"),
        "grid_shape[1]",
    ),
    "blocks at odd cells >1": (odd_blocks, "blocks[1]"),
    "a staggered field": (with_grid(lambda g: g.zeros(parity="odd", staggered=0)), "parity"),
    "offsets beyond the halo": (
        with_grid(lambda g: g.zeros(parity="odd", halo=2, offsets=(1, 3))),
        "offsets",
    ),
    "a text as `checkerboard`": (bare(8, 8, checkerboard="yes"), "checkerboard"),
}


BAD: Table = {
    **{name: (call, DecompositionError, word) for name, (call, word) in BAD_GRIDS.items()},
    **{name: (with_grid(call), FieldError, word) for name, (call, word) in BAD_FIELDS.items()},
    **{f"{name} >1": (with_grid(call), MismatchError, "") for name, call in MISMATCHES.items()},
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    check_error(BAD, name, comm)
