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


class Messages:
    """An exchange of messages between GPUs, whose arrays are filled and compared on the stream, without the host."""

    def __init__(self, comm: MPI.Intracomm, wires: list[Wire]) -> None:
        sends = [w for w in wires if w.source == comm.rank]
        receives = [w for w in wires if w.target == comm.rank]
        self._sources = {w: cupy.full(ELEMENTS, -1.0) for w in sends}
        self._targets = {w: cupy.full(ELEMENTS, -1.0) for w in receives}
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
            path="ipc",
        )

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
def messages(comm: MPI.Intracomm) -> Iterator[Callable[[list[Wire]], Messages]]:
    """Return a function that prepares messages."""
    made: list[Messages] = []
    halox.Grid((comm.size,), halo=0, comm=comm, device="gpu").close()  # selects this rank's GPU

    def make(wires: list[Wire]) -> Messages:
        made.append(Messages(comm, wires))
        return made[-1]

    yield make
    for one in made:
        one.exchange.close()


@pytest.mark.parametrize("shape", [ring, chain])
def test_in_one_direction_and_in_both(shape: Any, messages: Any, comm: MPI.Intracomm) -> None:
    """Hosts run ahead of stalled streams and of each other; results are read only at the end."""
    made = messages(shape("staging", comm.size))
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
    rng = np.random.default_rng([SEED, number, comm.size])
    wires = []
    for tag in range(rng.integers(1, 9)):
        a, b = (int(rank) for rank in rng.choice(comm.size, 2, replace=False))
        sent, received = (str(name) for name in rng.choice(list(TYPES), 2))
        wires.append(Wire(a, b, (sent,), (received,), tag=tag))
    made = messages(wires)
    right = []
    for epoch in range(10):
        made.fill(epoch)
        made.exchange()
        right.append(made.right(epoch))
    assert agree(all(bool(r) for r in right), comm), (wires, [bool(r) for r in right])


def test_streams_that_change(messages: Any, comm: MPI.Intracomm) -> None:
    """Two streams exchange the same values in turn; only the exchanges order the streams."""
    made = messages(ring("staging", comm.size))
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
