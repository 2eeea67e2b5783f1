"""Reductions of arrays and fields on GPUs, from the public calls down to the kernels, on simulated GPUs."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    ClosedError,
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    MismatchError,
    StateError,
)
from halox.reductions.algorithms import DEVICE_ALGORITHMS
from halox.runtime.gpu import memory
from tests.fakes.cpu_allreduce import limit_kernels
from tests.fakes.fake_cupy import Array, Machine
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.mpi.reductions.reduction_calls import calls_with, check_closed
from tests.support import require
from tests.unit.reductions.reduction_oracle import expected, same, sample

require("cxx")

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(3)]

KERNELS = ("oneshot", "reduce_scatter_allgather")
WAYS = ["own GPUs", "one GPU", "a node each", "two nodes"]
OWN_GPUS = pytest.mark.parametrize("way", ["own GPUs"], indirect=True)
TWO_WAYS = pytest.mark.parametrize("way", ["own GPUs", "two nodes"], indirect=True)
"""By one kernel of all ranks, and by several steps."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def machine(way: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Machine:
    nodes = {"a node each": "rank", "two nodes": "second" if comm.rank % 3 == 1 else "first"}
    if way in nodes:
        monkeypatch.setenv("HALOX_NODE", nodes[way])
    found = Machine(comm.rank, shared=way == "one GPU" and comm.size > 1)
    found.install(monkeypatch)
    return found


@pytest.fixture
def grid(machine: Machine, comm: MPI.Intracomm) -> Any:
    shape = (5 * comm.size + 1, 7)
    with halox.Grid(shape, halo=((1, 2), (1, 2)), comm=comm, device="gpu") as found:
        yield found


def possible(way: str, ranks: int) -> set[str]:
    """Return the algorithms that must be available."""
    kernels, trees = {"oneshot", "reduce_scatter_allgather"}, {"shared_buffer", "binomial"}
    found = {"host"}  # these GPUs have no NCCL
    if way == "own GPUs" or ranks == 1:
        found |= kernels
    if way in ("own GPUs", "one GPU") and ranks > 1:
        found |= trees
    return found


def wanted(algorithm: str, way: str, op: str, values: list[Any]) -> Any:
    """Return the ranks' values combined in the order that the algorithm promises."""
    if algorithm == "binomial":
        parts = list(values)
        while len(parts) > 1:
            parts = [expected(op, parts[i : i + 2]) for i in range(0, len(parts), 2)]
        return parts[0]
    return expected(op, values)


def reduced(algorithm: str | None, comm: MPI.Intracomm, shape: Any, dtype: Any, op: str) -> Any:
    return halox.Allreduce(comm, shape, dtype, op, algorithm, device="gpu")


@pytest.mark.parametrize("algorithm", DEVICE_ALGORITHMS)
@pytest.mark.part(3)
def test_algorithms(algorithm: str, way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    """Results have NumPy's bits in the documented order; an unavailable algorithm raises on all ranks with a reason."""
    if algorithm not in possible(way, comm.size):
        reasons = {"one GPU": "shares its GPU", "own GPUs": "none"}
        reason = reasons.get(way, "are on different nodes")
        if comm.size == 1:
            reason = "there is one rank"
        if algorithm == "hierarchical":
            is_apart = way in ("two nodes", "a node each") and comm.size > 1
            reason = "NCCL|libnccl" if is_apart else "on one node"
        with pytest.raises(FieldError, match=reason):
            reduced(algorithm, comm, 3, "f8", "sum")
        return
    for op, dtype, elements in (("sum", "f8", 700), ("max", "i2", 5), ("prod", "c16", 33)):
        values = [sample(dtype, op, elements, rank) for rank in range(comm.size)]
        with reduced(algorithm, comm, elements, dtype, op) as reduce:
            assert reduce.algorithm == algorithm
            assert reduce.captures == (algorithm in KERNELS)
            assert set(reduce.reasons) == set(DEVICE_ALGORITHMS) - possible(way, comm.size)
            given = Array(values[comm.rank].copy())
            found = reduce(given)
            again = reduce(given, out=given)
            assert isinstance(found, Array) and again is given
        ok = same(found.get(), wanted(algorithm, way, op, values))
        ok &= found.get().tobytes() == given.get().tobytes()
        ok &= len(set(comm.allgather(found.get().tobytes()))) == 1
        assert agree(ok, comm), (op, dtype)


@pytest.mark.parametrize("refused", [False, True])
def test_through_the_host(
    refused: bool, way: str, machine: Machine, comm: MPI.Intracomm, monkeypatch: Any
) -> None:
    """Values move in pieces through page-locked shared memory, or through MPI if one rank cannot page-lock it."""
    if refused and comm.rank == comm.size - 1:

        def register(_: Any) -> Any:
            raise DeviceError("cannot register 1 bytes of host memory")

        monkeypatch.setattr(memory, "register", register)
    has_pieces = way in ("own GPUs", "one GPU") and not refused
    # All memory on a communicator is freed when its last object is closed; the tests' plugin has one on `comm`.
    own = comm.Dup()
    for elements in (5, 300_000 if has_pieces else 5000):
        values = [sample("f8", "sum", elements, rank) for rank in range(comm.size)]
        with reduced("host", own, elements, "f8", "sum") as reduce:
            registered = len(machine.registered)
            right = expected("sum", values)
            for _ in range(3):
                given = Array(values[comm.rank].copy())
                reduce(given, out=given)
                assert agree(same(given.get(), right), comm)
            assert len(machine.registered) == registered, "once is enough"
        assert not machine.registered
    own.Free()


def test_the_choice(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    with reduced(None, comm, 3, "f8", "sum") as reduce:
        assert reduce.algorithm in possible(way, comm.size)
        if way == "own GPUs":
            assert reduce.algorithm == "oneshot" and reduce.device == "gpu"
    if way == "own GPUs" and comm.size > 1:
        with reduced(None, comm, 1 << 21, "f8", "sum") as reduce:
            assert reduce.algorithm == "reduce_scatter_allgather"


@TWO_WAYS
def test_places_of_arrays(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    base = np.arange(24).reshape(6, 4)
    total = base * (comm.size * (comm.size + 1) // 2)
    mine = base * (comm.rank + 1)
    with reduced(None, comm, (6, 4), "i8", "sum") as reduce:
        found = reduce(mine)
        assert isinstance(found, np.ndarray) and np.array_equal(found, total)
        around = np.zeros((6, 8), "i8")
        around[:, 1::2] = mine
        out = Array(np.full((12, 4), -1)[::2])
        assert reduce(Array(around[:, 1::2]), out) is out
        assert np.array_equal(out.get(), total)
        overlapping = np.zeros(7 * 4, "i8")
        overlapping[4:] = mine.ravel()
        source, target = (overlapping[i : i + 24].reshape(6, 4) for i in (4, 0))
        reduce(Array(source), out=Array(target))
        assert np.array_equal(target, total)
        unaligned = np.zeros(200, np.uint8)[3:195].view("i8").reshape(6, 4)
        unaligned[...] = mine
        assert np.array_equal(reduce(Array(unaligned)).get(), total)
        host = np.zeros((6, 4), "i8")
        assert reduce(Array(mine), out=host) is host and np.array_equal(host, total)
    with reduced(None, comm, (), "f8", "max") as reduce:
        found = reduce(float(comm.rank))
        assert isinstance(found, np.float64) and found == comm.size - 1
        zero = reduce(Array(np.array(1.0 + comm.rank)))
        assert isinstance(zero, Array) and zero.shape == () and float(zero) == comm.size
    with reduced(None, comm, (0, 3), "f8", "sum") as reduce:
        assert reduce(Array(np.zeros((0, 3)))).shape == (0, 3)


@OWN_GPUS
@pytest.mark.usefixtures("machine")
def test_the_memory_of_the_arrays(comm: MPI.Intracomm) -> None:
    """The device follows ``like``; arrays in other memory are combined, too, and warn once."""
    on_host, on_gpu = np.full(3, 2.0), Array(np.full(3, 2.0))
    for like, device, other in ((on_host, "cpu", on_gpu), (on_gpu, "gpu", on_host)):
        with halox.Allreduce(comm, 3, "f8", like=like) as reduce:
            assert reduce.device == device
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for _ in range(2):
                    assert type(reduce(like)) is type(like)
            with pytest.warns(UserWarning, match="like="):
                assert type(reduce(other)) is type(other)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = reduce(other)
            values = np.asarray(found.get() if device == "cpu" else found)
            assert values.tolist() == [2.0 * comm.size] * 3
    with pytest.raises(FieldError, match="device, like"):
        halox.Allreduce(comm, 3, "f8", device="cpu", like=on_host)


@pytest.mark.parametrize("algorithm", ["shared_buffer", "host"])
def test_a_bad_array_on_one_rank(
    algorithm: str, way: str, machine: Machine, comm: MPI.Intracomm
) -> None:
    """All ranks raise in the same call, since the host takes part in it."""
    if algorithm not in possible(way, comm.size):
        pytest.skip("is not available")
    last = comm.rank == comm.size - 1
    fixed = np.zeros(4)
    fixed.flags.writeable = False
    with reduced(algorithm, comm, 4, "f8", "sum") as reduce:
        good = Array(np.ones(4))
        for bad, out, kind in (
            (Array(np.ones(5)), None, FieldError),
            (Array(np.ones(4, "f4")), None, FieldError),
            (Array(np.ones(4), device=3), None, DeviceError),
            ("text", None, FieldError),
            (good, fixed, FieldError),
        ):
            with pytest.raises(kind):
                reduce(bad if last else good, out=out if last else None)
            assert (reduce(good).get() == comm.size).all()


@OWN_GPUS
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("algorithm", KERNELS)
@pytest.mark.part(2)
def test_a_bad_array_on_one_rank_with_kernels(
    algorithm: str, machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of the other ranks wait until the limit; the next call of the rank waits on the host, equally long."""
    limit_kernels(monkeypatch, 1.0)
    reduce = reduced(algorithm, comm.Dup(), 4, "f8", "sum")
    good, last = Array(np.ones(4)), comm.size - 1
    assert (reduce(good).get() == comm.size).all()
    comm.Barrier()
    if comm.rank == last:
        with pytest.raises(FieldError):
            reduce(Array(np.ones(5)))
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            reduce(good)
    else:
        reduce(good)
        with pytest.raises(ExchangeTimeoutError):
            reduce(good)
    comm.Barrier()


@pytest.mark.parametrize("algorithm", [*KERNELS, "host"])
def test_a_mistake_on_all_ranks(
    algorithm: str, way: str, machine: Machine, comm: MPI.Intracomm
) -> None:
    """The next call works, whether or not the stream is being captured."""
    if algorithm not in possible(way, comm.size):
        pytest.skip("is not available")
    with reduced(algorithm, comm, 4, "f8", "sum") as reduce:
        given, out = Array(np.ones(4)), Array(np.zeros(4))
        for _ in range(3):
            with pytest.raises(FieldError):
                reduce(Array(np.ones(5)), out=out)
            assert (reduce(given, out=out).get() == comm.size).all()
        machine.capturing = True
        with pytest.raises((FieldError, StateError)):
            reduce(Array(np.ones(5)), out=out)
        machine.capturing = False
        assert (reduce(given, out=out).get() == comm.size).all()


@TWO_WAYS
def test_bad_arguments(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    with pytest.raises(FieldError):
        reduced("fastest", comm, 3, "f8", "sum")
    with pytest.raises(FieldError):
        halox.Allreduce(comm, 3, "f8", "sum", "oneshot", device="cpu")
    with pytest.raises(FieldError):
        reduced(None, comm, 1 << 62, "f8", "sum")
    if comm.size > 1:
        first = comm.rank == 0
        with pytest.raises(MismatchError):
            reduced("host" if first else None, comm, 3, "f8", "sum")
        with pytest.raises(MismatchError):
            halox.Allreduce(comm, 3, "f8", "sum", "host", device="gpu" if first else "cpu")
    with halox.Grid((comm.size,), comm=comm, device="gpu") as grid:
        given = Array(np.ones(4))
        for _ in range(3):
            assert (grid.allreduce(given).get() == comm.size).all()
            for op in (["sum"], "average", None):
                with pytest.raises(FieldError):
                    grid.allreduce(given, op)  # type: ignore[arg-type]
        with pytest.raises(FieldError):
            grid.allreduce(Array(np.zeros(2, "c8")), "max")
        assert grid.allreduce(2.0, "prod") == 2.0**comm.size


@OWN_GPUS
@pytest.mark.parametrize("dtype", ["U5", "M8[s]", "V5", "g", ">f8"])
def test_dtypes_that_cupy_does_not_have(
    dtype: str, machine: Machine, grid: halox.Grid, comm: MPI.Intracomm
) -> None:
    on_last = dtype if comm.rank == comm.size - 1 else "f8"
    for factory in (grid.zeros, grid.ones, grid.empty):
        for given in (dtype, on_last):
            with pytest.raises(FieldError):
                factory(given)
    other = Array(np.zeros(grid.padded_shape, dtype))  # from another library, or from CuPy 13
    for call in (grid.sum, grid.min, grid.norm, lambda u: grid.dot(u, grid.ones())):
        with pytest.raises(FieldError):
            call(other)
    assert grid.sum(grid.ones()).get() == np.prod(grid.grid_shape)


def test_captures(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    """In a capture all ranks refuse work that needs the host, before any of it is done."""
    machine.capturing = True
    with pytest.raises(StateError):
        reduced(None, comm, 3, "f8", "sum")
    machine.capturing = False
    with reduced(None, comm, 3, "f8", "sum") as reduce:
        array = Array(np.ones(3))
        reduce(array)
        machine.capturing = True
        if reduce.captures:
            reduce(array, out=array)
            columns = Array(np.ones((3, 2))[:, 0])
            for given, out in ((columns, array), (array, columns), (np.ones(3), array)):
                with pytest.raises(StateError):
                    reduce(given, out=out)
        else:
            with pytest.raises(StateError):
                reduce(array)
        machine.capturing = False


def test_captured_reductions_of_a_grid(
    grid: halox.Grid, way: str, machine: Machine, comm: MPI.Intracomm
) -> None:
    """Only calls that were made before, with fields of the same strides, and by one launch each."""
    field, _ = field_of(grid, "f8")
    given, number = Array(np.ones(4)), Array(np.zeros(()))
    calls: list[Callable[..., Any]] = [
        lambda: grid.allreduce(given, out=given),
        lambda: grid.norm(field, out=number),
        lambda: grid.norm(field, out=number, reproducible=True),
    ]
    for call in calls:
        call()
    machine.capturing, before = True, machine.launches
    if way == "own GPUs" or comm.size == 1:
        for call in calls:
            call()
        assert machine.launches == before + 3
        for refused in (
            lambda: grid.norm(Array(np.asfortranarray(field.get()))),
            lambda: grid.min(field),
            lambda: grid.allreduce(given, "prod", out=given),
        ):
            with pytest.raises(StateError):
                refused()
        assert agree(bool((given.get() == comm.size**2).all()), comm)
    else:
        for call in calls:
            with pytest.raises(StateError):
                call()
    machine.capturing = False
    assert float(grid.norm(field)) > 0


NUMBERS = {
    "sum": lambda a: a.sum(),
    "min": lambda a: a.min(),
    "max": lambda a: a.max(),
    "norm": lambda a: np.sqrt((np.abs(a.astype("c16")) ** 2).sum()),
}


def field_of(grid: halox.Grid, dtype: Any, seed: int = 0) -> tuple[Array, np.ndarray]:
    """Return a field with arbitrary halo values, and the whole array."""
    rng = np.random.default_rng(seed)
    whole = rng.integers(-9, 9, grid.grid_shape) / 4
    if np.dtype(dtype).kind == "c":
        whole = whole + 1j * rng.integers(-9, 9, grid.grid_shape) / 4
    whole = np.abs(whole).astype(dtype) if np.dtype(dtype).kind == "u" else whole.astype(dtype)
    values = np.full(grid.padded_shape, 99).astype(dtype)
    values[1:-2, 1:-2] = whole[grid.owned]
    return Array(values), whole


class TestNumbersOfFields:
    @pytest.mark.parametrize("dtype", ["f8", "f2", "c8", "u1"])
    @pytest.mark.part(4)
    def test_numbers(self, grid: halox.Grid, dtype: str, way: str, comm: MPI.Intracomm) -> None:
        field, whole = field_of(grid, dtype)
        wide = {"f": "f8", "c": "c16", "u": "u8"}[whole.dtype.kind]
        for name, number in NUMBERS.items():
            if dtype == "c8" and name in ("min", "max"):
                with pytest.raises(FieldError):
                    getattr(grid, name)(field)
                continue
            getattr(grid, name)(field)
            found = getattr(grid, name)(field)
            assert isinstance(found, Array) and found.shape == ()
            kind = {"norm": "f8", "sum": wide}.get(name, dtype)
            assert found.dtype == np.dtype(kind)
            ok = np.isclose(found.get(), number(whole.astype(wide)), rtol=1e-14)
            out = Array(np.zeros((1, 1), kind))
            assert getattr(grid, name)(field, out=out) is out
            ok &= out.get().tobytes() == found.get().tobytes()
            ok &= len(set(comm.allgather(found.get().tobytes()))) == 1
            assert agree(bool(ok), comm), name
        for other_dtype in (dtype, "c16"):
            other, b = field_of(grid, other_dtype, 1)
            found = grid.dot(field, other)
            right = np.vdot(whole.astype(wide), b.astype(np.result_type(wide, other_dtype)))
            assert agree(np.isclose(found.get(), right, rtol=1e-13), comm), other_dtype

    @TWO_WAYS
    def test_owned_cells(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Arrays without halo, contiguous and views of a field, alone and with fields."""
        field, _ = field_of(grid, "f8")
        view = grid.interior(field)
        for array in (view, Array(np.asfortranarray(view.get())), Array(2 * view.get()[:, ::-1])):
            values = np.concatenate(comm.allgather(array.get().reshape(-1)))
            for name in (*NUMBERS, *NUMBERS):
                found = getattr(grid, name)(array)
                assert agree(np.isclose(found.get(), NUMBERS[name](values)), comm), name
            for _ in range(2):
                found = grid.dot(array, field).get(), grid.reduce("a * f", a=array, f=field).get()
                mine = float((array.get() * view.get()).sum())
                assert agree(np.allclose(found, comm.allreduce(mine)), comm)
            assert np.isclose(grid.std(array), values.std())
        with pytest.raises(FieldError, match="without their halo"):
            grid.exchange(view)

    @TWO_WAYS
    @pytest.mark.parametrize("dtype", ["f8", "c8", "u1"])
    def test_deviation(self, grid: halox.Grid, dtype: str, comm: MPI.Intracomm) -> None:
        field, whole = field_of(grid, dtype)
        exact = whole.astype(np.result_type(dtype, "f8")).std()
        for _ in range(2):
            assert agree(bool(np.isclose(grid.std(field), exact, rtol=1e-14)), comm)

    @OWN_GPUS
    @pytest.mark.parametrize("dtype", ["f8", "u1", "?"])
    def test_places(self, grid: halox.Grid, dtype: str, comm: MPI.Intracomm) -> None:
        """The first of equal numbers, and the first NaN."""
        field, whole = field_of(grid, dtype)
        whole[...] = whole == whole.max() if dtype == "?" else whole
        for wrong in range(3 if "f" in dtype else 1):
            whole.reshape(-1)[whole.size // 2 :: 7][: 2 * wrong] = np.nan if wrong else 0
            field[1:-2, 1:-2] = whole[grid.owned]
            for name in ("argmin", "argmax"):
                right = np.unravel_index(getattr(np, name)(whole), whole.shape)
                assert agree(getattr(grid, name)(field) == right, comm), name

    @OWN_GPUS
    def test_histogram(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        field, whole = field_of(grid, "f8")
        for bins in (5, [-1.0, 0.5, 2.0], []):
            found, right = grid.histogram(field, bins), np.histogram(whole, bins)
            assert agree(all(map(np.array_equal, found, right)), comm)

    @TWO_WAYS
    def test_cells_that_no_kernel_walks(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """On rank 0 each axis of the field has gaps: it computes its value by CuPy, and combines it with the others."""
        layout = {"components": (..., 2, 2, 2, 2)}
        field = grid.full(1.5, "f8", **layout)
        if comm.rank == 0:
            gaps = Array(np.full((*grid.padded_shape, 4, 4, 4, 4), 1.5)[..., ::2, ::2, ::2, ::2])
            field = grid.declare(gaps, **layout)
        cells = 16 * np.prod(grid.grid_shape)
        assert np.isclose(float(grid.norm(field)), 1.5 * np.sqrt(cells), rtol=1e-14)
        assert float(grid.max(field)) == 1.5

    @TWO_WAYS
    def test_errors(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        field, _ = field_of(grid, "f8")
        last = comm.rank == comm.size - 1
        with pytest.raises(FieldError, match="shape"):
            grid.sum(Array(np.zeros((3, 99))) if last else field)
        with pytest.raises(FieldError):
            grid.max(field, out=Array(np.zeros(2)) if last else None)
        with pytest.raises(DeviceError):
            grid.min(field, out=np.zeros(1) if last else None)
        if comm.size > 1:
            with pytest.raises(MismatchError):
                grid.norm(field_of(grid, "f4" if last else "f8")[0])
        assert float(grid.norm(field)) > 0

    @TWO_WAYS
    def test_errors_of_later_calls(self, grid: halox.Grid, way: str, comm: MPI.Intracomm) -> None:
        """A bad argument after good calls, of one rank if the host takes part, of all ranks; later calls work."""
        field, _ = field_of(grid, "f8")
        given, bad = Array(np.ones(3)), Array(np.zeros(2))
        odd = np.zeros(8 * field.get().size + 1, "u1")[1:].view("f8").reshape(field.shape)
        assert odd.ctypes.data % 8
        last = comm.rank == comm.size - 1
        by_kernels = way == "own GPUs" and comm.size > 1
        for call in (
            lambda wrong: grid.norm(field, out=bad if wrong else None),
            lambda wrong: grid.max(Array(odd) if wrong else field),
            lambda wrong: grid.allreduce(given, out=bad if wrong else None),
        ):
            before = call(False).get()
            for _ in range(2):
                for wrong in (True,) if by_kernels else (last, True):
                    with pytest.raises(FieldError):
                        call(wrong)
                    assert same(call(False).get(), before)

    @pytest.mark.ranks(2, 3)
    @TWO_WAYS
    def test_parities_that_differ(self, way: str, machine: Machine, comm: MPI.Intracomm) -> None:
        """A reduction of the even field on one rank and the odd field on another is an error."""
        mine = "odd" if comm.rank == comm.size - 1 else "even"
        with halox.Grid((4 * comm.size, 6), comm=comm, device="gpu", checkerboard=True) as grid:
            fields = {one: grid.full(n, parity=one) for n, one in enumerate(("even", "odd"), 1)}
            for name, call in (("sum", grid.sum), ("max", grid.max)):
                with pytest.raises(MismatchError):
                    call(fields[mine])
                for one, value in (("even", 1), ("odd", 2)):
                    cells = 12 * comm.size if name == "sum" else 1
                    assert float(call(fields[one])) == value * cells


class TestRepeatedCalls:
    """Calls with the same arrays, which go straight to the launch, and with others in their place."""

    def test_arrays(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Operations and targets alternate for one array with changing contents; returned results stay."""
        given, out = Array(np.zeros((3, 2))), Array(np.zeros((3, 2)))
        results = []
        with reduced(None, comm, (3, 2), "f8", "sum") as reduce:
            for call in range(4):
                steps = np.arange(6.0).reshape(3, 2)
                values = [steps * (rank - 1) + call for rank in range(comm.size)]
                given[...] = values[comm.rank]
                total, most = sum(values), np.max(values, axis=0)
                assert grid.allreduce(given, "max", out=out) is out
                ok = np.array_equal(out.get(), most)
                assert reduce(given, out=out) is out
                ok &= np.array_equal(out.get(), total)
                results.append((grid.allreduce(given), total))
                results.append((grid.allreduce(given, "max"), most))
                results.append((reduce(given), total))
                ok &= np.array_equal(given.get(), values[comm.rank])
                assert grid.allreduce(given, out=given) is given
                ok &= np.array_equal(given.get(), total)
                assert agree(ok, comm), call
        assert agree(all(np.array_equal(a.get(), b) for a, b in results), comm)

    def test_fields(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Current contents count, also after a new declaration; returned results stay."""
        (field, whole), (other, b) = field_of(grid, "f8"), field_of(grid, "f8", 1)
        out, results = Array(np.zeros(())), []
        for call in range(1, 4):
            field[...], whole = field.get() * call, whole * call
            results.append((grid.sum(field), whole.sum()))
            assert np.isclose(float(grid.norm(field, out=out)), np.linalg.norm(whole))
            assert np.isclose(float(grid.dot(field, other, out=out)), np.vdot(whole, b))
            assert np.isclose(float(grid.dot(other, field, out=out)), np.vdot(whole, b))
            results.append((grid.dot(field, field), np.vdot(whole, whole)))
            assert np.isclose(float(grid.sum(field * 2)), 2 * whole.sum())
        grid.declare(field)
        assert np.isclose(float(grid.norm(field, out=out)), np.linalg.norm(whole))
        assert agree(all(np.isclose(float(found), right) for found, right in results), comm)

    @OWN_GPUS
    def test_arrays_of_the_host_and_of_a_gpu(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """In turns, with one shape and dtype; if some ranks give arrays of the host, all raise."""
        host, given = np.zeros(3), Array(np.zeros(3))
        ok = True
        for call in range(4):
            host[...] = given[...] = comm.rank + call
            total = sum(range(comm.size)) + call * comm.size
            on_gpu, on_host = grid.allreduce(given), grid.allreduce(host)
            ok &= type(on_gpu) is Array and bool((on_gpu.get() == total).all())
            ok &= type(on_host) is np.ndarray and bool((on_host == total).all())
        assert agree(ok, comm)
        is_last = comm.rank == comm.size - 1
        if comm.size > 1:
            with pytest.raises(MismatchError):
                grid.allreduce(np.ones(4) if is_last else Array(np.ones(4)))
            with pytest.raises(FieldError):
                grid.allreduce(np.ones(4, "f2") if is_last else Array(np.ones(4)))
        assert (grid.allreduce(np.ones(4)) == comm.size).all()

    @OWN_GPUS
    def test_evicted_alike_on_all_ranks(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """All ranks evict the oldest reductions first, whichever arrays a rank keeps: else the ranks' calls differ."""
        kept = Array(np.zeros(3))
        ok = True
        for elements in range(4, 38):
            for _ in range(2):
                given = kept if comm.rank == 0 else Array(np.zeros(3))
                given[...] = 1.0
                ok &= bool((grid.allreduce(given, out=given).get() == comm.size).all())
            other = Array(np.ones(elements))
            ok &= bool((grid.allreduce(other, out=other).get() == comm.size).all())
        assert agree(ok, comm)

    @OWN_GPUS
    def test_no_memory_for_a_result(
        self, grid: halox.Grid, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All ranks refuse the call, as for a bad array, and go on."""
        cupy: Any = sys.modules["cupy"]
        empty, full = cupy.empty, False

        def allocate(*given: Any) -> Any:
            if full:
                raise MemoryError("no memory")
            return empty(*given)

        monkeypatch.setattr(cupy, "empty", allocate)
        given, field = Array(np.ones(4)), grid.ones("f8")
        for call in (lambda: grid.allreduce(given), lambda: grid.max(field)):
            for _ in range(3):
                before = call().get()
            full = True
            with pytest.raises(MemoryError):
                call()
            full = False
            assert same(call().get(), before)

    def test_closed(self, machine: Machine, comm: MPI.Intracomm) -> None:
        given, out, number = Array(np.ones(4)), Array(np.ones(4)), Array(np.zeros(()))
        with halox.Grid((4 * comm.size,), comm=comm, device="gpu") as grid:
            field = grid.ones("f8")
            calls = calls_with(grid, given, out, field, number)
            for call in calls * 3:
                call()
        check_closed(calls)
        reduce = reduced(None, comm, 4, "f8", "sum")
        for _ in range(3):
            reduce(given)
        reduce.close()
        with pytest.raises(ClosedError):
            reduce(given)
