"""The staged channels on a fake GPU, with streams that run in any order that their events allow.

A random generator delays and reorders work as far as CUDA allows. One rank sends to itself through MPI.
tests/mpi/paths/test_fragments.py tests the protocol between ranks, and tests/gpu/ranks runs it on GPUs.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halox.datatypes import contiguous, indexed_block, subarray
from halox.errors import StateError
from halox.packing.host import HostPacker
from halox.paths.base import Job
from halox.paths.fragments import cutter, whole
from halox.paths.messages import Message, Part
from halox.runtime.arrays import describe
from tests.fakes.cpu_kernels import aligned
from tests.fakes.host_launches import HostLaunch, host_launches
from tests.support import forget_captures, full, require

require("mpi")

from halox.paths.buffers import Buffer, RequestBuffers  # noqa: E402
from halox.paths.staged.channel import StagedChannel, staged_channel  # noqa: E402
from halox.paths.staged.pipeline import FragmentPipeline  # noqa: E402
from halox.runtime.world import World  # noqa: E402

Step = Callable[[], bool]
"""Runs if it can; returns whether it has run."""


class FakeStream:
    def __init__(self, gpu: FakeGpu, ptr: int) -> None:
        self.gpu, self.ptr, self.queue = gpu, ptr, []  # type: ignore[var-annotated]

    def put(self, call: Callable[[], None]) -> None:
        self.queue.append(lambda: (call(), True)[1])

    def wait_event(self, event: FakeEvent) -> None:
        record = event.last
        self.queue.append(lambda: record["passed"])

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.queue)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.last = gpu, {"passed": True}

    def record(self, stream: FakeStream) -> None:
        record = self.last = {"passed": False}
        stream.put(lambda: record.update(passed=True))

    @property
    def done(self) -> bool:
        self.gpu.run_some()
        return self.last["passed"]

    def synchronize(self) -> None:
        record = self.last
        self.gpu.run_until(lambda: record["passed"])


class FakeGpu:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[FakeStream] = []
        self.current = self.stream()
        self.capturing: set[int] = set()
        self.made = 0

    def stream(self, **_: Any) -> FakeStream:
        self.streams.append(FakeStream(self, 1 + len(self.streams)))
        return self.streams[-1]

    def run_one(self) -> bool:
        """Run the first work of a random stream that can run; returns whether there was one."""
        for stream in self.random.sample(self.streams, len(self.streams)):
            if stream.queue and stream.queue[0]():
                stream.queue.pop(0)
                return True
        return False

    def run_some(self) -> None:
        for _ in range(self.random.choice((0, 0, 1, 2))):
            self.run_one()

    def run_until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            assert self.run_one(), "the streams wait for one another"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        runtime = SimpleNamespace(
            streamIsCapturing=lambda stream: stream in self.capturing,
            CUDARuntimeError=type("CUDARuntimeError", (RuntimeError,), {}),
        )
        cuda = SimpleNamespace(
            runtime=runtime,
            get_current_stream=lambda: self.current,
            Device=lambda number: contextlib.nullcontext(),
            Event=lambda disable_timing: FakeEvent(self),
            Stream=lambda non_blocking: self.stream(),
        )
        forget_captures(monkeypatch)
        for module in ("cuda", "streams"):
            monkeypatch.setattr(
                f"halox.runtime.gpu.{module}.cupy", lambda: SimpleNamespace(cuda=cuda)
            )

    def queued(self, launch: HostLaunch) -> Any:
        """Return a launch that enqueues its work on a fake stream."""
        self.made += 1

        def put(stream: int, source: int = 0, target: int = 0) -> None:
            self.streams[stream - 1].put(lambda: launch.launch(None, source, target))

        return SimpleNamespace(launch=put)


def buffer_on_gpu(nbytes: int) -> Buffer:
    """Return memory with the same address on the host and on the fake GPU."""
    from mpi4py import MPI

    owner = np.zeros(max(1, nbytes), np.uint8)
    pointer = owner.ctypes.data
    return Buffer(MPI.memory.fromaddress(pointer, nbytes), pointer, owner)


class Rig:
    """A rank that sends parts of two arrays to itself."""

    def __init__(
        self, seed: int, monkeypatch: pytest.MonkeyPatch, operation: Any, cut: Any
    ) -> None:
        from mpi4py import MPI

        self.gpu = FakeGpu(seed)
        self.gpu.install(monkeypatch)
        self.stack = ExitStack()
        self.stack.enter_context(host_launches(self.gpu.queued))
        self.world = World(MPI.COMM_SELF)
        self.u = np.zeros((40, 50, 12))
        self.v = np.zeros((4000,))
        at = np.random.default_rng(3).permutation(1900)[:700]
        face = [subarray(self.u.shape, (40, 50, 1), (0, 0, k), "f8") for k in (1, 0)]
        some = [indexed_block(1, at, "f8"), indexed_block(1, at + 2000, "f8")]
        rows = [contiguous(120, "f8"), subarray((4000,), (120,), (3800,), "f8")]
        sides = [(face[n], some[n], rows[n]) for n in (0, 1)]
        arrays = [self.u, self.v]
        parts = [(Part(0, f), Part(1, s), Part(1, r)) for f, s, r in sides]
        if operation == "add":  # swap source and target
            parts.reverse()
        send, receive = Message(0, "send", parts[0]), Message(0, "receive", parts[1])
        self.sent, self.received = parts
        job = Job([describe(a) for a in arrays], (send,), (receive,), operation)
        self.carrier = RequestBuffers(
            self.world, job.sends, job.receives, lambda m: 5, buffer_on_gpu, cut
        )
        self.channel = staged_channel(self.world, job, self.carrier, 0)
        self.operation = operation

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in (self.u, self.v):
            array[...] = rng.integers(-999, 999, array.shape)

    def expected(self) -> list[np.ndarray]:
        arrays = [self.u.copy(), self.v.copy()]
        packed = [np.empty(p.nbytes, np.uint8) for p in self.sent]
        for p, some in zip(self.sent, packed, strict=True):
            HostPacker(arrays[p.array], p.datatype, 1).pack(some)
        if self.operation == "add":
            for p in self.sent:
                HostPacker(arrays[p.array], p.datatype, 1).unpack(np.zeros(p.nbytes, np.uint8))
        for p, some in zip(self.received, packed, strict=True):
            packer = HostPacker(arrays[p.array], p.datatype, 1)
            (packer.adding if self.operation == "add" else packer.unpacking)(some)()
        return arrays

    def move(self, offset: int) -> None:
        """Replace the arrays; the first one is ``offset`` bytes from a multiple of 256."""
        kept = [aligned(a.nbytes, at) for a, at in ((self.u, offset), (self.v, 16))]
        self.u, self.v = (
            found.view("f8").reshape(a.shape)
            for a, found in zip((self.u, self.v), kept, strict=True)
        )
        self.channel.bind(self.channel.views([a.ctypes.data for a in (self.u, self.v)]))

    def close(self) -> None:
        self.stack.close()
        self.channel.close()
        self.world.close()


@pytest.mark.parametrize("operation", ["copy", "add"])
@pytest.mark.parametrize("cut", [whole, cutter(4096)])
@pytest.mark.parametrize("seed", [0, 1, *full(2, 3)])
@pytest.mark.part(2)
def test_in_order_with_the_users_streams(
    seed: int, cut: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's kernels before, between and after `start` and `finish` are ordered, on changing streams."""
    rig = Rig(seed, monkeypatch, operation, cut)
    assert isinstance(rig.channel, StagedChannel if cut is whole else FragmentPipeline)
    gpu = rig.gpu
    users = [gpu.current, gpu.stream()]
    wanted: list[list[np.ndarray]] = []
    right: list[bool] = []

    def prepare(step: int) -> None:
        rig.fill(step)
        wanted.append(rig.expected())

    def look() -> None:
        right.append(all(map(np.array_equal, (rig.u, rig.v), wanted[-1])))

    for step in range(12):
        if step % 3 == 2:
            gpu.current.synchronize()
            gpu.current = users[step % 2]
        gpu.current.put(lambda step=step: prepare(step))
        rig.channel.start()
        gpu.run_some()
        rig.channel.finish()
        gpu.current.put(look)
    gpu.current.synchronize()
    assert right == [True] * 12
    rig.close()
    assert not any(stream.queue for stream in gpu.streams[2:]), "closed with work in flight"


@pytest.mark.parametrize("operation", ["copy", "add"])
@pytest.mark.parametrize("cut", [whole, cutter(4096)])
def test_moved_to_other_arrays(cut: Any, operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of any alignment work; the joint launch and the launches of each array are created once."""
    rig = Rig(0, monkeypatch, operation, cut)
    assert rig.channel.is_movable
    first = before = rig.gpu.made
    for step, offset in enumerate((16, 8, 0, 8, 4, 64, 24)):
        rig.move(offset)
        rig.fill(step)
        wanted = rig.expected()
        rig.channel.start()
        rig.channel.finish()
        rig.gpu.current.synchronize()
        assert np.array_equal(rig.u, wanted[0]) and np.array_equal(rig.v, wanted[1])
        if step in (2, 3, 5, 6):
            assert rig.gpu.made == before, "such an alignment was known"
        before = rig.gpu.made
    assert before > first
    rig.close()


@pytest.mark.parametrize("cut", [whole, cutter(4096)])
@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_closed_in_the_middle(
    seed: int, is_finished: bool, cut: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are released only when no kernel uses them any longer."""
    rig = Rig(seed, monkeypatch, "copy", cut)
    busy: list[bool] = []

    def look(*_: Any) -> None:
        busy.append(any(stream.queue for stream in rig.gpu.streams))

    monkeypatch.setattr(rig.carrier._leftovers, "keep", look)
    rig.fill(seed)
    rig.channel.start()
    if is_finished:
        rig.channel.finish()
    rig.channel.close()
    assert busy == [False]


class EagerCarrier(RequestBuffers):
    """Every message has arrived before the first query, as from a peer that is far ahead."""

    def expect(self, epoch: int) -> None:
        pass

    def post_stage(self, epoch: int, stage: int) -> None:
        pass

    def arrived(self, epoch: int, stage: int) -> bool:
        return True

    def complete(self, epoch: int) -> None:
        pass


@pytest.mark.parametrize("seed", range(6))
def test_unpacking_waits_for_what_the_user_did_before(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel still reads the halo when the peer's message has already arrived; unpacking must wait for it."""
    monkeypatch.setattr("tests.unit.paths.test_staged.RequestBuffers", EagerCarrier)
    rig = Rig(seed, monkeypatch, "copy", cutter(4096))
    ((arrived,),) = rig.carrier.device_pointers()[1]
    size = rig.carrier.incoming_ends[0][-1]
    ctypes.memset(arrived, 7, size)
    rig.fill(seed)
    before, seen = rig.u.copy(), []
    rig.gpu.current.put(lambda: None)
    rig.gpu.current.put(lambda: seen.append(rig.u.copy()))
    rig.channel.start()
    rig.channel.finish()
    rig.gpu.current.synchronize()
    assert np.array_equal(seen[0], before)
    assert (rig.u[:, :, 0].copy().view(np.uint8) == 7).all(), "and then it was unpacked"
    rig.close()


@pytest.mark.parametrize("cut", [whole, cutter(4096)])
def test_capture(cut: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel refuses a stream in capture without enqueuing work, and works again afterwards."""
    rig = Rig(1, monkeypatch, "copy", cut)
    rig.fill(1)
    wanted = rig.expected()
    rig.gpu.capturing.add(rig.gpu.current.ptr)
    with pytest.raises(StateError):
        rig.channel.check()
    assert not any(stream.queue for stream in rig.gpu.streams)
    rig.gpu.capturing.clear()
    rig.channel.start()
    rig.channel.finish()
    rig.gpu.current.synchronize()
    assert np.array_equal(rig.u, wanted[0]) and np.array_equal(rig.v, wanted[1])
    rig.close()
