"""Grids in blocks of equal work: exchanges and sums as with other blocks, results as on one rank, errors."""

from __future__ import annotations

import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from mpi4py import MPI

import halox
from halox.errors import DecompositionError, HaloxError, MismatchError
from tests.mpi.conftest import PART, agree
from tests.oracle import NUMERIC, Case, check_adjoint, check_exchanges
from tests.strategies import cells, checkerboards, folds, on_ranks
from tests.support import trials

pytestmark = pytest.mark.geometry

ROOT = Path(__file__).resolve().parents[2]
FOLD = {(0, "high"): halox.Connection(flip=1)}


@st.composite
def weighted(draw: st.DrawFn, ranks: int, dtypes: Any = NUMERIC) -> Case:
    """Return a case of another test with weights, most of them 0, and its blocks."""
    kinds = cells(ranks, dtypes, wide=True), folds(ranks), checkerboards(ranks, dtypes, wide=True)
    case = draw(st.one_of(*kinds))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    weights = np.asarray(random.random(case.shape) ** 9)
    weights[weights < np.quantile(weights, 0.6)] = 0
    weights = weights.mean(0, keepdims=True) if draw(st.booleans()) else weights
    return replace(case, weights=weights)


def in_its_blocks(case: Case, comm: MPI.Intracomm) -> Case:
    """Return the case with the blocks that follow from its weights."""
    with case.grid(comm) as grid:
        owned = comm.allgather(grid.owned)
        by_axis = [
            sorted({(own[n].start, own[n].stop) for own in owned}) for n in range(len(case.shape))
        ]
    return replace(case, blocks=tuple(tuple(b - a for a, b in pairs) for pairs in by_axis))


random_cases = partial(on_ranks, part=PART)


@random_cases(weighted, trials(40) // 2)
def test_exchanges(case: Case, comm: MPI.Intracomm) -> None:
    check_exchanges(in_its_blocks(case, comm), comm)


@random_cases(weighted, trials(20) // 4)
def test_accumulations(case: Case, comm: MPI.Intracomm) -> None:
    check_adjoint(in_its_blocks(case, comm), comm)


def sea_in_a_corner(i: Any, j: Any) -> Any:
    return (i < 13) & (j < 20)


def test_the_tripolar_example_as_on_one_rank(comm: MPI.Intracomm) -> None:
    """A tracer that crosses the fold, with staggered fields; the blocks at the fold are no mirror images."""
    turn = runpy.run_path(str(ROOT / "examples/tripolar.py"))["turn"]
    options: dict[str, Any] = {"periodic": (False, True), "connect": FOLD, "device": "cpu"}
    with halox.Grid((24, 36), comm=MPI.COMM_SELF, **options) as grid:
        wanted = grid.gather(turn(grid, 0.1)[0])
    with halox.Grid((24, 36), comm=comm, weights=sea_in_a_corner, **options) as grid:
        found, lost = turn(grid, 0.1)
        whole = grid.gather(found)
        said = str(grid.describe())
    is_right = comm.rank > 0 or np.allclose(whole, wanted, rtol=0, atol=1e-12)
    assert agree(is_right and lost < 1e-12 and "weights: the largest block" in said, comm)


def test_what_follows_from_a_grid(comm: MPI.Intracomm, tmp_path: Path) -> None:
    """Rank 0 alone has the weights. Sums, a checkpoint, coarse grids and an FFT have the values of the whole grid."""
    i, j = np.ogrid[:32, :24]
    sea = sea_in_a_corner(i, j) if comm.rank == 0 else None
    whole = np.random.default_rng(3).integers(0, 99, (32, 24)).astype(float)
    path = comm.bcast(tmp_path) / "u.zarr"
    with halox.Grid((32, 24), weights=sea, comm=comm, device="cpu") as grid:
        work = comm.allgather(sea_in_a_corner(*grid.indices()).sum())
        said = str(grid.describe()).split("has ")[1]
        assert said.startswith(f"{max(work) / np.mean(work):.2f} of the mean work")
        assert max(work) < 1.5 * np.mean(work)
        u = grid.scatter(whole if comm.rank == 0 else None)
        right = [grid.sum(u) == whole.sum(), grid.max(u) == whole.max()]
        gathered = grid.gather(u)
        right += [comm.rank > 0 or np.array_equal(gathered, whole)]
        grid.save(path, u=u)
        with grid.coarsen(2, even=False) as coarse:
            right += [coarse.grid_shape == (16, 12), coarse.sum(coarse.ones()) == 16 * 12]
        with halox.FFT(grid) as fft:
            spectrum = fft.grid.gather(fft.forward(u.astype("c16")))
            right += [comm.rank > 0 or np.allclose(spectrum, np.fft.fftn(whole))]
    with halox.Grid((32, 24), weights=whole + 1, comm=comm, device="cpu") as grid:
        right += [grid.sum(grid.load(path)["u"]) == whole.sum()]
    assert agree(all(right), comm)


def fails(i: Any, j: Any) -> Any:
    raise ZeroDivisionError("no weights here")


BAD: dict[str, tuple[Any, str]] = {
    "zeros": (lambda rank: np.zeros((6, 8)), "got only 0"),
    "negative": (lambda rank: np.eye(6, 8) - 0.5, r"-0.5 at \(0, 1\)"),
    "NaN": (lambda rank: np.where(np.eye(6, 8), np.nan, 1), r"nan at \(0, 0\)"),
    "inf on rank 0": (lambda rank: np.full((6, 8), np.inf) if rank == 0 else None, "inf at"),
    "shape": (lambda rank: np.ones((8, 6)), r"\(6, 8\)"),
    "axes": (lambda rank: np.ones(8), r"\(6, 8\)"),
    "text": (lambda rank: "sea", r"\(6, 8\)"),
    "complex": (lambda rank: np.ones((6, 8), complex), "complex128"),
    "masked": (lambda rank: np.ma.masked_array(np.ones((6, 8))), "masked"),
    "one odd rank": (lambda rank: [[1], [2, 3]] if rank == 0 else None, "ValueError"),
    "a function that fails": (lambda rank: fails, "ZeroDivisionError: no weights here"),
    "a function of no array": (lambda rank: lambda i, j: "sea", r"\(6, 8\)"),
}


@pytest.mark.usually(2)
@pytest.mark.parametrize("name", BAD)
def test_bad_weights(name: str, comm: MPI.Intracomm) -> None:
    make, word = BAD[name]
    with pytest.raises(HaloxError, match=f"weights.*{word}") as caught:
        halox.Grid((6, 8), weights=make(comm.rank), comm=comm, device="cpu")
    assert isinstance(caught.value, ValueError)
    assert set(comm.allgather(str(caught.value))) == {str(caught.value)}


@pytest.mark.usually(2, 3)
def test_weights_that_contradict(comm: MPI.Intracomm) -> None:
    """Other weights on other ranks, weights without rank 0, and weights with blocks."""
    options: dict[str, Any] = {"comm": comm, "device": "cpu"}
    with pytest.raises(DecompositionError, match=r"weights.*blocks="):
        halox.Grid((6, 8), weights=np.ones((6, 8)), blocks=(None, None), **options)
    if comm.size > 1:
        for weights in (
            np.full((6, 8), comm.rank + 1.0),
            np.ones((6, 8)) if comm.rank else None,
            sea_in_a_corner if comm.rank else np.ones((6, 8)),
        ):
            with pytest.raises(MismatchError, match="weights"):
                halox.Grid((6, 8), weights=weights, **options)
    with halox.Grid((6 * comm.size, 8), weights=np.ones((1, 1)), **options) as grid:
        assert grid.sum(grid.ones()) == 48 * comm.size


def test_a_cartesian_communicator_gives_the_process_grid(comm: MPI.Intracomm) -> None:
    cart = comm.Create_cart((1, comm.size), periods=(True, False))
    i, j = np.ogrid[:12, :24]
    with halox.Grid((12, 24), weights=sea_in_a_corner(i, j), comm=cart, device="cpu") as grid:
        found = grid.proc_shape, grid.periodic, [*grid.proc_coords]
        is_right = found == ((1, comm.size), (True, False), cart.Get_coords(cart.rank))
        assert agree(is_right and grid.rank_shape[0] == 12, comm)
    cart.Free()
