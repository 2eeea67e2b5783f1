"""The `ipc` path with real GPUs, shared or not; tests/mpi/test_ipc.py tests the order of its steps on a fake GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox.errors import ExchangeTimeoutError, StateError
from halox.paths.base import Job
from halox.paths.fragments import cutter, whole
from halox.paths.ipc import make_ipc_channel
from halox.paths.messages import Message, Part
from halox.paths.node import NodeLink
from halox.runtime.arrays import describe
from halox.runtime.context import Context
from halox.runtime.world import World
from tests.mpi.conftest import agree
from tests.mpi.test_ipc import Wire, chain, packed, ring, unpack
from tests.mpi.test_typed import TYPES
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]

SEED = 20261121
ELEMENTS = 130


class Rig:
    """A channel between the ranks' GPUs built without a plan, so that a test can choose each wire's way."""

    def __init__(self, comm: MPI.Intracomm, wires: list[Wire], cut: Any = whole) -> None:
        self.world, self.wires = World(comm), wires
        device = self.world.node_rank % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(device).use()
        self.around = Context(self.world)
        self.shared, self.arena = self.around.arena, self.around.use_device(device)
        assert self.around.events is not None
        self.events = self.around.events
        self.sends = [w for w in wires if w.source == comm.rank]
        self.receives = [w for w in wires if w.target == comm.rank]
        self.arrays = {w: self._array(w.way == "get") for w in self.sends}
        self.arrays |= {w: self._array(w.way == "put") for w in self.receives}
        # Copied to the GPU now, so that later steps never synchronize with the host.
        values = {w: np.arange(ELEMENTS) + 1e4 * n for n, w in enumerate(wires)}
        self.values = {w: cupy.asarray(values[w]) for w in self.sends}
        self.wanted = {}
        for w in self.receives:
            wanted = np.full(ELEMENTS, -1.0)
            unpack(w.received[0], packed(w.sent[0], values[w]), wanted)
            self.wanted[w] = cupy.asarray(wanted), cupy.asarray((wanted != -1) * 1e7)
        cupy.cuda.get_current_stream().synchronize()
        everything = [*self.sends, *self.receives]
        sends = [self._message(w, "send") for w in self.sends]
        receives = [self._message(w, "receive") for w in self.receives]
        ways: Any = {m.key: w.way for m, w in zip([*sends, *receives], everything, strict=True)}
        job = Job(
            [describe(self.arrays[w]) for w in everything],
            tuple(sorted(sends, key=lambda m: (m.peer, m.tag))),
            tuple(sorted(receives, key=lambda m: (m.peer, m.tag))),
        )
        peers = sorted({m.peer for m in (*sends, *receives)})
        self.link = NodeLink(self.world, self.shared, [], peers)
        memory = (self.arena, self.events)
        self.channel = make_ipc_channel(self.world, job, ways, memory, self.link, cut)

    def _array(self, exported: bool) -> cupy.ndarray:
        shape, dtype = (ELEMENTS,), np.dtype("f8")
        array = self.arena.array(shape, dtype) if exported else cupy.empty(shape, dtype)
        array[...] = -1.0
        return array

    def _message(self, wire: Wire, direction: Any) -> Message:
        sends = direction == "send"
        number = list(self.arrays).index(wire)
        names = wire.sent if sends else wire.received
        peer = wire.target if sends else wire.source
        return Message(peer, direction, (Part(number, TYPES[names[0]]),), wire.tag)

    def fill(self, epoch: int) -> None:
        for wire, values in self.values.items():
            self.arrays[wire][...] = values + 1e7 * epoch

    def right(self, epoch: int) -> cupy.ndarray:
        """Enqueue a comparison of all receive arrays; returns a device scalar."""
        right = cupy.ones((), bool)
        for wire, (wanted, grown) in self.wanted.items():
            right &= (self.arrays[wire] == wanted + grown * epoch).all()
        return right

    def exchange(self) -> None:
        if self.channel is not None:
            self.channel.start()
            self.channel.finish()

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.link.close()
        self.arrays.clear()
        self.around.close()


@pytest.fixture
def rig(comm: MPI.Intracomm) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(*args: Any, **options: Any) -> Rig:
        made.append(Rig(comm, *args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("shape", [ring, chain])
@pytest.mark.parametrize("way", ["staging", "put", "get"])
def test_every_way(way: str, shape: Any, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """Hosts run ahead of stalled streams and of each other; results are read only at the end."""
    made = rig(shape(way, comm.size))
    rng = np.random.default_rng([SEED, comm.rank])
    right = []
    for epoch in range(60):
        if rng.random() < 0.1:
            stall()
        if rng.random() < 0.1:
            time.sleep(0.002)
        made.fill(epoch)
        made.exchange()
        right.append(made.right(epoch))
    assert agree(all(bool(r) for r in right), comm), [bool(r) for r in right]


@pytest.mark.parametrize("number", range(12))
def test_random_messages(number: int, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    rng = np.random.default_rng([SEED, number, comm.size])
    wires = []
    for tag in range(rng.integers(1, 9)):
        a, b = (int(rank) for rank in rng.choice(comm.size, 2, replace=False))
        way = str(rng.choice(["staging", "staging", "put", "get"]))
        sent, received = (str(name) for name in rng.choice(list(TYPES), 2))
        sent, received = (
            "contiguous" if way == "get" else sent,
            "contiguous" if way == "put" else received,
        )
        wires.append(Wire(a, b, (sent,), (received,), way, tag))
    made = rig(wires)
    right = []
    for epoch in range(10):
        made.fill(epoch)
        made.exchange()
        right.append(made.right(epoch))
    assert agree(all(bool(r) for r in right), comm), (wires, [bool(r) for r in right])


@pytest.mark.parametrize("way", ["staging", "put", "get"])
def test_streams_that_change(way: str, rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    """Two streams exchange the same values in turn; only the exchanges order the streams."""
    made = rig(ring(way, comm.size))
    made.fill(0)
    cupy.cuda.get_current_stream().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    right = []
    for epoch in range(10):
        with streams[epoch % 2]:
            stall()
            made.exchange()
            right.append(made.right(0))
    for stream in streams:
        stream.synchronize()
    assert agree(all(bool(r) for r in right), comm)


def test_capture_is_refused_and_goes_on(rig: Callable[..., Rig], comm: MPI.Intracomm) -> None:
    made = rig(ring("staging", comm.size))
    made.fill(0)
    made.exchange()
    counter = cupy.zeros(1)
    counter += 1  # compiled before the capture
    cupy.cuda.get_current_stream().synchronize()
    assert made.channel is not None
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        counter += 1
        with pytest.raises(StateError, match=r"ipc path .*captured"):
            made.channel.check()
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
    assert float(counter[0]) == 4
    made.exchange()
    assert agree(bool(made.right(0)), comm)


@pytest.mark.parametrize("sent", TYPES)
def test_fragments_of_some_bytes(sent: str, comm: MPI.Intracomm) -> None:
    """A message in at least seven fragments; sender and receiver have different datatypes."""
    n = 170
    source, target = TYPES[sent], TYPES["vector"]
    reach = max(t.extent * n + t.true_ub for t in (source, target)) // 8 + 1
    host = np.arange(reach, dtype="f8")
    world = World(comm)
    device = world.node_rank % cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(device).use()
    x, y = cupy.asarray(host), cupy.full(reach, -1.0)
    blocks = [t.blocks(n) for t in (source, target)]
    out, back = (
        np.concatenate(
            [np.arange(o, o + k, 8) // 8 for o, k in zip(b.offsets, b.lengths, strict=True)]
        )
        for b in blocks
    )
    assert out.size * 8 >= 7 * 4096
    around = Context(world)
    arena, events = around.use_device(device), around.events
    assert events is not None
    sends = (Message(1, "send", (Part(0, source, n),)),) if comm.rank == 0 else ()
    receives = (Message(0, "receive", (Part(1, target, n),)),) if comm.rank == 1 else ()
    job = Job([describe(x), describe(y)], sends, receives)
    link = NodeLink(world, around.arena, [], [1 - comm.rank] if comm.rank < 2 else [])
    ways: Any = {m.key: "staging" for m in (*sends, *receives)}
    cupy.cuda.get_current_stream().synchronize()
    channel = make_ipc_channel(world, job, ways, (arena, events), link, cutter(4096))
    wanted = np.full(reach, -1.0)
    for step in range(5):
        x[...] = cupy.asarray(host + 1e6 * step)
        if channel is not None:
            channel.start()
            channel.finish()
        if receives:
            wanted[back] = out + 1e6 * step
        assert agree(bool((y == cupy.asarray(wanted)).all()), comm)
    if channel is not None:
        channel.close()
    link.close()
    around.close()


def test_a_rank_that_does_not_come(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALOX_TIMEOUT", "2")
    grid = halox.Grid(
        (8 * comm.size, 8),
        proc_shape=(comm.size, 1),
        periodic=True,
        comm=comm.Dup(),
        device="gpu",
        path="ipc",
    )
    u = grid.zeros()
    grid.exchange(u)
    comm.Barrier()
    caught = ""
    if comm.rank == 0:
        try:
            grid.exchange(u)
        except ExchangeTimeoutError as error:
            caught = str(error)
    assert agree(comm.rank > 0 or "rank 0 has waited for rank" in caught, comm), caught
