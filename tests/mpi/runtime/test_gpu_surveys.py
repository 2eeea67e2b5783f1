"""The survey of GPUs on simulated GPUs: its results on one node and on several, its cost, and its second use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi4py import MPI

import halox
from halox.paths import cuda_aware
from halox.paths.cuda_aware import CudaAwarePath
from halox.plans.calibration import costs_of
from halox.runtime import topology
from halox.runtime.context import Context
from halox.runtime.nccl_ranks import why_no_nccl
from halox.runtime.topology import Topology
from halox.runtime.world import World
from tests.calls import calls_of
from tests.fakes.fake_cupy import FakeArena, FakeEvents
from tests.fakes.fake_nccl import machine_with_nccl
from tests.mpi.bad_input import odd_on
from tests.mpi.conftest import agree
from tests.support import require

require("cxx")


@pytest.fixture
def comm() -> MPI.Intracomm:
    """Return a new communicator, since halox keeps the survey with it."""
    return MPI.COMM_WORLD.Dup()


def surveyed(comm: MPI.Intracomm, device: int | None = 0) -> tuple[Topology, str | None]:
    """Return a new object's topology, and the reason against NCCL."""
    context = Context(World(comm))
    if device is not None:
        context.use_device(device)
    found = context.find_gpus(), context.of_gpus(why_no_nccl)
    context.close()
    return found


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usually(3)
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4])
def test_pairs(comm: MPI.Intracomm, ranks_per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot map memory or wait for events of rank 0; pairs are counted by hand."""
    monkeypatch.setenv("HALOX_NODE", str(comm.rank // ranks_per_node))
    machine_with_nccl(comm, monkeypatch)

    def refuse(*_: object) -> None:
        raise RuntimeError("not here")

    if comm.rank == 1:
        monkeypatch.setattr(FakeArena, "open", refuse)
        monkeypatch.setattr(FakeEvents, "open", refuse)
    found, _ = surveyed(comm)
    on_a_node = [
        (a, b)
        for b in range(comm.size)
        for a in range(b)
        if a // ranks_per_node == b // ranks_per_node
    ]
    apart = [pair for pair in on_a_node if 1 in pair]
    assert found.pairs == (len(on_a_node) - len(apart), len(apart))
    assert found.all_map == (not apart and comm.size <= ranks_per_node)
    near = {a for pair in on_a_node if comm.rank in pair for a in pair}
    for a, b in [(comm.rank, other) for other in range(comm.size) if other != comm.rank]:
        for why in (
            found.why_unmapped(a, b),
            found.why_no_events(a, b),
            found.why_no_signals(b, a),
        ):
            assert (why is None) == (b in near and 1 not in (a, b))
    reasons = [*found.no_events.values()]
    assert bool(reasons) == any(1 in pair for pair in on_a_node if {*pair} <= near)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usually(3)
@pytest.mark.parametrize("node", ["", "rank"])
def test_shared_gpus(comm: MPI.Intracomm, node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on other nodes of the same machine share a GPU, too; a rank on the host has no GPU."""
    monkeypatch.setenv("HALOX_NODE", node)
    machine_with_nccl(comm, monkeypatch)
    found, why = surveyed(comm)
    assert agree(why is None and found.users.tolist() == [1] * comm.size, comm)
    assert not any(map(found.sharers, range(comm.size)))
    found, why = surveyed(comm, None if comm.rank == comm.size - 1 else 0)
    assert found.users.tolist() == [1] * (comm.size - 1) + [0]
    assert why is not None and f"rank {comm.size - 1} has no arrays on a GPU" in why
    machine_with_nccl(comm, monkeypatch, shared=True)
    found, why = surveyed(comm)
    assert found.is_shared and found.users.tolist() == [comm.size] * comm.size
    assert found.sharers(1) == tuple(rank for rank in range(comm.size) if rank != 1)
    assert why == "ranks 0 and 1 share a GPU, which NCCL refuses"


@pytest.mark.ranks(2, 3)
@pytest.mark.usually(2)
def test_a_second_object_surveys_only_if_a_gpu_has_changed(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with_nccl(comm, monkeypatch)
    first, _ = surveyed(comm)
    assert surveyed(comm)[0] is first
    last = comm.rank == comm.size - 1
    without, why = surveyed(comm, None if last else 0)
    assert without is not first and without.gpus[comm.size - 1] == 0 and why is not None
    again, why = surveyed(comm)
    assert again is not without and again.gpus[-1] == first.gpus[-1] and why is None


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usually(3)
def test_mpi_takes_device_pointers_if_all_ranks_say_so(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's "no" on one rank holds against the setting."""

    def why_not() -> str | None:
        context = Context(World(comm))
        why = CudaAwarePath().survey(context, is_named=False)
        context.close()
        assert comm.allgather(why) == [why] * comm.size
        return why

    odd = odd_on(comm)
    monkeypatch.setattr(cuda_aware, "_library_denies", lambda: False)
    for here in ("0", "", odd("0", "1"), odd("", "1")):
        monkeypatch.setenv("HALOX_CUDA_AWARE", here)
        assert "HALOX_CUDA_AWARE" in str(why_not())
    monkeypatch.setenv("HALOX_CUDA_AWARE", "1")
    assert why_not() is None
    monkeypatch.setattr(cuda_aware, "_library_denies", lambda: odd(True, False))
    assert "MPIX_Query_cuda_support" in str(why_not())


@pytest.mark.ranks(8)
@pytest.mark.usually(8)
def test_calls_do_not_grow_with_the_ranks(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each survey, on four ranks and on eight; a second grid makes no survey."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    machine_with_nccl(comm, monkeypatch)
    half = comm.Split(comm.rank // 4, comm.rank)

    def counts(ranks: MPI.Intracomm) -> dict[str, int]:
        ranks = ranks.Dup()
        calls: dict[str, int] = {}
        for turn in ("first", "second"):
            with halox.Grid((8 * ranks.size, 4), comm=ranks, device="gpu") as grid:
                context = grid.domain.context
                context.use_device(0)
                finds: dict[str, Callable[[], object]] = {
                    "GPUs": context.find_gpus,
                    "NCCL": lambda: context.of_gpus(why_no_nccl),  # noqa: B023
                    "MPI": lambda: CudaAwarePath().survey(context, is_named=False),  # noqa: B023
                    "costs": lambda: context.once(costs_of),  # noqa: B023
                }
                for name, find in finds.items():
                    found = calls_of(find)
                    calls[f"{name}, {turn} grid"] = found.total()
                    is_survey = (name, turn) == ("GPUs", "first")
                    assert (topology.survey.__code__ in found) == is_survey
        return calls

    counts(half)  # imports modules
    few, many = counts(half), counts(comm)
    assert all(0 < many[name] <= few[name] for name in few), (few, many)
    for name in ("GPUs", "NCCL"):
        assert many[f"{name}, second grid"] < many[f"{name}, first grid"] / 2
