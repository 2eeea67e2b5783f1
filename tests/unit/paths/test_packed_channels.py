"""Channels of packed messages on a GPU whose streams run in any order that their events allow.

One rank sends to itself through MPI. tests/mpi/paths/test_channels.py tests the protocol between ranks, and
tests/gpu/ranks runs it on GPUs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest

from halox.paths.base import Job
from halox.paths.fragments import cutter, whole
from halox.paths.messages import Message, Part
from halox.runtime.arrays import describe
from tests.fakes.cpu_kernels import aligned
from tests.fakes.host_cuda import HostCuda, host_cuda
from tests.fakes.host_launches import host_launches
from tests.fakes.layouts import Layout, box, scattered
from tests.support import full, require

require("mpi")

from mpi4py import MPI  # noqa: E402

from halox.paths.buffers import Buffer, RequestBuffers, host_buffer  # noqa: E402
from halox.paths.staged.pipeline import StagedPipeline, Work  # noqa: E402
from halox.runtime.arrays import borrow  # noqa: E402
from halox.runtime.world import World  # noqa: E402

End = tuple[int, Layout]
"""Number of an array, and some of its bytes."""


class Rig:
    """A rank that sends parts of arrays to itself.

    ``make`` makes the channel from the rank's `World`, its job and the buffers.
    """

    def __init__(
        self,
        arrays: Sequence[np.ndarray],
        parts: Sequence[tuple[End, End]],
        make: Any,
        *,
        operation: Any = "copy",
        cut: Any = whole,
        buffer: Any = host_buffer,
        buffers: Any = RequestBuffers,
        describe: Any = borrow,
    ) -> None:
        self.arrays, self.parts, self.operation = [*arrays], parts, operation
        self.world = World(MPI.COMM_SELF)
        send, receive = (
            Message(0, direction, tuple(Part(n, layout.datatype) for n, layout in ends))
            for direction, ends in zip(("send", "receive"), zip(*parts, strict=True), strict=True)
        )
        job = Job([describe(a) for a in arrays], (send,), (receive,), operation)
        self.buffers = buffers(self.world, job.sends, job.receives, lambda m: 5, buffer, cut)
        self.channel = make(self.world, job, self.buffers)

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for array in self.arrays:
            array[...] = rng.integers(1, 80, array.shape)

    def expected(self) -> list[np.ndarray]:
        """Return the arrays after an exchange, by NumPy."""
        before = [array.copy() for array in self.arrays]
        after = [array.copy() for array in self.arrays]
        is_sum = self.operation == "add"
        for (n, sent), _ in self.parts if is_sum else ():
            after[n].reshape(-1).view("u1")[sent.bytes] = 0
        for (n, sent), (to, received) in self.parts:
            values = before[n].reshape(-1).view("u1")[sent.bytes]
            target = after[to].reshape(-1).view("u1")
            # The sums of three small integers are those of their bytes.
            target[received.bytes] = target[received.bytes] + values if is_sum else values
        return after

    def is_right(self, wanted: Sequence[np.ndarray]) -> bool:
        return all(map(np.array_equal, self.arrays, wanted))

    def exchange(self, seed: int) -> None:
        self.fill(seed)
        wanted = self.expected()
        self.channel.start()
        self.channel.finish()
        assert self.is_right(wanted)

    def close(self) -> None:
        self.channel.close()
        self.channel.free()
        self.world.close()


# On a GPU


def buffer_on_gpu(nbytes: int) -> Buffer:
    """Return memory with the same address on the host and on the GPU."""
    owner = np.zeros(max(1, nbytes), np.uint8)
    pointer = owner.ctypes.data
    return Buffer(MPI.memory.fromaddress(pointer, nbytes), pointer, owner)


SHAPE = (20, 20, 8)


def parts_on_gpu() -> list[tuple[End, End]]:
    """Return a face of the first array, and scattered blocks and a row of the second, each to another place."""
    at = 96 * np.random.default_rng(3).permutation(160)[:80]
    faces = [box(SHAPE, (20, 20, 3), (0, 0, k)) for k in (3, 0)]
    cells = [scattered([64] * 80, (at + 16000 * k).tolist()) for k in (0, 1)]
    lines = [box((4000,), (120,), (k,)) for k in (0, 3880)]
    return [
        ((0, faces[0]), (0, faces[1])),
        ((1, cells[0]), (1, cells[1])),
        ((1, lines[0]), (1, lines[1])),
    ]


class GpuRig(Rig):
    def __init__(self, gpu: HostCuda, operation: Any, cut: Any, buffers: Any) -> None:
        self.gpu, self.made = gpu, 0
        parts = parts_on_gpu()
        super().__init__(
            [np.zeros(SHAPE, "i8"), np.zeros(4000, "i8")],
            [(b, a) for a, b in parts] if operation == "add" else parts,
            lambda world, job, buffers: StagedPipeline(
                world, buffers, Work(job, buffers, 0, "staged")
            ),
            operation=operation,
            cut=cut,
            buffer=buffer_on_gpu,
            buffers=buffers,
            describe=describe,
        )

    def exchange(self, seed: int) -> None:
        self.fill(seed)
        wanted = self.expected()
        self.channel.start()
        self.channel.finish()
        self.gpu.current.synchronize()
        assert self.is_right(wanted)

    def move(self, offset: int) -> None:
        """Replace the arrays; the first one is ``offset`` bytes from a multiple of 256."""
        for n, at in enumerate((offset, 16)):
            old = self.arrays[n]
            self.arrays[n] = aligned(old.nbytes, at).view("i8").reshape(old.shape)
        self.channel.bind(self.channel.views([a.ctypes.data for a in self.arrays]))


@contextmanager
def rig_on_gpu(
    seed: int, cut: Any, operation: Any = "copy", buffers: Any = RequestBuffers
) -> Iterator[GpuRig]:
    with ExitStack() as stack:
        gpu = stack.enter_context(host_cuda(seed))
        launches: list[Any] = []

        def queued(launch: Any) -> Any:
            launches.append(launch)
            return gpu.queued(launch)

        stack.enter_context(host_launches(queued))
        rig = GpuRig(gpu, operation, cut, buffers)
        rig.launches = launches  # type: ignore[attr-defined]
        yield rig


CUTS = pytest.mark.parametrize("cut", [whole, cutter(4096)])
OPERATIONS = pytest.mark.parametrize("operation", ["copy", "add"])


@OPERATIONS
@CUTS
@pytest.mark.parametrize("seed", [0, 1, *full(2, 3)])
def test_in_order_with_the_users_streams(seed: int, cut: Any, operation: str) -> None:
    """The user's kernels before, between and after `start` and `finish` are ordered, on changing streams."""
    with rig_on_gpu(seed, cut, operation) as rig:
        gpu = rig.gpu
        users = [gpu.current, gpu.stream()]
        wanted: list[list[np.ndarray]] = []
        right: list[bool] = []

        def prepare(step: int) -> None:
            rig.fill(step)
            wanted.append(rig.expected())

        for step in range(12):
            if step % 3 == 2:
                gpu.current.synchronize()
                gpu.current = users[step % 2]
            gpu.current.put(lambda step=step: prepare(step))
            rig.channel.start()
            gpu.run_some()
            rig.channel.finish()
            gpu.current.put(lambda: right.append(rig.is_right(wanted[-1])))
        gpu.current.synchronize()
        assert right == [True] * 12
        rig.close()
        assert not gpu.is_busy, "closed with work in flight"


@OPERATIONS
@CUTS
def test_moved_to_other_arrays(cut: Any, operation: str) -> None:
    """Arrays of any alignment work; the joint launch and the launches of each array are created once."""
    with rig_on_gpu(0, cut, operation) as rig:
        made = []
        for step, offset in enumerate((16, 8, 0, 8, 4, 64, 24)):
            rig.move(offset)
            rig.exchange(step)
            made.append(len(rig.launches))
        assert [a == b for a, b in zip(made[1:], made, strict=False)][1:3] == [True, True]
        assert made[5] == made[6] == made[4] > made[0], "later such alignments were known"
        rig.close()


class Early(RequestBuffers):
    """Every message has arrived before the first query, as from a peer that is far ahead."""

    def expect(self, epoch: int) -> None:
        pass

    def post_stage(self, epoch: int, stage: int) -> None:
        pass

    def arrived(self, epoch: int, stage: int) -> bool:
        return True

    def complete(self, epoch: int) -> None:
        pass


@pytest.mark.parametrize("seed", range(4))
def test_unpacking_waits_for_what_the_user_did_before(seed: int) -> None:
    """A kernel still reads the halo when the peer's message has already arrived; unpacking must wait for it."""
    with rig_on_gpu(seed, cutter(4096), buffers=Early) as rig:
        ((arrived,),) = rig.buffers.device_pointers()[1]
        ctypes.memset(arrived, 7, rig.buffers.incoming_ends[0][-1])
        rig.fill(seed)
        before, seen = rig.arrays[0].copy(), []
        rig.gpu.current.put(lambda: None)
        rig.gpu.current.put(lambda: seen.append(rig.arrays[0].copy()))
        rig.channel.start()
        rig.channel.finish()
        rig.gpu.current.synchronize()
        assert np.array_equal(seen[0], before)
        assert (rig.arrays[0][:, :, :3].copy().view("u1") == 7).all(), "and then it was unpacked"
        rig.close()
