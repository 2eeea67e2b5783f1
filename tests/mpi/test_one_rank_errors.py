"""Errors that only one rank can detect: all ranks raise at once, and the grid stays usable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.collectives.host.shared_reduction import SharedReduction
from halox.errors import ExchangeTimeoutError, FieldError, HaloxError, MismatchError
from halox.runtime.arrays import check_elements_apart, describe
from tests.mpi.limits import short_waits

pytestmark = pytest.mark.ranks(1, 2, 3, 4)

LARGE = np.finfo("f8").max


@pytest.fixture
def grid(comm: MPI.Intracomm) -> Iterator[halox.Grid]:
    with halox.Grid((4, 3 * comm.size), periodic=True, comm=comm, device="cpu") as g:
        yield g


def bad_on_last(grid: halox.Grid, bad: Any, good: Any) -> Any:
    return bad if grid.rank == grid.size - 1 else good


def raised_by_all(grid: halox.Grid, kind: type, word: str, call: Callable[[], Any]) -> None:
    """Assert that all ranks raise the same class, none by the time limit, and that the next calls work."""
    with pytest.raises(HaloxError) as caught:
        call()
    assert set(grid.comm.allgather(type(caught.value))) == {kind}
    assert word in str(caught.value)
    u = grid.ones()
    grid.exchange(u)
    assert grid.sum(u) == 12 * grid.size


@contextmanager
def strict(how: str) -> Iterator[None]:
    if how == "errstate":
        with np.errstate(all="raise"):
            yield
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield


@pytest.mark.parametrize("how", ["errstate", "-W error"])
@pytest.mark.parametrize("where", ["all ranks", "one rank"])
def test_floating_point_errors(how: str, where: str, grid: halox.Grid) -> None:
    u = grid.ones()
    grid.interior(u)[:2] = bad_on_last(grid, LARGE, 1)
    name = "FloatingPointError" if how == "errstate" else "RuntimeWarning"

    def call() -> None:
        if where == "all ranks" or grid.rank == grid.size - 1:
            with strict(how):
                grid.sum(u)
        else:
            grid.sum(u)

    raised_by_all(grid, HaloxError, name, call)


@pytest.mark.parametrize("how", ["errstate", "-W error"])
def test_combining_raises_nowhere(how: str, grid: halox.Grid) -> None:
    """A sum that overflows only between ranks is infinite on all, whatever a rank's warning settings are."""
    u = grid.zeros()
    grid.interior(u)[0, 0] = LARGE
    with strict(how if grid.rank == 0 else "errstate"):
        found = grid.sum(u)
    assert found == (np.inf if grid.size > 1 else LARGE)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ("x", "f8"),
        (300, "u1"),
        (-1, "u4"),
        (np.int64(300), "u1"),
        (np.nan, "i4"),
        (1e30, "i8"),
        (None, "i4"),
        ({}, "f8"),
        ((1, 2, 3), [("a", "f8"), ("b", "i4")]),
    ],
    ids=str,
)
def test_values_that_do_not_fit(value: Any, dtype: Any, grid: halox.Grid) -> None:
    raised_by_all(grid, FieldError, "value", lambda: grid.full(value, dtype))
    on_one = bad_on_last(grid, value, np.zeros((), dtype)[()])
    raised_by_all(grid, FieldError, "value", lambda: grid.full(on_one, dtype))


def test_values_of_another_shape(grid: halox.Grid) -> None:
    raised_by_all(grid, FieldError, "value", lambda: grid.full(bad_on_last(grid, [1] * 7, 1)))
    rows = grid.full([1.0, 2, 3], components_after=3)
    assert np.all(rows == [1, 2, 3])


@pytest.mark.parametrize("factory", ["zeros", "ones", "empty"])
def test_no_memory_on_one_rank(
    factory: str, grid: halox.Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*arguments: Any) -> Any:
        raise MemoryError("no room for this")

    monkeypatch.setattr("halox.domain.allocation.reads_in_place", lambda *_: False)
    with monkeypatch.context() as patched:
        if grid.rank == grid.size - 1:
            patched.setattr("halox.domain.allocation.allocate", allocate)
        with pytest.raises(HaloxError, match="no room for this"):
            getattr(grid, factory)()
    raised_by_all(grid, FieldError, "dtype", lambda: grid.zeros(bad_on_last(grid, object, "f8")))


@pytest.mark.parametrize("factory", ["zeros", "ones", "empty"])
@pytest.mark.parametrize(
    ("dtype", "components"), [("V1000000000", 1 << 40), ("f8", 1 << 60), ("f8", (1,) * 65)]
)
def test_fields_that_no_machine_holds(
    factory: str, dtype: str, components: Any, grid: halox.Grid
) -> None:
    for bad in (components, bad_on_last(grid, components, ())):
        call = getattr(grid, factory)
        raised_by_all(grid, FieldError, "components", lambda: call(dtype, components=bad))  # noqa: B023


def test_dtypes_with_axes(grid: halox.Grid) -> None:
    dtype = ("f8", (3,))
    raised_by_all(grid, FieldError, "dtype", lambda: grid.zeros(dtype))
    raised_by_all(grid, FieldError, "dtype", lambda: grid.ones(bad_on_last(grid, dtype, "f8")))
    raised_by_all(grid, FieldError, "dtype", lambda: grid.zeros_like(grid.zeros(), dtype))


class Raising:
    """An array of another library, which raises in every query."""

    def __dlpack_device__(self) -> Any:
        raise ZeroDivisionError("nobody expects this")

    def __dlpack__(self, **_: Any) -> Any:
        raise ZeroDivisionError("nobody expects this")


@pytest.mark.parametrize("method", ["exchange", "accumulate", "plan", "explain", "gather", "sum"])
def test_an_array_that_raises(method: str, grid: halox.Grid) -> None:
    u = bad_on_last(grid, Raising(), grid.ones())
    raised_by_all(grid, FieldError, "ZeroDivisionError", lambda: getattr(grid, method)(u))


@pytest.mark.parametrize("seen", [False, True])
def test_an_allreduce_without_memory(
    seen: bool, grid: halox.Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, given = np.empty, np.ones(4)

    def full(shape: Any, *rest: Any) -> Any:
        if shape == (4,):
            raise MemoryError("no room for this")
        return empty(shape, *rest)

    for _ in range(3 if seen else 0):
        grid.allreduce(given)
    with monkeypatch.context() as patched:
        if grid.rank == grid.size - 1:
            patched.setattr(np, "empty", full)
        with pytest.raises(HaloxError, match="an allreduce failed: MemoryError: no room"):
            grid.allreduce(given)
    assert grid.allreduce(given).tolist() == [grid.size] * 4


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("elements", [4, 4000])
@pytest.mark.full
def test_an_allreduce_that_a_rank_does_not_come_to(elements: int, comm: MPI.Intracomm) -> None:
    """One rank makes no call, or stops after the first step of a larger allreduce."""
    g = halox.Grid((4, 3 * comm.size), comm=comm.Dup(), device="cpu")
    ones = np.ones(elements)
    assert (g.allreduce(ones) == comm.size).all()
    comm.Barrier()
    if comm.rank < comm.size - 1:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            g.allreduce(ones)
    elif elements > 4:
        g._world.begin("allreduce")
        (made,) = g._reductions.arrays.reductions.values()
        made._values.gather((), "an allreduce")
    comm.Barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("elements", [4, 4000])
def test_an_allreduce_in_which_ranks_differ_once(
    elements: int, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gather that compares the arguments also moves small arrays; all ranks raise, on one node or several."""
    last = comm.rank == comm.size - 1
    for nodes in ("one", "rank"):
        monkeypatch.setenv("HALOX_NODE", nodes)
        with halox.Grid((4, 3 * comm.size), comm=comm, device="cpu") as g:
            ones, total, u = np.ones(elements), [comm.size] * elements, g.ones()
            for bad, op, kind, text in (
                (
                    np.ones(elements, "i8"),
                    "sum",
                    MismatchError,
                    "same shape and dtype on all ranks",
                ),
                (np.ones((elements, 1)), "sum", MismatchError, "same shape and dtype on all ranks"),
                (np.ones(7), "sum", MismatchError, "same shape and dtype on all ranks"),
                (np.ones(7000), "sum", MismatchError, "same shape and dtype on all ranks"),
                (ones, "prod", MismatchError, "same operation on all ranks: rank 0 gave sum, rank"),
                (ones, "mean", FieldError, rf"\[rank {comm.size - 1}\] op must be one of"),
                (ones, ["sum"], FieldError, r"op must be one of"),
                (ones.astype("f2"), "sum", FieldError, "dtype float16 cannot be reduced"),
                ("text", "sum", FieldError, "cannot be reduced"),
            ):
                with pytest.raises(kind, match=text):
                    g.allreduce(*((bad, op) if last else (ones, "sum")))
                assert g.allreduce(ones).tolist() == total, (bad, op)
            with pytest.raises(FieldError):
                g.allreduce(ones, out=np.ones(3) if last else np.ones(elements))
            with pytest.raises(MismatchError):
                g.sum(u) if last else g.allreduce(ones)
            assert g.allreduce(ones, out=ones).tolist() == total


@pytest.mark.ranks(2, 3)
def test_a_small_allreduce_meets_once(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """One gather compares the arguments and moves the values, also for fields. A larger array takes a second step."""
    steps = []
    reduce = SharedReduction.reduce

    def counted(self: SharedReduction, *given: Any) -> None:
        steps.append(self)
        reduce(self, *given)

    monkeypatch.setattr(SharedReduction, "reduce", counted)
    with halox.Grid((4, 3 * comm.size), comm=comm, device="cpu") as g:
        ranks = g._world.ranks
        for elements, large in ((1, 0), (4, 0), (440, 0), (441, 1)):
            ones = np.ones(elements)
            g.allreduce(ones)
            for given in (ones, ones[::-1], ones.copy()):
                steps.clear()
                before = ranks.rounds
                assert (g.allreduce(given) == comm.size).all()
                assert (ranks.rounds - before, len(steps)) == (1, large)
        u = g.ones()
        for call in (g.sum, g.max, g.norm, lambda u: g.dot(u, u)):
            call(u)
            before = ranks.rounds
            call(u)
            assert ranks.rounds == before + 1


@pytest.mark.parametrize(
    "dtype",
    ["S3", "U2", "M8[s]", "m8[D]", "?", "V5", "c8", [("a", "f8"), ("b", "S2")]],
    ids=str,
)
def test_contents_are_numpy_s(dtype: Any, grid: halox.Grid) -> None:
    shape = grid.padded_shape
    dirty = grid.empty("u1", components_after=np.dtype(dtype).itemsize)
    dirty[...] = 255
    del dirty  # its memory is used again
    assert grid.zeros(dtype).tobytes() == np.zeros(shape, dtype).tobytes()
    assert grid.ones(dtype).tobytes() == np.ones(shape, dtype).tobytes()
    value = np.ones((), dtype)[()]
    assert grid.full(value, dtype).tobytes() == np.full(shape, value, dtype).tobytes()


def test_contents_of_structs_with_gaps(grid: halox.Grid) -> None:
    dtype = np.dtype({"names": ["a", "b"], "formats": ["f8", "f4"], "offsets": [16, 4]})
    dirty = grid.full(255, "u1", components_after=dtype.itemsize)
    del dirty
    assert not any(grid.zeros(dtype).tobytes())
    assert np.all(grid.ones(dtype) == np.ones(grid.padded_shape, dtype))
    assert np.all(grid.full((2, 3), dtype) == np.array((2, 3), dtype))


def test_full_of_none_is_no_empty_field(grid: halox.Grid) -> None:
    assert np.all(np.isnan(grid.full(None)))


def test_accumulate_of_the_same_cells_twice(grid: halox.Grid) -> None:
    u, both = grid.ones(), grid.ones(components=2)
    for fields, named in (
        ((u, u), (0, 1)),
        ((grid.ones(), u, u[:]), (1, 2)),
        ((both, both[1]), (0, 1)),
        ((u, u[::-1, ::-1]), (0, 1)),
    ):
        call = partial(grid.accumulate, *fields)
        raised_by_all(grid, FieldError, "{} and {}".format(*named), call)
    grid.accumulate(both[0], both[1])
    between = grid.ones(components_after=2)
    grid.accumulate(between[..., 0], between[..., 1])


def overlapping(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Return zeros with given strides, so that elements may share memory."""
    return np.lib.stride_tricks.as_strided(np.zeros(4096), shape, strides)


@pytest.mark.parametrize("strides", [(8, 8), (0, 8), (8, 0), (4, 80)], ids=str)
def test_targets_whose_elements_share_memory(
    strides: tuple[int, int], grid: halox.Grid, comm: MPI.Intracomm, tmp_path: Any
) -> None:
    """All ranks refuse an array with elements that share memory, before any write."""
    bad = bad_on_last(grid, overlapping(grid.padded_shape, strides), np.zeros(grid.padded_shape))
    path = comm.bcast(str(tmp_path / "run"))
    grid.save(path, u=grid.ones())
    whole = np.ones(grid.grid_shape) if comm.rank == 0 else None
    calls: tuple[Callable[[], Any], ...] = (
        lambda: grid.scatter(whole, out=bad),
        lambda: grid.load(path, u=bad),
    )
    for call in calls:
        raised_by_all(grid, FieldError, "share memory", call)
    assert not bad.any()
    with halox.FFT(grid, axes=0) as fft:
        given, result = fft.physical.zeros("c16"), np.ones(fft.grid.padded_shape, "c16")
        shared = np.lib.stride_tricks.as_strided(result, strides=strides)
        out = bad_on_last(grid, shared, result)
        raised_by_all(grid, FieldError, "out", lambda: fft.forward(given, out))


@pytest.mark.parametrize("strides", [(16, 24), (-16, 24), (8, -400)], ids=str)
def test_elements_that_interleave(strides: tuple[int, int]) -> None:
    """Elements between one another, or in backward order, share no memory."""
    check_elements_apart(describe(overlapping((3, 2), strides)), "u")
