"""Allreduce across nodes by NCCL, with simulated GPUs and a simulated NCCL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    MismatchError,
    StateError,
)
from halox.runtime import communicator, status
from halox.runtime.communicator import CELLS, HANDSHAKE
from halox.runtime.nccl_ranks import NcclRanks
from tests.fakes.fake_cupy import Array, Machine
from tests.fakes.fake_nccl import FakeNccl, machine_with_nccl
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.support import becomes, require
from tests.unit.reductions.reduction_oracle import expected, same, sample

require("cxx")

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]


@pytest.fixture
def comm() -> MPI.Intracomm:
    """Return a new communicator, since halox keeps NCCL's communicator with it."""
    return MPI.COMM_WORLD.Dup()


@pytest.fixture(params=["a node each", "two nodes"])
def node(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> str:
    if request.param == "two nodes":
        return "second" if comm.rank % 3 == 1 else "first"
    return "rank"


@pytest.fixture
def gpu(
    node: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> tuple[Machine, FakeNccl]:
    monkeypatch.setenv("HALOX_NODE", node)
    return machine_with_nccl(comm, monkeypatch)


def wanted(op: str, node: str, values: list[Any]) -> Any:
    """Combine the values of each node in rank order, then the results of the nodes in node order."""
    if node == "rank":
        return expected(op, values)
    groups = [
        [v for i, v in enumerate(values) if (i % 3 == 1) == second] for second in (False, True)
    ]
    return expected(op, [expected(op, group) for group in groups])


@pytest.mark.parametrize(
    ("op", "dtype", "elements"),
    [
        ("sum", "f8", 701),
        ("max", "f4", 37),
        ("prod", "c16", 33),
        ("logical_xor", "?", 64),
        ("sum", "f8", 140_003),
    ],
)
def test_combined_in_the_order_of_the_nodes(
    op: str,
    dtype: str,
    elements: int,
    node: str,
    gpu: tuple[Machine, FakeNccl],
    comm: MPI.Intracomm,
) -> None:
    values = [sample(dtype, op, elements, rank) for rank in range(comm.size)]
    right = wanted(op, node, values)
    with halox.Allreduce(comm, elements, dtype, op, device="gpu") as reduce:
        assert (reduce.algorithm, reduce.captures) == ("hierarchical", True)
        for _ in range(2):
            mine = Array(values[comm.rank].copy())
            found = reduce(mine)
            ok = same(found.get(), right) and same(mine.get(), values[comm.rank])
            again = reduce(mine, out=mine)
            ok &= again is mine and mine.get().tobytes() == found.get().tobytes()
            assert agree(ok, comm)
        assert len(set(comm.allgather(found.get().tobytes()))) == 1


def test_prepared_calls(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """Repeated calls with the same arrays, to ``out``, in place, and to new arrays."""
    a, b, out = (Array(np.zeros(5)) for _ in range(3))
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        for step in range(4):
            a.values[...] = b.values[...] = comm.rank + step
            wanted = sum(range(comm.size)) + comm.size * step
            found = reduce(a)
            assert reduce(a, out) is out and reduce(b, out=b) is b
            right = all(bool((x.get() == wanted).all()) for x in (found, out, b))
            assert agree(right and bool((a.get() == comm.rank + step).all()), comm), step


def test_captured(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """A bad call of one rank adds nothing to the graph, and needs no meeting of the ranks."""
    machine, nccl = gpu
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        a, out = Array(np.full(5, comm.rank + 1.0)), Array(np.zeros(5))
        machine.capturing, before = True, len(nccl.groups)
        if comm.rank == 0:
            with pytest.raises(FieldError):
                reduce(Array(np.zeros(4)), out)
            assert len(nccl.groups) == before
        reduce(a, out)
        with pytest.raises(StateError):
            halox.Allreduce(comm, 6, "f8", device="gpu")
        machine.capturing = False
        total = comm.size * (comm.size + 1) / 2
        assert agree(bool((out.get() == total).all() and (reduce(a).get() == total).all()), comm)


def test_without_nccl_it_goes_through_the_host(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm
) -> None:
    _, nccl = gpu
    nccl.why_not = "no libnccl.so.2 can be loaded" if comm.rank == 1 else ""
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        assert reduce.algorithm == "host" and "libnccl" in reduce.reasons["hierarchical"]
        found = reduce(Array(np.full(5, 2.0)))
        assert agree(bool((found.get() == 2 * comm.size).all()), comm)


def test_a_bad_array_on_all_ranks(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        with pytest.raises(FieldError):
            reduce(Array(np.zeros(4)))
        found = reduce(Array(np.full(5, 2.0)))
        assert agree(bool((found.get() == 2 * comm.size).all()), comm)


def test_a_bad_array_on_one_rank(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """The next call of that rank waits for the other ranks on the host: NCCL would pair it with their earlier call."""
    reduce = halox.Allreduce(comm, 5, "f8", device="gpu")
    if comm.rank == comm.size - 1:
        with pytest.raises(FieldError):
            reduce(Array(np.zeros(4)))
        with short_waits(), pytest.raises(ExchangeTimeoutError):
            reduce(Array(np.ones(5)))
    comm.Barrier()


def test_a_stalled_rank(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """The communicator is aborted, and the next call names the reduction that timed out."""
    _, nccl = gpu
    with halox.Allreduce(comm, 3, "f8", "max", device="gpu") as reduce:
        array = Array(np.ones(3))
        reduce(array)
        nccl.is_stuck = True
        watch = reduce._reduction._algorithm._watch
        watch.limit_s = 0.3  # for the stalled call only
        watch._words[0] = 1  # as a kernel writes at the start of a reduction
        assert becomes(lambda: nccl.aborted)
        with pytest.raises(ExchangeTimeoutError):
            reduce(array)


def test_captured_reductions_of_fields(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured reduction allocates no temporary: its memory would be reused while the graph still writes there."""
    import cupy

    machine, _ = gpu

    def refuse(shape: Any, dtype: Any = "f8") -> Any:
        raise AssertionError("a temporary in a graph")

    with halox.Grid((4 * comm.size, 6), comm=comm, device="gpu") as grid:
        u, out = Array(np.full(grid.padded_shape, comm.rank + 1.0)), Array(np.zeros(()))
        squares = 24 * sum((rank + 1.0) ** 2 for rank in range(comm.size))
        for name, right in (("norm", squares**0.5), ("dot", squares)):
            arrays = (u,) if name == "norm" else (u, u)
            getattr(grid, name)(*arrays, out=out)
            out.values[...] = 0
            with monkeypatch.context() as patch:
                patch.setattr(cupy, "empty", refuse)
                machine.capturing = True
                getattr(grid, name)(*arrays, out=out)
                machine.capturing = False
            assert agree(bool(np.isclose(float(out), right, rtol=1e-14)), comm), name


@pytest.mark.parametrize(
    "what", ["device_algorithms.ArrayKernels", "nccl_reduction.write"], ids=["before", "after"]
)
def test_a_rank_without_memory(
    what: str,
    gpu: tuple[Machine, FakeNccl],
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank fails before or after the connection: all take another algorithm, or raise if this one is requested."""
    if comm.rank == 1:

        def refuse(*_: Any) -> Any:
            raise DeviceError("no memory left")

        monkeypatch.setattr(f"halox.reductions.device.{what}", refuse)
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        assert reduce.algorithm == "host" and "no memory left" in reduce.reasons["hierarchical"]
        assert agree(bool((reduce(Array(np.ones(5))).get() == comm.size).all()), comm)
        kept = [one for one in reduce._world.ranks.resources.values() if isinstance(one, NcclRanks)]
        # A watch is removed later if its thread holds the lock.
        assert agree(becomes(lambda: not any(one._watched for one in kept)), comm)
    with pytest.raises(FieldError):
        halox.Allreduce(comm, 5, "f8", algorithm="hierarchical", device="gpu")


@pytest.mark.ranks(1, 2)
@pytest.mark.usually(1)
def test_messages_of_different_kinds_have_different_tags() -> None:
    """An unread note stays pending while other calls receive by their tags, which must differ."""
    ranks: Any = SimpleNamespace(watch=SimpleNamespace(number=0))
    calls: set[int] = set()
    for ranks.watch.number in range(10_000):
        tags = {communicator.Communicator.call_tag(ranks, kind) for kind in (HANDSHAKE, CELLS)}
        assert len(tags) == 2
        calls |= tags
    assert min(calls) > status._NOTE_TAG
    assert max(calls) < communicator.FIRST_PLAN_TAG < 32767 // 2, "MPI's smallest bound of tags"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("node", ["a node each"], indirect=True)
def test_in_another_order(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL matches the values of two reductions; the next call raises, on all ranks."""
    monkeypatch.setenv("HALOX_TIMEOUT", "0")  # no thread watches between the calls
    one, other = Array(np.full(3, comm.rank + 1.0)), Array(np.full(3, comm.rank + 1.0))
    with (
        pytest.warns(UserWarning, match="message of plan"),
        halox.Grid((4 * comm.size, 4), comm=comm, device="gpu") as grid,
    ):

        def call(op: Any) -> float:
            return float(grid.allreduce(one, op, out=other).get()[0])

        found = [call(op) for op in ("sum", "max", "max", "sum")]
        assert agree(found == [3, 2, 2, 3], comm)
        for op in ("sum", "max") if comm.rank == 0 else ("max", "sum"):
            call(op)
        with pytest.raises(MismatchError) as raised:
            call("sum")
    assert "in the same order on all ranks" in str(raised.value)
