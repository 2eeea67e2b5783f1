"""The survey of GPUs on simulated GPUs: its results on one node and on several, its cost, and its second use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mpi4py import MPI

import halox
from halox.errors import HaloxError
from halox.exchange.calibration import costs_of
from halox.paths.cuda_aware import CudaAwarePath
from halox.runtime import device_pointers, topology
from halox.runtime.context import Context
from halox.runtime.device_pointers import Verdict
from halox.runtime.nccl_ranks import why_no_nccl
from halox.runtime.topology import Topology
from halox.runtime.world import World
from tests.calls import calls_of
from tests.fakes.fake_cupy import FakeArena, FakeEvents
from tests.fakes.fake_nccl import machine_with_nccl
from tests.mpi.bad_input import odd_on, raised_by_all
from tests.mpi.conftest import agree
from tests.support import require

require("cxx")


@pytest.fixture
def comm() -> MPI.Intracomm:
    """Return a new communicator, since halox keeps the survey with it."""
    return MPI.COMM_WORLD.Dup()


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return the ranks that find that MPI takes no device pointers: at first all."""
    ranks = {*range(MPI.COMM_WORLD.size)}

    def ask(*_: object, **__: object) -> Verdict:
        return Verdict(MPI.COMM_WORLD.rank not in ranks, "found by asking")

    monkeypatch.delenv("HALOX_CUDA_AWARE", raising=False)
    monkeypatch.setattr(device_pointers, "asked_before", ask)
    return ranks


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
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, refusing: set[int]
) -> None:
    machine_with_nccl(comm, monkeypatch)
    first, _ = surveyed(comm)
    assert surveyed(comm)[0] is first
    last = comm.rank == comm.size - 1
    without, why = surveyed(comm, None if last else 0)
    assert without is not first and without.gpus[comm.size - 1] == 0 and why is not None
    again, why = surveyed(comm)
    assert again is not without and again.gpus[-1] == first.gpus[-1] and why is None
    # A setting of one rank may change the results on all ranks.
    if last:
        monkeypatch.setenv("HALOX_CUDA_AWARE", "0")
    changed, _ = surveyed(comm)
    assert changed is not again and surveyed(comm)[0] is changed


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usually(3)
def test_all_nodes_must_take_device_pointers(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, refusing: set[int]
) -> None:
    """A refusal on one node holds for all nodes."""
    monkeypatch.setenv("HALOX_NODE", "rank")
    world = World(comm)
    for ranks in ({comm.size - 1}, set[int]()):
        refusing.intersection_update(ranks)
        found = device_pointers.find_out(world, device=0)
        assert found.takes == (not ranks) and comm.allgather(found) == [found] * comm.size
    assert not device_pointers.find_out(world, device=None).takes, "no GPU at all"
    # A setting on one rank holds for all ranks; an invalid setting on one rank is an error on all.
    odd = odd_on(comm)
    monkeypatch.setenv("HALOX_CUDA_AWARE", odd("0", ""))
    assert not device_pointers.find_out(world, device=0).takes
    monkeypatch.setenv("HALOX_CUDA_AWARE", odd("perhaps", ""))
    raised_by_all(comm, HaloxError, "perhaps", lambda: device_pointers.find_out(world, device=0))
    world.close()


@pytest.mark.ranks(8)
@pytest.mark.usually(8)
def test_calls_do_not_grow_with_the_ranks(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, refusing: set[int]
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
    for name in ("GPUs", "NCCL", "MPI"):
        assert many[f"{name}, second grid"] < many[f"{name}, first grid"] / 2
