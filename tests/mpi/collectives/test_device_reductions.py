"""Reductions of arrays and fields on GPUs, from the public calls down to the kernels, on simulated GPUs."""

from __future__ import annotations

import faulthandler
import gc
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.collectives.algorithms import DEVICE_ALGORITHMS
from halox.collectives.device import device_fields
from halox.collectives.device.kernel_plans import ReductionPlan
from halox.collectives.host import shared_reduction
from halox.errors import (
    ClosedError,
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    StateError,
)
from halox.runtime.gpu import memory
from tests.fakes.fake_cupy import Array, Machine
from tests.mpi.collectives.reduction_calls import calls_with, check_closed
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.support import require
from tests.unit.collectives.reduction_oracle import expected, same, sample

require("cxx")

pytestmark = [pytest.mark.ranks(1, 2, 3, 4), pytest.mark.usually(3)]

KERNELS = ("oneshot", "reduce_scatter_allgather")
WAYS = ["own GPUs", "one GPU", "a node each", "two nodes"]


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


def possible(way: str, ranks: int) -> set[str]:
    """Return the algorithms that must be available."""
    kernels, trees = {"oneshot", "reduce_scatter_allgather"}, {"shared_buffer", "binomial"}
    found = {"hierarchical", "host"}
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
    if algorithm == "hierarchical" and way == "two nodes":
        groups = (
            [values[i] for i in range(len(values)) if i % 3 != 1],
            [values[i] for i in range(len(values)) if i % 3 == 1],
        )
        return expected(op, [expected(op, group) for group in groups if group])
    return expected(op, values)


def reduced(algorithm: str | None, comm: MPI.Intracomm, shape: Any, dtype: Any, op: str) -> Any:
    return halox.Allreduce(comm, shape, dtype, op, algorithm, device="gpu")


def test_more_elements_than_memory(machine: Machine, comm: MPI.Intracomm) -> None:
    """All ranks raise, or all select an algorithm that needs no memory of that size."""
    with pytest.raises(FieldError):
        reduced(None, comm, 1 << 62, "f8", "sum")
    made = True
    try:
        reduced(None, comm, 1 << 52, "f8", "sum").close()
    except HaloxError:
        made = False
    assert agree(made, comm) == made


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("dtype", ["U5", "S3", "M8[s]", "m8[D]", "V5", "g", ">f8", ">i4"])
@pytest.mark.part(3)
def test_dtypes_that_cupy_does_not_have(dtype: str, comm: MPI.Intracomm) -> None:
    with halox.Grid((4, 3 * comm.size), comm=comm, device="gpu") as grid:
        on_last = dtype if comm.rank == comm.size - 1 else "f8"
        for factory in (grid.zeros, grid.ones, grid.empty):
            for given in (dtype, on_last):
                with pytest.raises(FieldError):
                    factory(given)
        other = Array(np.zeros(grid.padded_shape, dtype))  # from another library, or from CuPy 13
        for call in (grid.sum, grid.min, grid.norm, lambda u: grid.dot(u, grid.ones())):
            with pytest.raises(FieldError):
                call(other)
        assert grid.sum(grid.ones()).get() == 12 * comm.size


@pytest.mark.parametrize("algorithm", DEVICE_ALGORITHMS)
@pytest.mark.part(2)
def test_algorithms(algorithm: str, way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    """Results have NumPy's bits in the documented order; an unavailable algorithm raises on all ranks with a reason."""
    if algorithm not in possible(way, comm.size):
        reasons = {"one GPU": "shares its GPU", "own GPUs": "none"}
        reason = reasons.get(way, "are on different nodes")
        if comm.size == 1:
            reason = "there is one rank"
        with pytest.raises(FieldError, match=reason):
            reduced(algorithm, comm, 3, "f8", "sum")
        return
    for op, dtype, elements in (("sum", "f8", 700), ("max", "i2", 5), ("prod", "c16", 33)):
        values = [sample(dtype, op, elements, rank) for rank in range(comm.size)]
        with reduced(algorithm, comm, elements, dtype, op) as reduce:
            assert reduce.algorithm == algorithm
            assert reduce.captures == (algorithm in ("oneshot", "reduce_scatter_allgather"))
            assert set(reduce.reasons) == set(DEVICE_ALGORITHMS) - possible(way, comm.size)
            given = Array(values[comm.rank].copy())
            found = reduce(given)
            again = reduce(given, out=given)
            assert isinstance(found, Array) and again is given
        ok = same(found.get(), wanted(algorithm, way, op, values))
        ok &= found.get().tobytes() == given.get().tobytes()
        ok &= len(set(comm.allgather(found.get().tobytes()))) == 1
        assert agree(ok, comm), (op, dtype)


@pytest.mark.parametrize("elements", [5, 5000, 12288])
@pytest.mark.parametrize("refused", [False, True])
def test_through_the_host(
    elements: int, refused: bool, way: str, machine: Machine, comm: MPI.Intracomm, monkeypatch: Any
) -> None:
    """Values move in pieces through page-locked shared memory, or through MPI if one rank cannot page-lock it."""
    monkeypatch.setattr(shared_reduction, "DEVICE_PIECE_BYTES", 4096)
    if refused and comm.rank == comm.size - 1:

        def register(_: Any) -> Any:
            raise DeviceError("cannot register 1 bytes of host memory")

        monkeypatch.setattr(memory, "register", register)
    is_one_node = way in ("own GPUs", "one GPU") and comm.size > 1
    values = [sample("f8", "sum", elements, rank) for rank in range(comm.size)]
    with reduced("host", comm, elements, "f8", "sum") as reduce:
        through: Any = reduce._reduction._algorithm
        assert (through._shared is not None) == (is_one_node and not refused)
        registered = len(machine.registered)
        for _ in range(5):
            given = Array(values[comm.rank].copy())
            reduce(given, out=given)
            assert agree(same(given.get(), expected("sum", values)), comm)
        assert len(machine.registered) == registered, "once is enough"
        if is_one_node and not refused:
            assert registered == (1 if elements == 5 or comm.rank == 0 else 2)
    assert not machine.registered


def test_the_same_arrays_again(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    """Later calls with known arrays read the current contents; after close they raise."""
    reduce = reduced(None, comm, 5, "f8", "sum")
    given, out = Array(np.zeros(5)), Array(np.zeros(5))
    for call in range(4):
        given[...] = comm.rank + call
        assert reduce(given, out=out) is out
        total = sum(range(comm.size)) + comm.size * call
        assert agree(bool((out.get() == total).all()), comm), call
        assert reduce(given, out=given) is given
        assert agree(bool((given.get() == total).all()), comm), call
    reduce.close()
    with pytest.raises(ClosedError):
        reduce(given, out=out)


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
            assert (
                np.asarray(found.get() if device == "cpu" else found).tolist()
                == [2.0 * comm.size] * 3
            )
    with pytest.raises(FieldError, match="device, like"):
        halox.Allreduce(comm, 3, "f8", device="cpu", like=on_host)


def test_the_choice(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    with reduced(None, comm, 3, "f8", "sum") as reduce:
        assert reduce.algorithm in possible(way, comm.size)
        if way == "own GPUs":
            assert reduce.algorithm == "oneshot" and reduce.device == "gpu"
    with reduced(None, comm, 1 << 21, "f8", "sum") as reduce:
        found = reduce(Array(np.ones(1 << 21)))
        assert (found.get() == comm.size).all()
        if way == "own GPUs" and comm.size > 1:
            assert reduce.algorithm == "reduce_scatter_allgather"


def test_where_arrays_lie(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
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
        memory = np.zeros(7 * 4, "i8")
        memory[4:] = mine.ravel()
        reduce(Array(memory[4:].reshape(6, 4)), out=Array(memory[:24].reshape(6, 4)))
        assert np.array_equal(memory[:24].reshape(6, 4), total), "overlapping"
        raw = np.zeros(200, np.uint8)
        crooked = raw[3:195].view("i8").reshape(6, 4)
        crooked[...] = mine
        assert np.array_equal(reduce(Array(crooked)).get(), total), "not aligned"
        host = np.zeros((6, 4), "i8")
        assert reduce(Array(mine), out=host) is host and np.array_equal(host, total)
    with reduced(None, comm, (), "f8", "max") as reduce:
        found = reduce(float(comm.rank))
        assert isinstance(found, np.float64) and found == comm.size - 1
        zero = reduce(Array(np.array(1.0 + comm.rank)))
        assert isinstance(zero, Array) and zero.shape == () and float(zero) == comm.size
    with reduced(None, comm, (0, 3), "f8", "sum") as reduce:
        assert reduce(Array(np.zeros((0, 3)))).shape == (0, 3)


@pytest.mark.parametrize("algorithm", ["shared_buffer", "host", "hierarchical"])
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
        for bad, out, kind, text in (
            (Array(np.ones(5)), None, FieldError, r"array: got shape \(5,\)"),
            (Array(np.ones(4, "f4")), None, FieldError, "float32"),
            (Array(np.ones(4), device=3), None, DeviceError, "array is on GPU 3"),
            ("text", None, FieldError, "is not a value of"),
            (good, fixed, FieldError, "out is read-only"),
        ):
            with pytest.raises(kind, match=text):
                reduce(bad if last else good, out=out if last else None)
            assert (reduce(good).get() == comm.size).all()


@pytest.mark.parametrize("algorithm", ["oneshot", "reduce_scatter_allgather", "host"])
def test_a_mistake_on_all_ranks_is_no_more_than_that(
    algorithm: str, way: str, machine: Machine, comm: MPI.Intracomm
) -> None:
    if algorithm not in possible(way, comm.size):
        pytest.skip("is not available")
    with reduced(algorithm, comm, 4, "f8", "sum") as reduce:
        given, out = Array(np.ones(4)), Array(np.zeros(4))
        for _ in range(3):
            with pytest.raises(FieldError):
                reduce(Array(np.ones(5)), out=out)
            assert (reduce(given, out=out).get() == comm.size).all()
        machine.capturing = True
        with pytest.raises((FieldError, StateError), match=r"array: got shape \(5,\)|captured"):
            reduce(Array(np.ones(5)), out=out)
        machine.capturing = False
        assert (reduce(given, out=out).get() == comm.size).all()


def test_bad_arguments(way: str, machine: Machine, comm: MPI.Intracomm) -> None:
    with pytest.raises(FieldError):
        reduced("fastest", comm, 3, "f8", "sum")
    with pytest.raises(FieldError):
        halox.Allreduce(comm, 3, "f8", "sum", "oneshot", device="cpu")
    if comm.size > 1:
        first = comm.rank == 0
        with pytest.raises(MismatchError):
            reduced("host" if first else None, comm, 3, "f8", "sum")
        with pytest.raises(MismatchError):
            halox.Allreduce(comm, 3, "f8", "sum", "host", device="gpu" if first else "cpu")


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
            for given, out, name in (
                (columns, array, "array"),
                (array, columns, "out"),
                (np.ones(3), array, "array"),
            ):
                with pytest.raises(StateError, match=name):
                    reduce(given, out=out)
        else:
            with pytest.raises(StateError):
                reduce(array)
        machine.capturing = False


NUMBERS = {
    "sum": lambda a: a.sum(),
    "min": lambda a: a.min(),
    "max": lambda a: a.max(),
    "norm": lambda a: np.sqrt((np.abs(a.astype("c16")) ** 2).sum()),
}


@pytest.mark.part(2)
class TestGrid:
    @pytest.fixture
    def grid(self, machine: Machine, comm: MPI.Intracomm) -> Any:
        shape = (5 * comm.size + 1, 7)
        with halox.Grid(shape, halo=((1, 2), (1, 2)), comm=comm, device="gpu") as found:
            yield found

    @staticmethod
    def field(grid: halox.Grid, dtype: Any, seed: int = 0) -> tuple[Array, np.ndarray]:
        """Return a field with arbitrary halo values, and the whole array."""
        rng = np.random.default_rng(seed)
        whole = rng.integers(-9, 9, grid.grid_shape) / 4
        if np.dtype(dtype).kind == "c":
            whole = whole + 1j * rng.integers(-9, 9, grid.grid_shape) / 4
        whole = np.abs(whole).astype(dtype) if np.dtype(dtype).kind == "u" else whole.astype(dtype)
        values = np.full(grid.padded_shape, 99).astype(dtype)
        values[1:-2, 1:-2] = whole[grid.owned]
        return Array(values), whole

    @pytest.mark.parametrize("dtype", ["f8", "f2", "c8", "u1"])
    @pytest.mark.part(2)
    def test_numbers(self, grid: halox.Grid, dtype: str, way: str, comm: MPI.Intracomm) -> None:
        field, whole = self.field(grid, dtype)
        for name, number in NUMBERS.items():
            if dtype == "c8" and name in ("min", "max"):
                with pytest.raises(FieldError):
                    getattr(grid, name)(field)
                continue
            getattr(grid, name)(field)
            found = getattr(grid, name)(field)
            assert isinstance(found, Array) and found.shape == ()
            wide = {"f": "f8", "c": "c16", "u": "u8"}[whole.dtype.kind]
            kind = {"norm": "f8", "sum": wide}.get(name, dtype)
            assert found.dtype == np.dtype(kind)
            value = number(whole.astype(wide))
            ok = np.isclose(found.get(), value, rtol=1e-14)
            out = Array(np.zeros((1, 1), kind))
            assert getattr(grid, name)(field, out=out) is out
            ok &= out.get().tobytes() == found.get().tobytes()
            ok &= len(set(comm.allgather(found.get().tobytes()))) == 1
            assert agree(bool(ok), comm), name
        other, b = self.field(grid, dtype, 1)
        found = grid.dot(field, other)
        assert np.isclose(found.get(), np.vdot(whole.astype(wide), b.astype(wide)), rtol=1e-13)

    @pytest.mark.parametrize("dtype", ["f8", "c8", "u1"])
    def test_deviation(
        self, grid: halox.Grid, dtype: str, machine: Machine, comm: MPI.Intracomm
    ) -> None:
        """One launch of a rank reads a real field, also in later calls."""
        field, whole = self.field(grid, dtype)
        exact = whole.astype(np.result_type(dtype, "f8")).std()
        for _ in range(2):
            before = machine.launches
            found = grid.std(field)
            assert machine.launches - before == (2 if dtype == "c8" else 1)
            assert agree(bool(np.isclose(found, exact, rtol=1e-14)), comm)

    @pytest.mark.parametrize("way", ["own GPUs"])
    @pytest.mark.parametrize("numbers", [(-2e154,), (1e155, 3e155), (1e200, -1e200), (1, np.inf)])
    def test_deviation_of_large_numbers(
        self, grid: halox.Grid, numbers: tuple[float, ...], comm: MPI.Intracomm
    ) -> None:
        """Also if only the cell in the middle of a rank, which is subtracted first, has the first number."""
        field, whole = self.field(grid, "f8")
        for first in (whole.size, 1):
            whole[...] = numbers[-1]
            whole.reshape(-1)[: 2 * first : 2] = numbers[0]
            field[1:-2, 1:-2] = whole[grid.owned]
            with np.errstate(all="ignore"):
                right = whole.std()
            assert agree(np.allclose(grid.std(field), right, 1e-13, equal_nan=True), comm)

    @pytest.mark.parametrize("way", ["own GPUs"])
    @pytest.mark.parametrize("dtype", ["f8", "f4", "u1", "i8", "?"])
    def test_places(
        self, grid: halox.Grid, dtype: str, machine: Machine, comm: MPI.Intracomm
    ) -> None:
        """The first of equal numbers, and the first NaN, in one launch."""
        field, whole = self.field(grid, dtype)
        whole[...] = whole == whole.max() if dtype == "?" else whole
        for wrong in range(3 if "f" in dtype else 1):
            whole.reshape(-1)[whole.size // 2 :: 7][: 2 * wrong] = np.nan if wrong else 0
            field[1:-2, 1:-2] = whole[grid.owned]
            for name in ("argmin", "argmax"):
                before = machine.launches
                found = getattr(grid, name)(field)
                right = np.unravel_index(getattr(np, name)(whole), whole.shape)
                assert agree(found == right and machine.launches == before + 1, comm), name

    @pytest.mark.parametrize("way", ["own GPUs"])
    def test_histogram(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Then an array of one rank that does not fit the grid is still an error of `min` on all ranks."""
        field, whole = self.field(grid, "f8")
        for bins in (5, [-1.0, 0.5, 2.0], []):
            found, right = grid.histogram(field, bins), np.histogram(whole, bins)
            assert agree(all(map(np.array_equal, found, right)), comm)
        with pytest.raises(FieldError):
            grid.min(field if comm.rank else field[1:])
        assert agree(float(grid.min(field)) == whole.min(), comm)

    def test_the_same_fields_again(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Later calls with known fields read the current contents, also after a new declaration."""
        (field, whole), (other, b) = self.field(grid, "f8"), self.field(grid, "f8", 1)
        out = Array(np.zeros(()))
        for call in range(1, 4):
            field[...] = field.get() * call
            whole = whole * call
            assert np.isclose(float(grid.norm(field, out=out)), np.linalg.norm(whole))
            assert np.isclose(float(grid.dot(field, other, out=out)), np.vdot(whole, b))
            assert np.isclose(float(grid.dot(other, field, out=out)), np.vdot(whole, b))
        grid.declare(field)
        assert np.isclose(float(grid.norm(field, out=out)), np.linalg.norm(whole))

    def test_dots_of_unlike_dtypes(self, grid: halox.Grid) -> None:
        (field, a), (other, b) = self.field(grid, "f4"), self.field(grid, "c16", 1)
        assert np.isclose(grid.dot(field, other).get(), np.vdot(a, b))

    def test_no_new_plan_for_other_addresses_and_strides(
        self, grid: halox.Grid, machine: Machine, comm: MPI.Intracomm, monkeypatch: Any
    ) -> None:
        field, whole = self.field(grid, "f8")
        grid.sum(field)

        def none(*_: Any) -> None:
            raise AssertionError("made anew")

        monkeypatch.setattr(grid._reductions, "_make", none)
        for other in (Array(field.get()), Array(np.asfortranarray(field.get()))):
            before = machine.launches
            found = grid.sum(other)
            assert np.isclose(float(found), whole.sum())
            assert machine.launches > before

    def test_launches(self, grid: halox.Grid, way: str, machine: Machine, comm: Any) -> None:
        """One launch reduces the cells; a node of several ranks among other nodes needs another for its ranks."""
        field, _ = self.field(grid, "f8")
        grid.norm(field)
        before = machine.launches
        grid.norm(field)
        has_node = (
            way == "two nodes"
            and sum((r % 3 == 1) == (comm.rank % 3 == 1) for r in range(comm.size)) > 1
        )
        assert machine.launches == before + (2 if has_node and comm.size > 2 else 1)

    def test_cells_that_no_kernel_walks(
        self, grid: halox.Grid, monkeypatch: Any, comm: MPI.Intracomm
    ) -> None:
        """Rank 0 has no kernel for its cells: it computes its value by CuPy, and combines with the other ranks."""
        from halox.collectives.device import kernel_reductions as allreduce

        if comm.rank == 0:
            monkeypatch.setattr(allreduce, "field_row", lambda *_: None)
        field, whole = self.field(grid, "f8")
        for name, number in NUMBERS.items():
            assert np.isclose(float(getattr(grid, name)(field)), number(whole))

    def test_errors(self, grid: halox.Grid, comm: MPI.Intracomm, machine: Machine) -> None:
        field, _ = self.field(grid, "f8")
        last = comm.rank == comm.size - 1
        with pytest.raises(FieldError, match="shape"):
            grid.sum(Array(np.zeros((3, 99))) if last else field)
        with pytest.raises(FieldError):
            grid.max(field, out=Array(np.zeros(2)) if last else None)
        with pytest.raises(DeviceError):
            grid.min(field, out=np.zeros(1) if last else None)
        if comm.size > 1:
            with pytest.raises(MismatchError):
                grid.norm(self.field(grid, "f4" if last else "f8")[0])
        machine.capturing = True
        with pytest.raises(StateError):
            grid.norm(field)
        machine.capturing = False
        assert float(grid.norm(field)) > 0

    def test_errors_of_what_has_been_taken_before(
        self, grid: halox.Grid, way: str, comm: MPI.Intracomm
    ) -> None:
        """A bad argument after good calls, of one rank if the host takes part, of all ranks; later calls work."""
        field, _ = self.field(grid, "f8")
        given, bad = Array(np.ones(3)), Array(np.zeros(2))
        odd = np.zeros(8 * field.get().size + 1, "u1")[1:].view("f8").reshape(field.shape)
        assert odd.ctypes.data % 8
        last = comm.rank == comm.size - 1
        by_kernels = way == "own GPUs" and comm.size > 1
        calls = (
            (lambda wrong: grid.norm(field, out=bad if wrong else None), "out: got shape"),
            (lambda wrong: grid.max(Array(odd) if wrong else field), "multiples of 8 bytes"),
            (lambda wrong: grid.allreduce(given, out=bad if wrong else None), "out: got shape"),
        )
        for call, text in calls:
            before = call(False).get()
            for _ in range(2):
                for wrong in (True,) if by_kernels else (last, True):
                    with pytest.raises(FieldError, match=text):
                        call(wrong)
                    assert same(call(False).get(), before)

    def test_captures(self, grid: halox.Grid, way: str, machine: Machine, comm: Any) -> None:
        field, _ = self.field(grid, "f8")
        out = Array(np.zeros(()))
        for exact in (False, True):
            grid.norm(field, out=out, reproducible=exact)
        machine.capturing = True
        if way == "own GPUs" or comm.size == 1:
            grid.norm(field, out=out)
            with pytest.raises(StateError):
                grid.norm(Array(np.asfortranarray(field.get())))
        else:
            for exact in (False, True):
                with pytest.raises(StateError):
                    grid.norm(field, out=out, reproducible=exact)
        machine.capturing = False

    def test_arrays(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        values = [sample("f8", "max", (3, 2), rank) for rank in range(comm.size)]
        given = Array(values[comm.rank].copy())
        for _ in range(3):
            found = grid.allreduce(given, "max")
            assert isinstance(found, Array) and same(found.get(), expected("max", values))
        assert grid.allreduce(given, "max", out=given) is given
        assert same(given.get(), expected("max", values))
        assert grid.allreduce(2.0, "prod") == 2.0**comm.size
        many = [Array(np.full(n, comm.rank + 1)) for n in range(1, 40)]
        total = comm.size * (comm.size + 1) // 2
        for _ in range(2):
            assert all((grid.allreduce(one).get() == total).all() for one in many)
        with pytest.raises(HaloxError, match="no meaning"):
            grid.allreduce(Array(np.zeros(2, "c8")), "max")

    def test_closed(self, machine: Machine, comm: MPI.Intracomm) -> None:
        grid = halox.Grid((4 * comm.size,), comm=comm, device="gpu")
        field = grid.ones("f8")
        assert float(grid.sum(field)) == 4 * comm.size
        grid.close()
        with pytest.raises(HaloxError, match="closed"):
            grid.sum(field)


def python_calls(call: Callable[[], Any]) -> int:
    """Count the calls of halox functions in a repeated call."""
    package, count = str(Path(halox.__file__).parent), 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(package)

    for _ in range(3):
        call()
    gc.disable()  # finalizers of earlier tests' objects would count, too
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize("way", ["own GPUs"], indirect=True)
class TestSeenBefore:
    """Reductions of known arrays go straight to the launch."""

    @pytest.fixture
    def grid(self, machine: Machine, comm: MPI.Intracomm) -> Any:
        with halox.Grid((5 * comm.size + 1, 7), comm=comm, device="gpu") as found:
            yield found

    @pytest.fixture
    def made(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Return a list that records the shape and operation of each allreduce that a grid makes."""
        shapes: list[Any] = []

        class Counted(device_fields.DeviceAllreduce):
            def __init__(self, *given: Any) -> None:
                shapes.append((given[2], given[4]))
                super().__init__(*given)

        monkeypatch.setattr(device_fields, "DeviceAllreduce", Counted)
        return shapes

    def test_python_calls(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """A cached call makes at most two calls more than the persistent form."""
        given, out = Array(np.ones(5)), Array(np.ones(5))
        with reduced(None, comm, 5, "f8", "max") as reduce:
            for place in (given, out, None):
                persistent = python_calls(lambda place=place: reduce(given, out=place))  # type: ignore[misc]
                convenient = python_calls(
                    lambda place=place: grid.allreduce(given, "max", out=place)  # type: ignore[misc]
                )
                assert persistent <= 3 and convenient <= persistent + 2, place
        field, number = grid.ones("f8"), Array(np.zeros(()))
        for name in NUMBERS:
            assert python_calls(lambda name=name: getattr(grid, name)(field)) <= 5  # type: ignore[misc]
            assert (
                python_calls(lambda name=name: getattr(grid, name)(field, out=number)) <= 4  # type: ignore[misc]
            )
        assert python_calls(lambda: grid.dot(field, field)) <= 5

    def test_operations_and_places(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Operations and targets alternate for one array with changing contents; returned results stay."""
        given, out = Array(np.zeros((3, 2))), Array(np.zeros((3, 2)))
        results = []
        for call in range(4):
            values = [np.arange(6.0).reshape(3, 2) * (rank - 1) + call for rank in range(comm.size)]
            given[...] = values[comm.rank]
            total, most = sum(values), np.max(values, axis=0)
            assert grid.allreduce(given, "max", out=out) is out
            ok = np.array_equal(out.get(), most)
            results.append((grid.allreduce(given), total))
            results.append((grid.allreduce(given, "max"), most))
            ok &= np.array_equal(given.get(), values[comm.rank])
            assert grid.allreduce(given, out=given) is given
            ok &= np.array_equal(given.get(), total)
            assert agree(ok, comm), call
        assert agree(all(np.array_equal(a.get(), b) for a, b in results), comm)
        assert len({id(array) for array, _ in results}) == len(results)

    def test_numbers_without_out(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """Calls without ``out`` alternate with calls that have it; a temporary field leaves no launch behind."""
        field, out = grid.ones("f8"), Array(np.zeros(()))
        cells = np.prod(grid.grid_shape)
        results = []
        for call in range(1, 5):
            field[...] = call
            results.append((grid.sum(field), call * cells))
            assert float(grid.sum(field, out=out)) == call * cells
            results.append((grid.dot(field, field), call**2 * cells))
            assert float(grid.sum(field * 2)) == 2 * call * cells
        assert agree(all(float(number) == value for number, value in results), comm)
        assert len(grid._reductions.fields.known) == 3

    def test_arrays_that_are_gone(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        """The launch of an array does not serve a later array at its address."""
        found = grid._reductions.arrays.known
        ids = set()
        total = comm.size * (comm.size + 1) // 2
        for dtype, elements in (("f8", 6), ("i8", 6), ("f8", 3)) * 3:
            given = Array(np.full(elements, comm.rank + 1, dtype))
            ids.add(id(given))
            for _ in range(3):
                result = grid.allreduce(given)
                assert result.dtype == np.dtype(dtype)
                assert (result.get() == np.full(elements, total)).all()
            assert len(found) == 1
            out = Array(np.zeros(elements, dtype))
            grid.allreduce(given, out=out)
            assert (out.get() == total).all() and len(found) == 2
            del out
            assert len(found) == 1
            del given
            assert not found
        assert len(ids) < 9, "an address has been used again"

    def test_arrays_of_the_host_and_of_a_gpu_in_turns(
        self, grid: halox.Grid, comm: MPI.Intracomm
    ) -> None:
        """A host array and a GPU array of one shape and dtype have separate reductions, and the latter a launch."""
        host, given = np.zeros(3), Array(np.zeros(3))
        ok = True
        for call in range(4):
            host[...] = given[...] = comm.rank + call
            total = sum(range(comm.size)) + call * comm.size
            on_gpu, on_host = grid.allreduce(given), grid.allreduce(host)
            ok &= type(on_gpu) is Array and bool((on_gpu.get() == total).all())
            ok &= type(on_host) is np.ndarray and bool((on_host == total).all())
        assert agree(ok, comm)
        assert [device for device, *_ in grid._reductions.arrays.reductions] == ["gpu", "cpu"]
        assert len(grid._reductions.arrays.known) == 1

    def test_arrays_of_the_host_on_one_rank_and_of_gpus_on_others(
        self, grid: halox.Grid, comm: MPI.Intracomm
    ) -> None:
        """Ranks do not confuse the records of host arrays and GPU arrays: all raise."""
        is_last = comm.rank == comm.size - 1
        if comm.size > 1:
            with pytest.raises(MismatchError):
                grid.allreduce(np.ones(3) if is_last else Array(np.ones(3)))
            with pytest.raises(FieldError):
                grid.allreduce(np.ones(3, "f2") if is_last else Array(np.ones(3)))
        assert (grid.allreduce(np.ones(3)) == comm.size).all()

    def test_evicted_alike_on_all_ranks(
        self, grid: halox.Grid, made: list[Any], comm: MPI.Intracomm
    ) -> None:
        """All ranks evict the oldest reductions first, whichever arrays a rank keeps alive."""
        kept = Array(np.zeros(3))

        def often_used() -> bool:
            given = kept if comm.rank == 0 else Array(np.zeros(3))
            given[...] = 1.0
            grid.allreduce(given, out=given)
            return bool((given.get() == comm.size).all())

        ok = True
        for elements in range(4, 40):
            ok &= often_used() and often_used()
            other = Array(np.ones(elements))
            ok &= bool((grid.allreduce(other, out=other).get() == comm.size).all())
        assert agree(ok, comm)
        shapes = [shape for (shape,), _ in made]
        assert len(set(comm.allgather(tuple(shapes)))) == 1
        assert shapes == [*range(3, 35), 35, 3, *range(36, 40)]
        assert len(grid._reductions.arrays.reductions) == 32

    def test_other_shapes_in_place(
        self, grid: halox.Grid, made: list[Any], comm: MPI.Intracomm
    ) -> None:
        given, out = Array(np.ones(6)), Array(np.zeros(6))
        with reduced(None, comm, 6, "f8", "sum") as reduce:
            for _ in range(3):
                reduce(given)
                grid.allreduce(given)
                grid.allreduce(given, out=out)
            given.values = given.values.reshape(2, 3)
            with pytest.raises(FieldError):
                reduce(given)
        with pytest.raises(FieldError):
            grid.allreduce(given, out=out)
        for _ in range(3):
            found = grid.allreduce(given)
            assert found.shape == (2, 3) and (found.get() == comm.size).all()
        out.values = out.values.reshape(2, 3)
        assert (grid.allreduce(given, out=out).get() == comm.size).all()
        assert [shape for shape, _ in made] == [(6,), (2, 3)]

    @pytest.mark.parametrize("is_same_size", [False, True])
    def test_fields_of_other_shapes_in_place(
        self, grid: halox.Grid, is_same_size: bool, comm: MPI.Intracomm
    ) -> None:
        field, number = grid.ones("f8"), Array(np.zeros(()))
        right = field.values
        for _ in range(3):
            grid.sum(field)
            grid.sum(field, out=number)
        field.values = right.T if is_same_size else right.reshape(-1)
        for _ in range(2):
            with pytest.raises(FieldError, match="shape"):
                grid.sum(field, out=number)
            with pytest.raises(FieldError, match="shape"):
                grid.sum(field)
            with pytest.raises(FieldError, match="shape"):
                grid.dot(field, field)
        field.values = right
        assert float(grid.sum(field, out=number)) == np.prod(grid.grid_shape)

    def test_captured(self, grid: halox.Grid, machine: Machine, comm: MPI.Intracomm) -> None:
        given, field, number = Array(np.ones(4)), grid.ones("f8"), Array(np.zeros(()))
        grid.allreduce(given, out=given)
        grid.norm(field, out=number)
        before = machine.launches
        machine.capturing = True
        grid.allreduce(given, out=given)
        grid.norm(field, out=number)
        with pytest.raises(StateError):
            grid.allreduce(given, "prod", out=given)
        machine.capturing = False
        assert machine.launches == before + 2
        assert agree(bool((given.get() == comm.size**2).all()), comm)

    def test_no_memory_for_a_result(
        self, machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All ranks refuse the call, as for a bad array, and go on."""
        cupy: Any = sys.modules["cupy"]
        empty, full = cupy.empty, False

        def allocate(*given: Any) -> Any:
            if full:
                raise MemoryError("no memory")
            return empty(*given)

        monkeypatch.setattr(cupy, "empty", allocate)
        given = Array(np.ones(4))
        with halox.Grid((8 * comm.size,), comm=comm, device="gpu") as grid:
            field = grid.ones("f8")
            for call in (lambda: grid.allreduce(given), lambda: grid.max(field)):
                for _ in range(3):
                    before = call().get()
                full = True
                with pytest.raises(MemoryError):
                    call()
                full = False
                assert same(call().get(), before)

    def test_an_operation_that_is_none(self, grid: halox.Grid, comm: MPI.Intracomm) -> None:
        given = Array(np.ones(4))
        for _ in range(3):
            grid.allreduce(given)
            for op in (["sum"], "average", None):
                with pytest.raises(FieldError):
                    grid.allreduce(given, op)  # type: ignore[arg-type]

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


@pytest.mark.ranks(3)
@pytest.mark.parametrize("way", ["two nodes"], indirect=True)
def test_nodes_of_unlike_size(
    machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A rank alone on its node must take part in MPI_Comm_split too: otherwise the other ranks hang there."""
    monkeypatch.setenv("HALOX_TIMEOUT", "30")
    new = comm.Dup()
    with capfd.disabled():
        # MPI's waits have no time limit: a hanging run prints its stacks and exits.
        faulthandler.dump_traceback_later(90, exit=True, file=sys.__stderr__)
        with reduced("hierarchical", new, 5, "f8", "sum") as reduce:
            found = reduce(Array(np.full(5, comm.rank + 1.0)))
        faulthandler.cancel_dump_traceback_later()
    assert agree(bool((found.get() == 6.0).all()), comm)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", ["own GPUs", "one GPU"], indirect=True)
@pytest.mark.part(2)
def test_a_rank_that_does_not_come(
    way: str, machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A parameter limits the wait of a kernel. The first call needs less, even on busy cores.
    limit_ns = 3 * 10**9
    parameter = ReductionPlan.parameter
    monkeypatch.setattr(ReductionPlan, "parameter", lambda *given: parameter(*given[:-1], limit_ns))
    reduce = reduced(None, comm.Dup(), 4, "f8", "sum")
    array = Array(np.ones(4))
    comm.Barrier()
    reduce(array)
    if comm.rank:
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            for _ in range(2):
                reduce(array)
    comm.Barrier()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("way", ["own GPUs"], indirect=True)
@pytest.mark.parametrize("algorithm", KERNELS)
def test_a_bad_array_on_one_rank_with_kernels(
    algorithm: str, machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of the other ranks wait until the limit; the next call of the rank waits on the host, equally long."""
    parameter, limit_ns = ReductionPlan.parameter, int(1e9)
    monkeypatch.setattr(ReductionPlan, "parameter", lambda *given: parameter(*given[:-1], limit_ns))
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


@pytest.mark.ranks(2, 3)
class TestParities:
    """A reduction of the even field on one rank and the odd field on another is an error."""

    @pytest.mark.parametrize("way", ["own GPUs", "one GPU", "two nodes"], indirect=True)
    def test_at_the_first_call(self, way: str, machine: Machine, comm: MPI.Intracomm) -> None:
        mine = "odd" if comm.rank == comm.size - 1 else "even"
        with halox.Grid((4 * comm.size, 6), comm=comm, device="gpu", checkerboard=True) as grid:
            fields = {one: grid.full(n, parity=one) for n, one in enumerate(("even", "odd"), 1)}
            for name, call in (("sum", grid.sum), ("max", grid.max)):
                with pytest.raises(MismatchError):
                    call(fields[mine])
                for one, value in (("even", 1), ("odd", 2)):
                    cells = 12 * comm.size if name == "sum" else 1
                    assert float(call(fields[one])) == value * cells

    @pytest.mark.full
    @pytest.mark.parametrize("way", ["own GPUs"], indirect=True)
    def test_later(
        self, way: str, machine: Machine, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Later calls do not compare the fields of the ranks: this call times out."""
        parameter = ReductionPlan.parameter
        monkeypatch.setattr(
            ReductionPlan, "parameter", lambda *given: parameter(*given[:-1], 3 * 10**9)
        )
        grid = halox.Grid((4 * comm.size, 6), comm=comm.Dup(), device="gpu", checkerboard=True)
        fields = [grid.ones(parity=one) for one in ("even", "odd")]
        for field in fields:
            grid.sum(field)
        mixed = fields[comm.rank == comm.size - 1]
        comm.Barrier()
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            for _ in range(2):
                grid.sum(mixed)
        comm.Barrier()
