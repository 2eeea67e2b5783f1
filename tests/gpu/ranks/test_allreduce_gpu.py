"""Allreduces of GPU arrays by every algorithm: the bits of NumPy in the documented order, in streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import (
    DeviceError,
    ExchangeTimeoutError,
    FieldError,
    HaloxError,
    MismatchError,
    StateError,
)
from halox.reductions.algorithms import DEVICE_ALGORITHMS
from tests.mpi.conftest import agree
from tests.support import require
from tests.unit.reductions.reduction_oracle import expected, same, sample
from tests.unit.reductions.test_operations import PAIRS

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import Guarded, stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 4, 8)]

KERNELS = ("oneshot", "reduce_scatter_allgather")
REPLAYS = 1000


@pytest.fixture(params=["as it is", "a node each"])
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "a node each":
        monkeypatch.setenv("HALOX_NODE", "rank")
    return str(request.param)


@pytest.fixture(params=DEVICE_ALGORITHMS)
def algorithm(request: pytest.FixtureRequest, nodes: str, comm: MPI.Intracomm) -> Iterator[str]:
    """The name of an algorithm; skips, with the reason, if these ranks cannot use it."""
    name = str(request.param)
    try:
        halox.Allreduce(comm, 1, "f8", "sum", name, device="gpu").close()
    except FieldError as error:
        pytest.skip(str(error))
    yield name


def made(comm: MPI.Intracomm, *arguments: Any) -> halox.Allreduce:
    return halox.Allreduce(comm, *arguments, device="gpu")


def wanted(algorithm: str, op: str, values: list[Any]) -> Any:
    """Combine the values of all ranks in the documented order."""
    parts = list(values)
    while algorithm == "binomial" and len(parts) > 1:
        parts = [expected(op, parts[i : i + 2]) for i in range(0, len(parts), 2)]
    return expected(op, parts)


def test_what_can_be_had(nodes: str, comm: MPI.Intracomm) -> None:
    """On a shared GPU without device signals; "hierarchical", which needs NCCL, across nodes only."""
    gpu = comm.rank % cupy.cuda.runtime.getDeviceCount()
    uuid = bytes(cupy.cuda.runtime.getDeviceProperties(gpu)["uuid"])
    shared = len(set(comm.allgather(uuid))) < comm.size
    with made(comm, 1, "f8") as reduce:
        found = set(DEVICE_ALGORITHMS) - set(reduce.reasons)
        if nodes == "a node each":
            assert found - {"hierarchical"} == {"host"}
            return
        assert {"host", "shared_buffer", "binomial"} <= found and "hierarchical" not in found
        assert found.isdisjoint(KERNELS) if shared else found.issuperset(KERNELS)
        assert shared or reduce.algorithm == "oneshot"


def test_operations(algorithm: str, comm: MPI.Intracomm) -> None:
    """A sample of the pairs of operation and dtype, since each pair compiles; more pairs for the usual algorithm."""
    for op, dtype in PAIRS[:: 4 if algorithm == "oneshot" else 9]:
        values = [sample(dtype, op, 3001, rank) for rank in range(comm.size)]
        array = cupy.asarray(values[comm.rank])
        with made(comm, 3001, dtype, op, algorithm) as reduce:
            found = reduce(array)
            assert reduce(array, out=array) is array
        result, total = found.get(), wanted(algorithm, op, values)
        # Products of complex numbers differ in rounding, since a GPU uses fused multiply-add.
        ok = same(result, total) or (op == "prod" and np.allclose(result, total, equal_nan=True))
        ok &= array.get().tobytes() == result.tobytes()
        ok &= len(set(comm.allgather(result.tobytes()))) == 1
        assert agree(ok, comm), (op, dtype)


@pytest.mark.parametrize("elements", [0, 1, 255, 257, (1 << 20) + 3])
def test_sizes_and_calls_in_a_row(algorithm: str, elements: int, comm: MPI.Intracomm) -> None:
    """Calls in place, many of them enqueued without synchronization where the algorithm needs no host."""
    base = cupy.arange(elements, dtype="f8")
    array, wrong = cupy.empty(elements), cupy.zeros((), "i8")
    with made(comm, elements, "f8", "max", algorithm) as reduce:
        for call in range(200 if algorithm in KERNELS else 8):
            array[...] = base + (call + comm.rank)
            reduce(array, out=array)
            wrong += (array != base + (call + comm.size - 1)).sum()
        assert agree(int(wrong) == 0, comm)


def test_the_same_bits_in_every_run(algorithm: str, comm: MPI.Intracomm) -> None:
    values = cupy.asarray(sample("f4", "sum", 777, comm.rank))
    with made(comm, 777, "f4", "sum", algorithm) as reduce:
        first = reduce(values).get().tobytes()
        runs = 1000 if algorithm in KERNELS else 50
        assert agree(all(reduce(values).get().tobytes() == first for _ in range(runs)), comm)
        assert len(set(comm.allgather(first))) == 1


def test_behind_and_ahead_of_what_the_stream_holds(algorithm: str, comm: MPI.Intracomm) -> None:
    """Calls alternate between two busy streams."""
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    array = cupy.zeros(5000)
    cupy.cuda.runtime.deviceSynchronize()
    with made(comm, 5000, "f8", "sum", algorithm) as reduce:
        for call in range(6):
            with streams[call % 2]:
                stall()
                array[...] = comm.rank + call
                reduce(array, out=array)
                found = array + 0
                ok = bool((found == sum(range(comm.size)) + comm.size * call).all())
            assert agree(ok, comm), call
            streams[call % 2].synchronize()


@pytest.mark.parametrize("offset", [0, 4, 8, 12])
def test_nothing_beside_the_array_is_written(
    algorithm: str, offset: int, comm: MPI.Intracomm
) -> None:
    values = [np.arange(301, dtype="f4") * (rank + 1) for rank in range(comm.size)]
    source, target = Guarded(4 * 301, offset), Guarded(4 * 301, offset)
    source.array[...] = cupy.asarray(values[comm.rank].view(np.uint8))
    with made(comm, 301, "f4", "sum", algorithm) as reduce:
        reduce(source.array.view("f4"), out=target.array.view("f4"))
    ok = np.array_equal(target.get().view("f4"), sum(values))
    assert agree(ok and np.array_equal(source.get().view("f4"), values[comm.rank]), comm)


def test_arrays_of_all_kinds(algorithm: str, comm: MPI.Intracomm) -> None:
    total = comm.size * (comm.size + 1) // 2
    with made(comm, (6, 4), "i8", "sum", algorithm) as reduce:
        around = cupy.zeros((6, 8), "i8")
        around[:, 1::2] = comm.rank + 1
        out = cupy.full((12, 4), -1, "i8")
        reduce(around[:, 1::2], out=out[::2])
        ok = bool((out[::2] == total).all()) and bool((out[1::2] == -1).all())
        found = reduce(np.full((6, 4), comm.rank + 1))
        ok &= isinstance(found, np.ndarray) and bool((found == total).all())
        memory = cupy.zeros(28, "i8")
        memory[4:] = comm.rank + 1
        reduce(memory[4:].reshape(6, 4), out=memory[:24].reshape(6, 4))
        ok &= bool((memory[:24] == total).all())
        raw = cupy.zeros(200, np.uint8)
        crooked = raw[3:195].view("i8").reshape(6, 4)
        bytes_of = np.full((6, 4), comm.rank + 1).view(np.uint8).ravel()
        raw[3:195] = cupy.asarray(bytes_of)
        ok &= bool((reduce(crooked) == total).all())
        assert agree(ok, comm)
    with made(comm, (), "f8", "max", algorithm) as reduce:
        found = reduce(float(comm.rank))
        assert isinstance(found, np.float64) and found == comm.size - 1
        assert float(reduce(cupy.asarray(comm.rank + 1.0))) == comm.size


def test_in_a_graph(algorithm: str, comm: MPI.Intracomm) -> None:
    """Replays a graph with work before and after the allreduce; other algorithms raise and leave the capture intact."""
    array, total = cupy.full(5000, comm.rank, "i8"), cupy.zeros(5000, "i8")
    sums = cupy.zeros(5000, "i8")
    sums += total + 1 - 1  # compiled before the capture
    array += 1
    with made(comm, 5000, "i8", "sum", algorithm) as reduce:
        assert reduce.captures or algorithm not in KERNELS
        assert not reduce.captures or algorithm in (
            *KERNELS,
            "hierarchical",
        )  # by NCCL, between nodes
        reduce(array, out=total)
        cupy.cuda.runtime.deviceSynchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            if reduce.captures:
                reduce(array, out=total)
            else:
                with pytest.raises(StateError):
                    reduce(array, out=total)
            sums += total
            array += 1
            graph = stream.end_capture()
            for _ in range(REPLAYS if reduce.captures else 0):
                graph.launch(stream)
            stream.synchronize()
        if not reduce.captures:
            return
        ranks = comm.size * (comm.size + 1) // 2
        value = REPLAYS * ranks + comm.size * REPLAYS * (REPLAYS - 1) // 2
        assert agree(bool((sums == value).all()), comm)


def test_not_made_in_a_capture(comm: MPI.Intracomm) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with pytest.raises(StateError):
            made(comm, 3, "f8")
        stream.end_capture()


def test_a_bad_array_on_one_rank(algorithm: str, comm: MPI.Intracomm) -> None:
    """All ranks raise in the same call if the algorithm uses the host, and can go on.

    Otherwise the other ranks would wait until the time limit; so all ranks pass a bad array.
    """
    good = cupy.ones(4)
    with made(comm, 4, "f8", "sum", algorithm) as reduce:
        is_bad = reduce.captures or comm.rank == comm.size - 1
        for bad, text in (
            (cupy.ones(5), r"array: got shape \(5,\)"),
            (cupy.ones(4, "f4"), "float32"),
        ):
            with pytest.raises(FieldError, match=text):
                reduce(bad if is_bad else good)
            assert agree(bool((reduce(good) == comm.size).all()), comm)


def test_a_mistake_on_all_ranks_is_no_more_than_that(algorithm: str, comm: MPI.Intracomm) -> None:
    good = cupy.ones(4)
    with made(comm, 4, "f8", "sum", algorithm) as reduce:
        for _ in range(2):
            with pytest.raises(FieldError):
                reduce(cupy.ones(5))
        assert agree(bool((reduce(good) == comm.size).all()), comm)


def test_an_array_on_another_gpu(algorithm: str, comm: MPI.Intracomm) -> None:
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip("there is one GPU")
    own = cupy.cuda.Device().id
    with made(comm, 4, "f8", "sum", algorithm) as reduce:
        with cupy.cuda.Device((own + 1) % count):
            elsewhere = cupy.ones(4)
        with pytest.raises(DeviceError):
            reduce(elsewhere)


def test_arguments_that_differ(comm: MPI.Intracomm) -> None:
    first = comm.rank == 0
    for bad, text in (
        ((4, "f8", "sum"), "shape differs"),
        ((3, "f4", "sum"), "dtype differs"),
        ((3, "f8", "max"), "op differs"),
        ((3, "f8", "sum", "host"), "algorithm differs"),
    ):
        with pytest.raises(MismatchError, match=text):
            made(comm, *(bad if first else (3, "f8", "sum")))
    with pytest.raises(FieldError):
        made(comm, 3, "f8", "sum", "fastest")
    with pytest.raises(HaloxError, match="no meaning for dtype complex64"):
        made(comm, 3, "c8", "max")


def test_a_rank_that_does_not_come(
    algorithm: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALOX_TIMEOUT", "1")
    reduce = made(comm.Dup(), 4, "f8", "sum", algorithm)
    array = cupy.ones(4)
    reduce(array).get()
    if comm.rank:
        with pytest.raises(ExchangeTimeoutError):
            for _ in range(2):
                reduce(array).get()
    comm.Barrier()
