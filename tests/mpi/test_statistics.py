"""Means, deviations, extremes, sums over axes, histograms and random fields against NumPy on the whole field."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import FieldError, MismatchError
from tests.mpi.bad_input import Table, check_error
from tests.mpi.conftest import agree

pytestmark = [pytest.mark.usually(1, 3), pytest.mark.filterwarnings("ignore:.*encountered")]

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"components": 2, "staggered": 0, "halo": 2},
    {"components": (..., 2, 3), "staggered": (1, 2)},
]
SHAPE = (7, 6, 9)
KNOWN = {
    "uniform": (
        "0x1.796f9a9170b1ap-2",
        "0x1.1878ebe7867a0p-2",
        "0x1.4c8a152f4b306p-2",
        "0x1.d132970a89cf8p-4",
    ),
    "normal": (
        "0x1.66223a079763ep-2",
        "-0x1.71f101ab5d4aap-2",
        "0x1.4dd17314418e8p-3",
        "-0x1.f3626f52a510dp-2",
    ),
}


def whole_field(dtype: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Return numbers with equal ones among them, the same on all ranks."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-9, 10, shape) + (1j * rng.integers(-9, 10, shape) if "c" in dtype else 0)
    return whole.astype(dtype) / (8 if "f" in dtype or "c" in dtype else 1)  # exact sums


def field_of(grid: halox.Grid, dtype: str, layout: dict[str, Any]) -> tuple[Any, np.ndarray]:
    """Return a field whose halo has other numbers, and the whole field."""
    u = grid.full(77, dtype, **layout)
    found = grid.layout(u)
    whole = whole_field(dtype, found.global_shape).astype(dtype)
    before = (slice(None),) * len(found.spec.components_before)
    grid.interior(u)[...] = whole[(*before, *found.owned)]
    return u, whole


@pytest.mark.usually(1, 3, 4)
@pytest.mark.parametrize("periodic", [False, True])
def test_numbers_of_fields(periodic: bool, comm: MPI.Intracomm) -> None:
    with halox.Grid(SHAPE, halo=1, periodic=periodic, device="cpu", comm=comm) as grid:
        for dtype, layout in itertools.product(("f8", "f4", "i2", "u8", "c16", "?"), LAYOUTS):
            wrong = wrong_numbers(grid, dtype, layout)
            assert agree(not wrong, comm), (dtype, layout, wrong)


def wrong_numbers(grid: halox.Grid, dtype: str, layout: dict[str, Any]) -> list[str]:
    """Return the calls whose results differ from those of NumPy."""
    u, whole = field_of(grid, dtype, layout)
    wide = whole.astype(np.result_type(dtype, "c16" if "c" in dtype else "f8"))
    results = [("mean", grid.mean(u), wide.mean()), ("std", grid.std(u), wide.std())]
    first = len(grid.layout(u).spec.components_before)
    for axis in (0, -1, (0, 2), (2, 1, 0)):
        named = (axis,) if isinstance(axis, int) else axis
        over = tuple(first + n % 3 for n in named)
        total, mean = grid.sum(u, axis=axis), grid.mean(u, axis=axis)
        assert total.dtype == grid.sum(u).dtype
        results.append((f"sum over {axis}", total, whole.sum(axis=over, dtype=total.dtype)))
        results.append((f"mean over {axis}", mean, wide.mean(axis=over)))
        for name in ("min", "max") if "c" not in dtype else ():
            extreme = getattr(grid, name)(u, axis=axis)
            assert extreme.dtype == dtype
            results.append((f"{name} over {axis}", extreme, getattr(whole, name)(axis=over)))
    if "c" not in dtype:
        for name in ("argmin", "argmax"):
            index = np.unravel_index(getattr(np, name)(whole), whole.shape)
            results.append((name, getattr(grid, name)(u), tuple(map(int, index))))
    return [name for name, found, right in results if not same(found, right)]


def same(found: Any, right: Any) -> bool:
    return np.shape(found) == np.shape(right) and np.allclose(found, right, rtol=1e-13, atol=1e-15)


def test_extremes_over_axes_of_nan_and_infinity(comm: MPI.Intracomm) -> None:
    whole = np.arange(48.0).reshape(8, 6)
    whole[0, 1], whole[:, 2], whole[7, 3] = np.nan, -np.inf, np.inf
    with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
        u = grid.scatter(whole)
        for name in ("min", "max"):
            for axis, dim in enumerate("xy"):
                right = getattr(whole, name)(axis=axis)
                for given in (axis, dim):
                    found = getattr(grid, name)(u, axis=given)
                    assert agree(np.array_equal(found, right, equal_nan=True), comm)
        assert agree(
            np.array_equal(grid.mean(u, axis="x"), whole.mean(axis=0), equal_nan=True), comm
        )


@pytest.mark.parametrize("shift", [0.0, 1e9])
def test_a_large_mean_cancels_no_digits(shift: float, comm: MPI.Intracomm) -> None:
    """Also when every block of a rank, and every rank, has another mean."""
    with halox.Grid((50, 40, 30), device="cpu", comm=comm) as grid:
        u = grid.zeros()
        whole = np.random.default_rng(1).normal(size=grid.grid_shape) + shift
        whole += np.linspace(0, 30, 50)[:, None, None]
        grid.interior(u)[...] = whole[grid.owned]
        exact = (whole - shift).std()
        assert agree(abs(grid.std(u) / exact - 1) < 1e-13, comm)
        u[...] = 1 / 3
        assert agree(grid.std(u) < 1e-16, comm)


@pytest.mark.parametrize(
    "numbers",
    [(-2e154,), (1e155, 3e155), (1e200, -1e200), (1e308, -1e308), (2e154, np.inf)],
    ids=str,
)
def test_deviations_of_large_numbers(numbers: tuple[float, ...], comm: MPI.Intracomm) -> None:
    """Those of NumPy, also if squares of the numbers or of the differences are not finite."""
    with halox.Grid((300, 90), device="cpu", comm=comm) as grid:
        whole = np.resize(np.array(numbers), grid.grid_shape)
        whole[:, 0] = numbers[0]
        u = grid.zeros()
        grid.interior(u)[...] = whole[grid.owned]
        for field, all_ in ((u, whole), (u + 0j, whole + 0j)):
            assert agree(np.allclose(grid.std(field), all_.std(), 1e-13, equal_nan=True), comm)


def test_nan_is_the_first_extreme(comm: MPI.Intracomm) -> None:
    with halox.Grid(SHAPE, device="cpu", comm=comm) as grid:
        for places in ([(6, 5, 8)], [(3, 2, 1), (0, 5, 8), (6, 0, 0)]):
            u, whole = field_of(grid, "f8", {})
            for place in places:
                whole[place] = np.nan
            grid.interior(u)[...] = whole[grid.owned]
            assert agree(grid.argmin(u) == grid.argmax(u) == min(places), comm)
            assert agree(bool(np.isnan(grid.std(u))), comm)


def test_histograms(comm: MPI.Intracomm) -> None:
    cases = [
        *itertools.product(("f8",), (7, [-1.0, 0.0, 0.3, 2.0], [], [1.0]), (None, (-0.7, 0.9))),
        *itertools.product(("f4", "i4"), (7, (2, 1000)), (None, np.array([0, 1]))),
    ]
    with halox.Grid((*SHAPE, 4), device="cpu", comm=comm) as grid:
        for dtype, bins, limits in cases:
            u, whole = field_of(grid, dtype, {"components": 2})
            found, right = grid.histogram(u, bins, limits), np.histogram(whole, bins, limits)
            for mine, of_numpy in zip(found, right, strict=True):
                assert agree(np.array_equal(mine, of_numpy), comm), (dtype, bins, limits)
                assert mine.dtype == of_numpy.dtype


def test_random_fields_do_not_depend_on_the_ranks(comm: MPI.Intracomm) -> None:
    """Each rank makes the whole field alone; the halo of the common field is as an exchange fills it."""
    options: dict[str, Any] = {"periodic": True, "device": "cpu", "checkerboard": True}
    alone = halox.Grid((8, 6, 8), comm=MPI.COMM_SELF, **options)
    with halox.Grid((8, 6, 8), comm=comm, **options) as grid:
        for dtype, dist, layout in itertools.product(
            ("f4", "c16"), ("uniform", "normal"), [*LAYOUTS, {"parity": "odd"}]
        ):
            u = grid.random(2**63, dist, dtype, **layout)
            whole = alone.interior(alone.random(2**63, dist, dtype, **layout))
            before = (slice(None),) * len(grid.layout(u).spec.components_before)
            expected = whole[(*before, *grid.layout(u).owned)]
            assert agree(np.array_equal(grid.interior(u), expected), comm)
            copy = u.copy()
            grid.exchange(u)
            assert agree(np.array_equal(u, copy), comm)
    alone.close()


@pytest.mark.parametrize("dist", KNOWN)
def test_random_numbers_stay_as_they_are(dist: str, comm: MPI.Intracomm) -> None:
    """A seed gives the same numbers in all versions: here those of four points, recorded in November 2026."""
    with halox.Grid((3, 4), halo=0, proc_shape=(1, comm.size), device="cpu", comm=comm) as grid:
        u = grid.gather(grid.random(2**40 + 5, dist))  # type: ignore[arg-type]
        found = [0.0] * 4 if u is None else u.reshape(-1)[[0, 1, 5, 11]].tolist()
        right = [float.fromhex(number) for number in KNOWN[dist]]
        tolerance = 0 if dist == "uniform" else 1e-14
        assert agree(u is None or np.allclose(found, right, rtol=tolerance, atol=0), comm)


def test_random_numbers_into_a_field(comm: MPI.Intracomm) -> None:
    """Of any layout and strides; the numbers are those of a new field, halo included."""
    with halox.Grid((8, 6, 8), periodic=True, device="cpu", comm=comm) as grid:
        for dtype, dist, layout in itertools.product(
            ("f4", "f8", "c8"), ("uniform", "normal"), LAYOUTS
        ):
            new = grid.random(5, dist, dtype, **layout)
            u = grid.zeros(dtype, **layout)
            assert grid.random(5, dist, out=u) is u
            assert agree(u.tobytes() == new.tobytes(), comm)
        strided = np.zeros((*grid.padded_shape, 2), "f8")[..., 0]
        grid.random(5, out=strided)
        assert agree(np.array_equal(strided, grid.random(5)), comm)


def test_random_numbers_into_a_wrong_array(comm: MPI.Intracomm) -> None:
    with halox.Grid((8, 6), device="cpu", comm=comm) as grid:
        u = grid.zeros()
        fixed = u.copy()
        fixed.flags.writeable = False
        for options in (
            {"out": u[1:]},
            {"out": fixed},
            {"out": u.astype("i8")},
            {"out": u, "dtype": "f8"},
            {"out": u, "components": 2},
        ):
            with pytest.raises(FieldError):
                grid.random(0, **options)
        if comm.size > 1:
            with pytest.raises(MismatchError, match="out"):
                grid.random(0, out=u if comm.rank else None)
        assert not u.any()


@pytest.mark.usually(1)
def test_random_numbers_have_their_distribution(comm: MPI.Intracomm) -> None:
    """Moments and correlations of neighbours within five standard errors; seeds differ."""
    with halox.Grid((64, 64), device="cpu", comm=comm) as grid:
        for dist, mean, std, fourth in (("uniform", 0.5, 12**-0.5, 1 / 80), ("normal", 0, 1, 3)):
            fields = [grid.gather(grid.random(seed, dist)) for seed in (0, 1)]
            if comm.rank == 0:
                a, b = (field - mean for field in fields)
                for product, expected in (
                    (a, 0),
                    (a**2, std**2),
                    (a**4, fourth),
                    (a[1:] * a[:-1], 0),
                    (a[:, 1:] * a[:, :-1], 0),
                    (a * b, 0),
                ):
                    error = product.std() / np.sqrt(product.size)
                    assert abs(product.mean() - expected) < 5 * error
                assert dist == "normal" or 0 <= fields[0].min() < fields[0].max() < 1


def on_grid(call: Callable[[halox.Grid, Any, int], object]) -> Callable[[MPI.Intracomm], None]:
    """Return a call with a grid, a field of ones, and the rank."""

    def run(comm: MPI.Intracomm) -> None:
        with halox.Grid((8, 6), device="cpu", comm=comm, checkerboard=True) as grid:
            call(grid, grid.ones(), comm.rank)

    return run


FIELD_ERRORS: dict[str, tuple[Any, str]] = {
    "a sum over an axis that the grid lacks": (lambda g, u, rank: g.sum(u, axis=2), "axis"),
    "a sum over an axis by its number and its name": (
        lambda g, u, rank: g.sum(u, axis=("x", 0)),
        "different grid axes",
    ),
    "a sum over an axis of a field of one parity": (
        lambda g, u, rank: g.sum(g.ones(parity="even"), axis=0),
        "axis",
    ),
    "sums over axes into an array": (lambda g, u, rank: g.sum(u, np.zeros(8), axis=1), "out"),
    "extremes over axes of expressions": (lambda g, u, rank: g.max("u", axis=1, u=u), "axis"),
    "extremes over axes of complex numbers": (lambda g, u, rank: g.min(u + 1j, axis=1), "min"),
    "the smallest of complex numbers": (lambda g, u, rank: g.argmin(u + 1j), "argmin"),
    "a wrong shape on one rank": (lambda g, u, rank: g.std(u if rank else u[1:]), "shape"),
    "a histogram of NaN without a range": (lambda g, u, rank: g.histogram(u * np.nan), "range"),
    "bins by name": (lambda g, u, rank: g.histogram(u, "auto"), "bins"),
    "falling edges of bins": (lambda g, u, rank: g.histogram(u, [1, 0]), "bins"),
    "a seed that is not an int": (lambda g, u, rank: g.random(0.5), "seed"),
    "an unknown distribution": (lambda g, u, rank: g.random(0, "cauchy"), "dist"),
    "random integers": (lambda g, u, rank: g.random(0, dtype="i4"), "int32"),
}
MISMATCHES: dict[str, tuple[Any, str]] = {
    "sums over unlike axes": (lambda g, u, rank: g.sum(u, axis=rank % 2), "axis"),
    "extremes of unlike kinds": (lambda g, u, rank: (g.min, g.max)[rank % 2](u, axis=0), "op"),
    "a sum over an axis on some ranks": (
        lambda g, u, rank: g.mean(u, axis=0 if rank else None),
        "different calls",
    ),
    "unlike dtypes": (lambda g, u, rank: g.std(u.astype("f4") if rank else u), "field"),
    "unlike bins": (lambda g, u, rank: g.histogram(u, 3 + rank), "bins"),
    "unlike seeds": (lambda g, u, rank: g.random(rank), "seed"),
    "unlike layouts": (lambda g, u, rank: g.random(0, components=1 + rank), "layout"),
}
TABLE: Table = {
    **{name: (on_grid(call), FieldError, word) for name, (call, word) in FIELD_ERRORS.items()},
    **{
        f"{name} >1": (on_grid(call), MismatchError, word)
        for name, (call, word) in MISMATCHES.items()
    },
}


@pytest.mark.parametrize("name", TABLE)
def test_bad_input(name: str, comm: MPI.Intracomm) -> None:
    check_error(TABLE, name, comm)
