"""Protocol of messages in fragments, with a simulated GPU that runs all work as late as possible.

`LateGpu` runs the work on its streams only when the host waits for it, or after several queries. So a buffer that is
reused too early has wrong bytes when the late work reads it.
"""

from __future__ import annotations

import ctypes
import gc
import random
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.datatypes import contiguous
from halox.errors import ExchangeTimeoutError
from halox.paths import fragments
from halox.paths.base import Channel, Job
from halox.paths.buffers import (
    Buffer,
    RequestBuffers,
    SharedBuffers,
    TransportBuffers,
    host_buffer,
    pinned_buffer,
)
from halox.paths.fragments import Cutter, cutter, whole
from halox.paths.host.packed import HostChannel
from halox.paths.messages import Message, Part, fuse
from halox.paths.node import NodeLink
from halox.paths.staged.pipeline import FragmentPipeline, Work
from halox.runtime.arena import SharedArena
from halox.runtime.arrays import borrow
from halox.runtime.world import World
from tests.mpi.conftest import agree
from tests.mpi.limits import short_waits
from tests.support import becomes, trials

pytestmark = pytest.mark.usually(2)

SIZES = {0: 70_000, 1: 9_000, 2: 16}
"""Bytes by tag: 17, 2 and 1 fragments of slightly more than 4096 bytes."""

CUT = cutter(4096)


def buffers(carrier: TransportBuffers) -> tuple[list[list[np.ndarray]], list[list[np.ndarray]]]:
    """Return the send buffers and the receive buffers, in host or device memory."""
    if any(carrier.outgoing) or any(carrier.incoming):
        return carrier.outgoing, carrier.incoming
    ends = (carrier.outgoing_ends, carrier.incoming_ends)

    def view(pointer: int, nbytes: int) -> np.ndarray:
        return np.frombuffer((ctypes.c_char * nbytes).from_address(pointer), np.uint8)

    out, come = (
        [[view(p, at[-1]) for p, at in zip(row, of, strict=True)] for row in rows]
        for rows, of in zip(carrier.device_pointers(), ends, strict=True)
    )
    return out, come


def on_device(nbytes: int) -> Buffer:
    """Allocate memory that only MPI and the simulated GPU access."""
    owner = np.zeros(max(1, nbytes), np.uint8)
    pointer = owner.ctypes.data
    return Buffer(MPI.memory.fromaddress(pointer, nbytes), pointer, owner)


class LateGpu(Work):
    """Packs and unpacks whole arrays of bytes, stage by stage, as late as possible."""

    def __init__(self, job: Job, carrier: TransportBuffers, seed: int) -> None:
        self._random = random.Random(seed)
        self._outgoing, self._incoming = buffers(carrier)
        self._ends = carrier.outgoing_ends, carrier.incoming_ends
        self._sources = [job.arrays[m.parts[0].array] for m in job.sends]
        self._targets = [job.arrays[m.parts[0].array] for m in job.receives]
        self._packs: list[Callable[[], None]] = []
        self._unpacks: list[Callable[[], None]] = []
        self.most_ahead = 0

    def begin(self, slot: int) -> None:
        assert not self._packs
        stages = max(map(len, self._ends[0]), default=0)
        self._packs = [self._moves(0, slot, stage) for stage in range(stages)]
        self._done = 0

    def is_packed(self, stage: int) -> bool:
        assert stage <= self._done, "stages are asked for in turn"
        if self._random.random() < 0.7:
            time.sleep(0)
            return False
        while self._done <= stage:
            self._packs.pop(0)()
            self._done += 1
        return True

    def unpack(self, slot: int, stage: int) -> None:
        self._unpacks.append(self._moves(1, slot, stage))
        if self._packs:
            self.most_ahead += 1

    def end(self) -> None:
        pass

    def wait_until_read(self) -> None:
        for call in self._unpacks:
            call()
        self._unpacks = []

    def wait_for_all(self) -> None:
        while self._packs:
            self._packs.pop(0)()
        self.wait_until_read()

    def _moves(self, side: int, slot: int, stage: int) -> Callable[[], None]:
        def move() -> None:
            rows = (self._outgoing, self._incoming)[side]
            arrays = (self._sources, self._targets)[side]
            for array, row, ends in zip(arrays, rows[slot], self._ends[side], strict=True):
                if stage < len(ends):
                    at = slice(ends[stage - 1] if stage else 0, ends[stage])
                    part = array[at]  # the last buffer ends in padding
                    if side == 0:
                        row[at][: part.size] = part
                    else:
                        part[...] = row[at][: part.size]

        return move


def messages(comm: MPI.Intracomm, pattern: str) -> tuple[list[Any], list[Any]]:
    """Return (peer, tag) of each send, and of each receive."""
    rank, size = comm.rank, comm.size
    if pattern == "ring":
        return [((rank + 1) % size, t) for t in SIZES], [((rank - 1) % size, t) for t in SIZES]
    if pattern == "all":
        others = [r for r in range(size) if r != rank]
        return [(r, (r + rank) % 3) for r in others], [(r, (r + rank) % 3) for r in others]
    sends = [(rank + 1, t) for t in SIZES] if rank + 1 < size else []
    return sends, [(rank - 1, t) for t in SIZES] if rank else []


class Rig:
    """One exchange between the ranks, through transport buffers of some kind."""

    def __init__(
        self, comm: MPI.Intracomm, pattern: str, kind: str, cut: Cutter = CUT, host: bool = False
    ) -> None:
        self.comm, self.world = comm, World(comm.Dup())
        sends, receives = messages(comm, pattern)
        self.arrays = [np.zeros(SIZES[tag], np.uint8) for _, tag in (*sends, *receives)]
        parts = [Part(n, contiguous(a.size, "u1")) for n, a in enumerate(self.arrays)]
        self.sends = fuse("send", [(*s, p) for s, p in zip(sends, parts, strict=False)])
        self.receives = fuse(
            "receive", [(*r, p) for r, p in zip(receives, parts[len(sends) :], strict=True)]
        )
        arrays = [borrow(array) for array in self.arrays] if host else self.arrays
        self.job = Job(arrays, self.sends, self.receives)
        self.arena = SharedArena(self.world.ranks)
        self.carrier = self._carrier(kind, cut)
        self.gpu: LateGpu | None = None
        self.channel: Channel
        if host:
            self.channel = HostChannel(self.job, self.carrier)
        else:
            self.gpu = LateGpu(self.job, self.carrier, comm.rank)
            self.channel = FragmentPipeline(self.world, self.carrier, self.gpu)

    def _carrier(self, kind: str, cut: Cutter) -> TransportBuffers:
        def tag(message: Message) -> int:
            return 20 + message.tag

        if kind == "shared":
            peers = sorted({m.peer for m in (*self.sends, *self.receives)})
            self.link = NodeLink(self.world, self.arena, self.sends, peers)
            return SharedBuffers(self.arena, self.link, self.sends, self.receives, cut)
        allocate = {"mpi": host_buffer, "pinned": pinned_buffer, "device": on_device}[kind]
        if kind == "device":
            cut = whole
        return RequestBuffers(self.world, self.sends, self.receives, tag, allocate, cut)

    def fill(self, step: int) -> None:
        for message in self.sends:
            self._array(message)[...] = values(self.comm.rank, message.tag, step)
        for message in self.receives:
            self._array(message)[...] = 0

    def right(self, step: int) -> bool:
        if self.gpu is not None:
            self.gpu.wait_until_read()
        return all(
            np.array_equal(self._array(m), values(m.peer, m.tag, step)) for m in self.receives
        )

    def _array(self, message: Message) -> np.ndarray:
        return self.arrays[message.parts[0].array]

    def close(self) -> None:
        self.channel.close()
        if self.world.size > 1:
            self.comm.Barrier()
        self.arena.close(is_last=True)
        self.world.close()


def values(rank: int, tag: int, step: int) -> np.ndarray:
    x = np.arange(SIZES[tag], dtype=np.uint32) + np.uint32(
        rank * 7919 + tag * 104729 + step * 15485863
    )
    return (x * np.uint32(2654435761) >> np.uint32(15)).astype(np.uint8) | 1


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HALOX_TIMEOUT", "30")
    yield


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["shared", "mpi", "device"])
@pytest.mark.parametrize("pattern", ["ring", "all", "one way"])
def test_late_gpus(pattern: str, kind: str, comm: MPI.Intracomm) -> None:
    """Every exchange is right, with random delays between its calls."""
    rig = Rig(comm, pattern, kind)
    rng = random.Random(comm.rank)
    wrong = []
    for step in range(trials(120)):
        rig.fill(step)
        if rng.random() < 0.1:
            time.sleep(0.003 * rng.random())
        rig.channel.start()
        if rng.random() < 0.1:
            time.sleep(0.003 * rng.random())
        rig.channel.finish()
        # `right` waits for the unpacking. Otherwise it would run in the next start, after `fill`.
        if not rig.right(step):
            wrong.append(step)
    assert agree(not wrong, comm), wrong
    rig.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["shared", "mpi"])
@pytest.mark.parametrize("pattern", ["ring", "one way"])
def test_unpacking_that_nobody_waits_for(pattern: str, kind: str, comm: MPI.Intracomm) -> None:
    """The unpacking of an exchange runs only in the next start; until then senders must not write the buffers."""
    rig = Rig(comm, pattern, kind)
    for step in range(40):
        for message in rig.sends:
            rig._array(message)[...] = values(comm.rank, message.tag, step)
        rig.channel.start()
        if step:  # `start` has waited for it
            last = [
                np.array_equal(rig._array(m), values(m.peer, m.tag, step - 1)) for m in rig.receives
            ]
            assert all(last), step
        rig.channel.finish()
    assert agree(rig.right(39), comm)
    rig.close()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["shared", "mpi"])
@pytest.mark.parametrize("cut", [CUT, whole])
def test_hosts_and_gpus_understand_one_another(kind: str, cut: Cutter, comm: MPI.Intracomm) -> None:
    """Odd ranks pack on the host and post everything at once, even ranks pack on a GPU stage by stage."""
    rig = Rig(comm, "ring", kind, cut, host=bool(comm.rank % 2))
    for step in range(30):
        rig.fill(step)
        rig.channel.start()
        rig.channel.finish()
        assert agree(rig.right(step), comm), step
    rig.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["mpi", "device"])
@pytest.mark.parametrize("host", [False, True])
def test_messages_that_mpi_cannot_count(
    kind: str, host: bool, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages above the limit of MPI's counts travel in parts, also if the path does not cut them."""
    if host and kind == "device":
        return
    monkeypatch.setattr(fragments, "MPI_BYTES", 4000)
    rig = Rig(comm, "ring", kind, whole, host=host)
    assert [len(ends) for ends in rig.carrier.outgoing_ends] == [18, 3, 1]
    for step in range(4):
        rig.fill(step)
        rig.channel.start()
        rig.channel.finish()
        assert agree(rig.right(step), comm), step
    rig.close()


@pytest.mark.ranks(2)
def test_requests_of_more_bytes_than_counts_hold(comm: MPI.Intracomm) -> None:
    """MPI accepts such requests, cut into parts; nothing is sent, so no memory is touched."""
    world = World(comm)
    part = Part(0, contiguous((1 << 31) + 16, "u1"))
    peer = 1 - comm.rank
    sends, receives = fuse("send", [(peer, 0, part)]), fuse("receive", [(peer, 0, part)])
    carrier = RequestBuffers(world, sends, receives, lambda message: 20)
    assert carrier.outgoing_ends == [(1 << 30, 1 << 31, (1 << 31) + 16)]
    carrier.close()
    world.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["shared", "mpi"])
def test_stages_overlap(kind: str, comm: MPI.Intracomm) -> None:
    """Fragments of the peer are unpacked while this rank still packs."""
    rig = Rig(comm, "ring", kind)
    for step in range(20):
        rig.fill(step)
        comm.Barrier()
        rig.channel.start()
        rig.channel.finish()
    assert rig.gpu is not None
    ahead = comm.allreduce(rig.gpu.most_ahead)
    assert ahead > 20, "unpacked before the last stage was packed"
    rig.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["shared", "mpi"])
def test_a_rank_that_stops_half_way(kind: str, comm: MPI.Intracomm) -> None:
    """Rank 0 sends three of its stages and then nothing: the error of its neighbour names it."""
    rig = Rig(comm, "ring", kind)
    rig.fill(0)
    if comm.rank == 0:
        rig.carrier.open(1)
        rig.carrier.expect(1)
        for stage in range(3):
            rig.carrier.post_stage(1, stage)
    else:
        rig.channel.start()
        if comm.rank == 1:
            text = r"rank 1 has waited for .* ranks \[.*0"
            with short_waits(), pytest.raises(ExchangeTimeoutError, match=text):
                rig.channel.finish()
    comm.Barrier()


class Pinned:
    """Takes the place of page-locked memory; a weak reference shows when it is released."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.device_pointer = self.array.ctypes.data

    def close(self) -> None:
        self.array = self.array[:0]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", ["mpi", "pinned", "device"])
def test_buffers_stay_until_the_messages_have_come(
    kind: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 closes its channel between start and finish, long before any other rank starts."""
    monkeypatch.setattr("halox.runtime.gpu.memory.pinned", Pinned)
    rig = Rig(comm, "ring", kind)
    rig.fill(2)
    assert isinstance(rig.carrier, RequestBuffers)
    left, right = rig.carrier._leftovers, True
    if comm.rank == 0:
        memory = [
            weakref.ref(buffer.memory if kind == "pinned" else buffer)
            for buffer in rig.carrier._buffers_in
        ]
        rig.channel.start()
        rig.channel.close()
        del rig.channel, rig.carrier, rig.gpu
        gc.collect()
        right = all(found() is not None for found in memory)
    comm.Barrier()
    if comm.rank != 0:
        rig.channel.start()
        rig.channel.finish()
        right = rig.right(2)
        rig.channel.close()
    comm.Barrier()
    assert agree(right, comm)

    def is_swept() -> bool:
        left.sweep()
        return not left._active

    assert agree(becomes(is_swept), comm)
    if comm.rank == 0:
        gc.collect()
        assert all(found() is None for found in memory)
    rig.arena.close(is_last=True)
    rig.world.close()
