"""Allreduce of NumPy arrays on several ranks, compared with NumPy in rank order."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.lib.stride_tricks import as_strided

import halox
from halox.errors import (
    ClosedError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    StateError,
)
from halox.reductions.algorithms import HOST_ALGORITHMS as ALGORITHMS
from halox.reductions.host import mpi_reduction, shared_reduction
from halox.reductions.operations import find_operation
from halox.runtime.context import Context
from tests.limits import fill_shared_memory, reduce_in_pieces
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.support import full
from tests.unit.reductions.reduction_oracle import expected, same, sample
from tests.unit.reductions.test_operations import PAIRS

pytestmark = pytest.mark.usually(1, 3, 8)

World = MPI.Intracomm
Allreduce = partial(halox.Allreduce, device="cpu")
GATHERED = mpi_reduction.GATHERED_BYTES // 8
SMALL = shared_reduction.SMALL_BYTES // 8
SIZES = [0, 1, GATHERED, GATHERED + 1, SMALL, SMALL + 1, 9999]


@pytest.fixture(params=["one node", "two nodes", "a node each"])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, comm: World) -> str:
    if request.param == "two nodes":
        # Nodes of different sizes, with interleaved ranks.
        monkeypatch.setenv("HALOX_NODE", "second" if comm.rank % 3 == 1 else "first")
    if request.param == "a node each":
        monkeypatch.setenv("HALOX_NODE", "rank")
    return str(request.param)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    reduce_in_pieces(monkeypatch, 4096)


@pytest.fixture(params=["shared memory", "too little of it"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is enough shared memory."""
    if request.param == "too little of it":
        fill_shared_memory(monkeypatch)
    return bool(request.param == "shared memory")


def node_of(rank: int, nodes: str) -> int:
    return {"one node": 0, "two nodes": rank % 3 == 1, "a node each": rank}[nodes]


def wanted(algorithm: str, op: str, values: Any, nodes: str) -> Any:
    """Return the ranks' values combined in the order that the algorithm promises."""
    if algorithm == "host":
        return expected(op, values)
    groups: dict[int, list[Any]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(node_of(rank, nodes), []).append(value)
    return expected(op, [expected(op, group) for group in groups.values()])


def same_everywhere(found: Any, comm: World) -> bool:
    return len(set(comm.allgather(found.tobytes()))) == 1


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("small_pieces")
def test_sizes(algorithm: str, elements: int, nodes: str, comm: World) -> None:
    values = [sample("f8", "sum", elements, rank) for rank in range(comm.size)]
    with Allreduce(comm, elements, "f8", "sum", algorithm) as reduce:
        assert reduce.algorithm == algorithm
        found = reduce(values[comm.rank])
    assert same(found, wanted(algorithm, "sum", values, nodes))
    assert same_everywhere(found, comm)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(
    ("algorithm", "elements"),
    [("host", 50), ("host", 5000), ("hierarchical", 50), *full(("hierarchical", 5000))],
)
def test_operations(algorithm: str, elements: int, comm: World) -> None:
    for op, dtype in PAIRS if elements == 50 else PAIRS[::7]:
        values = [sample(dtype, op, (elements, 2), rank) for rank in range(comm.size)]
        with Allreduce(comm, (elements, 2), dtype, op, algorithm) as reduce:
            found = reduce(values[comm.rank])
        ok = found.dtype == np.dtype(dtype) and same(found, expected(op, values))
        assert agree(ok, comm), (op, dtype)


def placed(where: str, values: Any) -> tuple[Any, Any]:
    """Return an array of these values, and memory for the result."""
    rows, columns = values.shape
    if where == "in place":
        array = values.copy()
        return array, array
    if where == "strided":
        around = np.full((2 * rows, 10), -7)
        around[::2, 1:5] = values
        return around[::2, 1:5], around[1::2, 9:5:-1]
    if where == "not aligned":
        memory = np.zeros(2 * values.nbytes + 3, np.uint8)
        parts = (memory[at:][: values.nbytes] for at in (1, 2 + values.nbytes))
        source, target = (part.view(values.dtype).reshape(values.shape) for part in parts)
        assert not source.flags.aligned and not target.flags.aligned
        source[...] = values
        return source, target
    if where == "overlapping":
        memory = np.zeros((rows + 1, columns), "i8")
        memory[1:] = values
        return memory[1:], memory[:-1]
    source = values.copy()
    source.flags.writeable = False
    return source, np.full_like(values, -1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("rows", [3, 2000])
@pytest.mark.parametrize(
    "where", ["in place", "strided", "not aligned", "overlapping", "read-only source"]
)
@pytest.mark.part(2)
def test_places_of_arrays(where: str, algorithm: str, rows: int, comm: World) -> None:
    base = np.arange(rows * 4).reshape(rows, 4)
    mine, total = base * (comm.rank + 1), base * (comm.size * (comm.size + 1) // 2)
    source, target = placed(where, mine)
    with Allreduce(comm, (rows, 4), "i8", algorithm=algorithm) as reduce:
        found = reduce(source)
        assert np.array_equal(found, total) and np.array_equal(source, mine)
        assert reduce(source, out=target) is target
    assert np.array_equal(target, total)
    assert where in ("in place", "overlapping") or np.array_equal(source, mine)
    if where == "strided":
        around = source.base
        assert (around[:, [0, 5]] == -7).all() and (around[1::2, 1:5] == -7).all()


def test_single_values(comm: World) -> None:
    total = sum(range(1, comm.size + 1))
    with Allreduce(comm, (), "f8") as reduce:
        found = reduce(np.array(comm.rank + 1.0))
        assert isinstance(found, np.ndarray) and found.shape == () and found == total
        for given in (comm.rank + 1, float(comm.rank + 1), np.float64(comm.rank + 1)):
            found = reduce(given)
            assert isinstance(found, np.float64) and found == total
    with Allreduce(comm, (), "u1", "max") as reduce:
        assert reduce(comm.rank) == comm.size - 1
        for bad in (-1, 256, 1.5, np.int64(1), "text"):
            with pytest.raises(FieldError):
                reduce(bad)
        assert reduce(200) == 200, "works after errors"


def only_on(comm: World, rank: int, bad: Any, good: Any) -> Any:
    return bad if comm.rank == rank % comm.size else good


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((3, "f8", "median"), "op"),
        ((3, "c8", "min"), "min"),
        ((3, object, "sum"), "dtype"),
        (((3, "x"), "f8", "sum"), "shape"),
        ((1 << 62, "f8", "sum"), "shape"),
        ((3, "f8", "sum", "fastest"), "algorithm"),
    ],
)
def test_bad_arguments(arguments: Any, word: str, comm: World) -> None:
    """Of all ranks, and of one rank."""
    for mine in (arguments, only_on(comm, 1, arguments, (3, "f8", "sum"))):
        with pytest.raises(FieldError, match=word):
            Allreduce(comm, *mine)


@pytest.mark.ranks(2, 3, 4, 6, 8)
@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ((4, "f8", "sum"), "shape"),
        (((3, 1), "f8", "sum"), "shape"),
        ((3, "f4", "sum"), "dtype"),
        ((3, "f8", "max"), "op"),
        ((3, "f8", "sum", "hierarchical"), "algorithm"),
    ],
)
def test_arguments_that_differ(bad: Any, word: str, comm: World) -> None:
    arguments = only_on(comm, 1, bad, (3, "f8", "sum", "host"))
    with pytest.raises(MismatchError, match=f"{word} differs between ranks"):
        Allreduce(comm, *arguments)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_memory_does_not_grow_with_the_shape(algorithm: str, nodes: str, comm: World) -> None:
    Allreduce(comm, 1 << 52, "f8", algorithm=algorithm).close()


@pytest.mark.parametrize("elements", [4, 4000])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_bad_array_on_one_rank(algorithm: str, elements: int, comm: World) -> None:
    """All ranks raise, nothing is written, and the next call is right."""
    good, out = np.ones(elements), np.full(elements, -1.0)
    fixed = np.ones(elements)
    fixed.flags.writeable = False
    cases: list[tuple[Any, Any]] = [
        (np.ones(elements + 1), out),
        (np.ones(elements, "f4"), out),
        ([1.0] * elements, out),
        (good, np.ones(elements, "i8")),
        (good, fixed),
        (good, as_strided(np.ones(1), (elements,), (0,))),
        (np.ma.ones(elements), out),
    ]
    with Allreduce(comm, elements, "f8", "sum", algorithm) as reduce:
        for array, target in cases:
            with pytest.raises(FieldError, match=r"array|out"):
                reduce(*only_on(comm, 1, (array, target), (good, out)))
            assert (out == -1).all()
        assert (reduce(good) == comm.size).all()


def test_closed(comm: World) -> None:
    reduce = Allreduce(comm, 3, "f8", "sum", "hierarchical")
    reduce.close()
    reduce.close()
    with pytest.raises(ClosedError):
        reduce(np.zeros(3))


def test_the_choice(nodes: str, comm: World) -> None:
    with Allreduce(comm, 3, "f8") as reduce:
        several = len({node_of(rank, nodes) for rank in range(comm.size)})
        assert reduce.algorithm in ALGORITHMS
        if several == 1 or several == comm.size:
            assert reduce.algorithm == "host"


def test_of_the_grid(comm: World) -> None:
    """The grid's allreduce also combines in rank order, so all ranks get the same bits."""
    with halox.Grid((4 * comm.size, 4), comm=comm, device="cpu") as grid:
        for elements in (5, 5000):
            values = [sample("f4", "sum", elements, rank) for rank in range(comm.size)]
            found = grid.allreduce(values[comm.rank])
            assert same(found, expected("sum", values)) and same_everywhere(found, comm)
        flags = np.array([comm.rank == 0, True, False])
        assert grid.allreduce(flags, op="logical_and").tolist() == [comm.size == 1, True, False]
        assert grid.allreduce(1 << comm.rank, op="bitwise_or") == (1 << comm.size) - 1


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.usefixtures("memory")
def test_where_ranks_meet(algorithm: str, comm: World) -> None:
    """Ranks combine through shared memory if there is enough, otherwise with the same bits and errors."""
    for elements in (3, 20000):
        values = [sample("f8", "sum", elements, rank) for rank in range(comm.size)]
        with Allreduce(comm, elements, "f8", "sum", algorithm) as reduce:
            for _ in range(3):
                found = reduce(values[comm.rank])
                assert same(found, expected("sum", values)) and same_everywhere(found, comm)
                with pytest.raises(FieldError):
                    reduce(only_on(comm, 1, np.zeros(1), values[comm.rank]))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("elements", [3, 4096 + 512, *full(4096, 5000)])
def test_many_calls_in_a_row(elements: int, algorithm: str, comm: World) -> None:
    """Calls reuse the slots of earlier calls, while random ranks are late."""
    rng = np.random.default_rng(comm.rank)
    base = np.arange(elements)
    ok = True
    with Allreduce(comm, elements, "i8", "sum", algorithm) as reduce:
        array = np.empty(elements, "i8")
        for call in range(200 if algorithm == "host" else 50):
            array[:] = base * call + comm.rank
            if rng.random() < 0.1:
                time.sleep(rng.random() * 2e-3)
            reduce(array, out=array)
            total = base * call * comm.size + sum(range(comm.size))
            ok = ok and np.array_equal(array, total)
    assert agree(ok, comm)


class LateMoves:
    """Copies as late as a GPU's stream may run them: in ``wait``."""

    def __init__(self) -> None:
        self._pending: list[tuple[Any, Any]] = []

    def of(self, array: Any) -> LateMoves:
        self._array = array
        return self

    def fetch(self, values: Any, start: int) -> None:
        self._pending.append((values, self._array[start : start + len(values)]))

    def wait(self) -> None:
        for target, source in self._pending:
            target[...] = source
        self._pending.clear()

    def bring(self, values: Any, start: int) -> None:
        self._pending.append((self._array[start : start + len(values)], values))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("elements", [3, 600, 4096, 5000])
@pytest.mark.part(2)
def test_moves_that_end_late(elements: int, comm: World) -> None:
    """A slot is overwritten only after the copies out of it have ended."""
    ground = Context(halox.runtime.world.World(comm))
    what = find_operation("sum", np.dtype("i8")), np.dtype("i8"), elements
    made = shared_reduction.make_shared_reduction(ground.world, ground.arena, *what)
    assert made is not None
    moves, rng, base = LateMoves(), np.random.default_rng(comm.rank), np.arange(elements)
    arrays = [base * call + comm.rank for call in range(200)]
    for call, array in enumerate(arrays):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        if call % 7 == 3:
            bad = ValueError("none") if comm.rank == call % comm.size else None
            with pytest.raises(HaloxError, match="none"):
                made.reduce(None if bad else moves.of(array.copy()), bad)
        made.reduce(moves.of(array), None)
    moves.wait()
    totals = (base * call * comm.size + sum(range(comm.size)) for call in range(200))
    assert agree(all(map(np.array_equal, arrays, totals)), comm)
    made.close()
    ground.close()


@pytest.mark.parametrize("first", ["small", "large"])
def test_memory_that_was_used_before(first: str, comm: World) -> None:
    """Memory holds leftovers of reductions, fields and failed calls; flags count on from the values that they find."""
    ground = Context(halox.runtime.world.World(comm))
    sizes = [5, 9000] if first == "small" else [9000, 5]
    for turn in range(4):
        block = ground.arena.allocate(40000)
        if block is not None:
            field = ground.arena.array(block, (40000,), np.dtype("u1"))
            field[:] = 255 if comm.rank % 2 else 7 + comm.rank
            del field
        for elements in sizes:
            what = find_operation("sum", np.dtype("i8")), np.dtype("i8"), elements
            made = shared_reduction.make_shared_reduction(ground.world, ground.arena, *what)
            assert (made is None) == (comm.size == 1)
            if made is None:
                continue
            for call in range(1, 4):
                values = np.full(elements, comm.rank + call + turn)
                made.reduce(shared_reduction.HostMoves(values, values), None)
                total = sum(range(comm.size)) + (call + turn) * comm.size
                assert agree(bool((values == total).all()), comm)
                bad = ValueError("none") if comm.rank == comm.size - 1 else None
                moves = None if bad else shared_reduction.HostMoves(values, values)
                with pytest.raises(HaloxError, match="none"):
                    made.reduce(moves, bad)
            made.close()
    ground.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("elements", [4, 5000])
@pytest.mark.part(2)
def test_the_rank_that_does_not_come_is_named(elements: int, comm: World) -> None:
    reduce = Allreduce(comm.Dup(), elements, "f8", "sum", "host")
    last = comm.size - 1
    reduce(np.ones(elements))
    if comm.rank != last:
        text = f"waited in an allreduce for rank {last} "
        with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
            reduce(np.ones(elements))
        with pytest.raises(StateError):
            reduce(np.ones(elements))
    comm.Barrier()
