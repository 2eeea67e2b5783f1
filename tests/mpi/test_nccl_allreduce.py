"""Allreduce across nodes by NCCL, on GPUs and with an NCCL that the host plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.collectives.device import nccl_reduction
from halox.errors import ExchangeTimeoutError, FieldError, MismatchError, StateError
from halox.runtime.gpu import streams
from tests.mpi.conftest import agree
from tests.mpi.fake_cupy import Array, Machine
from tests.mpi.fake_nccl import FakeNccl, machine_with_nccl
from tests.support import require
from tests.unit.reduction_oracle import expected, same, sample

require("cxx")

pytestmark = [pytest.mark.ranks(2, 3), pytest.mark.usually(2)]


@pytest.fixture
def comm() -> MPI.Intracomm:
    """A communicator of its own, since NCCL is kept with it."""
    return MPI.COMM_WORLD.Dup()


@pytest.fixture(params=["a node each", "two nodes"])
def node(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> str:
    if request.param == "two nodes":
        return "second" if comm.rank % 3 == 1 else "first"
    return "rank"


@pytest.fixture
def gpu(
    node: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Machine, FakeNccl]]:
    monkeypatch.setenv("HALOX_NODE", node)
    yield machine_with_nccl(comm, monkeypatch)
    streams._query.cache_clear()


def wanted(op: str, node: str, values: list[Any]) -> Any:
    """The nodes' values in the order of the nodes, each of them in the order of its ranks."""
    if node == "rank":
        return expected(op, values)
    groups = [
        [v for i, v in enumerate(values) if (i % 3 == 1) == second] for second in (False, True)
    ]
    return expected(op, [expected(op, group) for group in groups])


@pytest.mark.parametrize("form", ["whole", "name apart", "cut"])
def test_combined_in_the_order_of_the_nodes(
    form: str,
    node: str,
    gpu: tuple[Machine, FakeNccl],
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl_reduction, "NCCL_GATHERED_BYTES", 8 if form == "cut" else 1 << 20)
    if form == "name apart":
        monkeypatch.setattr(nccl_reduction, "_COPIED_BYTES", 0)
    for op, dtype, elements in (
        ("sum", "f8", 701),
        ("max", "f4", 37),
        ("prod", "c16", 33),
        ("logical_xor", "?", 64),
    ):
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
                assert agree(ok, comm), (op, dtype)
            assert len(set(comm.allgather(found.get().tobytes()))) == 1


def test_prepared_calls(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """With the same arrays again and again: to one that is given, in place, and to new ones."""
    a, b, out = (Array(np.zeros(5)) for _ in range(3))
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        for step in range(4):
            a.values[...] = b.values[...] = comm.rank + step
            wanted = sum(range(comm.size)) + comm.size * step
            found = reduce(a)
            assert reduce(a, out) is out and reduce(b, out=b) is b
            right = all(bool((x.get() == wanted).all()) for x in (found, out, b))
            assert agree(right and bool((a.get() == comm.rank + step).all()), comm), step
        assert len(reduce._launches) == 3


def test_captured(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    machine, _ = gpu
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        a, out = Array(np.full(5, comm.rank + 1.0)), Array(np.zeros(5))
        machine.capturing = True
        reduce(a, out)
        with pytest.raises(StateError, match="making a reduction needs the host"):
            halox.Allreduce(comm, 6, "f8", device="gpu")
        machine.capturing = False
        assert agree(bool((out.get() == comm.size * (comm.size + 1) / 2).all()), comm)


def test_without_nccl_it_goes_through_the_host(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm
) -> None:
    _, nccl = gpu
    nccl.why_not = "no libnccl.so.2 can be loaded" if comm.rank == 1 else ""
    with halox.Allreduce(comm, 5, "f8", algorithm="hierarchical", device="gpu") as reduce:
        assert not reduce.captures and not nccl.groups
        found = reduce(Array(np.full(5, 2.0)))
        assert agree(bool((found.get() == 2 * comm.size).all()), comm)


def test_a_bad_array_on_all_ranks(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        with pytest.raises(FieldError, match=r"array: got shape \(4,\)"):
            reduce(Array(np.zeros(4)))
        found = reduce(Array(np.full(5, 2.0)))
        assert agree(bool((found.get() == 2 * comm.size).all()), comm)


def test_a_bad_array_on_one_rank(gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm) -> None:
    """Nobody waits for it: the others' next call raises, and then all go on."""
    good, last = Array(np.ones(5)), comm.rank == comm.size - 1
    with halox.Allreduce(comm, 5, "f8", device="gpu") as reduce:
        for turn in range(3):
            if last:
                with pytest.raises(FieldError, match=r"array: got shape \(4,\)"):
                    reduce(Array(np.zeros(4)))
                comm.Barrier()
            else:
                time.sleep(0.05 * turn)  # the note may be there before this rank's call
                reduce(good)
                comm.Barrier()  # the note has been sent
                with pytest.raises(MismatchError, match=r"rank \d has cancelled"):
                    reduce(good)
            assert agree(bool((reduce(good).get() == comm.size).all()), comm)


def test_a_stalled_rank(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The communicator is aborted, and the next call says what was waited for."""
    _, nccl = gpu
    monkeypatch.setenv("HALOX_TIMEOUT", "1")
    with halox.Allreduce(comm, 3, "f8", "max", device="gpu") as reduce:
        array = Array(np.ones(3))
        reduce(array)
        nccl.is_stuck = True
        reduce._reduction._do._watch._words[0] = 1  # as the GPU does
        end = time.monotonic() + 30
        while not nccl.aborted and time.monotonic() < end:
            time.sleep(0.05)
        with pytest.raises(
            ExchangeTimeoutError, match=r"in a reduction \(op='max'\) by NCCL for 1 s"
        ):
            reduce(array)


@pytest.mark.ranks(2)
def test_a_note_that_has_come_is_seen_at_the_first_look(
    comm: MPI.Intracomm, tmp_path: Path
) -> None:
    """It is found although no other call of MPI has let it in: NCCL carries what this rank waits for."""
    sent = Path(comm.bcast(tmp_path)) / "sent"
    world: Any = SimpleNamespace(
        comm=comm, mpi=MPI, rank=comm.rank, size=comm.size, node_ranks=[comm.rank]
    )
    notes = nccl_reduction._Notes()
    comm.Barrier()
    if comm.rank:
        notes.send(world, 3, 7)
        sent.touch()
    else:
        while not sent.exists():
            time.sleep(0.001)
        notes.look(world)
    assert agree(bool(comm.rank) or notes.found == {3: {7: 1}}, comm)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("node", ["a node each"], indirect=True)
def test_in_another_order(
    gpu: tuple[Machine, FakeNccl], comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL matches the values of two reductions; the next call raises, on all ranks."""
    monkeypatch.setenv("HALOX_TIMEOUT", "0")  # so that no thread looks in between
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
        with pytest.raises(
            MismatchError, match=r"a message of plan 2 of .* one of plan 1"
        ) as raised:
            call("sum")
    assert "in the same order on all ranks" in str(raised.value)
