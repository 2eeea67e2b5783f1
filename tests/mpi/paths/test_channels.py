"""The contract of all channels between ranks, on CPUs: cells, order, an absent rank, and the end.

`channels` has the table. The recorded channels run on a GPU that runs nothing: rank 0 checks the work of all streams.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox import datatypes as dt
from halox.errors import ExchangeTimeoutError, HaloxError, StateError
from halox.paths.buffers import RequestBuffers
from halox.paths.messages import Part, fuse
from halox.runtime.world import World
from tests.fakes.fake_gpu import Work, waits
from tests.mpi.conftest import agree, on_first
from tests.mpi.limits import short_waits
from tests.mpi.paths.channels import (
    CHANNELS,
    RECORDED,
    Wire,
    chain,
    mixed,
    ring,
)
from tests.support import becomes

pytestmark = [pytest.mark.ranks(2, 3, 4), pytest.mark.usually(3)]

EPOCHS = 7
NCCL = "nccl"
"""Its waits are on the GPU: `test_nccl` has the absent rank."""

Make = Callable[..., Any]


@pytest.fixture
def rig(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Yield a function that makes the rig of a channel's name; close the rigs."""
    made = []

    def make(name: str, wires: list[Wire], **options: Any) -> Any:
        made.append(CHANNELS[name](comm, monkeypatch, wires, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("name", CHANNELS)
@pytest.mark.part(3)
def test_random_messages(name: str, number: int, rig: Make, comm: MPI.Intracomm) -> None:
    """Random messages, types, parts and protocols in one exchange; ranks run ahead and fall behind."""
    rng = np.random.default_rng([number, comm.size])
    made = rig(name, CHANNELS[name].random_wires(rng, comm.size))
    made.poison()
    for epoch in range(5):
        made.step(epoch)
    assert made.is_right()


@pytest.mark.parametrize("shape", [ring, chain])
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(("copy engine", way) for way in ("put", "get")),
        *((name, "staging") for name in ("ipc", "staged/shared", "host/shared", "process_vm")),
    ],
)
def test_in_one_direction_and_in_both(
    name: str, way: str, shape: Any, rig: Make, comm: MPI.Intracomm
) -> None:
    """A sender that receives nothing runs ahead, and overwrites nothing that is still to be read."""
    made = rig(name, shape(way, comm.size))
    made.poison()
    for epoch in range(EPOCHS):
        made.step(epoch)
    assert made.is_right()


@pytest.mark.parametrize("name", CHANNELS)
def test_two_plans_are_finished_in_any_order(name: str, rig: Make, comm: MPI.Intracomm) -> None:
    """Ranks finish two plans in different orders: a rank that waits in one plan also progresses the other plan."""
    is_mixed = name == "copy engine"
    first = rig(name, mixed(comm.size) if is_mixed else ring("staging", comm.size))
    second = first.twin()
    plans = [(first, 0), (second, 50)]
    for made, _ in plans:
        made.poison()
    with short_waits(20):
        for epoch in range(4):
            for made, later in plans:
                made.begin(epoch + later)
            for made, later in plans if (epoch + comm.rank) % 2 else plans[::-1]:
                made.end(epoch + later)
    assert first.is_right() and second.is_right()
    second.leave()


@pytest.mark.parametrize("name", [name for name in CHANNELS if name != NCCL])
@pytest.mark.part(4)
def test_a_rank_that_does_not_come(name: str, rig: Make, comm: MPI.Intracomm) -> None:
    """Its neighbours raise an error that names it, can close the channel, and keep the memory that it may write to."""
    made = rig(name, ring("put" if name == "copy engine" else "staging", comm.size))
    made.step(0)
    comm.Barrier()
    caught = ""
    if comm.rank != 1:
        with short_waits():
            try:
                made.step(1)
            except ExchangeTimeoutError as error:
                caught = str(error)
            made.channel.close()
    is_named = f"rank {comm.rank} has waited for" in caught and "1" in caught.partition("for")[2]
    assert agree(comm.rank not in (0, 2) or is_named, comm), caught
    if name in RECORDED:
        assert agree(not made.arena.released, comm)
    comm.Barrier()


def test_a_closed_rank_keeps_its_buffers(rig: Make, comm: MPI.Intracomm) -> None:
    """Rank 0 closes its channel between start and finish, long before any other rank starts."""
    for name in ("staged/mpi", "cuda_aware"):
        made = rig(name, ring("staging", comm.size))
        left, memory = made.carrier._leftovers, []
        made.poison()
        if comm.rank == 0:
            memory = [weakref.ref(buffer) for buffer in made.carrier._buffers_in]
            made.begin(2)
            made.channel.close()
            del made.channel, made.carrier, made.gpu
            gc.collect()
        comm.Barrier()
        is_kept = all(found() is not None for found in memory)
        if comm.rank != 0:
            made.step(2)
            made.channel.close()
        else:
            made.channel = SimpleNamespace(close=lambda: None, free=lambda: None)
            made.gpu = None
            made.later.clear()
        assert agree(is_kept, comm) and made.is_right()

        def is_swept(left: Any = left) -> bool:
            left.sweep()
            return not left._active

        assert agree(becomes(is_swept), comm)
        gc.collect()
        assert all(found() is None for found in memory)


def test_messages_that_mpi_cannot_count(comm: MPI.Intracomm) -> None:
    """They are cut into parts, which MPI accepts; nothing is sent, so no memory is touched."""
    world = World(comm)
    part = Part(0, dt.contiguous((1 << 31) + 16, "u1"))
    low, high = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    sends, receives = fuse("send", [(high, 0, part)]), fuse("receive", [(low, 0, part)])
    carrier = RequestBuffers(world, sends, receives, lambda message: 20)
    assert carrier.outgoing_ends == [(1 << 30, 1 << 31, (1 << 31) + 16)]
    carrier.close()
    world.close()


@pytest.mark.parametrize("name", ["staged/shared", "staged/mpi"])
def test_stages_overlap(name: str, rig: Make, comm: MPI.Intracomm) -> None:
    """Fragments of the peer are unpacked while this rank still packs."""
    wires = [Wire(r, (r + 1) % comm.size, ("large",), ("large columns",)) for r in range(comm.size)]
    made = rig(name, wires)
    for epoch in range(20):
        made.fill(epoch)
        comm.Barrier()
        made.channel.start()
        made.channel.finish()
    assert comm.allreduce(made.gpu.unpacked_ahead) > 10


# The order of work on GPUs

SHAPES = {
    "ipc": ("ipc", lambda n: ring("staging", n)),
    "ipc, one way": ("ipc", lambda n: chain("staging", n)),
    "copy engine, put": ("copy engine", lambda n: ring("put", n)),
    "copy engine, get one way": ("copy engine", lambda n: chain("get", n, "triangle", "columns")),
    "copy engine, mixed": ("copy engine", mixed),
}
shapes = pytest.mark.parametrize("shape", SHAPES)


@shapes
@pytest.mark.part(2)
def test_every_wait_is_needed(shape: str, rig: Make, comm: MPI.Intracomm) -> None:
    """The check of the order is sharp: it fails if any single wait of a stream for an event is omitted."""
    name, wires = SHAPES[shape]
    made = rig(name, wires(comm.size))
    made.poison()
    for epoch in range(EPOCHS):
        made.step(epoch)
    assert made.is_right()
    logs = made.logs()

    def all_needed() -> None:
        found, idle = [*waits(logs, range(3, EPOCHS - 2))], []
        for wait in found:
            try:
                Work(logs, without=wait).check_order()
            except AssertionError:
                continue
            idle.append(wait)
        assert not idle and len(found) >= 2 * (comm.size - 1), idle

    on_first(all_needed, comm)


@shapes
@pytest.mark.part(3)
def test_the_caller_changes_streams(shape: str, rig: Make, comm: MPI.Intracomm) -> None:
    """An exchange is ordered behind the last exchange, whichever streams start and finish use."""
    name, wires = SHAPES[shape]
    made = rig(name, wires(comm.size))
    made.poison()
    made.fill(0)
    streams = made.gpu.streams[:3]
    for epoch in range(EPOCHS):
        made.gpu.epoch = epoch
        made.channel.start()
        made.gpu.current = streams[made.random.integers(3)]
        made.channel.finish()
        made.expect(0)
    assert made.is_right()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("name", RECORDED)
def test_memory_stays_until_all_have_closed(
    name: str, started: bool, rig: Make, comm: MPI.Intracomm
) -> None:
    """Rank 0 closes first, after finish or between start and finish; the memory is then released on all ranks."""
    made = rig(name, ring("staging" if name == "ipc" else "put", comm.size))
    made.step(0)
    if started:
        made.channel.start()
    for rank in (0, 1):
        if (comm.rank > 0) == rank:
            made.channel.close()
        comm.Barrier()
        assert agree(not made.arena.released and not made.events._free, comm)
    made.leave()
    has_released = (
        bool(made.arena.released) or name == "copy engine"
    )  # which has no memory of its own
    assert agree(bool(has_released and made.events._free), comm)


@pytest.mark.parametrize("name", RECORDED)
def test_a_stream_that_does_not_end_keeps_its_memory(
    name: str, rig: Make, comm: MPI.Intracomm
) -> None:
    made = rig(name, ring("staging" if name == "ipc" else "put", comm.size))
    made.step(0)
    comm.Barrier()
    made.gpu.current.done = False
    with short_waits(0.2):
        made.channel.close()
    assert not made.channel.has_ended and not made.arena.released
    comm.Barrier()


@pytest.mark.parametrize("name", RECORDED)
def test_later_plans_take_the_memory_of_closed_plans(
    name: str, rig: Make, comm: MPI.Intracomm
) -> None:
    made = rig(name, ring("staging" if name == "ipc" else "put", comm.size))
    sizes = []
    for _ in range(4):
        made.step(0)
        made.leave()
        made.channel = made.make()
        sizes.append((len(made.arena.sizes), len(made.arena.opened), made.gpu.made))
    assert len(set(sizes)) == 1, sizes


@pytest.mark.parametrize("name", [name for name in RECORDED if name != "copy engine"])
def test_an_error_of_one_rank_is_raised_on_all(name: str, rig: Make, comm: MPI.Intracomm) -> None:
    made = rig(name, ring("staging" if name == "ipc" else "put", comm.size))
    made.leave()
    made.arena.is_full = comm.rank == 1
    with pytest.raises(HaloxError, match=r"\[rank 1\] .*MemoryError: no such luck"):
        made.make()
    assert comm.rank == 1 or made.events._free


# The `ipc` path


@pytest.mark.parametrize("name", ["ipc", "ipc, adding"])
def test_moved_to_other_arrays(name: str, rig: Make, comm: MPI.Intracomm) -> None:
    """The channel can be bound to other arrays while work is pending on the old arrays."""
    wires = [
        Wire(a, (a + s) % comm.size, ("vector", "contiguous"), ("columns", "contiguous"), tag=s + 1)
        for a in range(comm.size)
        for s in (-1, 1)
    ]
    made = rig(name, wires)
    assert made.channel.is_movable
    made.poison()
    for epoch, offset in enumerate((None, 0, 16, 8 * (1 + comm.rank), None, 8, 64)):
        if offset is not None:
            made.move(offset)
            made.poison()
        made.step(epoch)
    assert made.is_right()


def test_captures_of_ipc_are_refused(rig: Make, comm: MPI.Intracomm) -> None:
    """No work is enqueued before the error, and the next exchange is right."""
    made = rig("ipc", ring("staging", comm.size))
    made.poison()
    made.step(0)
    before = len(made.gpu.log)
    made.gpu.capturing.add(made.gpu.current.ptr)
    with pytest.raises(StateError):
        made.channel.check()
    assert len(made.gpu.log) == before
    made.gpu.capturing.clear()
    made.step(1)
    assert made.is_right()
