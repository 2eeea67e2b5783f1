"""NCCL between simulated GPUs (`fake_cupy`): moves bytes by MPI at once, and asserts where NCCL would hang or fail.

Sends and receives between two ranks must match in number, order and size, and all ranks must start groups in the same
order. Ranks must be connected before a group is captured.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halox.errors import DeviceError
from halox.runtime.gpu.marks import Mark
from halox.runtime.gpu.nccl import NcclOp
from halox.runtime.gpu.pools import Pool
from tests.fakes.cpu_kernels import aligned
from tests.fakes.fake_cupy import Machine
from tests.fakes.host_launches import leave

WAIT_S = 120.0


class FakeNccl:
    """Takes the place of Nccl on one rank.

    Attributes
    ----------
    groups : list of list of NcclOp
        Launched groups, except groups that only connect ranks.
    is_stuck : bool
        Set to make this rank's kernels wait from now on.
    blocks : threading.Event or None
        If set, the creation of a communicator waits for this event.
    aborted : list of int
        Aborted communicators.
    """

    def __init__(self, machine: Machine, comm: MPI.Intracomm, version: int = 22907) -> None:
        self.version, self._machine, self._wire = version, machine, comm
        self.groups: list[list[NcclOp]] = []
        self.is_stuck = False
        self.blocks: threading.Event | None = None
        self.aborted: list[int] = []
        self.why_not = ""
        self.made = 0
        self._connected: set[tuple[int, bool, int]] = set()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        machine = self._machine
        event = SimpleNamespace(ptr=0)
        side = SimpleNamespace(stream=machine.stream, before=event, after=event)
        for name, fake in {
            "runtime.gpu.pools.SIDE_STREAMS": Pool(lambda device: side),
            "runtime.nccl_ranks.load_nccl": self._load,
            "paths.nccl.channel.MarkLaunch": self._mark_launch,
            "reductions.device.nccl_reduction.MarkLaunch": self._mark_launch,
        }.items():
            monkeypatch.setattr(f"halox.{name}", fake)
        import cupy

        cupy.cuda.Memory = _memory
        cupy.cuda.Stream = lambda non_blocking: machine.stream

    def _load(self) -> FakeNccl:
        if self.why_not:
            raise DeviceError(self.why_not)
        return self

    def _mark_launch(self, mark: Mark, device: int) -> Any:
        def launch(stream: int) -> None:
            if not (self.is_stuck and mark.is_end):
                leave(mark)

        return SimpleNamespace(at=launch)

    def unique_id(self) -> bytes:
        return np.random.default_rng().bytes(128)

    def make(self, size: int, unique_id: bytes, rank: int) -> int:
        if self.blocks is not None:
            self.blocks.wait()
        said = self._wire.allgather((size, unique_id))
        assert said == [(self._wire.size, unique_id)] * size and rank == self._wire.rank
        self.made += 1
        return self.made

    def abort(self, comm: int) -> None:
        self.aborted.append(comm)

    def failure(self, comm: int) -> str:
        return ""

    def prepared(self, comm: int, ops: Sequence[NcclOp]) -> Callable[[int], None]:
        assert all(op.nbytes > 0 and 0 <= op.peer < self._wire.size for op in ops)
        assert all(op.peer != self._wire.rank for op in ops)

        def launch(stream: int) -> None:
            self._launch(comm, ops)

        return launch

    def _launch(self, comm: int, ops: Sequence[NcclOp]) -> None:
        assert comm not in self.aborted, "a communicator is used that was aborted"
        peers = {(comm, op.is_send, op.peer) for op in ops}
        if self._machine.capturing:
            assert peers <= self._connected, "NCCL cannot connect ranks in a capture"
        else:
            self._connected |= peers
        if any(op.nbytes > 1 for op in ops):
            self.groups.append([*ops])
        if self.is_stuck:
            return
        requests = [
            self._wire.isend(ctypes.string_at(op.pointer, op.nbytes), op.peer, comm)
            for op in ops
            if op.is_send
        ]
        for op in ops:
            if not op.is_send:
                found = self._received(op.peer, comm)
                assert len(found) == op.nbytes, "a receive is not as long as its send"
                ctypes.memmove(op.pointer, found, op.nbytes)
        for request in requests:
            request.wait()

    def _received(self, peer: int, comm: int) -> bytes:
        end = time.monotonic() + WAIT_S
        while not self._wire.iprobe(peer, comm):
            assert time.monotonic() < end, f"NCCL waits for rank {peer} for ever"
        found: bytes = self._wire.recv(source=peer, tag=comm)
        return found


def _memory(nbytes: int) -> Any:
    array = aligned(nbytes)
    return SimpleNamespace(ptr=array.ctypes.data, array=array)


def machine_with_nccl(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shared: bool = False,
    version: int = 22907,
) -> tuple[Machine, FakeNccl]:
    """Install and return a simulated GPU and NCCL for this rank; collective."""
    machine = Machine(comm.rank, shared=shared)
    machine.install(monkeypatch)
    found = FakeNccl(machine, comm.Dup(), version)
    found.install(monkeypatch)
    return machine, found
