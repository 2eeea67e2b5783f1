"""The `ipc` path with real GPUs, shared or not; tests/mpi/paths/test_channels.py tests its order on a fake GPU.

test_paths_gpu.py tests what all paths have in common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import halox
from halox import Exchange, Recv, Send
from halox.errors import ExchangeTimeoutError
from halox.paths.base import Job
from halox.paths.fragments import cutter
from halox.paths.ipc import make_ipc_channel
from halox.paths.messages import Message, Part
from halox.paths.node import NodeLink
from halox.runtime.arrays import describe
from halox.runtime.context import Context
from halox.runtime.world import World
from tests.gpu.ranks.paths import mappable_arrays
from tests.mpi.conftest import agree
from tests.mpi.paths.channels import Wire, chain, packed, ring, unpack
from tests.mpi.test_typed import TYPES
from tests.support import require

require("gpu")

import cupy  # noqa: E402

from tests.gpu.guarded import stall  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.ranks(2, 3, 4)]

SEED = 20261121
ELEMENTS = 130

Zeros = Callable[[int, str], Any]


class Messages:
    """An exchange of messages between GPUs, whose arrays are filled and compared on the stream, without the host.

    ``path`` names a protocol, or leaves it to halox; arrays that a protocol moves directly come from ``zeros``.
    """

    def __init__(self, comm: MPI.Intracomm, zeros: Zeros, wires: list[Wire], path: str) -> None:
        sends = [w for w in wires if w.source == comm.rank]
        receives = [w for w in wires if w.target == comm.rank]
        # All ranks allocate together.
        mappable = {w: zeros(ELEMENTS, "f8") for w in wires if w.way != "staging"}
        self._sources = {w: self._array(mappable if w.way == "get" else {}, w) for w in sends}
        self._targets = {w: self._array(mappable if w.way == "put" else {}, w) for w in receives}
        # Copied to the GPU now, so that later steps never synchronize with the host.
        values = {w: np.arange(ELEMENTS) + 1e4 * n for n, w in enumerate(wires)}
        self._values = {w: cupy.asarray(values[w]) for w in sends}
        self._wanted = {}
        for w in receives:
            wanted = np.full(ELEMENTS, -1.0)
            unpack(w.received[0], packed(w.sent[0], values[w]), wanted)
            self._wanted[w] = cupy.asarray(wanted), cupy.asarray((wanted != -1) * 1e7)
        cupy.cuda.get_current_stream().synchronize()
        self.exchange = Exchange(
            [Send(self._sources[w], TYPES[w.sent[0]], w.target, tag=w.tag) for w in sends],
            [Recv(self._targets[w], TYPES[w.received[0]], w.source, tag=w.tag) for w in receives],
            comm=comm,
            path=path,
        )

    @staticmethod
    def _array(mappable: dict[Wire, Any], wire: Wire) -> Any:
        array = mappable.get(wire)
        if array is None:
            array = cupy.empty(ELEMENTS)
        array[...] = -1.0
        return array

    def fill(self, epoch: int) -> None:
        for wire, values in self._values.items():
            self._sources[wire][...] = values + 1e7 * epoch

    def right(self, epoch: int) -> Any:
        """Enqueue a comparison of all receive arrays; returns a device scalar."""
        right = cupy.ones((), bool)
        for wire, (wanted, grown) in self._wanted.items():
            right &= (self._targets[wire] == wanted + grown * epoch).all()
        return right


@pytest.fixture
def messages(comm: MPI.Intracomm) -> Iterator[Callable[[list[Wire], str], Messages]]:
    """Return a function that prepares messages by a path."""
    made: list[Messages] = []
    with mappable_arrays(comm) as zeros:

        def make(wires: list[Wire], path: str) -> Messages:
            made.append(Messages(comm, zeros, wires, path))
            return made[-1]

        yield make
        for one in made:
            one.exchange.close()


@pytest.mark.parametrize("shape", [ring, chain])
@pytest.mark.parametrize("way", ["staging", "put", "get"])
def test_every_way(way: str, shape: Any, messages: Any, comm: MPI.Intracomm) -> None:
    """Hosts run ahead of stalled streams and of each other; results are read only at the end."""
    made = messages(shape(way, comm.size), f"ipc/{way}")
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
def test_random_messages(number: int, messages: Any, comm: MPI.Intracomm) -> None:
    """Messages that halox moves by different protocols, since some of their arrays are contiguous and mappable."""
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
    made = messages(wires, "ipc")
    right = []
    for epoch in range(10):
        made.fill(epoch)
        made.exchange()
        right.append(made.right(epoch))
    assert agree(all(bool(r) for r in right), comm), (wires, [bool(r) for r in right])


@pytest.mark.parametrize("way", ["staging", "put", "get"])
def test_streams_that_change(way: str, messages: Any, comm: MPI.Intracomm) -> None:
    """Two streams exchange the same values in turn; only the exchanges order the streams."""
    made = messages(ring(way, comm.size), f"ipc/{way}")
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
